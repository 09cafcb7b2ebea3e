"""conv_transpose2d_cat against torch.cat and native's conv_transpose2d, and gradients of slices."""

import itertools

import pytest
import torch
from common import gradcheck, opcheck

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

LAST, FIRST = torch.channels_last, torch.contiguous_format
ON_GPU = {"device": "h200"}

# channels of skip, then n, c, h, w, k, r, s, stride, padding, output_padding, groups, dilation
CASES = {
    "unet": (64, 2, 128, 8, 12, 64, 2, 2, 2, 0, 0, 1, 1),
    "tails": (24, 3, 72, 9, 7, 40, 2, 2, 2, 0, 0, 1, 1),
    "one product": (8, 1, 64, 33, 20, 128, 2, 2, 2, 0, 0, 1, 1),
    "4x4": (16, 2, 16, 5, 6, 64, 4, 4, 4, 0, 0, 1, 1),
    "overlapping": (64, 2, 64, 7, 6, 64, 4, 4, 2, 1, 0, 1, 1),
    "3x3": (64, 2, 64, 7, 6, 128, 3, 3, 2, 1, 1, 1, 1),
    "odd skip": (5, 2, 16, 5, 6, 8, 2, 2, 2, 0, 0, 1, 1),
    "odd": (3, 2, 5, 5, 6, 7, 2, 2, 2, 0, 0, 1, 1),
    "groups": (16, 2, 32, 5, 6, 32, 2, 2, 2, 0, 0, 2, 1),
    "one pixel": (16, 2, 64, 1, 1, 64, 1, 1, 1, 0, 0, 1, 1),
}


def native(skip, *args, skip_first=True, **kwargs):
    y = torch.nn.functional.conv_transpose2d(*args, **kwargs)
    return torch.cat([skip, y] if skip_first else [y, skip], -3)


def ours_last(*args):
    return F.conv_transpose2d_cat(*args, skip_first=False)


def native_last(*args):
    return native(*args, skip_first=False)


def make(case, device, dtype, formats=(LAST, LAST), *, bias=True):
    skip_channels, n, c, h, w, k, r, s, *rest = CASES[case]
    operands = [torch.randn(n, c, h, w), torch.randn(c, k // rest[3], r, s), torch.randn(k)]
    y = torch.nn.functional.conv_transpose2d(operands[0], operands[1], None, *rest)
    skip = torch.randn(n, skip_channels, *y.shape[2:])
    memory = (formats[0], formats[1], formats[1])
    images = [
        t.to(device, dtype, memory_format=m).requires_grad_()
        for t, m in zip((skip, *operands[:2]), memory, strict=True)
    ]
    return (*images, operands[2].to(device, dtype).requires_grad_() if bias else None, *rest)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("formats", [(LAST, LAST), (FIRST, LAST), (LAST, FIRST), (FIRST, FIRST)])
def test_values(device, dtype, case, formats):
    for bias in (True, False):
        args = make(case, device, dtype, formats, bias=bias)
        compare_with_native(F.conv_transpose2d_cat, native, args)
        compare_with_native(ours_last, native_last, args)


@pytest.mark.parametrize("case", CASES)
def test_integers_are_exact(device, dtype, case):
    args = make(case, device, torch.float64)
    tensors = [(a.detach() * 100).round().remainder(3) - 1 for a in args[:4]]
    for function, reference in ((F.conv_transpose2d_cat, native), (ours_last, native_last)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        exact = [t.clone().requires_grad_() for t in tensors]
        y, expected = function(*leaves, *args[4:]), reference(*exact, *args[4:])
        assert torch.equal(y.double(), expected.to(dtype).double())
        cotangent = torch.randint_like(expected, -1, 2)
        ours = torch.autograd.grad(y, leaves, cotangent.to(dtype))
        for a, e in zip(ours, torch.autograd.grad(expected, exact, cotangent), strict=True):
            assert torch.equal(a.double(), e.to(dtype).double())


@pytest.mark.parametrize("case", CASES)
def test_layout_of_results(device, case):
    for formats in itertools.product((LAST, FIRST), repeat=2):
        args = make(case, device, torch.float32, formats)
        y, expected = F.conv_transpose2d_cat(*args), native(*args)
        assert y.stride() == expected.stride()
        cotangent = torch.randn_like(expected)
        ours = torch.autograd.grad(y, args[:4], cotangent)
        theirs = torch.autograd.grad(expected, args[:4], cotangent)
        assert ours[0].stride() == theirs[0].stride()  # of skip: a view of the cotangent
        meta = F.conv_transpose2d_cat(*(t.detach().to("meta") for t in args[:4]), *args[4:])
        assert meta.stride() == y.stride()


@pytest.mark.parametrize(("before", "after"), [(64, 0), (0, 64), (8, 56), (3, 2), (72, 64)])
@pytest.mark.parametrize("case", ["unet", "4x4", "overlapping", "3x3", "tails", "one pixel"])
def test_gradients_of_slices(device, dtype, case, before, after):
    """A cotangent that is a slice of channels gives what a dense copy of it gives."""
    _, *args = make(case, device, dtype)
    y = F.conv_transpose2d(*args)
    n, k, h, w = y.shape
    wide = torch.randn(n, before + k + after, h, w, device=device).to(dtype, memory_format=LAST)
    wide[:, :before], wide[:, before + k :] = float("nan"), float("nan")
    slice = wide[:, before : before + k]
    compare_with_native(
        lambda *t: F.conv_transpose2d(*t, *args[3:]),
        lambda *t: torch.nn.functional.conv_transpose2d(*t, *args[3:]),
        tuple(args[:3]),
    )
    for wanted in ((0, 1, 2), (0,), (1,), (2,), (0, 2)):
        leaves = [args[i] for i in wanted]
        ours = torch.autograd.grad(y, leaves, slice, retain_graph=True)
        dense = torch.autograd.grad(
            y, leaves, slice.contiguous(memory_format=LAST), retain_graph=True
        )
        for a, b in zip(ours, dense, strict=True):
            assert a.isfinite().all()
            error = (a.double() - b.double()).abs().max()
            eps = torch.finfo(torch.float32 if dtype.itemsize < 8 else dtype).eps
            bound = max(torch.finfo(dtype).eps, 64 * eps) * b.double().abs().max()
            assert error <= bound


def test_skips_that_are_slices(device, dtype):
    skip, *args = make("unet", device, dtype)
    wide = torch.cat([skip.detach()] * 3, 1).contiguous(memory_format=LAST)
    for view in (wide[:, 64:128], wide[:, 5:69], wide[:, ::3], skip.detach().flip(0)):
        leaf = view.detach().requires_grad_()
        compare_with_native(F.conv_transpose2d_cat, native, (leaf, *args))


def test_unbatched(device, dtype):
    skip, x, w, b, *rest = make("unet", device, dtype)
    args = (skip.detach()[0].requires_grad_(), x.detach()[0].requires_grad_(), w, b, *rest)
    compare_with_native(F.conv_transpose2d_cat, native, args)


@pytest.mark.parametrize(("samples", "channels"), [(0, 3), (2, 0), (0, 0)])
def test_empty(device, dtype, samples, channels):
    x = torch.randn(samples, 4, 5, 5, device=device).to(dtype).requires_grad_()
    skip = torch.randn(samples, channels, 10, 10, device=device).to(dtype).requires_grad_()
    w = torch.randn(4, 6, 2, 2, device=device).to(dtype).requires_grad_()
    y, expected = F.conv_transpose2d_cat(skip, x, w, None, 2), native(skip, x, w, None, 2)
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-2)
    for ours, theirs in zip(
        torch.autograd.grad(y.sum(), (skip, x, w)),
        torch.autograd.grad(expected.sum(), (skip, x, w)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_dtypes_promote(device):
    skip, *args = make("unet", device, torch.float32)
    y, expected = F.conv_transpose2d_cat(skip.double(), *args), native(skip.double(), *args)
    assert y.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    whole = [torch.ones(1, 2, 4, 4, dtype=torch.int64), torch.ones(1, 3, 2, 2, dtype=torch.int64)]
    whole.append(torch.ones(3, 2, 2, 2, dtype=torch.int64))
    assert_same(F.conv_transpose2d_cat(*whole, stride=2), native(*whole, stride=2))


@pytest.mark.parametrize("skip_first", [True, False])
def test_gradients(device, skip_first):
    shapes = (1, 2, 4, 6), (1, 3, 2, 3), (3, 2, 2, 2), (2,)
    leaves = [
        torch.randn(s, device=device, dtype=torch.float64, requires_grad=True) for s in shapes
    ]
    gradcheck(lambda *t: F.conv_transpose2d_cat(*t, 2, skip_first=skip_first), tuple(leaves))


def test_deterministic(device, dtype):
    args = make("unet", device, dtype)

    def run():
        y = F.conv_transpose2d_cat(*args)
        return [y, *torch.autograd.grad(y.sum() * 0.37, args[:4])]

    for a, b in zip(run(), run(), strict=True):
        assert_same(a, b)


def test_the_copy_and_the_product_repeat(device):
    """The product starts while the copy runs: the results of many calls are equal."""
    low = torch.bfloat16
    args = [t.detach() if isinstance(t, torch.Tensor) else t for t in make("unet", device, low)]
    expected = F.conv_transpose2d_cat(*args)
    results = [F.conv_transpose2d_cat(*args) for _ in range(50)]
    assert all(torch.equal(y, expected) for y in results)


def test_func_transforms(device):
    skip = torch.randn(3, 2, 4, 6, device=device, dtype=torch.float64)
    x = torch.randn(3, 2, 2, 3, device=device, dtype=torch.float64)
    w = torch.randn(2, 4, 2, 2, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(skip, t, w, None, 2).sin().sum()),
        lambda f: torch.func.jacrev(lambda t: f(skip, t, w, None, 2)),
        lambda f: torch.func.jacfwd(lambda t: f(skip, t, w, None, 2)),
        lambda f: torch.func.vmap(lambda t: f(skip[0], t, w, None, 2)),
        lambda f: torch.func.hessian(lambda t: f(skip, t, w, None, 2).pow(3).sum()),
    ):
        torch.testing.assert_close(transform(F.conv_transpose2d_cat)(x), transform(native)(x))


def test_opcheck(device):
    operator = torch.ops.warpwright.conv_transpose2d_cat.default
    for formats in ((LAST, LAST), (FIRST, FIRST)):
        skip, x, w, b, *_ = make("tails", device, torch.float64, formats)
        windows = [2, 2], [0, 0], [0, 0], 1, [1, 1]
        for skip_first in (True, False):
            opcheck(operator, (skip, x, w, b, *windows, skip_first))
            opcheck(operator, (skip[0], x[0], w, None, *windows, skip_first))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(device, low):
    skip, x, w, b, *rest = make("unet", device, torch.float32)
    for kept in (skip, skip.detach().to(low).requires_grad_()):
        with torch.autocast(device, dtype=low):
            y, expected = F.conv_transpose2d_cat(kept, x, w, b, *rest), native(kept, x, w, b, *rest)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=0.05, atol=0.3)
        grads = torch.autograd.grad(y.float().sum(), (kept, x, w, b))
        assert [g.dtype for g in grads] == [kept.dtype, *[torch.float32] * 3]


# ---- the choice ----


def half(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16).contiguous(memory_format=LAST)


def lines_of(*args, **kwargs):
    text = warpwright.explain("conv_transpose2d_cat", *args, **kwargs, **ON_GPU)
    return dict(line.strip().split("  ", 1) for line in text.splitlines()[1:])


def test_a_decoder_in_place():
    for c, k, side in ((512, 256, 32), (256, 128, 64), (128, 64, 128)):
        skip, x, w = half(16, k, 2 * side, 2 * side), half(16, c, side, side), half(c, k, 2, 2)
        lines = lines_of(skip, x, w, None, 2)
        assert "all taps" in lines["forward"]
        assert "writes its slice" in lines["concatenation"]
        assert "with the pitch" in lines["gradient's slice"]
        assert "windows by TMA" in lines["grad_input"]
        assert "windows by TMA" in lines["grad_weight"]


def test_other_decoders():
    x, w = half(2, 64, 8, 8), half(64, 64, 2, 2)
    lines = lines_of(half(2, 5, 16, 16), x, w, None, 2)  # rows that do not start at 16 bytes
    assert "by ATen" in lines["concatenation"]
    assert "multiples of 16 bytes" in lines["gradient's slice"]
    lines = lines_of(half(2, 64, 16, 16).contiguous(), x, w, None, 2)
    assert "by ATen" in lines["concatenation"]
    lines = lines_of(half(2, 64, 16, 16), x, half(64, 40, 2, 2), None, 2)
    assert "writes its slice" in lines["concatenation"]
    assert "windows of the weight's gradient" in lines["gradient's slice"]


# ---- errors ----


@pytest.mark.parametrize("shape", [(2, 3, 8, 9), (2, 3, 9, 8), (1, 3, 8, 8), (3, 8, 8), (2, 3, 8)])
def test_errors_of_skip(device, shape):
    x, w = torch.ones(2, 4, 4, 4, device=device), torch.ones(4, 2, 2, 2, device=device)
    with pytest.raises(RuntimeError, match="conv_transpose2d_cat: skip: expected"):
        F.conv_transpose2d_cat(torch.ones(shape, device=device), x, w, None, 2)


def test_errors(device):
    skip = torch.ones(2, 3, 8, 8, device=device)
    x, w = torch.ones(2, 4, 4, 4, device=device), torch.ones(4, 2, 2, 2, device=device)
    with pytest.raises(RuntimeError, match="expected device"):
        F.conv_transpose2d_cat(skip.to("meta"), x, w, None, 2)
    with pytest.raises(RuntimeError, match="to have 4 channels"):
        F.conv_transpose2d_cat(skip, x[:, :3], w, None, 2)
    with pytest.raises(TypeError, match="argument 'skip' must be Tensor, not NoneType"):
        F.conv_transpose2d_cat(None, x, w, None, 2)
    with pytest.raises(TypeError, match="argument 'skip_first' must be bool"):
        F.conv_transpose2d_cat(skip, x, w, None, 2, skip_first=1)
    with pytest.raises(RuntimeError, match="negative output_padding"):
        F.conv_transpose2d_cat(skip, x, w, None, 2, output_padding=-1)
