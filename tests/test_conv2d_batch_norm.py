"""conv2d_batch_norm and its forms with an activation, against the chain of native ops that they replace."""

import pytest
import torch
from conv_norms import CHANNELS_LAST, plan_line
from torch import nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

import warpwright
import warpwright.functional as F
from warpwright import explain, swap, unswap
from warpwright.swap import patterns
from warpwright.testing import assert_same

native = nn.functional
FORMS = (
    "conv2d_batch_norm",
    "conv2d_batch_norm_relu",
    "conv2d_batch_norm_add_relu",
    "conv2d_batch_norm_silu",
    "conv2d_batch_norm_hardswish",
)
every_form = pytest.mark.parametrize("form", FORMS)


def operands(device, dtype, n=3, c=4, k=5, side=7, window=3, add=False):
    """Input, residual or None, weight, bias; norm's vectors by name."""
    generator = torch.Generator().manual_seed(n + 7 * c)

    def t(*sizes, type=dtype):
        return torch.randn(sizes, generator=generator).to(device, type).requires_grad_()

    vector = dtype if dtype.itemsize > 2 else torch.float32
    norm = {"norm_weight": t(k, type=vector), "norm_bias": t(k, type=vector)}
    out = side + 2 * (window // 2) - window + 1
    residual = t(n, k, out, out) if add else None
    return t(n, c, side, side), residual, t(k, c, window, window), t(k), norm


def statistics(k, device, dtype=torch.float32):
    return {
        "running_mean": torch.zeros(k, device=device, dtype=dtype),
        "running_var": torch.ones(k, device=device, dtype=dtype),
    }


def chain(x, residual, weight, bias, stride=1, padding=0, *, norm_weight, norm_bias, form, **norm):
    y = native.conv2d(x, weight, bias, stride, padding)
    stats = norm.pop("running_mean", None), norm.pop("running_var", None)
    y = native.batch_norm(y, *stats, norm_weight, norm_bias, **norm)
    y = y if residual is None else y + residual
    activation = form.removeprefix("conv2d_batch_norm").rpartition("_")[2]
    return getattr(native, activation)(y) if activation else y


def call(form, x, residual, *args, **kwargs):
    added = () if residual is None else (residual,)
    return getattr(F, form)(x, *added, *args, **kwargs)


@every_form
@pytest.mark.parametrize("training", [True, False])
def test_values_and_gradients(device, form, training):
    x, residual, weight, bias, norm = operands(device, torch.float64, add="add" in form)
    mine, theirs = statistics(5, device, x.dtype), statistics(5, device, x.dtype)
    inputs = [t for t in (x, residual, weight, bias, *norm.values()) if t is not None]
    y = call(form, x, residual, weight, bias, 1, 1, **mine, **norm, training=training)
    expected = chain(
        *(x, residual, weight, bias, 1, 1),
        **theirs, **norm, training=training, form=form,
    )  # fmt: skip
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, inputs, dy),
        torch.autograd.grad(expected, inputs, dy),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name])


def operator(activation, add, update):
    """The raw operator, which no public call on a CPU reaches, as a function of its tensors."""

    def run(x, weight, bias, norm_weight, norm_bias, *residual):
        stats = (torch.zeros(5).to(x), torch.ones(5).to(x), 0.1) if update else ()
        op = getattr(torch.ops.warpwright, "conv2d_batch_norm" + "_update" * update)
        added = residual[0] if add else None
        windows = ([1, 2], [1, 0], [1, 1], 1)
        return op(
            x, weight, bias, added, norm_weight, norm_bias, *stats, 1e-3, activation, *windows
        )[0]  # fmt: skip

    return run


KINDS = [
    ("none", False, False),
    ("relu", False, True),
    ("relu", True, False),
    ("silu", False, True),
    ("hardswish", False, False),
]


def small(device):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 2, 4, 5), (5, 2, 3, 3), (5,), (5,), (5,), (2, 5, 4, 2))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_derivatives(device, kind):
    inputs = small(device)[: 6 if kind[1] else 5]
    run = operator(*kind)
    assert gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("activation", ["relu", "silu", "hardswish"])
def test_forward_over_reverse(device, activation):
    """The tangent of a gradient: the saved output of the convolution carries one."""
    run, inputs = operator(activation, False, False), small(device)[:5]
    direction = [torch.randn_like(t) for t in inputs]

    def gradient(*tensors):
        return torch.autograd.grad(run(*tensors).square().sum(), tensors, create_graph=True)[0]

    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(t.detach(), d).requires_grad_()
            for t, d in zip(inputs, direction, strict=True)
        ]
        tangent = forward_ad.unpack_dual(gradient(*duals)).tangent
    step = 1e-6
    moved = [
        [t.detach().add(d, alpha=sign * step).requires_grad_() for t, d in zip(inputs, direction, strict=True)]
        for sign in (1, -1)
    ]  # fmt: skip
    expected = (gradient(*moved[0]) - gradient(*moved[1])) / (2 * step)
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_opcheck(device, kind):
    activation, add, update = kind
    x, weight, bias, norm_weight, norm_bias, residual = (t.float().detach() for t in small(device))
    tensors = [t.requires_grad_() for t in (x, weight, bias)]
    stats = (torch.zeros(5).to(x), torch.ones(5).to(x), 0.1) if update else ()
    op = getattr(torch.ops.warpwright, "conv2d_batch_norm" + "_update" * update).default
    windows = ([1, 2], [1, 0], [1, 1], 1)
    vectors = (norm_weight.requires_grad_(), norm_bias)
    opcheck(op, (*tensors, residual if add else None, *vectors, *stats, 1e-3, activation, *windows))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": lambda t: t[0]}, "input: expected 4 dimensions, got 3"),
        ({"input": lambda t: t.int()}, "input: expected float32"),
        ({"norm_weight": lambda t: t[:4]}, "norm_weight: expected 5 elements, got 4"),
        ({"norm_bias": lambda t: t.half()}, "norm_bias: expected Double, got Half"),
        ({"running_var": lambda t: t.to("meta")}, "running_var: expected device"),
        (
            {"residual": lambda t: t, "activation": lambda t: "silu"},
            "residual: expected none without relu",
        ),
        (
            {"activation": lambda t: "gelu"},
            "activation: expected none, relu, silu or hardswish, got gelu",
        ),
    ],
)
def test_errors_of_the_operator(device, change, message):
    x, weight, bias, norm_weight, norm_bias, residual = (t.detach() for t in small(device))
    arguments = {
        "input": x, "weight": weight, "bias": bias, "residual": None,
        "norm_weight": norm_weight, "norm_bias": norm_bias,
        "running_mean": torch.zeros(5).to(x), "running_var": torch.ones(5).to(x),
        "momentum": 0.1, "eps": 1e-5, "activation": "relu",
        "stride": [1, 2], "padding": [1, 0], "dilation": [1, 1], "groups": 1,
    }  # fmt: skip
    for name, function in change.items():
        arguments[name] = function(residual if name == "residual" else arguments[name])
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        torch.ops.warpwright.conv2d_batch_norm_update(**arguments)


# ---- the choice ----


def statistics_line(n, c, k, window, stride, side, *rest):
    return plan_line("statistics", n, c, k, side, window, stride, *rest)


def test_the_convolutions_of_resnet50_take_the_statistics():
    """Those whose output is larger than what batch norm keeps on chip."""
    for case in (
        (256, 64, 64, 1, 1, 56), (256, 64, 64, 3, 1, 56), (256, 64, 256, 1, 1, 56),
        (256, 128, 128, 3, 2, 56), (256, 256, 512, 1, 2, 56), (256, 256, 1024, 1, 1, 14),
        (256, 512, 2048, 1, 1, 7), (512, 256, 256, 3, 1, 14),
    ):  # fmt: skip
        assert "taken by the convolution" in statistics_line(*case), case
    for case in (
        (256, 3, 64, 7, 2, 224),
        (256, 64, 64, 3, 1, 56, torch.float32),
        (256, 64, 64, 3, 1, 56, torch.bfloat16, torch.contiguous_format),
        (256, 512, 512, 3, 1, 7),  # on chip
    ):
        assert "taken" not in statistics_line(*case), case


# ---- the kernels ----

# n, c, k, window, stride, side: every tile, tails in rows and columns, several columns of tiles. Each
# output is larger than what batch norm keeps on chip.
SHAPES = {
    "1x1_64": (73, 64, 64, 1, 1, 57),
    "1x1_tail": (73, 64, 392, 1, 1, 39),
    "1x1_8_columns": (64, 64, 1024, 1, 1, 31),
    "1x1_16_columns": (32, 64, 2048, 1, 1, 31),
    "3x3_transposed": (73, 64, 64, 3, 1, 57),
    "3x3_three_columns": (24, 64, 192, 3, 1, 57),
    "3x3": (30, 128, 136, 3, 1, 61),
    "3x3_256x128": (256, 256, 256, 3, 1, 16),
    "3x3_stride": (90, 128, 128, 3, 2, 73),
    "1x1_stride": (24, 128, 512, 1, 2, 71),
}


def case_of(name, dtype, offset=0.0):
    n, c, k, window, stride, side = SHAPES[name]
    torch.manual_seed(5)
    x = torch.randn(n, c, side, side, device="cuda").to(dtype).to(memory_format=CHANNELS_LAST)
    w = (torch.randn(k, c, window, window, device="cuda") / (c * window**2) ** 0.5).to(dtype)
    bias = (offset * torch.randn(k, device="cuda")).to(dtype)
    windows = ([stride] * 2, [window // 2] * 2, [1, 1], 1)
    return x, w.to(memory_format=CHANNELS_LAST), bias, windows


def run_kernel(x, w, bias, windows):
    op = torch.ops.warpwright.conv2d_batch_norm
    return op(x, w, bias, None, None, None, 1e-5, "none", *windows)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_statistics_are_those_of_the_rounded_output(name, dtype, offset):
    """Also of channels whose mean is large next to their deviation."""
    x, w, bias, windows = case_of(name, dtype, offset)
    assert "taken by the convolution" in explain("conv2d_batch_norm", x, w, bias, *windows[:2])
    _, convolved, mean, rstd, _ = run_kernel(x, w, bias, windows)
    assert_same(convolved, torch.ops.warpwright.conv2d(x, w, bias, *windows))
    exact = convolved.double()
    variance, exact_mean = torch.var_mean(exact, (0, 2, 3), correction=0)
    exact_rstd = (variance + 1e-5).rsqrt()
    native_mean, native_rstd = torch.batch_norm_stats(convolved, 1e-5)
    # What either contributes to a normalised value of size 1.
    for got, theirs in (
        ((mean - exact_mean) * exact_rstd, (native_mean - exact_mean) * exact_rstd),
        (rstd / exact_rstd - 1, native_rstd / exact_rstd - 1),
    ):
        assert got.abs().max() <= 1.5 * theirs.abs().max() + 2.0**-23


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_repeats_have_the_same_bits(name):
    arguments = case_of(name, torch.bfloat16)
    first = run_kernel(*arguments)
    for _ in range(10):
        for got, want in zip(run_kernel(*arguments), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@every_form
@pytest.mark.parametrize("name", ["1x1_tail", "1x1_8_columns", "3x3_transposed", "3x3_stride"])
def test_like_one_after_the_other(name, form):
    """Outputs, running statistics and gradients of calls whose convolution takes the statistics.

    Batch norm takes a bias away again, so its gradient is rounding errors alone.
    """
    x, w, bias, (stride, padding, *_) = case_of(name, torch.bfloat16, 1.0)
    k = w.shape[0]
    y = F.conv2d(x, w, bias, stride, padding)
    residual = [torch.randn_like(y).requires_grad_()] if "add" in form else []
    vectors = [torch.rand(k, device="cuda").add(0.5).requires_grad_() for _ in range(2)]
    inputs = [t.requires_grad_() for t in (x, w)] + residual + vectors
    dy = torch.randn_like(y)
    results = []
    for fused in (True, False):
        stats = statistics(k, "cuda")
        if fused:
            norm = dict(zip(("norm_weight", "norm_bias"), vectors, strict=True))
            arguments = (x, *residual, w, bias, stride, padding)
            z = getattr(F, form)(*arguments, **stats, **norm, training=True)
        else:
            rest = (*residual, *stats.values(), *vectors, True)
            z = getattr(F, form.removeprefix("conv2d_"))(
                F.conv2d(x, w, bias, stride, padding), *rest
            )
        results.append((z.detach(), *stats.values(), *torch.autograd.grad(z, inputs, dy)))
    for got, want in zip(*results, strict=True):
        # A norm: a value next to zero may pass the ReLU on one side only.
        difference = torch.linalg.vector_norm(got.float() - want.float())
        assert difference <= 2.0**-8 * torch.linalg.vector_norm(want.float())


@pytest.mark.gpu
@every_form
def test_autocast_step(form):
    """float32 layers under autocast: the fused call, and one layer after the other."""
    x, residual, weight, bias, norm = operands(
        "cuda", torch.float32, n=8, c=64, k=128, side=14, add="add" in form
    )
    results = []
    for fused in (True, False):
        stats = statistics(128, "cuda")
        with torch.autocast("cuda", torch.bfloat16):
            image = x.to(memory_format=CHANNELS_LAST)
            added = residual if residual is None else residual.bfloat16()
            if fused:
                y = call(form, image, added, weight, bias, 1, 1, **stats, **norm, training=True)
            else:
                convolved = F.conv2d(image, weight, bias, 1, 1)
                rest = [] if added is None else [added]
                vectors = (*stats.values(), *norm.values(), True)
                y = getattr(F, form.removeprefix("conv2d_"))(convolved, *rest, *vectors)
        inputs = [t for t in (x, residual, weight, *norm.values()) if t is not None]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        grads = torch.autograd.grad(y, inputs, dy)
        results.append((y, *stats.values(), *grads))
    for got, want in zip(*results, strict=True):
        difference = torch.linalg.vector_norm(got.float() - want.float())
        assert difference <= 2.0**-8 * torch.linalg.vector_norm(want.float())


# ---- layers and swap ----


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down = nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


def test_swap_hands_the_convolution_to_the_norm(device, monkeypatch):
    torch.manual_seed(0)
    model, twin = Residual().to(device), Residual().to(device)
    twin.load_state_dict(model.state_dict())
    swap(model, fuse=True)
    seen = []
    fused = patterns.runs_as_one

    def asked(norm, conv, *rest, **pool):
        seen.append((type(norm).__name__, conv))
        return fused(norm, conv, *rest, **pool)

    monkeypatch.setattr(patterns, "runs_as_one", asked)
    x = torch.randn(3, 4, 6, 6, device=device)
    assert_close_steps(model, twin, x)
    assert [kind for kind, _ in seen] == [
        "BatchNormReLU2d", "Conv2dBatchNorm2d", "BatchNormAddReLU2d",
    ]  # fmt: skip
    assert {conv for _, conv in seen} == {model.conv1, model.conv2, model.down[0]}
    model.conv2.register_forward_hook(lambda *_: None)  # a layer that is watched is called
    seen.clear()
    assert_close_steps(model, twin, x)
    assert len(seen) == 1
    unswap(model)
    assert type(model.bn2) is nn.BatchNorm2d


def assert_close_steps(model, twin, x):
    y, expected = model(x), twin(x)
    torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)


LAYERS = {"ReLU": "relu", "AddReLU": "relu", "SiLU": "silu", "Hardswish": "hardswish"}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(device, name):
    add = name == "AddReLU"
    kind = getattr(warpwright.nn, f"Conv2dBatchNorm{name}2d")
    layer = kind(4, 6, 3, padding=1, eps=1e-3, momentum=None).to(device)
    x = torch.randn(2, 4, 5, 5, device=device)
    residual = (torch.randn(2, 6, 5, 5, device=device),) if add else ()
    copy = nn.BatchNorm2d(6, eps=1e-3, momentum=None).to(device)
    expected = copy(native.conv2d(x, layer.conv.weight, None, 1, 1)) + sum(residual)
    expected = getattr(native, LAYERS[name])(expected)
    torch.testing.assert_close(layer(x, *residual), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(layer.norm.running_var, copy.running_var, rtol=2e-3, atol=2e-3)
    layer.eval()
    assert layer(x, *residual).shape == expected.shape
