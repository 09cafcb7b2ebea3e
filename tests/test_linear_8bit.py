"""quantize_rows, linear_int8 and linear_fp8 against float64, torch's own products, and each other."""

import pytest
import torch
from common import assert_no_leak, layouts, opcheck

import warpwright
import warpwright.functional as F
from warpwright import _native_8bit
from warpwright.testing import assert_same

ops = torch.ops.warpwright
INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
CODES = [INT8, E4M3, E5M2]
LARGEST = {INT8: 127.0, E4M3: 448.0, E5M2: 57344.0}
INPUTS = [torch.float32, torch.bfloat16, torch.float16]
FUNCTIONS = {INT8: F.linear_int8, E4M3: F.linear_fp8}
# rows, features, outputs: tails of every tile, one k tile and several, a k off 16 bytes.
SHAPES = [
    (1, 16, 1),
    (1, 128, 8),
    (3, 7, 5),
    (64, 64, 64),
    (65, 144, 200),
    (130, 1040, 72),
    (257, 300, 513),
    (640, 2064, 776),
]


@pytest.fixture(params=[INT8, E4M3], ids=["int8", "e4m3"])
def codes(request):
    return request.param


@pytest.fixture(params=INPUTS, ids=lambda d: str(d).removeprefix("torch."))
def kind(request):
    return request.param


def randn(device, *shape, dtype=torch.float32):
    return torch.randn(shape, device=device).to(dtype)


def as_bytes(x):
    return x.view(torch.uint8) if x.itemsize == 1 else x


def operands(device, dtype, rows, features, outputs):
    """Codes and scales of an input and of a weight."""
    x = F.quantize_rows(randn(device, rows, features), dtype)
    w = F.quantize_rows(randn(device, outputs, features), dtype)
    return (*x, *w)


def exact(x, x_scale, w, w_scale, bias=None):
    y = x.double() @ w.double().t() * x_scale.double() * w_scale.double().t()
    return y if bias is None else y + bias.double()


def close(result, expected, sums=1e-5):
    """One rounding to the result's type, and what the sums lose, of the largest value."""
    size = expected.abs().max() if expected.numel() else 0
    bound = torch.finfo(result.dtype).eps / 2 * expected.abs() + sums * size
    assert ((result.double() - expected).abs() <= bound).all()


# ---- quantize_rows ----


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (3, 8), (5, 77), (2, 3, 40), (33, 1000), (7, 4096), (3, 9000), (2, 66000), (600, 24)],
)
def test_quantize_is_the_formula(device, kind, dtype, per_tensor, shape):
    """Bit for bit on both devices, in every layout; a row of zeros among them."""
    x = randn(device, *shape, dtype=kind)
    x.view(-1, shape[-1])[-1] = 0
    expected = _native_8bit.quantize_rows(x, dtype, per_tensor)
    for name, view in layouts(x):
        found = F.quantize_rows(view, dtype, per_tensor=per_tensor)
        assert [t.shape for t in found] == [t.shape for t in expected]
        assert [t.dtype for t in found] == [dtype, torch.float32]
        assert found[0].is_contiguous()
        assert_same(as_bytes(found[0]), as_bytes(expected[0]), name)
        assert_same(found[1], expected[1], name)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_quantize_gives_the_row_back(device, kind, dtype):
    """Half a step of the codes, relative to the element for floats."""
    x = randn(device, 50, 300, dtype=kind)
    found, scale = F.quantize_rows(x, dtype)
    error = (found.double() * scale.double() - x.double()).abs()
    step = {INT8: 0.5, E4M3: 2.0**-4, E5M2: 2.0**-3}[dtype]
    if dtype == INT8:
        assert (error <= step * 1.0001 * scale).all()
    else:
        smallest = 2.0**-10 if dtype == E4M3 else 2.0**-17  # of the subnormal codes' half steps
        assert (error <= step * 1.0001 * x.double().abs() + smallest * scale).all()
    assert (found.double().abs().amax(1) == LARGEST[dtype]).all()


@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_element_marks_its_row(device, kind, dtype, bad):
    x = randn(device, 4, 40, dtype=kind)
    x[2, 7] = bad
    scale = F.quantize_rows(x, dtype)[1]
    assert scale[[0, 1, 3]].isfinite().all()
    assert not scale[2].isfinite().any()
    assert not F.quantize_rows(x, dtype, per_tensor=True)[1].isfinite()
    if dtype in FUNCTIONS:
        weight, of_weight = F.quantize_rows(randn(device, 5, 40), dtype)
        y = FUNCTIONS[dtype](x, weight, of_weight)
        assert not y[2].isfinite().any()
        assert y[[0, 1, 3]].isfinite().all()


def test_quantize_of_tiny_and_huge_rows(device):
    for size in (1e-45, 1e-38, 1e-30, 3e38):
        x = torch.full((2, 16), size, device=device)
        for dtype in CODES:
            found, scale = F.quantize_rows(x, dtype)
            assert scale.isfinite().all()
            assert (scale > 0).all()
            assert found.float().isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_quantize_empty(device, shape):
    for per_tensor in (False, True):
        found, scale = F.quantize_rows(randn(device, *shape), INT8, per_tensor=per_tensor)
        assert found.shape == shape
        assert scale.shape == (() if per_tensor else (*shape[:-1], 1))
        assert scale.isfinite().all()


# ---- the product of codes ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", INPUTS, ids=str)
def test_product(device, codes, shape, out):
    x, x_scale, w, w_scale = operands(device, codes, *shape)
    function = FUNCTIONS[codes]
    bias = randn(device, shape[2])
    fast = {"accumulate": "fast"} if codes == E4M3 else {}
    for options, sums in (({}, 1e-4), (fast, 1e-2)):
        sums = 1e-6 if codes == INT8 else sums
        if device == "cuda" and codes == E4M3:  # tensor cores keep 13 bits of a sum of 32 products
            sums = max(sums, 1e-3)
        for b in (None, bias, bias.to(out)):
            y = function(x, w, w_scale, b, input_scale=x_scale, out_dtype=out, **options)
            assert y.dtype == out
            close(y, exact(x, x_scale, w, w_scale, b), sums)
        one = torch.tensor(2.0**-6, device=device)  # float16 holds the results
        y = function(x, w, one, input_scale=one, out_dtype=out, **options)
        close(y, exact(x, one, w, one), sums)
        y = function(x, w, out_dtype=torch.float32, **options)
        close(y, x.double() @ w.double().t(), sums)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_int8_are_exact(device, shape):
    rows, features, outputs = shape
    x = torch.randint(-128, 128, (rows, features), device=device, dtype=INT8)
    w = torch.randint(-128, 128, (outputs, features), device=device, dtype=INT8)
    expected = (x.double() @ w.double().t()).int()
    assert_same(F.linear_int8(x, w, out_dtype=torch.int32), expected)
    # float32 holds them all below 2^24.
    if features * 128 * 128 < 1 << 24:
        assert_same(F.linear_int8(x, w, out_dtype=torch.float32), expected.float())
    if rows > 16 and features % 8 == 0 and outputs % 8 == 0:
        assert_same(F.linear_int8(x, w, out_dtype=torch.int32), torch._int_mm(x, w.t()))


def test_small_integers_of_fp8_are_exact(device):
    """Every code of e4m3 by ones, and sums that 13 bits hold."""
    every = torch.arange(256, device=device, dtype=torch.uint8)
    every = every[(every != 127) & (every != 255)].view(E4M3)
    x = torch.zeros(254, 32, device=device)
    x[:, 5] = every.float()
    w = torch.zeros(8, 32, device=device)
    w[:, 5] = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0, 1.0, 1.0, 1.0], device=device)
    expected = x @ w.t()
    for accumulate in ("exact", "fast"):
        options = {"accumulate": accumulate, "out_dtype": torch.float32}
        assert_same(F.linear_fp8(x.to(E4M3), w.to(E4M3), **options), expected)
    x = torch.randint(-2, 3, (70, 512), device=device).float()
    w = torch.randint(-1, 2, (40, 512), device=device).float()
    assert_same(F.linear_fp8(x.to(E4M3), w.to(E4M3), out_dtype=torch.float32), x @ w.t())


@pytest.mark.parametrize("features", [1024, 4096, 16384])
def test_exact_sums_of_one_sign(device, features):
    """Hopper's tensor cores cut sums of 8-bit floats. Exact sums stay at the operands' rounding."""
    x, w = (
        randn(device, rows, features).abs().mul(64).clamp(max=448).to(E4M3) for rows in (64, 96)
    )
    expected = x.double() @ w.double().t()
    result = F.linear_fp8(x, w, out_dtype=torch.float32)
    error = (result.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert error <= 1e-3


def test_e5m2_codes(device):
    x, x_scale = F.quantize_rows(randn(device, 40, 64), E5M2)
    for dtype in (E4M3, E5M2):
        w, w_scale = F.quantize_rows(randn(device, 24, 64), dtype)
        for a, a_scale, b, b_scale in ((x, x_scale, w, w_scale), (w, w_scale, x, x_scale)):
            y = F.linear_fp8(a, b, b_scale, input_scale=a_scale, out_dtype=torch.float32)
            close(y, exact(a, a_scale, b, b_scale), 1e-4)


def test_layouts_of_codes(device, codes):
    x, x_scale, w, w_scale = operands(device, codes, 40, 64, 24)
    function = FUNCTIONS[codes]
    expected = function(x, w, w_scale, input_scale=x_scale)
    for (name, a), (_, b) in zip(layouts(as_bytes(x)), layouts(as_bytes(w)), strict=True):
        found = function(a.view(codes), b.view(codes), w_scale, input_scale=x_scale)
        assert_same(found, expected, name)
    wide = torch.zeros(24, 96, device=device, dtype=torch.uint8)
    wide[:, :64] = as_bytes(w)
    assert_same(function(x, wide.view(codes)[:, :64], w_scale, input_scale=x_scale), expected)
    scales = (w_scale.expand(24, 3)[:, 1], x_scale.flatten())
    assert_same(function(x, w, scales[0], input_scale=scales[1]), expected)
    assert_same(
        function(x.view(4, 10, 64), w, w_scale, input_scale=x_scale).flatten(0, 1), expected
    )
    assert_same(function(x[0], w, w_scale, input_scale=x_scale[0]), expected[0])


def test_empty(device, codes):
    function = FUNCTIONS[codes]
    for rows, features, outputs in ((0, 16, 8), (4, 0, 8), (4, 16, 0)):
        x, w = (
            randn(device, rows, features),
            torch.zeros(outputs, features, device=device).to(codes),
        )
        bias = randn(device, outputs)
        y = function(x, w, torch.ones((), device=device), bias)
        assert_same(y, bias.expand(rows, outputs).contiguous() if features == 0 else y)
        assert y.shape == (rows, outputs)


def test_is_repeatable(device, codes):
    args = operands(device, codes, 200, 2048, 300)
    first = FUNCTIONS[codes](args[0], args[2], args[3], input_scale=args[1])
    for _ in range(3):
        assert_same(FUNCTIONS[codes](args[0], args[2], args[3], input_scale=args[1]), first)


# ---- quantised as it comes ----


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 48), (16,), (130, 272)])
def test_linear(device, kind, codes, per_tensor, shape):
    """The two ops one after the other, bit for bit."""
    x = randn(device, *shape, dtype=kind)
    weight, scale = F.quantize_rows(randn(device, 40, shape[-1]), codes)
    bias = randn(device, 40, dtype=kind)
    function = FUNCTIONS[codes]
    for b in (None, bias, bias.float()):
        y = function(x, weight, scale, b, per_tensor=per_tensor)
        assert y.dtype == kind
        found, of_rows = F.quantize_rows(x, codes, per_tensor=per_tensor)
        expected = function(found, weight, scale, b, input_scale=of_rows, out_dtype=kind)
        assert_same(y, expected)
    exact_product = x.double() @ (weight.double() * scale.double()).t() + bias.double()
    error = (
        function(x, weight, scale, bias, per_tensor=per_tensor).double() - exact_product
    ).norm()
    assert error <= (0.02 if codes == INT8 else 0.06) * exact_product.norm()


@pytest.mark.parametrize("per_channel", [True, False])
def test_gradients(device, kind, codes, per_channel):
    """Straight through the quantisation of the input, by the dequantised weight."""
    x = randn(device, 2, 9, 64, dtype=kind).requires_grad_()
    weight, scale = F.quantize_rows(randn(device, 24, 64), codes, per_tensor=not per_channel)
    bias = randn(device, 24).requires_grad_()
    y = FUNCTIONS[codes](x, weight, scale, bias)
    dy = randn(device, *y.shape, dtype=kind)
    dx, db = torch.autograd.grad(y, (x, bias), dy, create_graph=True)
    dequantized = weight.double() * scale.double()
    eps = torch.finfo(kind).eps
    for found, expected in ((dx, dy.double() @ dequantized), (db, dy.double().sum((0, 1)))):
        assert (found.double() - expected).abs().max() <= 4 * eps * expected.abs().max()
    assert (dx.dtype, db.dtype) == (kind, torch.float32)


def test_double_backward(device, codes):
    """dx is linear in dy, so the second derivative by dy is a product by the same weight."""
    x = randn(device, 5, 32).requires_grad_()
    weight, scale = F.quantize_rows(randn(device, 7, 32), codes)
    dy = randn(device, 5, 7).requires_grad_()
    (dx,) = torch.autograd.grad(FUNCTIONS[codes](x, weight, scale), x, dy, create_graph=True)
    v = randn(device, 5, 32)
    (found,) = torch.autograd.grad(dx, dy, v)
    expected = v.double() @ (weight.double() * scale.double()).t()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_forward_mode(device, codes):
    x, t = randn(device, 5, 32), randn(device, 5, 32)
    bias, bias_t = randn(device, 7), randn(device, 7)
    weight, scale = F.quantize_rows(randn(device, 7, 32), codes)
    _, found = torch.func.jvp(
        lambda a, b: FUNCTIONS[codes](a, weight, scale, b), (x, bias), (t, bias_t)
    )
    expected = t.double() @ (weight.double() * scale.double()).t() + bias_t.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    _, of_bias = torch.func.jvp(lambda b: FUNCTIONS[codes](x, weight, scale, b), (bias,), (bias_t,))
    assert_same(of_bias, bias_t.expand(5, 7).contiguous())


def test_codes_have_no_gradient(device, codes):
    x, weight = randn(device, 3, 16).requires_grad_(), randn(device, 4, 16)
    assert not any(t.requires_grad for t in F.quantize_rows(x, codes))
    weight, scale = F.quantize_rows(weight, codes)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument"):
        FUNCTIONS[codes](x, weight, scale.requires_grad_())
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'bias'"):
        FUNCTIONS[codes](weight, weight, None, randn(device, 4).requires_grad_())


def test_no_leak(device, codes):
    weight, scale = F.quantize_rows(randn(device, 4, 16), codes)
    x = randn(device, 3, 16).requires_grad_()
    assert_no_leak(FUNCTIONS[codes], x, weight, scale)


def test_autocast(device, codes):
    x, bias = randn(device, 3, 16).requires_grad_(), randn(device, 4)
    weight, scale = F.quantize_rows(randn(device, 4, 16), codes)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = FUNCTIONS[codes](x, weight, scale, bias)
    assert y.dtype == torch.bfloat16
    expected = FUNCTIONS[codes](x.bfloat16(), weight, scale, bias.bfloat16())
    assert_same(y.detach(), expected.detach())
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_opcheck(device, codes):
    x = randn(device, 2, 3, 16).requires_grad_()
    weight, scale = F.quantize_rows(randn(device, 8, 16), codes)
    bias = randn(device, 8).requires_grad_()
    opcheck(ops.quantize_rows.default, (x.detach(), codes, False))
    opcheck(ops.quantize_rows.default, (x.detach(), codes, True))
    name = "linear_int8" if codes == INT8 else "linear_fp8"
    opcheck(getattr(ops, name).default, (x, weight, scale, bias, False))
    found, of_rows = F.quantize_rows(x, codes)
    opcheck(ops.scaled_linear.default, (found, of_rows, weight, scale, None, torch.bfloat16, False))


def test_native_functions_are_the_same(device, kind, codes):
    """What runs where no kernel of ours does."""
    x = randn(device, 4, 48, dtype=kind)
    weight, scale = F.quantize_rows(randn(device, 6, 48), codes)
    name = "linear_int8" if codes == INT8 else "linear_fp8"
    bias = randn(device, 6, dtype=kind)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    found = FUNCTIONS[codes](leaves[0], weight, scale, bias)
    expected = getattr(_native_8bit, name)(leaves[1], weight, scale, bias)
    step = 4 * torch.finfo(kind).eps
    if device == "cuda" and codes == E4M3:  # tensor cores keep 13 bits of a sum of 32 products
        step = max(step, 1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=step * float(expected.abs().max()))
    for y in (found, expected):
        y.backward(torch.ones_like(y))
    size = float(leaves[1].grad.abs().max())
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=0, atol=step * size)


# ---- errors and explain ----


def test_errors(device):
    x = randn(device, 3, 16)
    codes, scale = F.quantize_rows(x, INT8)
    floats = F.quantize_rows(x, E4M3)[0]

    def raises(message, function, *args, kind=RuntimeError, **kwargs):
        with pytest.raises(kind, match=message):
            function(*args, **kwargs)

    raises("dtype: expected int8, float8_e4m3fn or float8_e5m2", F.quantize_rows, x, torch.int16)
    raises("input: expected float32", F.quantize_rows, x.double(), INT8, kind=NotImplementedError)
    raises("at least one dimension", F.quantize_rows, x[0, 0], INT8)
    raises("'dtype' must be torch.dtype", F.quantize_rows, x, "int8", kind=TypeError)
    raises("'per_tensor' must be bool", F.quantize_rows, x, INT8, per_tensor=1, kind=TypeError)
    raises(
        "input: expected float32", F.linear_int8, x.double(), codes, scale, kind=NotImplementedError
    )
    raises("weight: expected codes of int8", F.linear_int8, x, floats, scale)
    raises("weight: expected codes of float8_e4m3fn", F.linear_fp8, x, codes, scale)
    raises("expected 16 features, got 15", F.linear_int8, x[:, :15], codes, scale)
    raises("weight_scale: expected 1 or 3 numbers", F.linear_int8, x, codes, scale[:2])
    raises("weight_scale: expected float32", F.linear_int8, x, codes, scale.double())
    raises("bias: expected shape", F.linear_int8, x, codes, scale, x[0])
    raises(
        "bias: expected Float or float32, got Double",
        F.linear_int8,
        x,
        codes,
        scale,
        x[0, :3].double(),
    )
    raises("input_scale: expected None", F.linear_int8, x, codes, scale, input_scale=scale)
    raises("out_dtype: expected None", F.linear_fp8, x, floats, scale, out_dtype=torch.float32)
    raises("per_tensor: expected False", F.linear_int8, codes, codes, scale, per_tensor=True)
    raises("input: expected int8 or floating", F.linear_int8, floats, floats)
    raises("input: expected e4m3", F.linear_fp8, codes, codes)
    raises("expected codes of the kind of input", F.linear_int8, codes, floats)
    raises(
        "out_dtype: int32 are the sums", F.linear_int8, codes, codes, scale, out_dtype=torch.int32
    )
    raises("out_dtype: expected float32", F.linear_fp8, floats, floats, out_dtype=torch.int32)
    raises("accumulate: expected", F.linear_fp8, x, floats, scale, accumulate="x", kind=ValueError)
    raises("'weight_scale' must be Tensor", F.linear_int8, x, codes, None, kind=TypeError)
    raises("'weight' must be Tensor", F.linear_fp8, floats, None, kind=TypeError)


def test_explain(codes):
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(14336, 4096, dtype=codes, device="meta")
    scale = torch.empty(14336, 1, device="meta")
    name = "linear_int8" if codes == INT8 else "linear_fp8"
    text = warpwright.explain(name, x, weight, scale, device="h200")
    assert "128 k" in text if codes == E4M3 else "int32 sums" in text
    assert "grad_input" in text
    assert "wgmma of 8-bit codes" in text
    assert "stores by TMA" in text
    assert "stores of two elements" in warpwright.explain(
        name, x.float(), weight, scale, device="h200"
    )
    odd = torch.empty(14335, 4096, dtype=codes, device="meta")
    assert "stores of one element" in warpwright.explain(name, x, odd, scale[1:], device="h200")
    found = torch.empty(8192, 4096, dtype=codes, device="meta")
    text = warpwright.explain(name, found, weight, scale, device="h200")
    assert "grad_input" not in text
    fast = {"accumulate": "fast"} if codes == E4M3 else {}
    assert "every 128 k" not in warpwright.explain(name, x, weight, scale, device="h200", **fast)
    text = warpwright.explain("quantize_rows", x, codes, device="h200")
    assert "read once" in text
    assert "a pass for the maximum" in warpwright.explain(
        "quantize_rows", x, codes, per_tensor=True, device="h200"
    )


def test_compiles(device, codes):
    weight, scale = F.quantize_rows(randn(device, 8, 16), codes)
    x = randn(device, 3, 16).requires_grad_()

    def step(a):
        return FUNCTIONS[codes](a, weight, scale).sin()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), step(x))
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(step(x).sum(), x)
    torch.testing.assert_close(found, expected)
