"""Convolutions under autocast: float32 weights in, 16-bit kernels, float32 gradients of the weights out."""

from collections import Counter

import pytest
import torch
from common import (
    assert_trains_with_a_grad_scaler,
    assert_transforms_agree_under_autocast,
    opcheck,
    small_resnet,
    subsets,
)
from programs import compiled_with_casts
from torch import nn
from torch.utils.checkpoint import checkpoint

import warpwright
import warpwright.functional as F
from warpwright import optim
from warpwright.testing import assert_same

ops = torch.ops.warpwright
low_types = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
formats = pytest.mark.parametrize("form", FORMATS)

# Shapes of input and weight, then stride, padding and groups.
LAYERS = {
    "3x3": ((2, 16, 9, 9), (8, 16, 3, 3), 1, 1, 1),
    "3x3_stride_2": ((2, 16, 9, 9), (24, 16, 3, 3), 2, 1, 1),
    "1x1": ((2, 24, 7, 8), (16, 24, 1, 1), 1, 0, 1),
    "1x1_stride_2": ((2, 16, 8, 8), (8, 16, 1, 1), 2, 0, 1),
    "depthwise": ((2, 16, 9, 10), (16, 1, 3, 3), 1, 1, 16),
    "depthwise_stride_2": ((2, 16, 9, 9), (16, 1, 5, 5), 2, 2, 16),
    "grouped": ((2, 16, 9, 9), (24, 8, 3, 3), 1, 1, 2),
    "stem": ((2, 3, 32, 32), (16, 3, 7, 7), 2, 3, 1),
    "few_channels": ((2, 3, 12, 12), (8, 3, 3, 3), 1, 1, 1),
}
layers = pytest.mark.parametrize("layer", LAYERS)

# Of real networks, as large as the kernels for them need.
REAL_LAYERS = {
    "stem_of_224": ((8, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
    "mobile_stem": ((8, 3, 224, 224), (16, 3, 3, 3), 2, 1, 1),
    "3x3_of_64": ((16, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
    "3x3_of_512": ((16, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1),
    "3x3_stride_2_of_128": ((16, 128, 56, 56), (128, 128, 3, 3), 2, 1, 1),
    "1x1_of_64": ((16, 64, 56, 56), (256, 64, 1, 1), 1, 0, 1),
    "1x1_of_2048": ((16, 2048, 7, 7), (512, 2048, 1, 1), 1, 0, 1),
    "1x1_stride_2_of_256": ((16, 256, 56, 56), (512, 256, 1, 1), 2, 0, 1),
    "depthwise_3x3": ((16, 96, 56, 56), (96, 1, 3, 3), 1, 1, 96),
    "depthwise_5x5_stride_2": ((16, 240, 28, 28), (240, 1, 5, 5), 2, 2, 240),
}


def operands(layer, device, form="nchw", dtypes=(torch.float32,) * 3, needs=(True,) * 3):
    """Leaves x, weight, bias, and the window: stride, padding, dilation, groups."""
    image, filters, stride, padding, groups = (LAYERS | REAL_LAYERS)[layer]
    generator = torch.Generator().manual_seed(5)
    leaves = []
    for shape, dtype, need in zip((image, filters, filters[:1]), dtypes, needs, strict=True):
        leaf = torch.randn(shape, generator=generator).to(device, dtype)
        if len(shape) == 4:
            leaf = leaf.contiguous(memory_format=FORMATS[form])
        leaves.append(leaf.requires_grad_(need))
    return leaves, ([stride] * 2, [padding] * 2, [1, 1], groups)


def convolved(x, w, b, window, activation):
    """The convolution, or with its batch norm and that activation ("none": without one)."""
    if activation is None:
        return ops.conv2d(x, w, b, *window)
    ones = torch.ones(w.shape[0], device=w.device)
    return ops.conv2d_batch_norm(x, w, b, None, ones, ones, 1e-5, activation, *window)[0]


ops_with = pytest.mark.parametrize("activation", [None, "none", "relu", "silu"], ids=str)


def gradients(y, leaves):
    """Of the leaves that need one, by a gradient of y that does not depend on the path."""
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    return torch.autograd.grad(y, [t for t in leaves if t.requires_grad], dy)


def assert_within_one_rounding(ours, theirs, low):
    """`theirs` are `ours` after a rounding to `low`. The CPU's kernels round both."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        if a.is_cuda:
            rounding = {"rtol": torch.finfo(low).eps, "atol": 2.0**-24}
            torch.testing.assert_close(a, b, **rounding)
        else:
            assert_same(a, b)


# ---- values ----


@ops_with
@layers
@formats
@low_types
def test_gradients(device, low, form, layer, activation):
    """As those of 16-bit operands whose casts are nodes of their own."""
    leaves, window = operands(layer, device, form)
    with torch.autocast(device, low):
        y = convolved(*leaves, window, activation)
    ours = gradients(y, leaves)
    separate = convolved(*(t.to(low) for t in leaves), window, activation)
    assert_same(y, separate)
    assert all(g.dtype == torch.float32 for g in ours)
    assert_within_one_rounding(ours, gradients(separate, leaves), low)


@pytest.mark.parametrize("needs", subsets(3), ids=str)
@pytest.mark.parametrize("kinds", ["fff", "lff", "lfl", "llf", "flf", "ffl"])
@pytest.mark.parametrize("activation", [None, "relu"], ids=str)
def test_every_mix_of_types(device, activation, kinds, needs):
    low = torch.bfloat16
    dtypes = [torch.float32 if kind == "f" else low for kind in kinds]
    leaves, window = operands("3x3", device, "nhwc", dtypes, needs)
    with torch.autocast(device, low):
        y = convolved(*leaves, window, activation)
    ours = gradients(y, leaves)
    assert [g.dtype for g in ours] == [t.dtype for t in leaves if t.requires_grad]
    separate = convolved(*(t.to(low) for t in leaves), window, activation)
    for a, b in zip(ours, gradients(separate, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=torch.finfo(low).eps, atol=1e-6)


def exact_weight_gradient(x, w, dy, window):
    stride, padding, dilation, groups = window
    found = nn.grad.conv2d_weight(
        x.double(), w.shape, dy.double(), stride, padding, dilation, groups
    )
    return found.float()


@pytest.mark.gpu
@pytest.mark.parametrize("layer", REAL_LAYERS)
@low_types
def test_gradients_are_not_rounded_to_16_bits(low, layer):
    (x, w, b), window = operands(layer, "cuda", "nhwc")
    x = x.detach().to(low)
    with torch.autocast("cuda", low):
        y = F.conv2d(x, w, b, *window)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, (w, b), dy)
    wanted = exact_weight_gradient(x, w, dy, window), dy.double().sum((0, 2, 3))
    # Rounding to 16 bits would give about a fifth of eps.
    for grad, value in zip(grads, wanted, strict=True):
        assert (grad - value).norm() <= torch.finfo(low).eps / 50 * value.norm()


def test_float16_gradients_beyond_its_largest_number(device):
    """A scaled gradient of the weight may exceed 65504: float32 holds it."""
    x = torch.full((8, 64, 8, 8), 10.0, device=device).to(memory_format=torch.channels_last)
    w = torch.ones(64, 1, 3, 3, device=device, requires_grad=True)
    with torch.autocast(device, torch.float16):
        y = F.conv2d(x, w, padding=1, groups=64)
    grad = torch.autograd.grad(y, w, torch.full_like(y, 20.0))[0][:, :, 1, 1]
    if device == "cuda":
        assert (grad == 102400).all()
    else:  # the CPU's kernel rounds it
        assert grad.isinf().all()


def test_repeats(device):
    leaves, window = operands("3x3", device, "nhwc")
    found = []
    for _ in range(2):
        with torch.autocast(device, torch.bfloat16):
            found.append(gradients(convolved(*leaves, window, "relu"), leaves))
    assert_same(*found)


# ---- casts ----


@ops_with
def test_the_node_leads_to_the_weight(device, activation):
    leaves, window = operands("3x3", device)
    with torch.autocast(device, torch.bfloat16):
        y = convolved(*leaves, window, activation)
    edges = [node for node, _ in y.grad_fn.next_functions]
    assert edges[1].variable is leaves[1]
    assert edges[2].variable is leaves[2]
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        assert not convolved(*leaves, window, activation).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "none", "relu"], ids=str)
@pytest.mark.parametrize("layer", REAL_LAYERS)
def test_no_cast_of_weight_gradients(layer, activation):
    """In channels_last, whose kernels all write float32."""
    (x, w, _), window = operands(layer, "cuda", "nhwc")
    x = x.detach().bfloat16().requires_grad_()

    def backward():
        with torch.autocast("cuda", torch.bfloat16):
            y = convolved(x, w, None, window, activation)
        dy = torch.ones_like(y)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(y, (x, w), dy)
        return Counter(event.name for event in profile.events())

    assert backward()["aten::_to_copy"] == 0


@pytest.mark.parametrize("cache", [False, True])
def test_autocasts_cache(device, cache):
    leaves, window = operands("3x3", device, "nhwc")
    found = []
    for enabled in (cache, True):
        with torch.autocast(device, torch.bfloat16, cache_enabled=enabled):
            y = convolved(convolved(*leaves, window, None)[:, :1].expand_as(leaves[0]),
                          *leaves[1:], window, "relu")  # fmt: skip
        found.append(gradients(y, leaves))
    assert_same(*found)


@pytest.mark.parametrize("activation", [None, "relu"], ids=str)
def test_a_weight_that_two_layers_share(device, activation):
    """Its gradients are added in float32."""
    (x, w, b), window = operands("depthwise", device, "nhwc")

    def run(x, w, b):
        return convolved(convolved(x, w, b, window, activation), w, b, window, activation)

    with torch.autocast(device, torch.bfloat16):
        y = run(x, w, b)
    ours = gradients(y, [x, w, b])
    low = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
    for a, e in zip(ours, gradients(run(*low), low), strict=True):
        assert a.dtype == torch.float32
        assert (a - e).norm() <= 2.0**-7 * e.norm() + 1e-3


def test_weight_copies(device):
    """A step's 16-bit copies stand in for the casts, and the gradients stay float32."""
    found = []
    for copies in (False, True):
        torch.manual_seed(3)
        first = nn.Conv2d(3, 8, 3, bias=False)
        net = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(device)
        warpwright.swap(net, fuse=True)
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_copies=copies)
        x = torch.randn(2, 3, 8, 8, device=device)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = net(x).float().square().mean()
            loss.backward()
            assert all(p.grad.dtype == torch.float32 for p in net.parameters())
            optimizer.step()
        found.append([loss, *net.parameters()])
    assert len(dict(optimizer._copied())) == 3
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


# ---- derivatives, transforms, programs ----


@ops_with
def test_second_derivatives(device, activation):
    leaves, window = operands("3x3", device)
    found = []
    for direct in (True, False):
        with torch.autocast(device, torch.bfloat16, enabled=direct):
            given = leaves if direct else [t.bfloat16() for t in leaves]
            y = convolved(*given, window, activation)
        first = torch.autograd.grad(y.float().pow(3).sum(), leaves, create_graph=True)
        assert all(g.dtype == torch.float32 and g.requires_grad for g in first[:2])
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        assert all(g.dtype == torch.float32 for g in second)
        found.append((*first, *second))
    for ours, separate in zip(*found, strict=True):
        assert (ours - separate).norm() <= 0.02 * separate.norm() + 1e-3


def test_forward_mode_and_transforms(device):
    leaves, window = operands("3x3", device)
    functions = [lambda *a, f=f: f(*a, *window) for f in (ops.conv2d, torch.conv2d)]
    assert_transforms_agree_under_autocast(functions, leaves, device)


def test_gradients_per_sample(device):
    (x, w, b), window = operands("3x3", device)

    def loss(w, b, x):
        with torch.autocast(device, torch.bfloat16):
            return ops.conv2d(x, w, b, *window).float().square().sum()

    samples = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(w, b, x)
    for i in range(x.shape[0]):
        one = torch.func.grad(loss, (0, 1))(w, b, x[i])
        for all_of, single in zip(samples, one, strict=True):
            assert all_of.dtype == torch.float32
            assert (all_of[i] - single).norm() <= 0.02 * single.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    leaves, window = operands("3x3", device, "nhwc")
    found = []
    for recomputes in (False, True):
        with torch.autocast(device, torch.bfloat16):
            run = lambda *t: convolved(*t, window, "relu")  # noqa: E731
            y = checkpoint(run, *leaves, use_reentrant=reentrant) if recomputes else run(*leaves)
        for leaf in leaves:
            leaf.grad = None
        y.float().square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    assert_same(*found)


@pytest.mark.parametrize("activation", [None, "relu"], ids=str)
def test_compiled_backward_has_no_casts_of_weights(device, activation):
    leaves, window = operands("3x3", device, "nhwc")
    x = leaves[0].detach().bfloat16().requires_grad_()
    given = (x, *leaves[1:])

    def run(*args):
        with torch.autocast(device, torch.bfloat16):
            return convolved(*args, window, activation)

    in_one_graph, casts = compiled_with_casts(run)
    results = [gradients(call(*given), given) for call in (in_one_graph, run)]
    assert_same(*results)
    forward, backward = casts
    assert len(forward) == 2  # the weight and the bias
    assert not backward


def test_compiled_step(device):
    """Of layers whose batch norm moves its statistics, with a shortcut that ends in their node."""
    found = []
    for compiles in (False, True):
        torch.manual_seed(1)
        net = small_resnet().to(device).to(memory_format=torch.channels_last)
        warpwright.swap(net, fuse=True)
        x = torch.randn(2, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
        torch.compiler.reset()
        run = torch.compile(net, backend="aot_eager") if compiles else net
        with torch.autocast(device, torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in net.parameters())
        found.append([loss, *net.buffers(), *(p.grad for p in net.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() <= 0.02 * b.float().norm() + 1e-6


def test_running_statistics(device):
    """The node below autocast moves the statistics and their versions, as the one below it."""
    (x, w, b), window = operands("3x3", device, "nhwc")
    found = []
    for direct in (True, False):
        mean, var = torch.zeros(8, device=device), torch.ones(8, device=device)
        with torch.autocast(device, torch.bfloat16, enabled=direct):
            given = (x, w, b) if direct else [t.bfloat16() for t in (x, w, b)]
            y = ops.conv2d_batch_norm_update(
                *given, None, None, None, mean, var, 0.1, 1e-5, "relu", *window
            )[0]
        assert mean._version == var._version == 1
        found.append((y, mean, var))
    assert_same(*found)


def test_grad_scaler(device):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    ).to(device)
    warpwright.swap(net, fuse=True)
    x = torch.randn(4, 3, 8, 8, device=device)
    assert_trains_with_a_grad_scaler(net, x)


# ---- the raw operators ----


@low_types
@formats
@layers
def test_float32_parameters(device, low, form, layer):
    leaves, window = operands(layer, device, form, (low,) * 3)
    x, w, b = (t.detach() for t in leaves)
    dy = torch.randn_like(ops.conv2d(x, w, b, *window))
    for mask in subsets(3):
        narrow = ops.conv2d_backward(dy, x, w, *window, mask)
        wide = ops.conv2d_backward(dy, x, w, *window, mask, None, True)
        for want, a, e, dtype in zip(mask, wide, narrow, (low, *[torch.float32] * 2), strict=True):
            assert (a is not None) == want
            if want:
                assert a.dtype == dtype
                assert_within_one_rounding([a], [e.to(dtype)], low)


def test_unbatched_and_empty(device):
    (x, w, b), window = operands("3x3", device, dtypes=(torch.bfloat16,) * 3, needs=(False,) * 3)
    dy = torch.randn_like(ops.conv2d(x, w, b, *window))
    flag = ([True] * 3, None, True)
    one = ops.conv2d_backward(dy[0], x[0], w, *window, *flag)
    assert one[0].shape == x[0].shape
    assert_same(one[1:], ops.conv2d_backward(dy[:1], x[:1], w, *window, *flag)[1:])
    none = ops.conv2d_backward(dy[:0], x[:0], w, *window, *flag)
    assert none[1].dtype == none[2].dtype == torch.float32
    assert not none[1].any()
    assert not none[2].any()


@low_types
def test_opcheck(device, low):
    (x, w, b), window = operands("3x3", device, dtypes=(low,) * 3, needs=(False,) * 3)
    dy = torch.randn_like(ops.conv2d(x, w, b, *window))
    for mask in subsets(3):
        opcheck(ops.conv2d_backward.default, (dy, x, w, *window, mask, None, True))
    wanted = (dy.requires_grad_(), x.requires_grad_(), w.requires_grad_(), *window)
    opcheck(ops.conv2d_backward.default, (*wanted, [True] * 3, None, True))
    y, z, mean, rstd, mask = (
        t.detach()
        for t in ops.conv2d_batch_norm(x, w, None, None, None, None, 1e-3, "relu", *window)
    )
    norm = (mean, rstd, mask, z, None, None, None, 1e-3, "relu", *window)
    given = (torch.randn_like(y), None, None, x.detach(), w.detach(), None, None, *norm)
    options = [True, True, False, False, False], True
    assert ops.conv2d_batch_norm_backward(*given, *options)[1].dtype == torch.float32
    opcheck(ops.conv2d_batch_norm_backward.default, (*given, *options))


def test_vmap_of_the_operator(device):
    (x, w, b), window = operands("3x3", device, dtypes=(torch.bfloat16,) * 3, needs=(False,) * 3)
    dys = torch.randn(3, *ops.conv2d(x, w, b, *window).shape, device=device).bfloat16()

    def backward(dy):
        return ops.conv2d_backward(dy, x, w, *window, [True] * 3, x, True)

    for found, *samples in zip(torch.vmap(backward)(dys), *map(backward, dys), strict=True):
        expected = torch.stack(samples)
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= 2.0**-7 * expected.norm()  # one rounding to bfloat16


def test_errors(device):
    (x, w, b), window = operands("3x3", device, needs=(False,) * 3)
    dy = ops.conv2d(x, w, b, *window)
    message = "conv2d_backward: float32_parameters: expected 16-bit operands, got Float"
    with pytest.raises(RuntimeError, match=message):
        ops.conv2d_backward(dy, x, w, *window, [True] * 3, None, True)
    with pytest.raises(RuntimeError, match=message):
        ops.conv2d_backward(dy.to("meta"), x.to("meta"), w.to("meta"), *window, [True] * 3, None, True)  # fmt: skip
    y, z, *kept = ops.conv2d_batch_norm(x, w, None, None, None, None, 1e-3, "none", *window)
    with pytest.raises(RuntimeError, match="float32_parameters: expected 16-bit operands"):
        ops.conv2d_batch_norm_backward(
            *(y, None, None, x, w, None, None, *kept, z, None, None, None, 1e-3, "none", *window),
            *([True, True, False, False, False], True),
        )
