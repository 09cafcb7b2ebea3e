"""linear_quantized against native's linear of the dequantised weight: values, derivatives, errors."""

import pytest
import torch
from common import assert_no_leak, assert_repeats, assert_replays, gradcheck, layouts, opcheck

import warpwright
import warpwright.functional as F
from warpwright._quantized_weight import (
    dequantize,
    from_fragments,
    has_fragments,
    linear_quantized,
    pack_pairs,
    to_fragments,
    unpack_pairs,
)
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
# (bits, group, zero points)
FORMS = [(4, 32, False), (4, 64, True), (4, 128, False), (4, 128, True), (8, 0, False)]
forms = pytest.mark.parametrize("form", FORMS, ids=str)
each_order = pytest.mark.parametrize("fragments", [False, True])


def weight(form, outputs, features, device, dtype, fragments=False):
    """codes, scales, zeros; of fragments with adjacent features, as QuantizedLinear keeps them."""
    bits, group, has_zeros = form
    zeros = None
    if bits == 8:
        codes = torch.randint(-128, 128, (outputs, features), device=device).char()
        scales = torch.rand(outputs, device=device).add(0.5).div(100).to(dtype)
    else:
        codes = torch.randint(256, (outputs, features // 2), device=device, dtype=torch.uint8)
        scales = torch.rand(features // group, outputs, device=device).add(0.5).div(10).to(dtype)
        scales = scales.t() if fragments else scales.t().contiguous()
        if has_zeros:
            zeros = torch.randint(16, scales.shape[::-1], device=device, dtype=torch.uint8).t()
    return to_fragments(codes) if fragments else codes, scales, zeros


def both(form, x, w, bias, fragments=False, **options):
    codes, scales, zeros = w

    def ours(x, scales, bias):
        return F.linear_quantized(x, codes, scales, zeros, bias, fragments=fragments, **options)

    def theirs(x, scales, bias):
        return linear_quantized(x, codes, scales, zeros, bias, fragments)

    compare_with_native(ours, theirs, (x, scales, bias))


@forms
@each_order
@pytest.mark.parametrize("rows", [(), (2, 3), (16,), (40,), (200,)])
def test_values(device, dtype, form, fragments, rows):
    x = torch.randn(*rows, 256, device=device).to(dtype).requires_grad_()
    w = weight(form, 48, 256, device, dtype, fragments)
    for bias in (None, torch.randn(48, device=device).to(dtype).requires_grad_()):
        both(form, x, w, bias, fragments)


@forms
def test_many_features(device, dtype, form):
    """More features than one CTA takes, and a last one with few."""
    for outputs, features in ((2064, 128), (64, 4096), (17008, 128)):
        if device == "cpu" and outputs > 10000:
            continue
        w = weight(form, outputs, features, device, dtype, fragments=True)
        for rows in (1, 9):
            x = torch.randn(rows, features, device=device).to(dtype)
            both(form, x, w, None, fragments=True, ahead=True)


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("rows", [17, 32, 33, 64, 65, 128, 129, 257, 600, 1025, 2049])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_tiles_of_tokens(form, rows, low):
    """Around each number of rows at which the plan changes: one tile of features and parts of a
    second, a k that clusters share, and one with a tail."""
    for outputs, features in ((48, 256), (272, 4096), (4112, 640)):
        w = weight(form, outputs, features, "cuda", low, fragments=True)
        x = torch.randn(rows, features, device="cuda").to(low).requires_grad_()
        bias = torch.randn(outputs, device="cuda").to(low).requires_grad_()
        both(form, x, w, bias, fragments=True, ahead=True)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128, 192, 256, 320, 960])
@pytest.mark.parametrize("zeros", [False, True])
def test_tiles_of_any_group(group, zeros):
    """Groups that begin and end inside of the 256 k of a tile of dx, and a last tile with part of
    them."""
    features = {128: 1152, 256: 1280}.get(group, 960)
    w = weight((4, group, zeros), 80, features, "cuda", torch.bfloat16, fragments=True)
    for rows in (3, 30, 70):
        x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        both(None, x, w, None, fragments=True)


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("shape", [(256, 2176, 16384), (1536, 5888, 4096), (20, 4096, 14336)])
def test_tiles_that_ctas_share(form, shape):
    """Parts of tiles: all of the units; a round of whole tiles first; parts of few units."""
    rows, columns, length = shape
    x = torch.randn(rows, length, device="cuda", dtype=torch.bfloat16)
    for gradient in (False, True):
        sizes = (length, columns) if gradient else (columns, length)
        w = weight(form, *sizes, "cuda", torch.bfloat16, fragments=True)
        call = ops.linear_quantized_backward if gradient else ops.linear_quantized

        def ours(call=call, w=w):
            codes, scales, zeros = w
            return call(x, codes, scales, zeros, fragments=True)

        dense = dequantize(*w, True).float()
        exact = x.float() @ (dense if gradient else dense.t())
        torch.testing.assert_close(ours().float(), exact, rtol=1e-2, atol=1e-2 * exact.std().item())
        assert_repeats(ours, 20)
        assert_replays(lambda: (ours(),))


@pytest.mark.gpu
def test_tiles_read_rows_at_any_pitch(dtype):
    """Rows that are part of a wider tensor, and tokens that no row follows in memory."""
    codes, scales, zeros = weight((4, 64, True), 64, 256, "cuda", dtype, fragments=True)
    wide = torch.randn(70, 512, device="cuda").to(dtype)
    x = wide[:, 128:384]
    expected = F.linear_quantized(x.contiguous(), codes, scales, zeros, fragments=True)
    assert_same(F.linear_quantized(x, codes, scales, zeros, fragments=True), expected)


@each_order
def test_weight_in_memory(device, dtype, fragments):
    """The gradient of rows of the identity is the weight itself, in every form and with tails."""
    forms = [(4, 32, True), (4, 64, False), (4, 12, True), (4, 2, True), (8, 0, False)]
    for form in forms:
        for outputs, features in ((16, 192), (32, 576), (48, 1152)):
            codes, scales, zeros = weight(form, outputs, features, device, dtype, fragments)
            expected = dequantize(codes, scales, zeros, fragments) + 0
            for rows in (outputs, 2049):  # by a fused kernel; by the weight in memory
                eye = torch.eye(rows, outputs, device=device, dtype=dtype)
                found = ops.linear_quantized_backward(eye, codes, scales, zeros, fragments)
                assert_same(found[:outputs], expected)


@pytest.mark.parametrize("shape", [(5, 6, 2), (3, 14, 14), (1, 2, 2), (7, 100, 10), (16, 96, 48)])
def test_odd_sizes(device, dtype, shape):
    outputs, features, group = shape
    x = torch.randn(3, features, device=device).to(dtype).requires_grad_()
    both(None, x, weight((4, group, True), outputs, features, device, dtype), None)
    both(None, x, weight((8, 0, False), outputs, features, device, dtype), None)


@pytest.mark.parametrize("group", [2, 12, 48, 192])
def test_odd_groups_of_fragments(device, dtype, group):
    """Groups that are no multiples of the kernels' lines and blocks."""
    x = torch.randn(3, 192, device=device).to(dtype).requires_grad_()
    form = (4, group, True)
    both(form, x, weight(form, 32, 192, device, dtype, fragments=True), None, fragments=True)


@each_order
def test_integers_are_exact(device, dtype, fragments):
    """Small integers have one sum in every order: equal bits with native, in every layout of x."""
    x = torch.randint(-2, 3, (5, 128), device=device).to(dtype)
    for form in ((4, 64, True), (8, 0, False)):
        codes, scales, zeros = weight(form, 32, 128, device, dtype)
        codes = codes % 3 if form[0] == 8 else codes
        codes = to_fragments(codes) if fragments else codes
        args = codes, torch.ones_like(scales), zeros
        bias = torch.randint(-9, 9, (32,), device=device).to(dtype)
        expected = linear_quantized(x, *args, bias, fragments)
        for name, same in layouts(x):
            found = F.linear_quantized(same, *args, bias, fragments=fragments)
            assert_same(found, expected, name)
        dy = torch.randint(-2, 3, (5, 32), device=device).to(dtype)
        for name, same in layouts(dy):
            found = ops.linear_quantized_backward(same, *args, fragments)
            assert_same(found, dy @ dequantize(*args, fragments), name)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_of_another_dtype(device, dtype, scale_dtype):
    for form in FORMS[::2]:
        for fragments in (False, True):
            codes, scales, zeros = weight(form, 32, 256, device, scale_dtype, fragments)
            x = torch.randn(4, 256, device=device).to(dtype)
            found = F.linear_quantized(x, codes, scales, zeros, fragments=fragments)
            exact = x.double() @ dequantize(codes, scales.double(), zeros, fragments).t()
            wide = torch.promote_types(dtype, scale_dtype)
            native = x.to(wide) @ dequantize(codes, scales, zeros, fragments, wide).t()
            error = (found.double() - exact).abs().max()
            bound = (native.to(dtype).double() - exact).abs().max()
            assert found.dtype == dtype
            steps = 4 if dtype == torch.float64 else 1  # float64 is native's own reference
            assert error <= 1.5 * bound + steps * torch.finfo(dtype).eps * exact.abs().max()


def test_layouts_of_the_weight(device, dtype):
    """Codes, scales and zeros of any strides, the same bits."""
    x = torch.randn(3, 256, device=device).to(dtype)
    codes, scales, zeros = weight((4, 32, True), 32, 256, device, dtype)
    expected = F.linear_quantized(x, codes, scales, zeros)
    for other in (codes.t().contiguous().t(), torch.cat([codes, codes], 1)[:, :128]):
        assert_same(F.linear_quantized(x, other, scales, zeros), expected)
    for s, z in ((scales.t().contiguous().t(), zeros), (scales, zeros.contiguous())):
        assert_same(F.linear_quantized(x, codes, s, z), expected)
    offset = torch.cat([codes.flatten()[:1], codes.flatten()])[1:].view(codes.shape)
    assert_same(F.linear_quantized(x, offset, scales, zeros), expected)
    order = to_fragments(codes)
    assert_same(
        F.linear_quantized(x, order, scales.contiguous(), zeros.contiguous(), fragments=True),
        F.linear_quantized(x, order, scales.t().contiguous().t(), zeros, fragments=True),
    ) if device == "cpu" else None


def test_empty(device, dtype):
    codes, scales, _ = weight((4, 32, False), 16, 64, device, dtype)
    bias = torch.randn(16, device=device).to(dtype)
    for x in (torch.empty(0, 64), torch.empty(2, 0, 64)):
        x = x.to(device, dtype).requires_grad_()
        both(None, x, (codes, scales, None), bias)
    assert F.linear_quantized(x, codes[:0], scales[:0]).shape == (2, 0, 0)
    nothing = torch.randn(3, 0, device=device).to(dtype)
    for form in ((codes[:, :0], scales[:, :0]), (codes[:, :0].char(), scales[:, 0].contiguous())):
        assert_same(F.linear_quantized(nothing, *form, None, bias), bias.expand(3, 16).contiguous())


def test_special_values(device, dtype):
    """A NaN or an infinity in a row reaches its own outputs only."""
    codes, scales, zeros = weight((4, 64, True), 32, 128, device, dtype, fragments=True)
    x = torch.randn(4, 128, device=device).to(dtype)
    clean = F.linear_quantized(x, codes, scales, zeros, fragments=True)
    x[1, 5], x[2, 100] = float("nan"), float("inf")
    found = F.linear_quantized(x, codes, scales, zeros, fragments=True)
    assert_same(found[[0, 3]], clean[[0, 3]])
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


@forms
def test_orders_of_codes(device, form):
    codes, _, _ = weight(form, 64, 256, device, torch.float32)
    assert has_fragments(codes)
    order = to_fragments(codes)
    assert (order.dtype, order.shape) == (codes.dtype, codes.shape)
    assert order.is_contiguous()
    assert_same(from_fragments(order), codes)
    assert not torch.equal(order, codes)


def test_fragment_order_by_hand(device):
    """Where the order of linear_quantized.h puts a code."""
    q = torch.randint(16, (32, 128), device=device, dtype=torch.uint8)
    order = to_fragments(pack_pairs(q)).flatten().tolist()
    for n, k in ((0, 0), (9, 5), (17, 66), (31, 127), (8, 40), (24, 63)):
        block, lane = n // 16 * 2 + k // 64, n % 8 * 4 + k % 32 // 8
        word, i = k % 64 // 32 * 2 + k % 8 // 4, k % 4
        nibble = n % 16 // 8 + 2 * (i // 2) + 4 * (i % 2)
        byte = order[block * 512 + lane * 16 + word * 4 + nibble // 2]
        assert byte >> (4 * (nibble % 2)) & 15 == q[n, k]


def test_pairs(device):
    q = torch.randint(16, (3, 10), device=device)
    assert torch.equal(unpack_pairs(pack_pairs(q)), q.byte())
    assert pack_pairs(torch.tensor([[1, 2]])).item() == 0x21  # the low nibble is the even column


@forms
@each_order
def test_gradients(device, form, fragments):
    """Of x and bias: first, second, forward mode."""
    form = (form[0], min(form[1], 32), form[2])
    codes, scales, zeros = weight(form, 16, 64, device, torch.float64, fragments)
    x = torch.randn(2, 64, device=device, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(16, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(
        lambda x, b: F.linear_quantized(x, codes, scales, zeros, b, fragments=fragments), (x, bias)
    )
    gradcheck(lambda x: F.linear_quantized(x, codes, scales, zeros, fragments=fragments), (x,))
    dy = torch.randn(2, 16, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda g: ops.linear_quantized_backward(g, codes, scales, zeros, fragments), (dy,))
    fixed = x.detach()
    gradcheck(
        lambda b: F.linear_quantized(fixed, codes, scales, zeros, b, fragments=fragments), (bias,)
    )


def test_scales_are_constants(device):
    x = torch.randn(2, 64, device=device, requires_grad=True)
    codes, scales, _ = weight((4, 32, False), 16, 64, device, torch.float32)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'scales'"):
        F.linear_quantized(x, codes, scales.clone().requires_grad_())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(scales, scales)
        with pytest.raises(RuntimeError, match="not differentiable wrt scales"):
            F.linear_quantized(x, codes, dual)


def test_func_transforms(device):
    codes, scales, zeros = weight((4, 32, True), 6, 64, device, torch.float64)
    x = torch.randn(4, 64, device=device, dtype=torch.float64)

    def ours(x):
        return F.linear_quantized(x, codes, scales, zeros).sin()

    def theirs(x):
        return linear_quantized(x, codes, scales, zeros).sin()

    for transform in (
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        torch.func.jacrev,
        torch.func.jacfwd,
        torch.func.vmap,
        lambda f: torch.func.hessian(lambda x: f(x[0]).sum()),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))


def test_opcheck(device):
    x = torch.randn(3, 64, device=device, requires_grad=True)
    bias = torch.randn(16, device=device, requires_grad=True)
    for form in ((4, 32, True), (8, 0, False)):
        for fragments in (False, True):
            w = weight(form, 16, 64, device, torch.float32, fragments)
            opcheck(ops.linear_quantized.default, (x, *w, bias, fragments))
            dy = torch.randn(3, 16, device=device, requires_grad=True)
            opcheck(ops.linear_quantized_backward.default, (dy, *w, fragments))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    codes, scales, zeros = weight((4, 32, True), 16, 64, device, torch.float32)
    compiled = torch.compile(
        lambda x: F.linear_quantized(x.tanh(), codes, scales, zeros).relu(),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    for n in (3, 8):
        x = torch.randn(n, 64, device=device, requires_grad=True)
        expected = linear_quantized(x.tanh(), codes, scales, zeros).relu()
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(y.sum(), x) for y in (compiled(x), expected))
        )


def test_autocast(device):
    """x and bias become the low type; the gradient returns in theirs."""
    codes, scales, zeros = weight((4, 32, True), 16, 64, device, torch.float32)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    bias = torch.randn(16, device=device, requires_grad=True)
    with torch.autocast(device, torch.bfloat16):
        y = F.linear_quantized(x, codes, scales, zeros, bias)
    assert y.dtype == torch.bfloat16
    assert_same(y, F.linear_quantized(x.bfloat16(), codes, scales, zeros, bias.bfloat16()))
    for gradient in torch.autograd.grad(y.sum(), (x, bias)):
        assert gradient.dtype == torch.float32


def test_memory_is_freed(device):
    codes, scales, _ = weight((4, 32, False), 16, 64, device, torch.float32)
    x = torch.randn(3, 64, device=device, requires_grad=True)
    assert_no_leak(lambda x: F.linear_quantized(x, codes, scales), x)


def test_only_the_weight_is_kept(device):
    """A frozen layer's node keeps no activations."""
    codes, scales, zeros = weight((4, 32, True), 16, 64, device, torch.float32)
    x, saved = torch.randn(3, 64, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear_quantized(x, codes, scales, zeros)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (codes, scales, zeros)]


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("rows", [1, 16, 30, 70, 200, 700])
def test_repeats_are_equal(form, rows):
    codes, scales, zeros = weight(form, 2064, 1024, "cuda", torch.bfloat16, fragments=True)
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)

    def step():
        return F.linear_quantized(x, codes, scales, zeros, fragments=True, ahead=True)

    dy = torch.randn(rows, 2064, device="cuda", dtype=torch.bfloat16)

    def gradient():
        return ops.linear_quantized_backward(dy, codes, scales, zeros, True)

    for call in (step, gradient):
        assert_repeats(call, 50)
        assert_replays(lambda call=call: (call(),))


def test_bad_input(device):
    x = torch.ones(3, 8, device=device)
    codes = torch.ones(6, 4, device=device, dtype=torch.uint8)
    scales, zeros = torch.ones(6, 2, device=device), torch.ones(6, 2, device=device).byte()
    wide = codes.repeat(1, 2).char()
    cases = (
        ((x, codes.int(), scales), RuntimeError, r"codes: expected Char \(int8\) or Byte"),
        ((x, codes[0], scales), RuntimeError, "codes: expected .*, got shape"),
        (
            (x[:, :7], codes, scales),
            RuntimeError,
            r"input: expected shape \(..., 8\), got \[3, 7\]",
        ),
        ((x[0, 0], codes, scales), RuntimeError, r"input: expected shape \(..., 8\)"),
        ((x.int(), codes, scales), NotImplementedError, "input: expected a real floating-point"),
        ((x, codes, scales[:5]), RuntimeError, r"scales: expected shape \(6, groups\)"),
        ((x, codes, scales[:, 0]), RuntimeError, r"scales: expected shape \(6, groups\)"),
        ((x, codes, scales.repeat(1, 4)), RuntimeError, "groups of even size, got 8"),
        ((x, codes, scales[:, :0]), RuntimeError, "groups of even size, got 0"),
        ((x, codes, scales.int()), RuntimeError, "scales: expected a real floating-point tensor"),
        ((x, wide, scales), RuntimeError, r"scales: expected shape \(6\) of int8 codes"),
        ((x, wide, scales[:, 0], zeros), RuntimeError, "zeros: int8 codes have no zero points"),
        ((x, codes, scales, zeros.int()), RuntimeError, "zeros: expected Byte, got Int"),
        ((x, codes, scales, zeros[:, :1]), RuntimeError, r"zeros: expected shape \[6, 2\]"),
        ((x, codes, scales, zeros, x[0]), RuntimeError, r"bias: expected shape \[6\], got \[8\]"),
        ((x, codes, scales, zeros, scales[:, 0].half()), RuntimeError, "bias: expected Float"),
        ((x, 3, scales), TypeError, r"argument 'codes' must be Tensor, not int"),
    )
    for arguments, kind, text in cases:
        with pytest.raises(kind, match=text):
            F.linear_quantized(*arguments)
    with pytest.raises(RuntimeError, match=r"fragments are contiguous multiples of \(16, 64\)"):
        F.linear_quantized(x, codes, scales, fragments=True)
    with pytest.raises(TypeError, match="argument 'fragments' must be bool, not int"):
        F.linear_quantized(x, codes, scales, fragments=1)
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape \(..., 6\)"):
        ops.linear_quantized_backward(x, codes, scales)


def test_explain():
    x = torch.empty(4, 4096, dtype=torch.bfloat16)
    codes = torch.empty(14336, 2048, dtype=torch.uint8)
    scales = torch.empty(32, 14336, dtype=torch.bfloat16).t()

    def text(x, scales=scales, **options):
        return str(
            warpwright.explain("linear_quantized", x, codes, scales, device="cuda", **options)
        )

    assert "mma of" in text(x, fragments=True)
    assert "plain order" in text(x)
    assert "more than" in text(x[:1].expand(2049, 4096), fragments=True)
    assert "no 16-bit type" in text(x.float(), fragments=True)
    assert "not adjacent" in text(x, scales.contiguous(), fragments=True)
    assert "cache" in str(warpwright.explain("linear_quantized", x, codes, scales))


@pytest.mark.parametrize("bits", [4, 8])
def test_plans(bits):
    """The numbers of rows at which the plan changes, and the reasons."""
    codes, scales = {
        4: (torch.empty(14336, 2048).byte(), torch.empty(32, 14336, dtype=torch.bfloat16).t()),
        8: (torch.empty(14336, 4096).char(), torch.empty(14336, dtype=torch.bfloat16)),
    }[bits]

    def text(rows, scales=scales, dtype=torch.bfloat16, device="h100"):
        x = torch.empty(rows, 4096, dtype=dtype)
        call = "linear_quantized", x, codes, scales
        return str(warpwright.explain(*call, fragments=True, device=device))

    tokens = {1: 8, 8: 8, 9: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64, 65: 128, 128: 128}
    tokens |= {129: 256, 1024: 256}
    for rows, tile in tokens.items():
        found = text(rows)
        assert f"by {tile} tokens" in found, rows
        forward, *_, backward = found.splitlines()[1:]
        assert ("stages per warp" in forward) == (rows <= 16), rows
        assert f"k by {max(tile, 32)} tokens" in backward, rows
    assert text(1024).count("tiles of tokens: 4") == 2
    last = {4: 2048, 8: 1024}[bits]
    assert text(last + 1).count(f"more than {last} rows") == 2
    assert "more than" not in text(last)
    assert "CTAs: 112 in clusters of 2" in text(64)
    assert "the rest shared, workspace" in text(1024).splitlines()[1]
    wide = 1 << 22
    x, scales_of_one = torch.empty(1, wide, dtype=torch.bfloat16, device="meta"), scales[:16]
    if bits == 8:  # one group: its index is a product with a rounded reciprocal
        codes_of_one = torch.empty(16, wide, dtype=torch.int8, device="meta")
        call = "linear_quantized", x, codes_of_one, scales_of_one.to("meta")
        assert "index of a group" in str(warpwright.explain(*call, fragments=True, device="h100"))
    for rows in (17, 64):  # an A100 has no clusters
        assert "stages per warp" in text(rows, device="a100")
    assert "an H100's" in text(65, device="a100")
    if bits == 4:
        single = torch.empty(32, 14336).t()
        assert "stages per warp" in text(64, single)
        assert "rounded twice" in text(65, single)
