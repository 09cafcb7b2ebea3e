"""The backward of a 1x1 convolution with few channels and of its batch norm, in one kernel
(csrc/ops/conv2d_batch_norm/narrow_backward.h)."""

import pytest
import torch
from conv_norms import CHANNELS_LAST, plan_line
from launches import launches

import warpwright.functional as F
from warpwright.swap.joins import skip_of

HALVES = [torch.bfloat16, torch.float16]
LINE = "both gradients"

# n, c, k, side: every number of boxes, tails of rows and of both channels. Batch norm keeps none of
# them on chip.
SHAPES = {
    "four_boxes": (40, 64, 256, 57),
    "one_box": (120, 64, 64, 53),
    "part_of_a_box": (120, 40, 72, 47),
    "two_boxes": (70, 16, 96, 53),
    "three_boxes": (60, 24, 144, 49),
    "tail_of_the_fourth": (50, 8, 200, 43),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def test_which_layers_take_it():
    for case in ((256, 64, 256, 56), (256, 16, 96, 112), (256, 24, 72, 56), *SHAPES.values()):
        assert "in one kernel" in plan_line(LINE, *case), case
    for case, reason in (
        ((256, 64, 64, 56, 3), "no 1x1"),
        ((256, 256, 64, 56), "more than 64 input"),
        ((256, 64, 264, 56), "256 output"),
        ((256, 64, 56, 56), "fewer than 64"),
        ((256, 64, 252, 56), "16-byte vectors"),
        ((256, 64, 256, 56, 1, 1, torch.float32), "only 16-bit"),
        ((256, 64, 256, 56, 1, 1, torch.bfloat16, torch.contiguous_format), "only 16-bit"),
        ((8, 64, 256, 28), "on chip"),
    ):
        assert reason in plan_line(LINE, *case), case


def image(*sizes, dtype, scale=1.0):
    values = torch.randn(*sizes, device="cuda") * scale
    return values.to(dtype).to(memory_format=CHANNELS_LAST).requires_grad_()


class Layer:
    """Convolution, batch norm and an activation; the input is a shortcut, too, if ``joins``."""

    def __init__(self, name, dtype, activation="relu", joins=False):
        n, c, k, side = SHAPES[name]
        torch.manual_seed(11)
        self.activation, self.joins = activation, joins
        self.x, self.w = image(n, c, side, side, dtype=dtype), image(k, c, 1, 1, dtype=dtype)
        self.w = (self.w.detach() / c**0.5).requires_grad_()
        self.norm = [torch.randn(k, device="cuda").requires_grad_() for _ in range(2)]
        self.dz = image(n, k, side, side, dtype=dtype).detach()
        self.dskip = image(n, c, side, side, dtype=dtype).detach()

    @property
    def inputs(self):
        return [self.x, self.w, *self.norm]

    def gradients(self, one=True):
        """By the fused op, or layer by layer."""
        suffix = f"_{self.activation}" if self.activation else ""
        scale, shift = self.norm
        if one:
            norm = {"norm_weight": scale, "norm_bias": shift, "training": True}
            z = getattr(F, f"conv2d_batch_norm{suffix}")(self.x, self.w, **norm)
        else:
            y = F.conv2d(self.x, self.w)
            z = getattr(F, f"batch_norm{suffix}")(y, None, None, scale, shift, True)
        if not self.joins:
            return torch.autograd.grad(z, self.inputs, self.dz)
        skip = skip_of(self.x, z)
        return torch.autograd.grad([z, skip], self.inputs, [self.dz, self.dskip])


def narrow_kernels(function):
    return sum("narrow_backward" in name for name in launches(function))


def relative(found, expected):
    norm = torch.linalg.vector_norm
    return (norm(found.double() - expected.double()) / norm(expected.double())).item()


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", ["", "relu", "silu", "hardswish"])
def test_gradients(name, dtype, activation):
    """Those of the layers' own kernels, which round dz to the same values."""
    layer = Layer(name, dtype, activation)
    assert narrow_kernels(layer.gradients) == 1
    found, expected = layer.gradients(), layer.gradients(one=False)
    for i in (0, 1):
        assert relative(found[i], expected[i]) <= 2.0**-8
    for i in (2, 3):  # the statistics of the forward differ in their last bits
        assert relative(found[i], expected[i]) <= 2.0**-10


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["", "relu", "silu", "hardswish"])
def test_compiled(activation):
    """The program of the backward has the same kernel."""
    layer = Layer(next(iter(SHAPES)), torch.bfloat16, activation)

    @torch.compile(fullgraph=True)
    def forward(x, w, scale, shift):
        norm = {"norm_weight": scale, "norm_bias": shift, "training": True}
        z = getattr(F, f"conv2d_batch_norm{f'_{activation}' if activation else ''}")(x, w, **norm)
        skip = skip_of(x, z)
        return (z, skip * 1) if layer.joins else (z,)

    def gradients():
        grads = [layer.dz, layer.dskip] if layer.joins else [layer.dz]
        return torch.autograd.grad(forward(*layer.inputs), layer.inputs, grads)

    for got, want in zip(gradients(), layer.gradients(), strict=True):
        assert torch.equal(got, want)
    assert narrow_kernels(gradients) == 1


@pytest.mark.gpu
@every_shape
def test_weights_gradient_is_as_good(name):
    """Against float64, from the same rounded dz."""
    layer = Layer(name, torch.bfloat16, "")
    scale, shift = layer.norm
    y = F.conv2d(layer.x, layer.w).detach().requires_grad_()
    z = F.batch_norm(y, None, None, scale, shift, True)
    (dy,) = torch.autograd.grad(z, [y], layer.dz)
    rows = dy.permute(0, 2, 3, 1).reshape(-1, dy.shape[1])
    x = layer.x.detach().permute(0, 2, 3, 1).reshape(-1, layer.x.shape[1])
    exact = rows.double().T @ x.double()
    theirs = (rows.T @ x).double() - exact
    found = layer.gradients()[1].flatten(1).double() - exact
    assert found.abs().max() <= 1.5 * theirs.abs().max() + 2.0**-8 * exact.abs().max()
    exact = (rows.double() @ layer.w.detach().flatten(1).double()).view(-1, layer.x.shape[1])
    dx = layer.gradients()[0].permute(0, 2, 3, 1).reshape(exact.shape).double()
    theirs = (rows @ layer.w.detach().flatten(1)).double() - exact
    assert (dx - exact).abs().max() <= 1.5 * theirs.abs().max() + 2.0**-8 * exact.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["four_boxes", "part_of_a_box"])
def test_a_shortcut(name):
    layer = Layer(name, torch.bfloat16, "silu", joins=True)
    assert narrow_kernels(layer.gradients) == 1
    for found, expected in zip(layer.gradients(), layer.gradients(one=False), strict=True):
        assert relative(found, expected) <= 2.0**-8


@pytest.mark.gpu
@every_shape
def test_repeats_have_the_same_bits(name):
    layer = Layer(name, torch.bfloat16)
    first = layer.gradients()
    for _ in range(10):
        for got, want in zip(layer.gradients(), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
def test_infinities_stay_in_their_channels():
    layer = Layer("three_boxes", torch.bfloat16)
    with torch.no_grad():
        layer.dz[0, 5, 0, 0] = torch.inf
        layer.dz[1, 140, 3, 3] = torch.nan
    found, expected = layer.gradients(), layer.gradients(one=False)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())


@pytest.mark.gpu
def test_what_still_runs_layer_by_layer():
    layer = Layer("two_boxes", torch.bfloat16)
    scale, shift = layer.norm

    def run(inputs, **options):
        norm = {"norm_weight": scale, "norm_bias": shift, "training": True}
        z = F.conv2d_batch_norm_relu(layer.x, layer.w, **norm)
        return torch.autograd.grad(z, inputs, layer.dz, **options)

    expected = layer.gradients()
    for inputs, options in (
        ([layer.x], {}),
        ([layer.w], {}),
        (layer.inputs, {"create_graph": True}),
    ):
        assert narrow_kernels(lambda i=inputs, o=options: run(i, **o)) == 0
        for got, leaf in zip(run(inputs, **options), inputs, strict=True):
            want = next(e for e, t in zip(expected, layer.inputs, strict=True) if t is leaf)
            assert relative(got.detach(), want) <= 2.0**-7
