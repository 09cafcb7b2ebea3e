"""cumsum in both directions against torch.cumsum."""

import pytest
import torch
from common import assert_no_leak, gradcheck, layouts, opcheck
from scans import SHAPES, direction, reversed_of

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


reversed_cumsum = reversed_of(torch.cumsum)


@pytest.fixture(params=[False, True], ids=["forward", "reverse"])
def form(request):
    return direction(F.cumsum, torch.cumsum, request.param)


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values(device, dtype, shape, dim, form):
    ours, theirs = form
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    compare_with_native(lambda t: ours(t, dim), lambda t: theirs(t, dim), (x,))
    assert ours(x, dim).is_contiguous()


def test_layouts(device, dtype, form):
    ours, theirs = form
    for name, x in layouts(torch.randn(4, 6, 5, device=device).to(dtype)):
        for dim in range(x.dim()):
            whole = (x.detach() * 4).round() + 0  # exact in every order, and no -0
            assert_same(ours(whole, dim), theirs(whole, dim), f"{name}, {dim}")
            compare_with_native(
                lambda t, d=dim: ours(t, d), lambda t, d=dim: theirs(t, d), (x.requires_grad_(),)
            )


def test_every_offset(device, dtype, form):
    """A tensor that begins between two 16-byte boundaries: each sum is exact."""
    ours, theirs = form
    base = torch.randint(-2, 3, (40100,), device=device).to(dtype)
    for offset in range(9):
        for size in (100, 20000) if offset % 4 == 1 else (100,):
            x = base[offset : offset + size]
            assert_same(ours(x, 0), theirs(x.double(), 0).to(dtype), f"{offset}, {size}")
            rows = base[offset : offset + 99].view(9, 11)
            assert_same(ours(rows, 1), theirs(rows, 1), f"rows, {offset}")
            assert_same(ours(rows, 0), theirs(rows, 0), f"columns, {offset}")


@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool, torch.complex64], ids=str)
def test_other_types(device, dtype, form):
    ours, theirs = form
    x = torch.randint(0, 2, (3, 70, 5), device=device).to(dtype)
    for dim in range(3):
        assert_same(ours(x, dim), theirs(x, dim))
    if dtype.is_complex:
        leaf = torch.randn(3, 4, device=device, dtype=torch.complex128, requires_grad=True)
        gradcheck(lambda t: ours(t, 1), (leaf,))


def test_integers_wrap(device):
    x = torch.full((5000,), 2**61, device=device)
    assert_same(F.cumsum(x, 0), torch.cumsum(x, 0))


@pytest.mark.parametrize(
    "to", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.complex64]
)
def test_dtype(device, to):
    x = torch.arange(-4, 4, device=device)
    for source in (x, x.float(), x.half()):
        assert_same(F.cumsum(source, 0, dtype=to), torch.cumsum(source, 0, dtype=to))
        expected = torch.cumsum(source.flip(0), 0, dtype=to).flip(0)
        assert_same(F.cumsum(source, 0, dtype=to, reverse=True), expected)
    leaf = torch.randn(6, device=device).half().requires_grad_()
    if to.is_floating_point:
        (grad,) = torch.autograd.grad(F.cumsum(leaf, 0, dtype=to).sum(), leaf)
        assert grad.dtype == torch.half


def test_special_values(device, dtype, form):
    """NaN and infinities reach what follows them in their row, and nothing else."""
    ours, theirs = form
    inf, nan = float("inf"), float("nan")
    for length in (6, 40, 20000):
        x = torch.ones(3, length, device=device, dtype=dtype)
        x[0, 3], x[1, 2], x[1, 4] = nan, inf, -inf
        x[2] = 0
        for t, dim in ((x, 1), (x.t().contiguous(), 0)):
            result, exact = ours(t, dim), theirs(t.double(), dim)
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(result), kind(exact)), (length, dim, kind)


def test_a_long_row_is_exact(device):
    """float32: the error does not grow with the length."""
    x = torch.rand(1 << 21, device=device)
    exact = torch.cumsum(x.double(), 0)
    assert ((F.cumsum(x, 0) - exact).abs() / exact).max() < 2e-6


@pytest.mark.parametrize("shape", [(40, 4096), (3, 60000), (4000, 64)])
def test_repeats_are_equal(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype)
    for dim in (0, 1):
        first = F.cumsum(x, dim)
        for _ in range(10 if device == "cuda" else 2):
            assert_same(F.cumsum(x, dim), first)


def test_gradients(device, form):
    ours, _ = form
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1):
        gradcheck(lambda t, d=dim: ours(t, d), (x,))


def test_func_transforms(device, form):
    ours, theirs = form
    x = torch.randn(4, 6, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t, 0).sin().sum()),
        lambda f: torch.func.jacrev(lambda t: f(t, 1)),
        lambda f: torch.func.jacfwd(lambda t: f(t, 1)),
        lambda f: torch.func.vmap(lambda t: f(t, 0)),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t, -1).cos().sum()), in_dims=1),
        lambda f: torch.func.hessian(lambda t: f(t, 0).pow(3).sum()),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))


def test_opcheck(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    for arguments in ((x, 0), (x, -1, True), (x.t(), 0), (x.detach().int(), 1)):
        opcheck(ops.cumsum.default, arguments)


def test_memory_is_freed(device):
    assert_no_leak(lambda x: F.cumsum(x, 0), torch.randn(6, device=device, requires_grad=True))


def test_nothing_is_kept(device):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.cumsum(torch.randn(6, device=device, requires_grad=True), 0)
    assert not saved


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x):
        return F.cumsum(x.sin(), 0) + F.cumsum(x, -1, reverse=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 6, device=device, requires_grad=True)
        expected, actual = step(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected))
        )


def test_bad_input(device):
    x = torch.ones(3, 4, device=device)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got"):
            F.cumsum(x, dim)
    for dim in (0.0, None, "N", True):
        with pytest.raises(TypeError, match=r"cumsum\(\): argument 'dim' must be int"):
            F.cumsum(x, dim)
    with pytest.raises(TypeError, match=r"cumsum\(\): argument 'input' must be Tensor, not int"):
        F.cumsum(3, 0)
    with pytest.raises(TypeError, match=r"cumsum\(\): argument 'reverse' must be bool, not int"):
        F.cumsum(x, 0, reverse=1)
    freed = torch.ones(4, device=device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"cumsum: input: .*data is not allocated"):
        F.cumsum(freed, 0)


def test_explain():
    gpu = {"device": "cuda"}
    x = torch.empty(8, 4096)
    assert "whole rows per block, 16-byte accesses" in warpwright.explain("cumsum", x, 1, **gpu)
    assert "whole columns per block" in warpwright.explain("cumsum", x, 0, **gpu)
    assert "look back" in warpwright.explain("cumsum", x.view(-1), 0, **gpu)
    assert "one element per access" in warpwright.explain("cumsum", x[:, :31], 0, **gpu)
    assert "whole rows" in warpwright.explain("cumsum", x.view(4, 8192), -1, **gpu)
    assert "look back" in warpwright.explain("cumsum", x.view(4, 8192).int(), -1, **gpu)
