"""group_norm and instance_norm against native."""

import copy

import pytest
import torch
import torch.nn.functional as native
from common import assert_no_leak, assert_replays, gradcheck, layouts, opcheck, subsets
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

DOUBLE = {"rtol": 1e-10, "atol": 1e-10}

ops = torch.ops.warpwright
# Groups of a few lanes, a warp and several; planes of odd size; one value per channel; no batch.
SHAPES = [
    ((2, 6, 8), 2),
    ((3, 4), 1),
    ((3, 6, 1, 1), 2),
    ((2, 6, 4, 4), 6),
    ((2, 6, 7, 7), 3),
    ((4, 32, 8, 8), 8),
    ((2, 64, 16, 16), 32),
    ((1, 8, 30, 31), 4),
    ((2, 40, 32, 36), 4),
    ((2, 5, 3, 4, 6), 1),
    ((40, 64, 6, 12), 16),
]
EMPTY = [((0, 6, 3), 2), ((2, 6, 0), 2), ((2, 0, 3), 1)]
# On a GPU: more groups than blocks, clusters of two to eight blocks, groups that no cluster holds.
LARGE = [
    ((600, 8, 24), 2),
    ((3, 320, 64, 64), 32),
    ((16, 640, 32, 32), 32),
    ((2, 640, 64, 64), 32),
    ((1, 64, 128, 128), 8),
    ((1, 64, 512, 512), 8),
    ((2, 3, 224, 224), 3),
    ((2, 2560, 16, 16), 32),
]


def check(ours, theirs, args):
    """The error rule; in float64, where native is the oracle, a distance."""
    if args[0].dtype != torch.float64:
        compare_with_native(ours, theirs, args)
        return
    found = []
    for function in (ours, theirs):
        y = function(*args)
        cotangent = found[0][1] if found else torch.randn_like(y)
        found.append((y, cotangent, *torch.autograd.grad(y, args, cotangent, allow_unused=True)))
    torch.testing.assert_close(found[0], found[1], **DOUBLE)


def operands(shape, device, dtype, vectors=None):
    x = (torch.randn(shape, device=device) * 2 + 1).to(dtype).requires_grad_()
    pair = [torch.randn(shape[1], device=device).to(vectors or dtype) for _ in range(2)]
    return (x, *(v.requires_grad_() for v in pair))


def native_group_norm(x, groups, *vectors):
    """On a GPU native leaves channels_last; ours keeps it, as native on the CPU does."""
    y = native_group_norm_of_values(x, groups, *vectors)
    is_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return y.contiguous(memory_format=torch.channels_last) if is_last and x.is_cuda else y


def native_group_norm_of_values(x, groups, *vectors):
    """On a GPU native takes no float32 vectors next to a 16-bit input."""
    if x.is_cuda and vectors and vectors[0].dtype != x.dtype:
        wide = torch.float64 if torch.float64 in (x.dtype, vectors[0].dtype) else torch.float32
        return native.group_norm(x.to(wide), groups, *(v.to(wide) for v in vectors)).to(x.dtype)
    return native.group_norm(x, groups, *vectors)


def compare(shape, groups, args):
    check(
        lambda x, *v: F.group_norm(x, groups, *v),
        lambda x, *v: native_group_norm(x, groups, *v),
        args,
    )


@pytest.mark.parametrize(("shape", "groups"), SHAPES)
def test_values(device, dtype, shape, groups):
    args = operands(shape, device, dtype)
    compare(shape, groups, args)
    compare(shape, groups, args[:1])


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "groups"), LARGE)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large(device, dtype, shape, groups, layout):
    if device == "cpu":
        pytest.skip("the CPU's kernels have one form per layout")
    x, *vectors = operands(shape, device, dtype)
    if layout == "channels_last":
        if len(shape) != 4:
            pytest.skip("three dimensions have no such layout")
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    compare(shape, groups, (x, *vectors))


@pytest.mark.parametrize(("shape", "groups"), EMPTY)
def test_empty(device, dtype, shape, groups):
    """Sums over nothing are zero. Native's gradient of the weight is NaN for empty planes."""
    args = operands(shape, device, dtype)
    y = F.group_norm(args[0], groups, *args[1:])
    assert y.shape == args[0].shape
    for grad, of in zip(torch.autograd.grad(y.sum(), args), args, strict=True):
        assert_same(grad, torch.zeros_like(of))


@pytest.mark.parametrize("short", [torch.bfloat16, torch.float16], ids=str)
def test_float32_vectors(device, short):
    for shape, groups in (((2, 6, 8), 2), ((2, 6, 7, 7), 3), ((4, 32, 8, 8), 8)):
        args = operands(shape, device, short, torch.float32)
        compare(shape, groups, args)
        compare(shape, groups, args[:2])


def test_one_vector(device, dtype):
    x, weight, bias = operands((2, 6, 8), device, dtype)
    check(
        lambda x, b: F.group_norm(x, 2, None, b),
        lambda x, b: native.group_norm(x, 2, torch.ones_like(b), b),
        (x, bias),
    )
    compare((2, 6, 8), 2, (x, weight))


def test_layouts(device, dtype):
    for what, x in layouts(torch.randn(3, 8, 5, 8, device=device).to(dtype)):
        _, *vectors = operands((3, 8), device, dtype)
        y = F.group_norm(x, 4, *vectors)
        last = what == "channels_last"
        expected = torch.channels_last if last else torch.contiguous_format
        assert y.is_contiguous(memory_format=expected), what
        compare((3, 8), 4, (x.requires_grad_(), *vectors))
        (grad,) = torch.autograd.grad(F.group_norm(x, 4)[0, 0, 0, 0], x)
        assert grad.is_contiguous(memory_format=expected), what
    volume = torch.randn(2, 6, 3, 4, 5, device=device).to(memory_format=torch.channels_last_3d)
    assert F.group_norm(volume, 3).is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(F.group_norm(volume, 3), native.group_norm(volume, 3))


@pytest.mark.parametrize("wanted", subsets(3))
def test_every_subset_of_gradients(device, wanted):
    for x, *vectors in (
        operands((2, 6, 4, 4), device, torch.float64),
        operands((2, 6, 3, 3), device, torch.float64),
    ):
        args = [t.detach().requires_grad_(w) for t, w in zip((x, *vectors), wanted, strict=True)]
        chosen = [t for t in args if t.requires_grad]
        dy = torch.randn_like(x)
        ours = torch.autograd.grad(F.group_norm(args[0], 3, *args[1:]), chosen, dy)
        theirs = torch.autograd.grad(native.group_norm(args[0], 3, *args[1:]), chosen, dy)
        torch.testing.assert_close(ours, theirs)


def test_far_from_zero(device):
    """The variance is no difference of large sums."""
    for shape in ((2, 8, 64), (2, 8, 7), (1, 4, 40000)):
        x = torch.randn(shape, device=device) + 1000
        for t in (x, x.unsqueeze(-1).to(memory_format=torch.channels_last)):
            exact = native.group_norm(t.double(), 2)
            ours = (F.group_norm(t, 2) - exact).abs().max()
            assert ours <= 1.5 * (native.group_norm(t, 2) - exact).abs().max() + 1e-4


def test_special_values(device, dtype):
    x = torch.randn(4, 4, 24, device=device).to(dtype)
    x[0, 1, 3], x[1, 2, 0] = float("nan"), float("inf")
    x[2] = 3.0
    for t in (x, x.unsqueeze(-1).to(memory_format=torch.channels_last)):
        ours, theirs = F.group_norm(t, 2), native.group_norm(t.double(), 2)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(F.group_norm(t, 2)[2], torch.zeros_like(ours[2]))


@pytest.mark.parametrize("shape", [(8, 32, 16, 16), (2, 8, 65, 3), (1, 16, 128, 128)])
def test_repeats_are_equal(device, dtype, shape):
    for last in (False, True):
        x, *vectors = operands(shape, device, dtype)
        if last:
            x = x.detach().to(memory_format=torch.channels_last).requires_grad_()

        def step(x=x, vectors=vectors):
            y = F.group_norm(x, 4, *vectors)
            return y.detach(), *torch.autograd.grad(y, (x, *vectors), torch.ones_like(y))

        first = step()
        for _ in range(10 if device == "cuda" else 2):
            assert_same(list(step()), list(first))


def test_gradients(device):
    x = torch.randn(2, 4, 3, device=device, dtype=torch.float64, requires_grad=True)
    vectors = [torch.randn(4, device=device, dtype=torch.float64, requires_grad=True) for _ in "wb"]
    gradcheck(lambda *a: F.group_norm(a[0], 2, *a[1:]), (x, *vectors))
    gradcheck(lambda t: F.group_norm(t, 4), (x,))
    image = torch.randn(2, 4, 2, 3, device=device, dtype=torch.float64)
    image = image.to(memory_format=torch.channels_last).requires_grad_()
    gradcheck(lambda t, w: F.group_norm(t, 2, w), (image, vectors[0]))


def test_func_transforms(device):
    x = torch.randn(3, 2, 4, 3, device=device, dtype=torch.float64)
    w = torch.randn(4, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.vmap(lambda t: f(t, 2, w)),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t, 2, w).sin().sum())),
        lambda f: torch.func.jacfwd(lambda t: f(t[0], 2, w)),
        lambda f: torch.func.hessian(lambda t: f(t[0], 2, w).sin().sum()),
    ):
        torch.testing.assert_close(transform(F.group_norm)(x), transform(native.group_norm)(x))


def test_opcheck(device):
    x, w, b = operands((2, 6, 3, 4), device, torch.float32)
    opcheck(ops.group_norm, (x, 3, w, b, 1e-5))
    opcheck(ops.group_norm, (x.detach().to(memory_format=torch.channels_last), 2, None, None, 0.1))
    _, mean, rstd = ops.group_norm(x.detach(), 3, None, None, 1e-5)
    for mask in ([True, True, True], [False, True, False]):
        opcheck(
            ops.group_norm_backward, (x.cos().detach().requires_grad_(), x, 3, w, mean, rstd, mask)
        )


def test_errors(device):
    x, w = torch.randn(2, 6, 4, device=device), torch.randn(6, device=device)
    cases = (
        ((x[0, 0], 2), {}),
        ((x, 4), {}),
        ((x, 0), {}),
        ((x, 2, w[:5]), {}),
        ((x, 2, None, w[:5]), {}),
        ((x, 2, w[:, None]), {}),
        ((x.long(), 2), {}),
        ((x.to(torch.complex64), 2), {}),
        ((x, 2, w.double()), {}),
        ((x.bfloat16(), 2, w.bfloat16(), w), {}),
        ((x.double(), 2, w, w), {}),
        ((x[:1, :, :1], 6), {}),
        ((x, "2"), {}),
        ((x, 2), {"eps": "a"}),
        ((x, 2, 3.0), {}),
    )
    for args, kwargs in cases:
        with pytest.raises(Exception) as expected:  # noqa: PT011  # native's type is the point
            native.group_norm(*args, **kwargs)
        with pytest.raises(expected.type):
            F.group_norm(*args, **kwargs)
    with pytest.raises(RuntimeError, match="num groups to be greater than 0, got -1"):
        ops.group_norm(x, -1, None, None, 1e-5)
    _, mean, rstd = ops.group_norm(x, 2, None, None, 1e-5)
    for args, message in (
        ((x[:1], x, 2, None, mean, rstd), "grad_output: expected shape"),
        ((x, x, 2, None, mean[:1], rstd), "mean: expected shape"),
        ((x, x, 2, None, mean, rstd.double()), "rstd: expected Float"),
        ((x, x, 4, None, mean, rstd), "divisible by num_groups"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.group_norm_backward(*args, [True, True, True])


def test_autocast(device):
    x, w, b = operands((2, 6, 8), device, torch.float32)
    with torch.autocast(device, dtype=torch.bfloat16):
        for t in (x, x.bfloat16()):
            y = F.group_norm(t, 2, w, b)
            assert y.dtype == native.group_norm(t, 2, w, b).dtype


def test_compile(device):
    x, w, b = operands((2, 6, 8), device, torch.float32)
    run = torch.compile(lambda *a: F.group_norm(a[0] * 2, 2, *a[1:]).relu(), fullgraph=True)
    torch.testing.assert_close(run(x, w, b), native.group_norm(x * 2, 2, w, b).relu())
    run(x, w, b).sum().backward()


def test_memory(device):
    x, w, b = operands((2, 6, 8), device, torch.float32)
    assert_no_leak(lambda *a: F.group_norm(a[0], 2, *a[1:]), x, w, b)


@pytest.mark.gpu
def test_graph(device):
    if device == "cpu":
        pytest.skip("CUDA graphs")
    for shape in ((4, 32, 32, 32), (2, 6, 7, 7)):
        x, *vectors = operands(shape, device, torch.bfloat16)

        def step(x=x, vectors=vectors):
            y = F.group_norm(x, 2, *vectors)
            return y.detach(), *torch.autograd.grad(y, (x, *vectors), torch.ones_like(y))

        assert_replays(step)


# ---- instance norm ----


def running_statistics(x, wanted):
    if not wanted:
        return [None, None]
    return [torch.full((x.shape[1],), s, device=x.device, dtype=x.dtype) for s in (0.5, 2.0)]


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 5, 7), (1, 4, 3, 4, 5)])
@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm(device, dtype, shape, running, by_input, affine):
    if not running and not by_input:
        pytest.skip("native raises")
    args = operands(shape, device, dtype)[: 3 if affine else 1]

    def call(function, x, *vectors):
        statistics = running_statistics(x, running)
        vectors = vectors or (None, None)
        return function(x, *statistics, *vectors, by_input, 0.3, 1e-4), statistics

    check(
        lambda *a: call(F.instance_norm, *a)[0], lambda *a: call(native.instance_norm, *a)[0], args
    )
    if running:
        constants = [t.detach() for t in args]
        pairs = zip(*(call(f, *constants)[1] for f in (F.instance_norm, native.instance_norm)))  # noqa: B905
        for ours, theirs in pairs:
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_instance_norm_errors(device):
    x = torch.randn(2, 3, 4, device=device)
    for args, kwargs in (
        ((x[:, :, :1],), {}),
        ((x[0],), {}),
        ((x,), {"use_input_stats": False}),
        ((x.long(),), {}),
        ((x, x[0, 0], None), {}),
        ((x,), {"weight": x[0, 0]}),
        ((x,), {"use_input_stats": 1.5}),
    ):
        with pytest.raises(Exception) as expected:  # noqa: PT011  # native's type is the point
            native.instance_norm(*args, **kwargs)
        with pytest.raises(expected.type):
            F.instance_norm(*args, **kwargs)


def test_layers(device):
    x = torch.randn(2, 6, 4, 8, device=device)
    for layer, inputs in (
        (nn.GroupNorm(3, 6), (x, x[:, :, 0])),
        (nn.GroupNorm(2, 6, affine=False), (x,)),
        (nn.InstanceNorm1d(6, affine=True), (x[:, :, 0], x[0, :, 0])),
        (nn.InstanceNorm2d(6), (x, x[0])),
        (nn.InstanceNorm2d(6, affine=True, track_running_stats=True), (x, x)),
        (nn.InstanceNorm3d(6), (x[:, :, None],)),
    ):
        theirs = layer.to(device)
        model = nn.Sequential(copy.deepcopy(theirs))
        report = warpwright.swap(model)
        assert type(model[0]).__module__ == "warpwright.nn", report
        for training in (True, False):
            model.train(training)
            theirs.train(training)
            for t in inputs:
                torch.testing.assert_close(model(t), theirs(t))
        torch.testing.assert_close(model[0].state_dict(), theirs.state_dict())
        warpwright.unswap(model)
        assert type(model[0]) is type(theirs)


def test_explain():
    x = torch.empty(16, 320, 64, 64, dtype=torch.bfloat16, device="meta")
    text = warpwright.explain("group_norm", x, 32, device="h100")
    assert "groups in a ring" in text
    # The backward holds 80 KB of x and of dy: a group in registers, the next one in shared memory.
    assert "512 thread(s) and 1 block(s) per group" in text
    last = x.to(memory_format=torch.channels_last)
    assert "channels innermost" in warpwright.explain("group_norm", last, 32, device="h100")
    assert "two passes" in warpwright.explain("instance_norm", x[..., :63, :63], device="h100")
