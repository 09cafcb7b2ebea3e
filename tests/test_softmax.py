"""softmax and log_softmax against native, along every dimension."""

import warnings

import pytest
import torch
import torch.nn.functional as native
from common import assert_no_leak, assert_replays, gradcheck, layouts, opcheck
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

DOUBLE = {"rtol": 1e-10, "atol": 1e-10}

ops = torch.ops.warpwright
NAMES = ["softmax", "log_softmax"]
both = pytest.mark.parametrize("name", NAMES)
SHORT = [torch.bfloat16, torch.float16]
# Rows of a few lanes, of a warp and of several warps; element accesses; rows that begin between
# vectors; columns of vectors and of elements.
SHAPES = [
    ((), 0),
    ((0,), 0),
    ((3, 0, 4), 1),
    ((3, 0, 4), 2),
    ((1,), 0),
    ((5, 1, 3), 1),
    ((7, 5), 1),
    ((37, 8), -1),
    ((300, 24), 1),
    ((9, 1000), 1),
    ((21, 701), 1),
    ((5, 1025), 1),
    ((3, 4099), 1),
    ((4, 7, 5), 1),
    ((2, 21, 6, 8), 1),
    ((65, 16), 0),
    ((2, 300, 24), 1),
]
# On a GPU: more rows than groups; more vectors per thread; rows and columns that are read twice.
LARGE = [
    ((5000, 128), 1),
    ((700, 2048), 1),
    ((300, 8192), 1),
    ((270, 16384), 1),
    ((140, 32768), 1),
    ((6, 65536), 1),
    ((9, 50257), 1),
    ((2, 131080), 1),
    ((4, 513, 72), 1),
    ((2, 1500, 33), 1),
    ((16, 19, 64, 64), 1),
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


def pair(name):
    return getattr(F, name), getattr(native, name)


@both
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values(device, dtype, name, shape, dim):
    ours, theirs = pair(name)
    x = (torch.randn(shape, device=device) * 3).to(dtype).requires_grad_()
    check(lambda t: ours(t, dim), lambda t: theirs(t, dim), (x,))
    assert ours(x, dim).is_contiguous()


@pytest.mark.gpu
@both
@pytest.mark.parametrize(("shape", "dim"), LARGE)
def test_large(device, dtype, name, shape, dim):
    if device == "cpu":
        pytest.skip("the CPU's kernels have one form per layout")
    ours, theirs = pair(name)
    x = (torch.randn(shape, device=device) * 3).to(dtype).requires_grad_()
    check(lambda t: ours(t, dim), lambda t: theirs(t, dim), (x,))


@both
def test_layouts(device, dtype, name):
    ours, theirs = pair(name)
    for what, x in layouts(torch.randn(4, 6, 5, 8, device=device).to(dtype)):
        for dim in range(x.dim()):
            y = ours(x, dim)
            assert y.is_contiguous(), what
            check(lambda t, d=dim: ours(t, d), lambda t, d=dim: theirs(t, d), (x.requires_grad_(),))


@both
def test_every_offset(device, dtype, name):
    """A tensor that begins between two 16-byte boundaries has the values of an aligned one."""
    ours, _ = pair(name)
    base = torch.randn(20100, device=device).to(dtype)
    for offset in range(9):
        for size in (100, 9000):
            x = base[offset : offset + size]
            expected = ours(x.double(), 0)
            error = (ours(x, 0).double() - expected).abs().max()
            scale = torch.finfo(dtype).eps * max(expected.abs().max(), 1e-3)
            assert error <= 4 * scale, f"{offset}, {size}"
            leaf = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(ours(leaf, 0)[0], leaf)
            assert grad.isfinite().all()


@both
@pytest.mark.parametrize("short", SHORT, ids=str)
def test_half_to_float(device, name, short):
    """16 bits to float32: as the conversion and native's softmax, in float32 throughout."""
    ours, theirs = pair(name)
    for shape, dim in (((9, 40), 1), ((3, 7, 16), 1), ((4, 2500), 1), ((6, 5, 3), 1)):
        x = (torch.randn(shape, device=device) * 3).to(short).requires_grad_()
        y = ours(x, dim, dtype=torch.float32)
        assert y.dtype == torch.float32
        check(
            lambda t, d=dim: ours(t, d, dtype=torch.float32),
            # Of the exact run in float64, too.
            lambda t, d=dim: theirs(
                t, d, dtype=torch.float64 if t.dtype == torch.float64 else torch.float32
            ),
            (x,),
        )
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.dtype == short


@both
@pytest.mark.parametrize("to", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.int64, torch.uint8, torch.bool, torch.float32])
def test_dtype(device, name, source, to):
    ours, theirs = pair(name)
    x = torch.randint(0, 5, (3, 8), device=device).to(source)
    y = ours(x, 1, dtype=to)
    assert y.dtype == to
    expected = theirs(x.double(), 1)
    assert (y.double() - expected).abs().max() <= 2 * torch.finfo(to).eps * expected.abs().max()
    assert_same(y, getattr(warpwright.functional, name)(x, 1, 3, to))  # native's order
    leaf = torch.randn(4, 6, device=device).requires_grad_()
    (grad,) = torch.autograd.grad(ours(leaf, 1, dtype=to)[0, 0], leaf)
    assert grad.dtype == torch.float32


@both
def test_special_values(device, dtype, name):
    """-inf rows, infinities and NaN: NaN at native's places; a masked row keeps its other values."""
    ours, theirs = pair(name)
    inf, nan = float("inf"), float("nan")
    for length in (6, 40, 1024, 1031, 9001):
        x = torch.randn(6, length, device=device).to(dtype)
        x[0] = -inf
        x[1, :] = -inf
        x[1, length // 2] = 1.0
        x[2, 3] = nan
        x[3, 1] = inf
        x[4, ::2] = -inf
        x[5] = torch.finfo(dtype).max
        for t, dim in ((x, 1), (x.t().contiguous(), 0)):
            result, exact = ours(t, dim), theirs(t.double(), dim)
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(result), kind(exact)), (length, dim, kind)
            finite = exact.isfinite()
            error = (result.double() - exact)[finite].abs().max()
            assert error <= 4 * torch.finfo(dtype).eps * exact[finite].abs().max()


@both
@pytest.mark.parametrize("shape", [(40, 4096), (3, 60000), (4000, 64), (33, 1025)])
def test_repeats_are_equal(device, dtype, name, shape):
    ours, _ = pair(name)
    x = torch.randn(shape, device=device).to(dtype)
    for dim in (0, 1):
        first = ours(x, dim)
        for _ in range(10 if device == "cuda" else 2):
            assert_same(ours(x, dim), first)


@both
def test_gradients(device, name):
    ours, _ = pair(name)
    x = torch.randn(3, 4, 2, device=device, dtype=torch.float64, requires_grad=True)
    for dim in (0, 1, -1):
        gradcheck(lambda t, d=dim: ours(t, d), (x,))
    gradcheck(lambda t: ours(t, 0), (torch.randn((), device=device).double().requires_grad_(),))


@both
def test_gradients_of_the_backward(device, name):
    ours, _ = pair(name)
    y = ours(torch.randn(3, 4, device=device, dtype=torch.float64), 1)
    op = getattr(ops, f"{name}_backward")
    dy = torch.randn_like(y).requires_grad_()
    for operands in ((dy, y.clone().requires_grad_()), (dy, y)):
        gradcheck(lambda *t: op(*t, 1, torch.float64), operands)


@both
def test_func_transforms(device, name):
    ours, theirs = pair(name)
    x = torch.randn(4, 6, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t, 0).sin().sum()),
        lambda f: torch.func.jacrev(lambda t: f(t, 1)),
        lambda f: torch.func.jacfwd(lambda t: f(t, 1)),
        lambda f: torch.func.hessian(lambda t: f(t, 0).sin().sum()),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t, 0).pow(2).sum())),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))


@both
def test_opcheck(device, name):
    op, backward = getattr(ops, name), getattr(ops, f"{name}_backward")
    x = torch.randn(3, 5, 2, device=device, requires_grad=True)
    opcheck(op, (x, 1))
    opcheck(op, (x.detach().bfloat16().requires_grad_(), -1, torch.float32))
    opcheck(op, (torch.arange(6, device=device).view(2, 3), 1, torch.float32))
    y = op(x.detach(), 1).requires_grad_()
    opcheck(backward, (x, y, 1, torch.float32))
    opcheck(backward, (x.detach(), y.detach(), 0, torch.float16))


@both
def test_errors(device, name):
    ours, theirs = pair(name)
    x = torch.randn(2, 3, device=device)
    for args, kwargs in (
        ((x, 2), {}),
        ((x, -3), {}),
        ((torch.tensor(1.0, device=device), 1), {}),
        ((x.long(), 1), {}),
        ((x > 0, 1), {}),
        ((x.to(torch.complex64), 1), {}),
        ((x, 1), {"dtype": torch.int64}),
        ((x, 1.5), {}),
        ((x, 1), {"dtype": "float32"}),
        ((3.0, 1), {}),
        ((None, 1), {}),
    ):
        with pytest.raises(Exception) as expected:  # noqa: PT011  # native's type is the point
            theirs(*args, **kwargs)
        with pytest.raises((RuntimeError, IndexError, TypeError, AttributeError)) as raised:
            ours(*args, **kwargs)
        same = isinstance(raised.value, type(expected.value))
        assert same or expected.type is AttributeError, (args, raised.value)


@both
def test_raw_operators_check_their_arguments(device, name):
    backward = getattr(ops, f"{name}_backward")
    x = torch.randn(2, 3, device=device)
    for args, message in (
        ((x, x[:1], 1, torch.float32), "grad_output: expected shape"),
        ((x.half(), x, 1, torch.float32), "grad_output: expected Float"),
        ((x, x, 1, torch.float64), "input_dtype: expected Float, BFloat16 or Half, got Double"),
        ((x.half(), x.half(), 1, torch.float32), "input_dtype: expected Half, the output's"),
        ((x.long(), x.long(), 1, torch.int64), "expected a real floating-point tensor"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError), match=message):
            backward(*args)
    with pytest.raises(IndexError):
        backward(x, x, 2, torch.float32)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="data is not allocated"):
        getattr(ops, name)(x, 1)


@both
def test_no_dimension_warns_as_native(device, name):
    ours, theirs = pair(name)
    for shape in ((3,), (2, 3), (2, 3, 4), (2, 3, 4, 5)):
        x = torch.randn(shape, device=device)
        with pytest.warns(UserWarning, match="Implicit dimension choice") as expected:
            y = theirs(x)
        with pytest.warns(UserWarning, match="Implicit dimension choice") as warned:
            torch.testing.assert_close(ours(x), y)
        assert str(warned[0].message) == str(expected[0].message)
        assert warned[0].filename == expected[0].filename == __file__


def test_layers(device):
    x = torch.randn(2, 3, 4, 5, device=device)
    for layer in (nn.Softmax(1), nn.Softmax(-1), nn.LogSoftmax(2), nn.Softmax2d()):
        model = nn.Sequential(copy_of(layer))
        report = warpwright.swap(model)
        assert type(model[0]).__module__ == "warpwright.nn", report
        torch.testing.assert_close(model(x), layer(x))
        if isinstance(layer, nn.Softmax2d):
            torch.testing.assert_close(model(x[0]), layer(x[0]))
            with pytest.raises(ValueError, match="expected input to be 3D or 4D"):
                model(x[0, 0])
        warpwright.unswap(model)
        assert type(model[0]) is type(layer)
    model = warpwright.nn.Softmax()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(model(x), native.softmax(x))


def copy_of(layer):
    return type(layer)() if isinstance(layer, nn.Softmax2d) else type(layer)(layer.dim)


@both
def test_autocast(device, name):
    ours, theirs = pair(name)
    x = torch.randn(3, 40, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for t in (x, x.bfloat16(), x.double()):
            y = ours(t, 1)
            assert y.dtype == theirs(t, 1).dtype
            torch.testing.assert_close(y, theirs(t, 1), rtol=2e-2, atol=2e-2)
        assert ours(x.bfloat16(), 1, dtype=torch.bfloat16).dtype == torch.bfloat16


@both
def test_compile(device, name):
    ours, theirs = pair(name)
    x = torch.randn(5, 40, device=device, requires_grad=True)
    run = torch.compile(lambda t: ours(t * 2, 1, dtype=torch.float64).sum(0), fullgraph=True)
    torch.testing.assert_close(run(x), theirs(x * 2, 1, dtype=torch.float64).sum(0))
    run(x)[0].backward()


@both
def test_memory(device, name):
    x = torch.randn(7, 9, device=device, requires_grad=True)
    assert_no_leak(lambda t: getattr(F, name)(t, 1), x)


@pytest.mark.gpu
@both
def test_graph(device, name):
    if device == "cpu":
        pytest.skip("CUDA graphs")
    x = torch.randn(64, 1000, device=device, requires_grad=True)

    def step():
        y = getattr(F, name)(x, 1)
        return y.detach(), *torch.autograd.grad(y, x, torch.ones_like(y))

    assert_replays(step)


def test_explain():
    x = torch.empty(16384, 4096, dtype=torch.bfloat16, device="meta")
    text = warpwright.explain("softmax", x, 1, device="cuda")
    assert "persistent blocks" in text
    assert "columns held" in warpwright.explain(
        "log_softmax", x.view(16, 1024, 4096)[:, :21], 1, device="cuda"
    )
    long = torch.empty(4, 50257, dtype=torch.bfloat16, device="meta")
    assert "read twice" in warpwright.explain("log_softmax", long, -1, device="cuda")
