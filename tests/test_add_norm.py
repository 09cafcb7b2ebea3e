"""add_layer_norm and add_rms_norm against the addition and the norm, as two ops."""

import pytest
import torch
import torch.nn.functional as native
from common import gradcheck, opcheck

import warpwright
import warpwright.functional as F
from warpwright import nn
from warpwright.testing import assert_same, compare_with_native

BF16, HALF, FP32 = torch.bfloat16, torch.float16, torch.float32
both = pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
# dtypes of input, residual and result
TYPES = [
    (FP32, FP32, None),
    (BF16, BF16, None),
    (HALF, HALF, None),
    (BF16, FP32, None),
    (BF16, FP32, BF16),
    (FP32, FP32, BF16),
    (FP32, HALF, HALF),
    (BF16, FP32, HALF),
    (torch.float64, torch.float64, None),
]
types = pytest.mark.parametrize("types", TYPES, ids=str)
SHAPES = [((7, 5), 1), ((2, 3, 4, 8), 2), ((100, 768), 1), ((9, 1001), 1)]
LARGE = [
    ((3000, 2048), 1),
    ((700, 4096), 1),
    ((300, 8192), 1),
    ((270, 16384), 1),
    ((12, 40000), 1),
]


def made(name, shape, types, device, dims=1):
    """Leaves: input, residual, weight and bias."""
    first, second, _ = types
    wide = torch.promote_types(first, second)
    count = 2 if name == "add_layer_norm" else 1
    rows = [torch.randn(shape, device=device).to(t) for t in (first, second)]
    vectors = [torch.randn(shape[-dims:], device=device).to(wide) for _ in range(count)]
    return tuple(t.requires_grad_() for t in (*rows, *vectors))


def apart(name, shape, dtype):
    """Native's addition and norm, and a cast; float64 is the exact result."""

    def run(x, residual, *v):
        total = residual + x
        y = getattr(native, name.removeprefix("add_"))(total, shape, *v)
        return total, y if dtype is None or y.dtype == torch.float64 else y.to(dtype)

    return run


def together(name, shape, dtype):
    return lambda x, residual, *v: getattr(F, name)(x, residual, shape, *v, dtype=dtype)


def joined(function):
    """Both results as one tensor."""
    return lambda *args: torch.cat([t.flatten() for t in function(*args)])


def compare(name, shape, dims, types, device):
    normalized = shape[-dims:]
    args = made(name, shape, types, device, dims)
    ours, expected = (f(name, normalized, types[2]) for f in (together, apart))
    if types[0] == torch.float64:
        for result, reference in zip(ours(*args), expected(*args), strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-10)
        return
    compare_with_native(joined(ours), joined(expected), args)


@both
@types
def test_error_rule(device, name, types):
    compare(name, (33, 64), 1, types, device)


@both
@pytest.mark.parametrize("types", [TYPES[0], TYPES[4]], ids=str)
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_shapes(device, name, types, shape, dims):
    compare(name, shape, dims, types, device)


@pytest.mark.gpu
@both
@types
@pytest.mark.parametrize(("shape", "dims"), LARGE, ids=str)
def test_large(name, types, shape, dims):
    compare(name, shape, dims, types, "cuda")


@both
@types
def test_bits_of_two_ops(device, name, types):
    """The sum is native's; the norm is that of the rounded sum; a call repeats its bits."""
    args = made(name, (50, 128), types, device)
    x, residual, *v = args
    total, y = together(name, (128,), types[2])(*args)
    assert_same(total, residual + x)
    # A 16-bit dtype next to a float32 sum is the only one that the norm takes.
    norm = getattr(F, name.removeprefix("add_"))
    assert_same(y, norm(total.detach(), (128,), *v, dtype=types[2]))
    cotangents = torch.randn_like(total), torch.randn_like(y)
    grads = torch.autograd.grad((total, y), args, cotangents, retain_graph=True)
    assert [g.dtype for g in grads] == [a.dtype for a in args]
    for _ in range(3):
        again = torch.autograd.grad((total, y), args, cotangents, retain_graph=True)
        assert_same(again, grads)
    if types[0] != types[1]:
        narrow, wide = sorted(grads[:2], key=lambda g: g.dtype.itemsize)
        assert_same(narrow, wide.to(narrow.dtype))


@both
def test_one_of_two_results(device, name):
    """A result without a gradient costs nothing but its own."""
    args = made(name, (6, 32), (BF16, FP32, None), device)
    ours, expected = (f(name, (32,), None) for f in (together, apart))
    for which in (0, 1):
        outputs = [f(*args)[which] for f in (ours, expected)]
        cotangent = torch.randn_like(outputs[0])
        got, want = (torch.autograd.grad(y, args, cotangent, allow_unused=True) for y in outputs)
        assert [g is None for g in got] == [w is None for w in want]
        for g, w in zip(got, want, strict=True):
            if g is not None:
                torch.testing.assert_close(g, w, rtol=2e-2 if g.dtype == BF16 else 1e-4, atol=1e-4)


@both
def test_some_gradients(device, name):
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        args = tuple(t.detach() for t in made(name, (6, 32), (BF16, FP32, BF16), device))
        for i in wanted:
            args[i].requires_grad_()
        leaves = [args[i] for i in wanted]
        cotangents = torch.randn(6, 32, device=device), torch.randn(6, 32, device=device).bfloat16()
        grads = []
        for f in (together, apart):
            outputs = f(name, (32,), BF16)(*args)
            # The weight alone: the sum has no history.
            assert [t.requires_grad for t in outputs] == [wanted[0] < 2, True]
            kept = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if t.requires_grad]
            roots, given = zip(*kept, strict=True)
            grads.append(torch.autograd.grad(roots, leaves, given))
        torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=1e-4)


@both
def test_the_sum_goes_on(device, name):
    """A residual stream: each sum is the next block's residual."""
    args = made(name, (6, 32), (FP32, FP32, None), device)

    def stream(function, x, residual, *v):
        for _ in range(3):
            residual, y = function(x, residual, *v)
            x = y.sin()
        return residual + x

    results = []
    for f in (together, apart):
        output = stream(f(name, (32,), None), *args)
        results.append([output, *torch.autograd.grad(output.square().sum(), args)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@both
def test_views(device, name):
    wide = torch.randn(6, 5, 200, device=device)
    dense = torch.randn(6, 5, 64, device=device)
    for view in (
        wide[:, :, :64],
        wide[:, :, 3:67],
        wide.transpose(0, 1)[:, :, 8:72].transpose(0, 1),
    ):
        for x, residual in ((view, dense), (dense, view)):
            got = getattr(F, name)(x, residual, (64,))
            assert all(t.is_contiguous() for t in got)
            assert_same(got, getattr(F, name)(x.contiguous(), residual.contiguous(), (64,)))


@both
def test_other_shapes_and_types(device, name):
    """Two ops, which broadcast and promote."""
    x = torch.randn(4, 8, device=device)
    for first, second in (
        (x, torch.randn(8, device=device)),
        (torch.randn(1, 8, device=device), x),
        (x, x.double()),
        (x.bfloat16(), x.half()),
        (x, 2.0),
    ):
        total, y = getattr(F, name)(first, second, (8,))
        assert_same(total, second + first)
        assert_same(y, getattr(F, name.removeprefix("add_"))(total, (8,)))


@both
def test_empty(device, name):
    for shape in ((0, 8), (4, 0)):
        x = torch.randn(shape, device=device, requires_grad=True)
        total, y = getattr(F, name)(x, x.detach(), shape[1:], dtype=BF16)
        assert (total.shape, y.shape, y.dtype) == (x.shape, x.shape, BF16)
        assert torch.autograd.grad((total.sum() + y.sum()), x)[0].shape == x.shape


@both
def test_derivatives(device, name):
    shapes = [(3, 8), (3, 8), (8,), (8,)][: 4 if name == "add_layer_norm" else 3]
    args = [torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in shapes]
    gradcheck(together(name, (8,), None), args)


@both
def test_functional_transforms(device, name):
    x, residual, *v = (t.detach() for t in made(name, (3, 5, 8), (FP32, FP32, None), device))
    function = getattr(F, name)
    expected = function(x, residual, (8,), *v)
    got = torch.func.vmap(lambda a, b: function(a, b, (8,), *v))(x, residual)
    assert_same(got, expected)
    got = torch.func.vmap(lambda a: function(a, residual[0], (8,), *v))(x)
    assert_same(got, function(x, residual[0].expand_as(x), (8,), *v))
    weights = torch.randn(3, 8, device=device)
    got = torch.func.vmap(lambda a, b, w: function(a, b, (8,), w))(x, residual, weights)
    each = [function(x[i], residual[i], (8,), weights[i]) for i in range(3)]
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*each, strict=True))))

    def loss(a, b, w):
        total, y = function(a, b, (8,), w)
        return (total.sin() * y.cos()).sum()

    grads = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(x, residual, weights)
    each = [torch.func.grad(loss, (0, 1, 2))(x[i], residual[i], weights[i]) for i in range(3)]
    torch.testing.assert_close(
        grads, tuple(map(torch.stack, zip(*each, strict=True))), rtol=1e-4, atol=1e-5
    )
    hessian = torch.func.hessian(lambda a: loss(a, residual[0], v[0]))(x[0])
    wide = [t.double() for t in (x[0], residual[0], v[0])]
    exact = torch.func.hessian(lambda a: loss(a, wide[1], wide[2]))(wide[0])
    torch.testing.assert_close(hessian.double(), exact, rtol=1e-3, atol=1e-3)


@both
def test_registration(device, name):
    op = getattr(torch.ops.warpwright, name).default
    backward = getattr(torch.ops.warpwright, f"{name}_backward").default
    for types in ((FP32, FP32, None), (BF16, FP32, BF16)):
        x, residual, *v = made(name, (3, 4, 8), types, device)
        opcheck(op, (x, residual, [8], *v, 1e-5, types[2]))
        total, y, *statistics = (t.detach() for t in op(x, residual, [8], *v, 1e-5, types[2]))
        grads = torch.randn_like(total), torch.randn_like(y)
        mask = [True] * (2 + len(v))
        args = (*grads, total, [8], v[0].detach(), *statistics, types[0], mask)
        opcheck(backward, args)


@both
def test_compiles(device, name):
    args = made(name, (6, 32), (BF16, FP32, BF16), device)
    function = torch.compile(together(name, (32,), BF16), backend="aot_eager", fullgraph=True)
    cotangents = torch.randn(6, 32, device=device), torch.randn(6, 32, device=device).bfloat16()
    results = []
    for f in (function, together(name, (32,), BF16)):
        outputs = f(*args)
        results.append((*outputs, *torch.autograd.grad(outputs, args, cotangents)))
    assert_same(*results)


@both
def test_errors(device, name):
    function = getattr(F, name)
    x = torch.randn(4, 8, device=device)
    with pytest.raises(RuntimeError, match="dtype: expected Float, BFloat16 or Half, got Double"):
        function(x, x, (8,), dtype=torch.float64)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        function(x, x, (7,))
    with pytest.raises(RuntimeError, match="weight"):
        function(x, x, (8,), torch.ones(7, device=device))
    with pytest.raises(TypeError, match="argument 'weight' must be Tensor, not int"):
        function(x, x, (8,), 3)
    op = getattr(torch.ops.warpwright, name)
    rest = ([8], None, None, 1e-5) if name == "add_layer_norm" else ([8], None, 1e-5)
    with pytest.raises(RuntimeError, match=rf"{name}: input: expected BFloat16, the residual's"):
        op(x, x.bfloat16(), *rest)
    with pytest.raises(RuntimeError, match=rf"{name}: input: expected shape"):
        op(x[:2], x, *rest)


@both
def test_modules(device, name):
    kind = {"add_layer_norm": nn.AddLayerNorm, "add_rms_norm": nn.AddRMSNorm}[name]
    layer = kind(8, eps=1e-3, device=device)
    torch.nn.init.normal_(layer.weight)
    x, residual = torch.randn(2, 4, 8, device=device)
    v = [p for _, p in layer.named_parameters()]
    assert_same(layer(x, residual), getattr(F, name)(x, residual, (8,), *v, 1e-3))
    assert layer(x, residual, dtype=BF16)[1].dtype == BF16
    assert repr(layer).startswith(f"warpwright.{kind.__name__}(")


@pytest.mark.gpu
@pytest.mark.parametrize("types", [(BF16, FP32), (BF16, BF16)], ids=str)
def test_autocast(types):
    """The types of native's addition and layer_norm under autocast."""
    args = made("add_layer_norm", (6, 32), (*types, None), "cuda")
    with torch.autocast("cuda", BF16):
        got = F.add_layer_norm(*args[:2], (32,), *args[2:])
        total = args[1] + args[0]
        expected = total, native.layer_norm(total, (32,), *args[2:])
        narrow = F.add_layer_norm(*args[:2], (32,), *args[2:], dtype=BF16)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    torch.testing.assert_close(got, expected)
    assert narrow[1].dtype == BF16
    torch.testing.assert_close(narrow[1], expected[1].to(BF16), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("number", [-1, 99, 1000])
@pytest.mark.parametrize("differentiated", [False, True])
def test_numbers_that_are_no_dtype(number, differentiated, device):
    """The backward as an operator: with a second derivative other code reads the number."""
    x, vector = torch.randn(3, 6, device=device), torch.rand(6, device=device)
    stats = torch.rand(3, 1, device=device)
    dy = torch.randn(3, 6, device=device).requires_grad_(differentiated)
    ops = torch.ops.warpwright
    with pytest.raises(RuntimeError, match="add_rms_norm_backward: dtype: expected Float"):
        ops.add_rms_norm_backward(x, dy, x, [6], vector, stats, number, [True] * 3)
    with pytest.raises(RuntimeError, match="add_layer_norm_backward: dtype: expected Float"):
        ops.add_layer_norm_backward(x, dy, x, [6], vector, stats, stats, number, [True] * 4)


def test_explain():
    for residual, text in ((FP32, "through a ring"), (torch.float64, "persistent blocks")):
        x = torch.randn(64, 768, device="meta", dtype=residual)
        said = warpwright.explain("add_rms_norm", x, x, (768,), device="cuda")
        assert text in said


# ---- norm_with_residual: a norm whose input goes on next to it ----


def beside(x, v, centered, dtype):
    op = torch.ops.warpwright.norm_with_residual
    weight, bias = (*v, None)[:2]
    return op(x, x.shape[-1:], weight, bias, 1e-5, centered, dtype)


@both
@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (3, 100, 768), (9, 1001)], ids=str)
def test_norm_with_residual(name, dtype, shape, device):
    """The two results are what two readers of x get, and so are the gradients."""
    _, x, *v = made(name, shape, (FP32, FP32, dtype), device)
    centered = len(v) == 2
    norm = F.layer_norm if centered else F.rms_norm

    def read(x, *v):
        return x.sin() * x, norm(x, shape[-1:], *v, eps=1e-5, dtype=dtype)

    def read_both(x, *v):
        residual, y = beside(x, v, centered, dtype)
        assert residual.grad_fn is y.grad_fn
        assert residual.data_ptr() == x.data_ptr()
        return residual.sin() * residual, y

    found = []
    for function in (read_both, read):
        outputs = function(x, *v)
        slope = torch.linspace(-1, 1, x.numel(), device=device).view(x.shape)
        cotangents = [slope.to(t.dtype) for t in outputs]
        found.append([*outputs, *torch.autograd.grad(outputs, (x, *v), cotangents)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@both
def test_norm_with_residual_of_one_reader(name, device):
    _, x, *v = made(name, (6, 8), (FP32, FP32, None), device)
    residual, y = beside(x, v, len(v) == 2, None)
    (dx,) = torch.autograd.grad(residual.sum(), x, retain_graph=True)
    assert_same(dx, torch.ones_like(x))
    norm = F.layer_norm if len(v) == 2 else F.rms_norm
    mine = torch.autograd.grad(y.sin().sum(), (x, *v))
    assert_same(mine, torch.autograd.grad(norm(x, (8,), *v, eps=1e-5).sin().sum(), (x, *v)))
    source = x * 1
    residual, _ = beside(source, v, len(v) == 2, None)
    product = residual * residual
    source.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    frozen = beside(x.detach(), v, len(v) == 2, None)
    assert not frozen[0].requires_grad
    assert frozen[1].requires_grad


@both
def test_norm_with_residual_further(name):
    """Second derivatives, transforms, modes and no grad."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    centered = name == "add_layer_norm"
    v = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(1 + centered)]
    function = joined(lambda x, *v: beside(x, v, centered, None))
    gradcheck(function, (x, *v))
    torch.autograd.gradgradcheck(function, (x, *v))
    norm = F.layer_norm if centered else F.rms_norm
    y = norm(x, (5,), *v, eps=1e-5)
    with torch.no_grad():
        assert_same(beside(x, v, centered, None), (x, y))
    w = [t.detach() for t in v]
    batched = torch.vmap(lambda row: beside(row, w, centered, None))(x.detach())
    torch.testing.assert_close(batched, (x.detach(), y.detach()))
    grad = torch.func.grad(lambda x: sum(t.sin().sum() for t in beside(x, w, centered, None)))
    (expected,) = torch.autograd.grad(x.sin().sum() + norm(x, (5,), *w, eps=1e-5).sin().sum(), x)
    torch.testing.assert_close(grad(x.detach()), expected)


@both
def test_a_freed_residual_beside_a_vector_that_learns(device, name):
    """The sum is then computed apart, by an addition."""
    x, residual, *vectors = made(name, (3, 4), TYPES[0], device)
    gone = residual.detach()
    gone.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=f"{name}: residual: the tensor has a non-zero number"):
        getattr(F, name)(x.detach(), gone, (4,), *vectors)
