"""linear_scan against its steps in native operations, one by one, and against doubling."""

import pytest
import torch
from common import assert_no_leak, gradcheck, layouts, opcheck

import warpwright
import warpwright.functional as F
from warpwright import _native
from warpwright.bench.language_cases import doubling_scan
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
SHAPES = [
    ((0,), 0),
    ((3, 0, 4), 1),
    ((3, 0, 4), 2),
    ((1,), 0),
    ((5, 1, 3), 1),
    ((37, 3), 1),
    ((6, 33), -1),
    ((4, 7, 5), 1),
    ((2, 65, 16), 1),
    ((130, 3, 8), 0),
]
LONG = [((2, 4096), 1), ((2, 20001), 1), ((5000, 24), 0), ((3000, 3), 0)]


@pytest.fixture(params=[False, True], ids=["forward", "reverse"])
def reverse(request):
    return request.param


def steps(gate, x, dim, reverse, levels=False):
    """From zero, so that each gate is used."""
    if x.shape[dim] == 0:
        return gate * x
    zero = torch.zeros_like(x.select(dim, 0))
    return _native.linear_scan(gate, x, zero, dim, reverse, levels=levels)


def make(shape, device, dtype):
    """Gates of both signs and at most 1 in size, and inputs."""
    gate = (torch.rand(shape, device=device, dtype=torch.float64) * 2 - 1).to(dtype)
    return gate.requires_grad_(), torch.randn(shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
def test_values(device, dtype, shape, dim, reverse):
    gate, x = make(shape, device, dtype)
    initial = torch.randn(x.select(dim, 0).shape if x.shape[dim] else (), device=device)
    compare_with_native(
        lambda a, b: F.linear_scan(a, b, dim=dim, reverse=reverse),
        lambda a, b: steps(a, b, dim, reverse),
        (gate, x),
    )
    if x.shape[dim]:
        compare_with_native(
            lambda a, b, h: F.linear_scan(a, b, h, dim=dim, reverse=reverse),
            lambda a, b, h: _native.linear_scan(a, b, h, dim, reverse),
            (gate, x, initial.to(dtype).requires_grad_()),
        )


@pytest.mark.parametrize(("shape", "dim"), LONG)
def test_long(device, dtype, shape, dim, reverse):
    gate, x = (t.detach() for t in make(shape, device, dtype))
    result = F.linear_scan(gate, x, dim=dim, reverse=reverse)
    operands = (t.double().flip(dim) if reverse else t.double() for t in (gate, x))
    exact = doubling_scan(*operands, dim)
    exact = exact.flip(dim) if reverse else exact
    eps = torch.finfo(dtype).eps
    assert ((result - exact).abs() <= 4 * eps * (1 + exact.abs())).all()


def test_integers_are_exact(device, dtype, reverse):
    """Gates of 0, 1 and -1: every order of additions gives the same bits, in every layout."""
    choice = torch.randint(0, 8, (4, 6, 50), device=device)
    gate = torch.where(choice < 6, choice % 2 * 2 - 1, 0).to(dtype)
    x = torch.randint(-2, 3, (4, 6, 50), device=device).to(dtype)
    for dim in range(3):
        initial = x.select(dim, 0) + 1
        expected = _native.linear_scan(gate, x, initial, dim, reverse)
        assert_same(F.linear_scan(gate, x, initial, dim=dim, reverse=reverse), expected)
        for name, a in layouts(gate):
            for _, b in layouts(x):
                found = F.linear_scan(a, b, initial, dim=dim, reverse=reverse)
                assert_same(found, expected, f"{name}, {dim}")
                break
        for shifted in (False, True):
            expected = _native.linear_scan(gate, x, None, dim, reverse, shifted)
            assert_same(ops.linear_scan(gate, x, None, dim, reverse, shifted), expected)


def make_levels(shape, device, dtype):
    """Levels that rise and fall by up to 1 per step, and inputs."""
    level = torch.randn(shape, device=device).cumsum(-1).sin().to(dtype)
    return level.requires_grad_(), torch.randn(shape, device=device).to(dtype).requires_grad_()


@pytest.mark.parametrize(("shape", "dim"), [case for case in SHAPES if 0 not in case[0]])
def test_levels(device, dtype, shape, dim, reverse):
    compare_with_native(
        lambda a, b: ops.linear_scan(a, b, None, dim, reverse, False, True),
        lambda a, b: steps(a, b, dim, reverse, levels=True),
        make_levels(shape, device, dtype),
    )


@pytest.mark.parametrize(("shape", "dim"), [*LONG, ((70001,), 0)])
def test_long_levels(device, shape, dim, reverse):
    """A sum weighted by exp(level - last level), for levels that only rise and only fall."""
    for sign in (1, -1):
        level = sign * torch.randn(shape, device=device).logcumsumexp(dim)
        x = torch.randn(shape, device=device)
        found = ops.linear_scan(level, x, None, dim, reverse, False, True)
        wide = level.double()
        weighted = x.double() * (-wide).exp()
        sums = weighted.flip(dim).cumsum(dim).flip(dim) if reverse else weighted.cumsum(dim)
        exact = sums * wide.exp()
        assert (found - exact).abs().max() <= 4 * torch.finfo(x.dtype).eps * exact.abs().max()


def test_levels_at_infinities(device, dtype, reverse):
    """Levels that fall to, from and between infinities: equal ones let nothing through."""
    inf = float("inf")
    for length in (6, 9000):
        level = torch.zeros(2, length, device=device, dtype=dtype)
        level[0, :3], level[1, -3:] = -inf, inf
        level = level if reverse else -level
        x = torch.zeros_like(level)
        x[:, :: length // 6] = 1
        for a, b, dim in ((level, x, 1), (level.t().contiguous(), x.t().contiguous(), 0)):
            expected = _native.linear_scan(a, b, None, dim, reverse, False, True)
            assert_same(ops.linear_scan(a, b, None, dim, reverse, False, True), expected)


def test_every_offset(device, dtype, reverse):
    base = torch.randint(-1, 2, (2, 9200), device=device).to(dtype)
    for offset in range(1, 9):
        gate, x = (t[offset : offset + 9100] for t in base)
        for rows in (1, 91):
            a, b = (t.reshape(rows, -1) for t in (gate, x))
            for shifted in (False, True):
                found = ops.linear_scan(a, b, None, 1, reverse, shifted)
                whole = ops.linear_scan(a.double(), b.double(), None, 1, reverse, shifted)
                assert_same(found, whole.to(dtype), f"{offset}, {rows}, {shifted}")


def test_rows_are_apart(device, dtype):
    """A NaN or an infinite gate in one row reaches no other."""
    for length in (7, 40, 9000):
        gate, x = (torch.ones(3, length, device=device, dtype=dtype) for _ in range(2))
        gate *= 0.5
        gate[1, 0], x[1, 3] = float("inf"), float("nan")
        for a, b, dim in ((gate, x, 1), (gate.t(), x.t(), 0)):
            result = F.linear_scan(a, b, dim=dim)
            rows = result if dim else result.t()
            assert rows[0].isfinite().all()
            assert rows[2].isfinite().all()
            assert rows[1, 3:].isnan().all()
            assert not rows[1, :3].isnan().any()


@pytest.mark.parametrize("shape", [(40, 4096), (3, 30000), (4000, 64)])
def test_repeats_are_equal(device, dtype, shape):
    gate, x = (t.detach() for t in make(shape, device, dtype))
    for dim in (0, 1):
        first = F.linear_scan(gate, x, dim=dim)
        for _ in range(10 if device == "cuda" else 2):
            assert_same(F.linear_scan(gate, x, dim=dim), first)


def test_broadcasting(device):
    gate, x = make((3, 1, 5), device, torch.float64)[0], make((4, 5), device, torch.float64)[1]
    compare_with_native(
        lambda a, b: F.linear_scan(a, b),
        lambda a, b: _native.linear_scan(*torch.broadcast_tensors(a, b), None, -1),
        (gate, x),
    )


def test_gradients(device, reverse):
    gate, x = make((3, 4), device, torch.float64)
    for dim in (0, 1):
        initial = torch.randn(4 - dim, device=device, dtype=torch.float64, requires_grad=True)
        gradcheck(
            lambda a, b, h, d=dim: F.linear_scan(a, b, h, dim=d, reverse=reverse),
            (gate, x, initial),
        )
        for shifted in (False, True):
            gradcheck(
                lambda a, b, d=dim, s=shifted: ops.linear_scan(a, b, None, d, reverse, s),
                (gate, x),
            )


def test_gradients_of_levels(device, reverse):
    level, x = make_levels((3, 4), device, torch.float64)
    for dim in (0, 1):
        gradcheck(
            lambda a, b, d=dim: ops.linear_scan(a, b, None, d, reverse, False, True), (level, x)
        )
    for wanted in range(2):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((level, x))]
        gradcheck(lambda a, b: ops.linear_scan(a, b, None, 1, reverse, False, True), leaves)


def test_each_gradient_alone(device):
    tensors = [*make((3, 4), device, torch.float64), torch.randn(3, device=device).double()]
    for wanted in range(3):
        leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(tensors)]
        gradcheck(F.linear_scan, leaves)


def test_func_transforms(device, reverse):
    gate, x = (t.detach() for t in make((4, 6), device, torch.float64))

    def ours(a, b):
        return F.linear_scan(a, b, reverse=reverse)

    def theirs(a, b):
        return _native.linear_scan(a, b, None, -1, reverse)

    for transform in (
        lambda f: torch.func.grad(lambda a, b: f(a, b).sin().sum(), argnums=(0, 1)),
        lambda f: torch.func.jacrev(f, argnums=(0, 1)),
        lambda f: torch.func.jacfwd(f, argnums=(0, 1)),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.hessian(lambda a, b: f(a, b).pow(2).sum(), argnums=(0, 1)),
    ):
        torch.testing.assert_close(transform(ours)(gate, x), transform(theirs)(gate, x))


def test_opcheck(device):
    gate, x = make((3, 4), device, torch.float32)
    initial = torch.randn(3, device=device, requires_grad=True)
    opcheck(ops.linear_scan.default, (gate, x, initial, 1))
    opcheck(ops.linear_scan.default, (gate, x, None, 0, True))
    opcheck(ops.linear_scan.default, (gate, x, None, -1, False, True))
    opcheck(ops.linear_scan.default, (gate, x, None, -1, True, False, True))


def test_memory_is_freed(device):
    assert_no_leak(F.linear_scan, *make((3, 4), device, torch.float32))


def test_only_gates_and_states_are_kept(device):
    gate, x = make((64,), device, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        h = F.linear_scan(gate, x)
    assert [t.data_ptr() for t in saved] == [gate.data_ptr(), h.data_ptr()]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(gate, x):
        return F.linear_scan(gate.tanh(), x) + F.linear_scan(gate, x, dim=0, reverse=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        gate, x = make((n, 6), device, torch.float32)
        expected, actual = step(gate, x), compiled(gate, x)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), (gate, x)) for y in (actual, expected))
        )


def test_bad_input(device):
    x = torch.ones(3, 4, device=device)
    cases = (
        ((x, torch.ones(5, device=device)), RuntimeError, "size of tensor|broadcast"),
        ((x.double(), x), RuntimeError, "linear_scan: gate: expected Float, got Double"),
        ((x, x, x), RuntimeError, r"linear_scan: initial: expected shape \[3\], got \[3, 4\]"),
        ((x, x, x[:, 0].half()), RuntimeError, "linear_scan: initial: expected Float, got Half"),
        ((x.int(), x.int()), NotImplementedError, "input: expected a real floating-point"),
        ((x[0, 0], x[0, 0]), RuntimeError, "input: expected at least one dimension"),
        ((x, 3), TypeError, r"linear_scan\(\): argument 'input' must be Tensor, not int"),
        ((x, x, 3), TypeError, r"linear_scan\(\): argument 'initial' must be Tensor, not int"),
    )
    for arguments, kind, text in cases:
        with pytest.raises(kind, match=text):
            F.linear_scan(*arguments)
    with pytest.raises(IndexError, match=r"expected to be in range of \[-2, 1\], but got 2"):
        F.linear_scan(x, x, dim=2)
    with pytest.raises(TypeError, match=r"linear_scan\(\): argument 'dim' must be int, not float"):
        F.linear_scan(x, x, dim=1.0)
    with pytest.raises(RuntimeError, match="initial: expected None, because shifted gates"):
        ops.linear_scan(x, x, x[:, 0], 1, False, True)
    with pytest.raises(RuntimeError, match="initial: expected None, because no level"):
        ops.linear_scan(x, x, x[:, 0], 1, False, False, True)
    with pytest.raises(RuntimeError, match="shifted: expected False, because levels"):
        ops.linear_scan(x, x, None, 1, False, True, True)


def test_explain():
    gpu = {"device": "cuda"}
    x = torch.empty(8, 2048)
    assert "whole rows per block" in warpwright.explain("linear_scan", x, x, **gpu)
    assert "look back" in warpwright.explain("linear_scan", x.view(-1), x.view(-1), **gpu)
    assert "columns" in warpwright.explain("linear_scan", x, x, dim=0, **gpu)
