"""layer_norm and rms_norm: one family of kernels, the same tests."""

import re

import pytest
import torch
import torch.nn.functional as native
from common import gradcheck, layouts, opcheck, subsets

import warpwright
import warpwright.functional as F
from warpwright.testing import (
    assert_as_good_as_native,
    assert_same,
    compare_with_native,
)

NAMES = ["layer_norm", "rms_norm"]
both = pytest.mark.parametrize("name", NAMES)
# (shape, normalized dimensions). Groups of a few lanes, of a warp and of several warps; rows with an
# idle part of the last group; element accesses; rows that start inside vectors.
SHAPES = [
    ((7, 5), 1),
    ((3,), 1),
    ((2, 3, 4, 5), 2),
    ((2, 3, 4, 8), 3),
    ((33, 64), 1),
    ((5, 2, 96), 1),
    ((300, 768), 1),
    ((21, 701), 1),
    ((9, 1001), 1),
    ((19, 1024), 1),
    ((3, 4099), 1),
    ((10, 4096), 1),
]
# On a GPU: more rows than groups; two and more vectors per thread; a block per row; rows that no
# group holds, of whole vectors and not.
LARGE = [
    ((5000, 128), 1),
    ((3000, 1600), 1),
    ((700, 2048), 1),
    ((400, 5120), 1),
    ((300, 8192), 1),
    ((270, 16384), 1),
    ((50, 9000), 1),
    ((12, 32768), 1),
    ((5, 65536), 1),
    ((3, 70008), 1),
    ((3, 9001), 1),
    ((3, 70001), 1),
]
SHORT = [torch.bfloat16, torch.float16]
DOUBLE = {"rtol": 1e-10, "atol": 1e-10}


def vectors(name, shape, device, dtype):
    """weight and, for layer_norm, bias."""
    count = 2 if name == "layer_norm" else 1
    return [torch.randn(shape, device=device).to(dtype) for _ in range(count)]


def on(namespace, name, shape, **kwargs):
    """The function of (input, weight, bias)."""
    return lambda x, *v: getattr(namespace, name)(x, shape, *v, **kwargs)


def compare(name, args, shape, **kwargs):
    """The error rule; in float64 native is no better an oracle than ours, so a plain tolerance."""
    ours, reference = (on(n, name, shape, **kwargs) for n in (F, native))
    if args[0].dtype != torch.float64:
        compare_with_native(ours, reference, args)
        return
    leaves = [t for t in args if t is not None and t.requires_grad]
    outputs = [ours(*args), reference(*args)]
    cotangent = torch.randn_like(outputs[1])
    grads = [torch.autograd.grad(output, leaves, cotangent) for output in outputs]
    torch.testing.assert_close((outputs[0], *grads[0]), (outputs[1], *grads[1]), **DOUBLE)


def leaves(tensors):
    return tuple(t.detach().requires_grad_() for t in tensors)


@both
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_error_rule(device, dtype, name, shape, dims):
    normalized = shape[-dims:]
    base = (torch.randn(shape, device=device) * 2 + 1).to(dtype)
    for _, x in layouts(base):
        compare(name, leaves((x, *vectors(name, normalized, device, dtype))), normalized)


@pytest.mark.gpu
@both
@pytest.mark.parametrize(("shape", "dims"), LARGE, ids=str)
def test_large(dtype, name, shape, dims):
    normalized = shape[-dims:]
    x = (torch.randn(shape, device="cuda") * 2 + 1).to(dtype)
    compare(name, leaves((x, *vectors(name, normalized, "cuda", dtype))), normalized)


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *SHORT], ids=str)
def test_plans(name, dtype):
    """Blocks have whole warps and whole groups, and a group has a place for each column."""
    pattern = (
        r"(\d+) block\(s\) of (\d+) threads, (\d+) per row, (\d+) access\(es\) of (\d+) element"
    )
    sizes = [*range(1, 1200, 7), *range(1200, 70000, 1111), *(8 * n for n in range(1, 9000, 173))]
    for cols in sizes:
        for rows in (1, 5, 1000):
            x = torch.empty(rows, cols, dtype=dtype, device="meta")
            lines = warpwright.explain(name, x, (cols,), device="cuda").splitlines()[1:]
            assert len(lines) == 2
            for line in lines:
                blocks, threads, lanes, vectors, vec = map(int, re.search(pattern, line).groups())
                assert threads % lanes == 0, line
                assert threads % 32 == 0, line
                assert threads <= 1024, line
                assert cols % vec == 0, line
                if "read three times" in line or "a kernel per gradient" in line:
                    assert blocks == rows, line
                    continue
                assert lanes * vectors * vec >= cols, line
                groups = threads // lanes
                assert (blocks - 1) * groups < rows, line
                if "persistent" not in line:
                    assert blocks * groups >= rows, line


@both
def test_views_of_rows(device, dtype, name):
    """Rows a constant step apart are read where they lie; what starts inside a vector, too."""
    wide = torch.randn(6, 5, 200, device=device).to(dtype)
    views = [
        wide[:, :, :64],
        wide[:, 1, :64],
        wide[:, :, 8:72],
        wide[:, :, 3:67],
        wide[::2, :, :64],
    ]
    views += [wide.transpose(0, 1)[:, :, :64], wide[0, 0, :64], wide[:, :1, :64].expand(6, 4, 64)]
    for view in views:
        args = leaves((view, *vectors(name, (64,), device, dtype)))
        compare(name, (view.detach().requires_grad_(), *args[1:]), (64,))
    weight = torch.randn(65, device=device).to(dtype)[1:]
    x = wide[0, :, :64].contiguous()
    found = [on(F, name, (64,))(x, w) for w in (weight, weight.clone())]
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


@both
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_mixed_dtype(name, dtype):
    """float32 vectors next to a 16-bit input. Native's layer_norm takes them on the CPU only."""
    for shape in ((11, 96), (3, 1001)):
        x = torch.randn(shape).to(dtype)
        compare(name, leaves((x, *vectors(name, shape[-1:], "cpu", torch.float32))), shape[-1:])


@pytest.mark.gpu
@both
@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("shape", [(300, 96), (40, 1001), (200, 4096), (135, 16384)], ids=str)
def test_mixed_dtype_on_gpu(name, dtype, shape):
    """As good as vectors of the input's type that hold the same numbers."""
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    short = leaves(vectors(name, shape[-1:], "cuda", dtype))
    wide = leaves([v.float() for v in short])
    dy = torch.randn_like(x)
    ours, same = (on(F, name, shape[-1:])(x, *v) for v in (wide, short))
    assert_same(ours, same)
    a = torch.autograd.grad(ours, (x, *wide), dy)
    b = torch.autograd.grad(same, (x, *short), dy)
    assert_same(a[0], b[0])
    for mine, rounded in zip(a[1:], b[1:], strict=True):
        assert mine.dtype == torch.float32
        assert_same(mine.to(dtype), rounded)


@pytest.mark.parametrize("weight", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_rms_norm_takes_any_real_weight(device, dtype, weight):
    x = torch.randn(5, 24, device=device).to(dtype)
    w = (torch.randn(24, device=device) * 3).to(weight)
    ours, reference = (n.rms_norm(x, (24,), w) for n in (F, native))
    assert ours.dtype == reference.dtype
    exact = native.rms_norm(x.double(), (24,), w.double())
    if dtype == torch.float64:
        torch.testing.assert_close(ours, reference, **DOUBLE)
        return
    assert_as_good_as_native(ours, reference, exact, "output")
    if weight.is_floating_point:
        w.requires_grad_()
        (grad,) = torch.autograd.grad(F.rms_norm(x, (24,), w).sum(), w)
        assert grad.dtype == weight


@both
@pytest.mark.parametrize("present", [(0, 0), (1, 0), (0, 1)], ids=str)
def test_optional_vectors(device, dtype, name, present):
    if name == "rms_norm" and present[1]:
        present = (0,)
    x = torch.randn(21, 40, device=device).to(dtype)
    given = vectors(name, (40,), device, dtype)
    given = [v.requires_grad_() if p else None for v, p in zip(given, present, strict=False)]
    compare(name, (x.requires_grad_(), *given), (40,))


@both
@pytest.mark.parametrize("eps", [0.0, 1e-3, 2, -1e-9, None])
def test_eps(device, dtype, name, eps):
    if name == "layer_norm" and eps is None:
        with pytest.raises(TypeError, match="'eps'"):
            F.layer_norm(torch.zeros(2, 3), (3,), eps=None)
        return
    x = torch.randn(6, 48, device=device) * 1e-2
    x = x.to(dtype).requires_grad_()
    compare(name, (x, *leaves(vectors(name, (48,), device, dtype))), (48,), eps=eps)


@both
def test_far_from_zero(device, name):
    """A mean of a thousand deviations costs no more digits than native's."""
    x = (torch.randn(50, 1024, device=device) + 1000).requires_grad_()
    compare(name, (x, *leaves(vectors(name, (1024,), device, torch.float32))), (1024,))


@both
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite(device, dtype, name, value):
    """They stay in their row, and in their column of the gradients of the vectors.

    Native's fused rms_norm loses some of them on a GPU, so the formula on the CPU is the reference.
    """
    for cols in (40, 41):
        x = torch.randn(12, cols, device=device).to(dtype)
        x[3, 7] = value
        dy = torch.randn_like(x)
        given = vectors(name, (cols,), device, dtype)
        found = []
        for namespace, where in ((F, device), (native, "cpu")):
            args = leaves([t.to(where) for t in (x, *given)])
            y = on(namespace, name, (cols,))(*args)
            found.append((y, *torch.autograd.grad(y, args, dy.to(where))))
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(torch.isfinite(ours).cpu(), torch.isfinite(theirs))


@both
@pytest.mark.parametrize(
    ("shape", "dims"),
    [((0, 8), 1), ((3, 0), 1), ((2, 0, 3), 2), ((2, 0, 3), 1), ((0,), 1)],
    ids=str,
)
def test_empty(device, dtype, name, shape, dims):
    normalized = shape[-dims:]
    args = leaves((torch.zeros(shape), *vectors(name, normalized, "cpu", torch.float32)))
    args = leaves([t.to(device, dtype) for t in args])
    ours, theirs = (on(n, name, normalized)(*args) for n in (F, native))
    assert_same(ours.detach(), theirs.detach())
    grads = torch.autograd.grad(ours.sum(), args)
    for grad, leaf in zip(grads, args, strict=True):
        assert grad.shape == leaf.shape
        assert not grad.any()


@both
def test_gradients(device, name):
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=device)
    given = vectors(name, (3, 4), device, torch.float64)
    for needs in subsets(1 + len(given)):
        args = [t.clone().requires_grad_(bool(n)) for t, n in zip((x, *given), needs, strict=True)]
        gradcheck(on(F, name, (3, 4)), tuple(args))
    gradcheck(on(F, name, (4,)), (x.clone().requires_grad_(),))


@both
def test_third_derivative(device, name):
    x = torch.randn(2, 5, dtype=torch.float64, device=device, requires_grad=True)
    given = leaves(vectors(name, (5,), device, torch.float64))

    def once(*args):
        y = on(F, name, (5,))(*args)
        grads = torch.autograd.grad((y**3).sum(), args, create_graph=True)
        return sum((g**2).sum() for g in grads)

    assert torch.autograd.gradgradcheck(once, (x, *given))


@both
def test_double_backward_matches_native(device, name):
    args = leaves((torch.randn(6, 24, device=device), *vectors(name, (24,), device, torch.float32)))
    dy = torch.randn(6, 24, device=device, requires_grad=True)
    found = []
    for namespace in (F, native):
        y = on(namespace, name, (24,))(*args)
        firsts = torch.autograd.grad(y, args, dy, create_graph=True)
        torch.manual_seed(1)
        directions = [torch.randn_like(g) for g in firsts]
        seconds = torch.autograd.grad(firsts, (*args, dy), directions, allow_unused=True)
        assert [s is None for s in seconds] == [
            len(args) == 3 and i == 2 for i in range(len(seconds))
        ]
        found.append([s for s in seconds if s is not None])
    torch.testing.assert_close(*found, rtol=2e-4, atol=2e-4)


@both
def test_func_transforms(device, name):
    x = torch.randn(4, 3, 8, device=device)
    given = vectors(name, (8,), device, torch.float32)

    def results(namespace):
        f = on(namespace, name, (8,))
        loss = lambda *a: f(*a).sin().sum()  # noqa: E731
        every = tuple(range(1 + len(given)))
        return (
            torch.func.grad(loss, argnums=every)(x, *given),
            torch.func.vmap(torch.func.grad(loss, argnums=every), (0, *(None for _ in given)))(
                x, *given
            ),
            torch.func.jvp(f, (x, *given), (x.cos(), *(v.cos() for v in given))),
            torch.func.hessian(loss)(x[0, :1], *given),
        )

    torch.testing.assert_close(results(F), results(native), rtol=1e-4, atol=1e-4)


@both
def test_opcheck(device, name):
    ops = torch.ops.warpwright
    x = torch.randn(3, 4, 6, device=device, requires_grad=True)
    w = torch.randn(6, device=device, requires_grad=True)
    dy = torch.randn(3, 4, 6, device=device)
    if name == "layer_norm":
        opcheck(ops.layer_norm.default, (x, [6], w, w.detach().cos(), 1e-5))
        opcheck(ops.layer_norm.default, (x.transpose(0, 1), [6], None, None, 1e-5))
        _, *saved = ops.layer_norm(x.detach(), [6], w.detach(), None, 1e-5)
        opcheck(ops.layer_norm_backward.default, (dy, x, [6], w, *saved, [True, True, True]))
        opcheck(ops.layer_norm_backward.default, (dy, x, [6], None, *saved, [True, False, True]))
    else:
        opcheck(ops.rms_norm.default, (x, [6], w, None))
        opcheck(ops.rms_norm.default, (x.transpose(0, 1), [6], None, 1e-5))
        _, rstd = ops.rms_norm(x.detach(), [6], w.detach(), 1e-5)
        opcheck(ops.rms_norm_backward.default, (dy, x, [6], w, rstd, [True, True]))
        opcheck(ops.rms_norm_backward.default, (dy, x, [6], None, rstd, [True, False]))


@both
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, name, dynamic):
    given = leaves(vectors(name, (16,), device, torch.float32))
    torch.compiler.reset()
    step = torch.compile(
        lambda x: on(F, name, (16,))(x * 2, *given).relu(), dynamic=dynamic, fullgraph=True
    )
    for rows in (3, 4, 5):
        x = torch.randn(rows, 6, 16, device=device, requires_grad=True)
        y, eager = step(x), on(F, name, (16,))(x * 2, *given).relu()
        torch.testing.assert_close(y, eager)
        grads = [torch.autograd.grad(t.sin().sum(), (x, *given)) for t in (y, eager)]
        torch.testing.assert_close(*grads)


@both
def test_deterministic(device, name):
    args = leaves(
        (torch.randn(700, 520, device=device), *vectors(name, (520,), device, torch.float32))
    )
    dy = torch.randn_like(args[0])

    def run():
        y = on(F, name, (520,))(*args)
        return (y, *torch.autograd.grad(y, args, dy))

    assert_same(run(), run())


@both
def test_autocast(device, name):
    """As native's: on a GPU layer_norm is computed and returned in float32."""
    x = torch.randn(6, 32, device=device).bfloat16().requires_grad_()
    given = leaves(vectors(name, (32,), device, torch.float32))
    with torch.autocast(device, torch.bfloat16):
        found = [on(n, name, (32,))(x, *given) for n in (F, native)]
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(found[0].sum(), (x, *given))
    assert [g.dtype for g in grads] == [torch.bfloat16] + [torch.float32] * len(given)


@both
def test_modified_statistics_are_detected(device, name):
    x = torch.randn(4, 8, device=device, requires_grad=True)
    op = getattr(torch.ops.warpwright, name)
    y, *saved = op(x, [8], None, *([None] if name == "layer_norm" else []), 1e-5)
    saved[-1].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


BAD = [
    (lambda f: f(torch.zeros(3, 8), (7,)), RuntimeError, r"Given normalized_shape=\[7\]"),
    (lambda f: f(torch.zeros(3, 8), ()), RuntimeError, "at least 1-dimensional"),
    (lambda f: f(torch.zeros(3, 8), (8,), torch.ones(7)), RuntimeError, "Expected weight to be of"),
    (lambda f: f(torch.zeros(3, 8), (8,), torch.ones(1, 8)), RuntimeError, "Expected weight to be"),
    (lambda f: f(torch.zeros(3, 8), 8), TypeError, "must be tuple of ints, not int"),
    (lambda f: f(torch.zeros(3, 8), (8.0,)), TypeError, "found element of type float at pos 0"),
    (lambda f: f(torch.zeros(3, 8), (8,), 3), TypeError, "'weight'.* must be Tensor, not int"),
    (lambda f: f(None, (8,)), TypeError, "'input'.* must be Tensor, not NoneType"),
    (lambda f: f(torch.zeros(3, 8), (8,), eps="a"), TypeError, "'eps'"),
    (
        lambda f: f(torch.zeros(3, 8).long(), (8,)),
        NotImplementedError,
        "not implemented for 'Long'",
    ),
    (
        lambda f: f(torch.zeros(3, 8), (2, 3, 8)),
        (RuntimeError, ValueError),
        "Given normalized_shape|at least 3 dimensions",
    ),
]


@both
@pytest.mark.parametrize(
    ("call", "kind", "message"), BAD, ids=lambda v: v if isinstance(v, str) else ""
)
def test_bad_input(name, call, kind, message):
    raised = []
    for namespace in (F, native):
        with pytest.raises(kind, match=message) as info:
            call(getattr(namespace, name))
        raised.append(info.type)
    assert raised[0] is raised[1]


def test_layer_norms_dtypes(device):
    x = torch.zeros(3, 8, device=device)
    for bad in (torch.float64, torch.bfloat16):
        with pytest.raises(RuntimeError, match="mixed dtype"):
            F.layer_norm(x, (8,), x[0].to(bad))
    with pytest.raises(RuntimeError, match="mixed dtype"):
        F.layer_norm(x.bfloat16(), (8,), x[0], x[0].bfloat16())
    with pytest.raises(RuntimeError, match="Expected bias"):
        F.layer_norm(x, (8,), None, x[:, 0])


def test_rms_norm_of_complex_numbers_is_natives():
    x = torch.randn(3, 8, dtype=torch.complex64)
    assert_same(F.rms_norm(x, (8,)), native.rms_norm(x, (8,)))


def test_rms_norm_keeps_channels_last(device):
    x = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    ours, theirs = F.rms_norm(x, (5,)), native.rms_norm(x, (5,))
    assert ours.stride() == theirs.stride()
    assert F.layer_norm(x, (5,)).is_contiguous()


def test_bad_backward(device):
    ops = torch.ops.warpwright
    x, stats = torch.zeros(3, 8, device=device), torch.zeros(3, 1, device=device)
    with pytest.raises(RuntimeError, match="grad_output: expected shape"):
        ops.layer_norm_backward(x[:2], x, [8], None, stats, stats, [True] * 3)
    with pytest.raises(RuntimeError, match="mean: expected shape"):
        ops.layer_norm_backward(x, x, [8], None, stats[:2], stats, [True] * 3)
    with pytest.raises(RuntimeError, match=r"rstd: expected .*Float"):
        ops.rms_norm_backward(x, x, [8], None, stats.double(), [True] * 2)
