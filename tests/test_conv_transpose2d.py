"""conv_transpose2d against native's: values, layouts, dtypes, derivatives and errors."""

import itertools

import pytest
import torch
from common import gradcheck, layouts, opcheck, subsets
from test_export import flags, same
from torch._prims_common import suggest_memory_format

import warpwright
import warpwright.functional as F
from warpwright import nn
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.conv_transpose2d
CHANNELS_LAST = torch.channels_last
FORMATS = [torch.contiguous_format, CHANNELS_LAST]
ON_GPU = {"device": "h200"}

# n, c, h, w, k, r, s, stride, padding, output_padding, groups, dilation
CASES = {
    "unet": (2, 64, 9, 8, 32, 2, 2, 2, 0, 0, 1, 1),
    "unet_tiles": (2, 72, 24, 17, 72, 2, 2, 2, 0, 0, 1, 1),
    "unet_wide": (1, 136, 16, 32, 128, 2, 2, 2, 0, 0, 1, 1),
    "gan": (2, 32, 7, 6, 16, 4, 4, 2, 1, 0, 1, 1),
    "gan_first": (3, 40, 1, 1, 24, 4, 4, 1, 0, 0, 1, 1),
    "gan_last": (2, 32, 9, 9, 3, 4, 4, 2, 1, 0, 1, 1),
    "kernel_is_stride": (2, 16, 5, 6, 8, 4, 3, (4, 3), 0, 0, 1, 1),
    "kernel_is_stride_padded": (2, 16, 5, 6, 8, 2, 2, 2, 1, 0, 1, 1),
    "kernel_is_stride_gaps": (2, 16, 5, 6, 8, 2, 2, 2, 0, 1, 1, 1),
    "kernel_is_stride_groups": (2, 32, 5, 6, 32, 2, 2, 2, 0, 0, 2, 1),
    "one_tap": (2, 24, 5, 6, 16, 1, 1, 1, 0, 0, 1, 1),
    "odd": (2, 5, 7, 9, 7, 3, 2, (2, 3), (1, 0), (1, 2), 1, (1, 2)),
    "3x3": (3, 16, 14, 14, 32, 3, 3, 1, 1, 0, 1, 1),
    "3x3_stride": (2, 16, 7, 7, 32, 3, 3, 2, 1, 1, 1, 1),
    "gaps": (2, 6, 4, 5, 5, 2, 2, 3, 0, 2, 1, 1),
    "dilated": (2, 8, 10, 9, 8, 3, 3, 1, 2, 0, 1, 2),
    "output_padding_of_a_stride": (2, 8, 6, 5, 12, 2, 3, 1, 1, (1, 2), 1, (2, 3)),
    "output_padding_over_a_stride": (1, 4, 3, 4, 6, 2, 2, 2, 0, (3, 2), 2, 4),
    "padding_over_kernel": (1, 4, 6, 5, 4, 2, 2, 2, 3, 0, 1, 1),
    "grouped": (2, 16, 5, 6, 24, 3, 3, 2, (1, 2), 1, 4, 1),
    "depthwise": (2, 24, 8, 7, 24, 4, 4, 2, 1, 0, 24, 1),
    "depthwise_multiplier": (2, 6, 5, 6, 18, 3, 5, (1, 2), (1, 3), (0, 1), 6, (2, 1)),
    "one_channel": (2, 1, 9, 8, 5, 3, 3, 2, 1, 1, 1, 1),
    "to_one_channel": (2, 16, 9, 8, 1, 3, 3, 2, 1, 1, 1, 1),
    "row": (2, 8, 1, 20, 16, 1, 4, (1, 4), 0, 0, 1, 1),
}
EACH_FORMAT = pytest.mark.parametrize(
    "formats", [*itertools.product(FORMATS, repeat=2)], ids=["cc", "cl", "lc", "ll"]
)


def make(
    case, device, dtype, *, bias=True, input_format=None, weight_format=None, requires_grad=True
):
    n, c, h, w, k, r, s, *rest = CASES[case]
    groups = rest[3]

    def tensor(shape, memory_format=None):
        t = torch.randn(shape, device=device).to(dtype)
        if memory_format is not None:
            t = t.to(memory_format=memory_format)
        return t.requires_grad_(requires_grad)

    return (
        tensor((n, c, h, w), input_format),
        tensor((c, k // groups, r, s), weight_format),
        tensor((k,)) if bias else None,
        *rest,
    )


def native_in_format(*args):
    """native, in the memory format that it gives to calls of cuDNN.

    On a GPU cuDNN takes no output padding of a stride or more. Native's own kernel then returns a
    contiguous result, whatever the operands are.
    """
    y, (x, w) = native(*args), args[:2]
    last = any(suggest_memory_format(t) == torch.channels_last for t in (x, w) if t.dim() == 4)
    return y.to(memory_format=torch.channels_last) if last and y.is_cuda and y.dim() == 4 else y


@pytest.mark.parametrize("case", CASES)
@EACH_FORMAT
def test_values(device, dtype, case, formats):
    for bias in (True, False):
        args = make(
            case, device, dtype, bias=bias, input_format=formats[0], weight_format=formats[1]
        )
        compare_with_native(F.conv_transpose2d, native_in_format, args)


@pytest.mark.parametrize("case", CASES)
@EACH_FORMAT
def test_layout_of_results(device, case, formats):
    args = make(case, device, torch.float32, input_format=formats[0], weight_format=formats[1])
    y, expected = F.conv_transpose2d(*args), native_in_format(*args)
    assert y.shape == expected.shape
    strides = [
        [step for step, size in zip(t.stride(), t.shape, strict=True) if size > 1]
        for t in (y, expected)
    ]
    assert strides[0] == strides[1]
    meta = F.conv_transpose2d(*(t.detach().to("meta") for t in args[:3]), *args[3:])
    assert meta.stride() == y.stride()


@pytest.mark.parametrize("case", CASES)
def test_integers_are_exact(device, dtype, case):
    # Small enough that every order of summation is exact in every dtype.
    args = make(case, device, torch.float64, requires_grad=False)
    tensors = [(a * 100).round().remainder(3) - 1 for a in args[:3]]
    for memory_format in FORMATS:
        x, w, b = (t.to(dtype) for t in tensors)
        x = x.to(memory_format=memory_format).requires_grad_()
        w, b = w.to(memory_format=memory_format).requires_grad_(), b.requires_grad_()
        exact_in = [t.detach().double().requires_grad_() for t in (x, w, b)]
        y, exact = F.conv_transpose2d(x, w, b, *args[3:]), native(*exact_in, *args[3:])
        assert torch.equal(y.double(), exact.to(dtype).double())
        cotangent = torch.randint_like(exact, -1, 2)
        ours = torch.autograd.grad(y, (x, w, b), cotangent.to(dtype))
        for a, e in zip(ours, torch.autograd.grad(exact, exact_in, cotangent), strict=True):
            assert torch.equal(a.double(), e.to(dtype).double())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_tf32(case):
    # Not against native's error: which of its kernels round to TF32 depends on the shape.
    torch.backends.cudnn.allow_tf32 = True
    for memory_format in FORMATS:
        args = make(case, "cuda", torch.float32, input_format=memory_format)
        exact_args = [a.detach().double().requires_grad_() for a in args[:3]]
        y, exact = F.conv_transpose2d(*args), native(*exact_args, *args[3:])
        cotangent = torch.randn_like(exact)
        ours = torch.autograd.grad(y, args[:3], cotangent.float())
        expected = torch.autograd.grad(exact, exact_args, cotangent)
        for a, e in zip((y, *ours), (exact, *expected), strict=True):
            error = (a.double() - e).abs().max()
            assert error <= 2e-3 * e.abs().max()


def test_layouts(device, dtype):
    w = torch.randn(4, 6, 2, 2, device=device).to(dtype)
    b = torch.randn(6, device=device).to(dtype)
    for _, x in layouts(torch.randn(2, 4, 7, 10, device=device).to(dtype)):
        compare_with_native(F.conv_transpose2d, native, (x.requires_grad_(), w, b, 2))
    x = torch.randn(2, 4, 7, 10, device=device).to(dtype)
    for _, view in layouts(w):
        compare_with_native(F.conv_transpose2d, native, (x, view.requires_grad_(), b, 2))
    for view in (x[:1].expand(3, -1, -1, -1), x[:, :1].expand(-1, 4, -1, -1), x.flip(0)[1:]):
        compare_with_native(F.conv_transpose2d, native, (view, w, b, 2))
    # The cotangent in another format, and expanded.
    x.requires_grad_()
    for cotangent in (
        torch.randn(2, 6, 14, 20, device=device).to(dtype).to(memory_format=CHANNELS_LAST),
        torch.ones((), device=device, dtype=dtype).expand(2, 6, 14, 20),
    ):
        (ours,) = torch.autograd.grad(F.conv_transpose2d(x, w, b, 2), x, cotangent)
        (exact,) = torch.autograd.grad(
            native(x.double(), w.double(), b.double(), 2), x, cotangent.double()
        )
        torch.testing.assert_close(ours, exact.to(dtype))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_offsets(device, dtype, offset):
    """Operands that start inside a vector."""

    def shifted(*shape):
        size = torch.Size(shape).numel()
        return torch.randn(size + offset, device=device).to(dtype)[offset:].view(shape)

    x = shifted(2, 8, 9, 16).permute(0, 3, 1, 2)
    w = shifted(16, 2, 2, 8).permute(0, 3, 1, 2)
    b = shifted(8)
    for operands in ((x, w.contiguous(), None), (x.clone(), w, b), (x, w, b)):
        leaves = [t if t is None else t.detach().requires_grad_() for t in operands]
        compare_with_native(F.conv_transpose2d, native, (*leaves, 2))


def test_unbatched(device, dtype):
    for memory_format in FORMATS:
        x = torch.randn(8, 7, 8, device=device).to(dtype).requires_grad_()
        w = torch.randn(8, 16, 2, 2, device=device).to(dtype).to(memory_format=memory_format)
        compare_with_native(F.conv_transpose2d, native, (x, w.requires_grad_(), None, 2))


def test_argument_forms(device):
    x, w = torch.randn(2, 4, 5, 6, device=device), torch.randn(4, 2, 3, 3, device=device)
    for kwargs in (
        {"stride": [2], "padding": (1,), "groups": 2},
        {"stride": [1, 2], "dilation": (2, 1), "groups": 2, "output_padding": [1, 0]},
        {"bias": torch.randn(2, device=device), "padding": torch.Size([1, 2])},
    ):
        torch.testing.assert_close(F.conv_transpose2d(x, w, **kwargs), native(x, w, **kwargs))


@pytest.mark.parametrize("shape", [(0, 4, 5, 5), (0, 4, 0, 5)], ids=str)
def test_empty(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    w = torch.randn(4, 6, 3, 3, device=device).to(dtype).requires_grad_()
    b = torch.randn(6, device=device).to(dtype).requires_grad_()
    y, expected = F.conv_transpose2d(x, w, b, 2), native(x, w, b, 2)
    assert_same(y, expected)
    ours = torch.autograd.grad(y.sum(), (x, w, b))
    for grad, leaf in zip(ours, (x, w, b), strict=True):
        assert_same(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (4, 2, 1), (3, 1, 1)])
def test_special_values(device, dtype, kernel, stride, padding):
    """NaN and infinities reach the outputs whose windows see them, and no other."""
    for memory_format, c in itertools.product(FORMATS, (1, 8)):
        x = torch.zeros(2, c, 9, 12, device=device).to(dtype)
        x[0, 0, 2, 3], x[0, 0, 6, 11], x[1, 0, 8, 0] = float("nan"), float("inf"), -float("inf")
        x = x.to(memory_format=memory_format).requires_grad_()
        w = torch.randn(c, 8, kernel, kernel, device=device).to(dtype)
        w = w.to(memory_format=memory_format)
        # In float64: native's bfloat16 CPU kernel spreads NaN to pixels that see none.
        exact_x = x.detach().double().requires_grad_()
        expected = native(exact_x, w.double(), None, stride, padding)
        y = F.conv_transpose2d(x, w, None, stride, padding)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf(), expected.isinf())
        dy = torch.randn_like(y)
        dy[0, 0, 1, 2], dy[0, 3, 3, 4], dy[1, 0, 4, 0] = float("nan"), float("inf"), 0
        (ours,) = torch.autograd.grad(y, x, dy)
        (theirs,) = torch.autograd.grad(expected, exact_x, dy.double())
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.parametrize(
    "case",
    ["odd", "grouped", "depthwise_multiplier", "padding_over_kernel", "kernel_is_stride",
     "output_padding_over_a_stride"],
)  # fmt: skip
def test_gradients(device, case):
    _n, c, h, w, k, r, s, *rest = CASES[case]
    groups = rest[3]
    c, k, h, w = max(groups, c // 4 // groups * groups), max(groups, k // 4), min(h, 3), min(w, 3)
    k = k // groups * groups
    h = w = h if case != "padding_over_kernel" else 6

    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float64)

    inputs = [tensor(1, c, h, w), tensor(c, k // groups, r, s), tensor(k)]
    flags = subsets(3) if case == "odd" else [(True, True, True)]
    for flags_i in flags:
        leaves = [t.clone().requires_grad_(f) for t, f in zip(inputs, flags_i, strict=True)]
        gradcheck(lambda x, w, b: F.conv_transpose2d(x, w, b, *rest), tuple(leaves))


def test_deterministic(device, dtype):
    for case in ("unet_wide", "gan"):
        args = make(case, device, dtype, input_format=CHANNELS_LAST)

        def run(args=args):
            y = F.conv_transpose2d(*args)
            return [y, *torch.autograd.grad(y.sum() * 0.37, args[:3])]

        for a, b in zip(run(), run(), strict=True):
            assert_same(a, b)


def test_func_transforms(device):
    x = torch.randn(3, 2, 4, 3, device=device, dtype=torch.float64)
    w = torch.randn(2, 4, 3, 2, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t, w, None, 2).sin().sum()),
        lambda f: torch.func.grad(lambda t: f(x, w * t.sum(), None, 2).sin().sum()),
        lambda f: torch.func.jacrev(lambda t: f(t, w, None, 2)),
        lambda f: torch.func.jacfwd(lambda t: f(t, w, None, 2)),
        lambda f: torch.func.vmap(lambda t: f(t, w, None, 2)),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t, w, None, 2).pow(2).sum())),
        lambda f: torch.func.hessian(lambda t: f(t, w, None, 2).pow(3).sum()),
    ):
        torch.testing.assert_close(transform(F.conv_transpose2d)(x), transform(native)(x))


def test_opcheck(device):
    ops = torch.ops.warpwright
    for case in ("unet", "odd", "output_padding_of_a_stride"):
        for formats in ((None, None), (CHANNELS_LAST, None)):
            x, w, b, *rest = make(
                case, device, torch.float64, input_format=formats[0], weight_format=formats[1]
            )
            stride, padding, more, dilation = (
                (v, v) if isinstance(v, int) else v for v in (*rest[:3], rest[4])
            )
            windows = (stride, padding, more, rest[3], dilation)
            opcheck(ops.conv_transpose2d.default, (x, w, b, *windows))
            opcheck(ops.conv_transpose2d.default, (x[0], w, None, *windows))
            dy = torch.randn_like(F.conv_transpose2d(x, w, b, *windows))
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                opcheck(ops.conv_transpose2d_backward.default, (dy, x, w, *windows, mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    w = torch.randn(3, 4, 2, 3, device=device, requires_grad=True)
    b = torch.randn(4, device=device, requires_grad=True)

    def step(x):
        y = F.conv_transpose2d(x, w, b, 2)
        return F.conv_transpose2d(y, w[:1].repeat(4, 1, 1, 1)[:, :1], b, (2, 1), 1, groups=4).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, h in ((4, 5), (5, 7)):
        x = torch.randn(n, 3, h, 8, device=device, requires_grad=True)
        leaves = (x, w, b)
        expected, actual = step(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        for a, e in zip(
            torch.autograd.grad(actual.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(device, low):
    x = torch.randn(2, 8, 8, 8, device=device, requires_grad=True)
    w = torch.randn(8, 16, 2, 2, device=device, requires_grad=True)
    b = torch.randn(16, device=device, requires_grad=True)
    with torch.autocast(device, dtype=low):
        y, expected = F.conv_transpose2d(x, w, b, 2), native(x, w, b, 2)
        assert y.dtype == expected.dtype == low
        wide = x.double(), w.double()
        assert F.conv_transpose2d(*wide).dtype == native(*wide).dtype
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32


@pytest.mark.parametrize("other", [torch.int64, torch.complex64])
def test_dtypes_of_native(other):
    x = torch.randint(-5, 5, (2, 3, 6, 6)).to(other)
    w = torch.randint(-5, 5, (3, 4, 2, 2)).to(other)
    ours, expected = F.conv_transpose2d(x, w, stride=2), native(x, w, stride=2)
    if other.is_complex:
        ours, expected = torch.view_as_real(ours), torch.view_as_real(expected)
    assert_same(ours, expected)


def test_decompositions(device):
    x, w = torch.randn(2, 4, 5, 6, device=device), torch.randn(4, 3, 3, 2, device=device)
    for image in (x, x[0], x.to(memory_format=torch.channels_last)):
        windows = ([2, 1], [1, 0], [1, 0], 2, [1, 2])
        y = same("conv_transpose2d", image, w, w.flatten()[:6].clone(), *windows)
        for mask in flags(3):
            same("conv_transpose2d_backward", y.cos(), image, w, *windows, mask)


# ---- the layer ----


def test_layer_with_an_output_size(device):
    torch.manual_seed(0)
    theirs = torch.nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, device=device)
    ours = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, device=device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 5, 7, device=device)
    for size in (None, [9, 13], [10, 14], [2, 6, 10, 13]):
        assert ours(x, size).shape == theirs(x, size).shape
        torch.testing.assert_close(ours(x, output_size=size), theirs(x, output_size=size))
    for size in ([11, 13], [9, 12], [9]):
        with pytest.raises(ValueError) as expected:  # noqa: PT011
            theirs(x, size)
        with pytest.raises(ValueError) as actual:  # noqa: PT011
            ours(x, size)
        assert str(actual.value) == str(expected.value)


def test_layer_of_complex_numbers():
    torch.manual_seed(0)
    options = {"stride": 2, "padding": 1, "dtype": torch.complex64}
    ours, theirs = (kind.ConvTranspose2d(4, 6, 3, **options) for kind in (nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 5, 7, dtype=torch.complex64, requires_grad=True)
    results = [layer(x, [10, 13]) for layer in (ours, theirs)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(y.abs().sum(), x) for y in results))


def test_swap(device):
    model = torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 8, 2, 2), torch.nn.ReLU()).to(device)
    x = torch.randn(2, 4, 5, 5, device=device)
    expected = model(x)
    report = warpwright.swap(model)
    assert {entry.op for entry in report.swapped} == {"conv_transpose2d", "relu"}
    assert type(model[0]) is nn.ConvTranspose2d
    torch.testing.assert_close(model(x), expected)
    warpwright.unswap(model)
    assert type(model[0]) is torch.nn.ConvTranspose2d


# ---- the choice ----


def half(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype).contiguous(memory_format=CHANNELS_LAST)


def forward_of(x, w, *args, **kwargs):
    return warpwright.explain("conv_transpose2d", x, w, *args, **ON_GPU, **kwargs).splitlines()[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_product_of_all_taps(dtype):
    for c, k, size in ((512, 256, 32), (256, 128, 64), (128, 64, 128)):
        x, w = half(16, c, size, size, dtype=dtype), half(c, k, 2, 2, dtype=dtype)
        text = forward_of(x, w, torch.empty(k, dtype=dtype), stride=2)
        assert "one product of all taps" in text
        assert "128x128" in text
    for small in (
        (half(1, 64, 8, 8), half(64, 64, 2, 2)),
        (half(16, 24, 40, 40), half(24, 8, 2, 2)),
    ):
        assert "64x64" in forward_of(*small, stride=2)
    assert "all taps" in forward_of(half(2, 64, 8, 8), half(64, 32, 4, 4), stride=4)
    assert "all taps" in forward_of(half(2, 64, 8, 8), half(64, 32, 1, 3), stride=(1, 3))


@pytest.mark.parametrize(
    ("operands", "options", "reason"),
    [
        ((half(2, 16, 8, 8), half(16, 8, 4, 4)), {"stride": 2, "padding": 1}, "overlap or leave"),
        ((half(2, 16, 8, 8), half(16, 8, 2, 2)), {"stride": 3}, "overlap or leave gaps"),
        ((half(2, 16, 8, 8), half(16, 8, 2, 2)), {"stride": 2, "output_padding": 1}, "gaps"),
        ((half(2, 16, 8, 8), half(16, 4, 2, 2)), {"stride": 2}, "whole 16-byte vectors"),
        ((half(2, 12, 8, 8), half(12, 8, 2, 2)), {"stride": 2}, "whole 16-byte vectors"),
        ((half(2, 16, 8, 8), half(16, 8, 2, 2)), {"stride": 2, "groups": 2}, "overlap or leave"),
        (
            (half(2, 16, 8, 8, dtype=torch.float32), half(16, 8, 2, 2, dtype=torch.float32)),
            {"stride": 2},
            "not a 16-bit type",
        ),
        (
            (half(2, 16, 8, 8).contiguous(), half(16, 8, 2, 2).contiguous()),
            {"stride": 2},
            "NCHW",
        ),
    ],
)
def test_other_calls_are_input_gradients(operands, options, reason):
    text = forward_of(*operands, **options)
    assert "the input gradient of a convolution" in text
    assert reason in text


def test_portable_path(monkeypatch):
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    assert "no sm_90a" in forward_of(half(16, 128, 32, 32), half(128, 64, 2, 2), stride=2)


def test_explained_on_the_cpu():
    text = warpwright.explain(
        "conv_transpose2d", torch.empty(8, 64, 16, 16), torch.empty(64, 32, 2, 2), stride=2
    )
    assert "grad_weight" in text
    assert "threads" in text
