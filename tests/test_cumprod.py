"""cumprod and logcumsumexp in both directions against torch's."""

import pytest
import torch
from common import assert_no_leak, gradcheck, layouts, opcheck
from scans import SHAPES, direction, reversed_of

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
LONG = [
    *(((n,), 0) for n in (1, 7, 1000, 16385, 40001, 200001)),
    ((40001, 3), 0),
    ((2, 3000, 8), 1),
]


@pytest.fixture(params=["cumprod", "logcumsumexp"])
def name(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["forward", "reverse"])
def form(request, name):
    return direction(getattr(F, name), getattr(torch, name), request.param)


def values(name, shape, device):
    """Products stay near 1."""
    x = torch.randn(shape, device=device)
    return torch.exp(x * 0.02) * x.sign() if name == "cumprod" else x


@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_values(device, dtype, name, shape, dim, form):
    ours, theirs = form
    x = values(name, shape, device).to(dtype).requires_grad_()
    length = shape[dim] if shape else 1
    if length > 1000 and dtype == torch.float64:
        # Native is its own reference there, but its gradient is summed in another order.
        results = [f(x, dim) for f in (ours, theirs)]
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in results]
        torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
    else:
        compare_with_native(lambda t: ours(t, dim), lambda t: theirs(t, dim), (x,))
    assert ours(x, dim).is_contiguous()


@pytest.mark.parametrize(("shape", "dim"), LONG, ids=str)
@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_gradients_of_long_rows(device, name, shape, dim, form, zeros):
    """A random gradient from above and one of a single sign; rows with signs, and with zeros."""
    ours, theirs = form
    x = values(name, shape, device)
    length = shape[dim]
    for i in range(min(zeros, length)):
        x.select(dim, (2 * i + 1) * length // (2 * zeros)).zero_()
    x.requires_grad_()
    compare_with_native(lambda t: ours(t, dim), lambda t: theirs(t, dim), (x,))
    compare_with_native(lambda t: ours(t, dim).sum(dim), lambda t: theirs(t, dim).sum(dim), (x,))


def test_layouts(device, dtype, name, form):
    ours, theirs = form
    for _, x in layouts(values(name, (4, 6, 5), device).to(dtype)):
        for dim in range(x.dim()):
            compare_with_native(
                lambda t, d=dim: ours(t, d), lambda t, d=dim: theirs(t, d), (x.requires_grad_(),)
            )


@pytest.mark.parametrize("reverse", [False, True])
def test_every_offset(device, dtype, reverse):
    """A tensor that begins between two 16-byte boundaries: each product is a power of two."""
    base = 2.0 ** torch.randint(-1, 2, (40100,), device=device)
    base[1::2] = 1 / base[::2]
    base = (base * torch.randint(0, 2, (40100,), device=device).mul(2).sub(1)).to(dtype)
    theirs = reversed_of(torch.cumprod) if reverse else torch.cumprod
    for offset in range(9):
        for size in (100, 20000) if offset % 4 == 1 else (100,):
            x = base[offset : offset + size]
            expected = theirs(x.double(), 0).to(dtype)
            assert_same(F.cumprod(x, 0, reverse=reverse), expected, f"{offset}, {size}")
            rows = base[offset : offset + 99].view(9, 11)
            for dim in (0, 1):
                assert_same(F.cumprod(rows, dim, reverse=reverse), theirs(rows, dim))


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64],
    ids=str,
)
def test_other_types(device, dtype, name, form):
    ours, theirs = form
    x = torch.randint(1, 3, (3, 70, 5), device=device).to(dtype)
    for dim in range(3):
        try:
            expected = theirs(x, dim)
        except (RuntimeError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                ours(x, dim)
            continue
        torch.testing.assert_close(ours(x, dim), expected)
    if dtype.is_complex:
        leaf = torch.randn(3, 4, device=device, dtype=torch.complex128, requires_grad=True)
        gradcheck(lambda t: ours(t, 1), (leaf,))


@pytest.mark.parametrize("to", [torch.float64, torch.bfloat16, torch.int64, torch.int32], ids=str)
def test_dtype(device, to):
    x = torch.arange(1, 6, device=device)
    for source in (x, x.float(), x.half()):
        assert_same(F.cumprod(source, 0, dtype=to), torch.cumprod(source, 0, dtype=to))
        expected = torch.cumprod(source.flip(0), 0, dtype=to).flip(0)
        assert_same(F.cumprod(source, 0, dtype=to, reverse=True), expected)


def test_special_values(device, dtype, form):
    """NaN and infinities reach what follows them in their row, and nothing else."""
    ours, theirs = form
    inf, nan = float("inf"), float("nan")
    for length in (6, 40, 20000):
        x = torch.ones(5, length, device=device, dtype=dtype)
        x[0, 3], x[1, 2], x[2, 4], x[3, :3] = nan, inf, -inf, -inf
        x[4, 2], x[4, 4] = -inf, inf
        for t, dim in ((x, 1), (x.t().contiguous(), 0)):
            result, exact = ours(t, dim), theirs(t.double(), dim)
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(result), kind(exact)), (length, dim, kind)


def test_gradients_at_zeros(device):
    """Native's rule: none, one and several zeros in a row."""
    rows = [[1.0, 2, 3, 4], [1, 0, 3, 4], [0, 2, 0, 4], [0, 0, 3, 4], [2, 3, 4, 0]]
    x = torch.tensor(rows, device=device, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, device=device, dtype=torch.float64)
    for ours, theirs in ((F.cumprod, torch.cumprod),):
        grads = [torch.autograd.grad((f(x, 1) * weight).sum(), x)[0] for f in (ours, theirs)]
        torch.testing.assert_close(*grads)
    gradcheck(lambda t: F.cumprod(t, 1), (x,))
    gradcheck(lambda t: F.cumprod(t, 0), (x,))


def test_gradients_at_infinities(device):
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 1, 2, 3], [-inf, -inf, 1, 2], [1, inf, 2, 3], [1, 2, -inf, 3], [1, nan, 2, 3]]
    x = torch.tensor(rows, device=device, dtype=torch.float64, requires_grad=True)
    grads = [torch.autograd.grad(f(x, 1).sum(), x)[0] for f in (F.logcumsumexp, torch.logcumsumexp)]
    torch.testing.assert_close(*grads, equal_nan=True)


def test_differences_of_size(device):
    """What follows a large element does not round away what came before it."""
    x = torch.tensor([-100.0, 0.0, 50.0, 50.0, -3.0], device=device)
    for reverse in (False, True):
        theirs = reversed_of(torch.logcumsumexp) if reverse else torch.logcumsumexp
        torch.testing.assert_close(
            F.logcumsumexp(x, 0, reverse=reverse),
            theirs(x.double(), 0).float(),
            rtol=1e-6,
            atol=torch.finfo(torch.float32).tiny,  # a GPU's exponentials flush denormal numbers
        )


@pytest.mark.parametrize("shape", [(40, 4096), (3, 60000), (4000, 64)], ids=str)
def test_repeats_are_equal(device, dtype, name, shape):
    x = values(name, shape, device).to(dtype)
    for dim in (0, 1):
        first = getattr(F, name)(x, dim)
        for _ in range(10 if device == "cuda" else 2):
            assert_same(getattr(F, name)(x, dim), first)


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
        lambda f: torch.func.hessian(lambda t: f(t, 0).sin().sum()),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))
    batched = torch.func.vmap(torch.func.grad(lambda t: ours(t, -1).cos().sum()), in_dims=1)
    each = [torch.func.grad(lambda t: theirs(t, -1).cos().sum())(x[:, i]) for i in range(6)]
    torch.testing.assert_close(batched(x), torch.stack(each))


def test_opcheck(device, name):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    for arguments in ((x, 0), (x, -1, True), (x.t(), 0)):
        opcheck(getattr(ops, name).default, arguments)


def test_memory_is_freed(device, name):
    ours = getattr(F, name)
    assert_no_leak(lambda x: ours(x, 0), torch.randn(6, device=device, requires_grad=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, name, dynamic):
    ours = getattr(F, name)

    def step(x):
        return ours(x.sin(), 0) + ours(x, -1, reverse=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 6, device=device, requires_grad=True)
        expected, actual = step(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected))
        )


def test_autocast(device):
    x = torch.rand(4, 60, device=device).bfloat16()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert F.cumprod(x, 1).dtype == torch.cumprod(x, 1).dtype
        assert F.logcumsumexp(x, 1).dtype == torch.logcumsumexp(x, 1).dtype


def test_bad_input(device, name):
    ours = getattr(F, name)
    x = torch.ones(3, 4, device=device)
    for dim in (2, -3):
        with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got"):
            ours(x, dim)
    for dim in (0.0, None, "N", True):
        with pytest.raises(TypeError, match=rf"{name}\(\): argument 'dim' must be int"):
            ours(x, dim)
    with pytest.raises(TypeError, match=rf"{name}\(\): argument 'input' must be Tensor, not int"):
        ours(3, 0)
    with pytest.raises(TypeError, match=rf"{name}\(\): argument 'reverse' must be bool, not int"):
        ours(x, 0, reverse=1)
    freed = torch.ones(4, device=device)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=rf"{name}: input: .*data is not allocated"):
        ours(freed, 0)


def test_explain(name):
    text = warpwright.explain(name, torch.empty(8, 4096), 1, device="cuda")
    assert "whole rows per block, 16-byte accesses" in text
    assert "linear_scan" in text
