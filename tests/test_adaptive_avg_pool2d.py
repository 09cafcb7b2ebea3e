"""Global average pooling: values, layouts, derivatives, dtypes, and the layer of a swapped model."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from common import assert_replays, gradcheck, layouts, opcheck
from torch import nn
from torch.nn import functional as native

import warpwright.functional as F
from warpwright import nn as ours
from warpwright import swap, unswap
from warpwright.swap.functions import mean_along
from warpwright.testing import assert_as_good_as_native, assert_same, compare_with_native

LAYOUTS = (torch.contiguous_format, torch.channels_last)
NODE = "WarpwrightGlobalAvgPool2dBackward"
OPS = torch.ops.warpwright
SHAPES = [
    (2, 9, 7, 7),
    (3, 64, 7, 7),
    (2, 72, 5, 3),
    (1, 130, 1, 1),
    (4, 8, 9, 12),
    (2, 1, 6, 5),
    (1, 3, 40, 60),
    (2, 1040, 3, 3),
    (5, 9, 7),
    (64, 8, 8),
]


def randn(device, dtype, *shape):
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def differentiated(pool, x, cotangent):
    x = x.detach().requires_grad_()
    y = pool(x, 1)
    return y, *torch.autograd.grad(y, x, cotangent)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_native(shape, device, dtype):
    torch.manual_seed(0)
    for _, x in layouts(randn(device, dtype, *shape)):
        cotangent = torch.randn_like(native.adaptive_avg_pool2d(x, 1))
        mine = differentiated(F.adaptive_avg_pool2d, x, cotangent)
        theirs = differentiated(native.adaptive_avg_pool2d, x, cotangent)
        exact = differentiated(native.adaptive_avg_pool2d, x.double(), cotangent.double())
        for m, t, e in zip(mine, theirs, exact, strict=True):
            assert (m.dtype, m.shape) == (t.dtype, t.shape)
            assert_as_good_as_native(m, t, e)
        assert mine[0].stride() == theirs[0].stride()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradient_has_the_inputs_format(shape, device):
    for x in (randn(device, torch.float32, *shape), *last_of(device, shape)):
        (gradient,) = differentiated(F.adaptive_avg_pool2d, x, torch.ones_like(x[..., :1, :1]))[1:]
        expected = torch.empty_like(x).stride()
        assert gradient.stride() == expected


def last_of(device, shape):
    x = randn(device, torch.float32, *shape)
    return [x.to(memory_format=torch.channels_last)] if len(shape) == 4 else []


def test_integers_give_native_bits(device, dtype):
    """Sums and their quotients by a power of two are exact."""
    for shape in ((2, 64, 4, 4), (3, 5, 8, 2), (7, 16, 4)):
        for x in (torch.randint(-8, 9, shape, device=device).to(dtype),):
            for _, arranged in layouts(x):
                cotangent = torch.randint(-8, 9, (*shape[:-2], 1, 1), device=device).to(dtype)
                mine = differentiated(F.adaptive_avg_pool2d, arranged, cotangent)
                theirs = differentiated(native.adaptive_avg_pool2d, arranged, cotangent)
                for m, t in zip(mine, theirs, strict=True):
                    assert torch.equal(m, t)


@pytest.mark.parametrize("size", [1, (1, 1), [1, 1], torch.Size([1, 1])])
def test_global_sizes_run_on_ours(size, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    assert F.adaptive_avg_pool2d(x, size).grad_fn.name() == NODE
    assert ours.AdaptiveAvgPool2d(size)(x).grad_fn.name() == NODE


@pytest.mark.parametrize("size", [2, (1, 2), (None, 1), (None, None), 0])
def test_other_sizes_are_natives(size, device):
    x = torch.randn(2, 3, 4, 5, device=device)
    assert_same(F.adaptive_avg_pool2d(x, size), native.adaptive_avg_pool2d(x, size))


@pytest.mark.parametrize("size", [True, None, 1.0, (1,), (1, 1, 1), -1, (1, True), "1"])
def test_errors_are_natives(size, device):
    x = torch.randn(2, 3, 4, 5, device=device)
    outcomes = []
    for pool in (F.adaptive_avg_pool2d, native.adaptive_avg_pool2d):
        try:
            outcomes.append(pool(x, size).shape)
        except (RuntimeError, TypeError) as error:
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("shape", [(5, 5), (5,), (), (2, 2, 3, 4, 4)])
def test_other_dimensions_are_natives(shape, device):
    x = torch.randn(shape, device=device)
    outcomes = []
    for pool in (F.adaptive_avg_pool2d, native.adaptive_avg_pool2d):
        try:
            outcomes.append(pool(x, 1))
        except (RuntimeError, IndexError, ValueError) as error:
            outcomes.append((type(error), str(error)))
    assert type(outcomes[0]) is type(outcomes[1])
    if isinstance(outcomes[0], tuple):
        assert outcomes[0] == outcomes[1]
    else:
        assert_same(*outcomes)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_other_dtypes_are_natives(dtype, device):
    x = torch.ones(2, 3, 4, 5, device=device).to(dtype)
    if dtype is torch.complex64:
        assert_same(F.adaptive_avg_pool2d(x, 1), native.adaptive_avg_pool2d(x, 1))
        return
    for pool in (F.adaptive_avg_pool2d, native.adaptive_avg_pool2d):
        with pytest.raises(RuntimeError, match="could not infer output dtype"):
            pool(x, 1)


@pytest.mark.parametrize(
    "shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (2, 3, 0, 0), (0, 2, 2)]
)
def test_empty(shape, device):
    x = torch.randn(shape, device=device, requires_grad=True)
    y = F.adaptive_avg_pool2d(x, 1)
    assert_same(y, native.adaptive_avg_pool2d(x, 1))
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert gradient.shape == shape


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_special_values(value, device, dtype):
    x = torch.ones(2, 64, 3, 3, device=device, dtype=dtype)
    x[0, 1, 1, 2] = value
    x[1, 2, 0, 0], x[1, 2, 2, 2] = value, -value
    for images in (x, x.to(memory_format=torch.channels_last), x[0]):
        assert_same(F.adaptive_avg_pool2d(images, 1), native.adaptive_avg_pool2d(images, 1))
    x = x.requires_grad_()
    cotangent = torch.ones(2, 64, 1, 1, device=device, dtype=dtype)
    cotangent[1, 3] = value
    (gradient,) = torch.autograd.grad(F.adaptive_avg_pool2d(x, 1), x, cotangent)
    assert_same(gradient[1, 3], torch.full_like(gradient[1, 3], value))
    assert gradient[0].isfinite().all()


def test_autocast_leaves_the_dtype(device):
    """Native's pool is no op of autocast's lists."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 16, 3, 4, device=device, dtype=dtype, requires_grad=True)
        results = []
        for pool in (F.adaptive_avg_pool2d, native.adaptive_avg_pool2d):
            with torch.autocast(device, torch.bfloat16):
                y = pool(x, 1)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            results.append((y.dtype, gradient.dtype))
        assert results[0] == results[1]


@pytest.mark.parametrize("last", [False, True])
def test_derivatives(device, last):
    shape, layout = (2, 3, 3, 4), torch.channels_last if last else torch.contiguous_format
    x = torch.randn(shape, device=device, dtype=torch.float64).contiguous(memory_format=layout)
    gradcheck(lambda t: F.adaptive_avg_pool2d(t, 1), (x.requires_grad_(),))
    one = torch.randn(3, 2, 4, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda t: F.adaptive_avg_pool2d(t, 1), (one,))


@pytest.mark.parametrize("cotangent", ["expanded", "strided", "misaligned", "other type"])
def test_cotangents(cotangent, device):
    """What arrives at the node need not be contiguous."""
    for layout in LAYOUTS:
        x = torch.randn(3, 64, 4, 4, device=device).contiguous(memory_format=layout)
        g = torch.randn(3, 64, 1, 1, device=device)
        if cotangent == "expanded":
            g = g[:1, :1].expand(3, 64, 1, 1)
        elif cotangent == "strided":
            g = torch.randn(3, 64, 2, 2, device=device)[:, :, 1:, 1:]
        elif cotangent == "misaligned":
            g = torch.randn(3 * 64 + 1, device=device)[1:].view(3, 64, 1, 1)
        else:
            x = x.bfloat16()
            g = g.bfloat16()
        (gradient,) = differentiated(F.adaptive_avg_pool2d, x, g)[1:]
        assert_same(gradient, (g / 16).expand_as(x))


def test_opcheck(device):
    x = torch.randn(2, 16, 3, 4, device=device, requires_grad=True)
    for images in (x, x.detach().to(memory_format=torch.channels_last).requires_grad_(), x[0]):
        opcheck(OPS.global_avg_pool2d.default, (images,))
    for last in (False, True):
        grad = torch.randn(2, 16, 1, 1, device=device, requires_grad=True)
        opcheck(OPS.global_avg_pool2d_backward.default, (grad, 3, 4, last))


def test_channels_last_needs_four_dimensions(device):
    grad = torch.randn(16, 1, 1, device=device)
    with pytest.raises(RuntimeError, match="channels_last: expected four dimensions"):
        OPS.global_avg_pool2d_backward(grad, 3, 4, True)


def test_compare_with_native(device):
    x = torch.randn(2, 64, 7, 7, device=device, dtype=torch.bfloat16, requires_grad=True)
    compare_with_native(F.adaptive_avg_pool2d, native.adaptive_avg_pool2d, (x, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(256, 2048, 7, 7), (64, 100, 7, 7), (3, 33, 57, 31)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large(shape, dtype):
    for layout in LAYOUTS:
        x = randn("cuda", dtype, *shape).contiguous(memory_format=layout)
        g = randn("cuda", dtype, *shape[:2], 1, 1)
        y, gradient = differentiated(F.adaptive_avg_pool2d, x, g)
        torch.testing.assert_close(y.double(), x.double().mean((2, 3), True), rtol=1e-2, atol=1e-4)
        assert gradient.stride() == x.stride()
        exact = (g.double() / (shape[2] * shape[3])).expand_as(x)
        torch.testing.assert_close(gradient.double(), exact, rtol=1e-2, atol=0)


@pytest.mark.gpu
def test_graph():
    x = torch.randn(8, 64, 7, 7, device="cuda").to(memory_format=torch.channels_last)
    x.requires_grad_()

    def step():
        y = F.adaptive_avg_pool2d(x, 1)
        return y.detach(), *torch.autograd.grad(y.square().sum(), x)

    assert_replays(step)


# ---- swapped models ----


class Head(nn.Module):
    """A network's last layers; ``form`` is how it pools."""

    def __init__(self, form="layer"):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 5)
        self.form, self.pool = form, nn.AdaptiveAvgPool2d((1, 1))

    def forward(self, x):
        x = torch.tanh(self.conv(x))
        if self.form == "layer":
            x = self.pool(x)
        elif self.form == "function":
            x = native.adaptive_avg_pool2d(x, output_size=1)
        elif self.form == "method":
            x = x.mean((2, 3))
        elif self.form == "method, kept":
            x = x.mean(dim=[-1, -2], keepdim=True) + x.new_zeros(1)
        elif self.form == "torch.mean":
            x = torch.mean(x, (-2, 3), False)
        elif self.form == "with a dtype":
            x = x.mean((2, 3), dtype=x.dtype)
        elif self.form == "rows":
            x = x.mean((2, 1)).repeat(1, 4)[:, :16]
        elif self.form == "four":
            x = native.adaptive_avg_pool2d(x, (2, 2)).sum((2, 3))
        return self.fc(x.flatten(1))


def names(output):
    found, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return {node.name() for node in found}


FORMS = ["layer", "function", "method", "method, kept", "torch.mean"]
OTHER_FORMS = ["with a dtype", "rows", "four"]


@pytest.mark.parametrize("form", FORMS + OTHER_FORMS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_swapped(form, last, autocast, device):
    torch.manual_seed(0)
    model = Head(form).to(device)
    native_model, exact_model = copy.deepcopy(model), copy.deepcopy(model).double()
    report = swap(model, fuse=True)
    assert ("adaptive_avg_pool2d" in [f.into for f in report.fusions]) == (form in FORMS[1:])
    x = torch.randn(4, 3, 6, 5, device=device)
    if last:
        x = x.to(memory_format=torch.channels_last)
    results = []
    for net, images in ((model, x), (native_model, x), (exact_model, x.double())):
        images = images.detach().requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast and net is not exact_model):
            y = net(images)
        if net is model:
            assert (NODE in names(y)) == (form in FORMS)
        results.append([y, *torch.autograd.grad(y.square().sum(), (images, *net.parameters()))])
    for m, t, e in zip(*results, strict=True):
        assert (m.dtype, m.shape) == (t.dtype, t.shape)
        assert_as_good_as_native(m, t, e, factor=3)
    unswap(model)
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        assert NODE not in names(model(x))


def test_the_kept_mean_has_native_strides(device):
    x = torch.randn(2, 16, 3, 4, device=device).to(memory_format=torch.channels_last)
    for dims, keepdim in itertools.product(((2, 3), (-1, 2), (1, 2), (3,)), (False, True)):
        mine = mean_along(x, dims, keepdim)
        theirs = x.mean(dims, keepdim)
        torch.testing.assert_close(mine, theirs)
        assert mine.stride() == theirs.stride()


def test_other_pools_stay_native():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((2, 1)))
    entries = swap(model).entries
    assert [entry.swapped for entry in entries] == [True, False]
    assert "output_size=(2, 1)" in entries[1].reason
    assert [type(layer) for layer in model] == [ours.AdaptiveAvgPool2d, nn.AdaptiveAvgPool2d]
    assert type(pickle.loads(pickle.dumps(model))[0]) is ours.AdaptiveAvgPool2d
    assert unswap(model) == 1


def test_timms_pool(device):
    layers = pytest.importorskip("timm.layers")
    for flatten, channels in itertools.product((False, True), ("NCHW", "NHWC")):
        native_pool = layers.SelectAdaptivePool2d(
            pool_type="fast", flatten=flatten, input_fmt=channels
        )
        pool = copy.deepcopy(native_pool)
        assert swap(pool).entries[0].swapped
        x = torch.randn(2, 16, 6, 5, device=device, requires_grad=True)
        torch.testing.assert_close(pool(x), native_pool(x))
        assert (NODE in names(pool(x))) == (channels == "NCHW")
