import itertools

import pytest
import torch
from common import gradcheck, layouts, opcheck, subsets

import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.conv2d
CHANNELS_LAST = torch.channels_last
FORMATS = [torch.contiguous_format, CHANNELS_LAST]

# n, c, h, w, k, r, s, stride, padding, dilation, groups
CASES = {
    "3x3": (3, 16, 14, 14, 32, 3, 3, 1, 1, 1, 1),
    "odd": (2, 5, 17, 19, 7, 3, 2, (2, 3), (1, 0), (1, 2), 1),
    "1x1": (2, 24, 13, 11, 40, 1, 1, 1, 0, 1, 1),
    "1x1_stride": (2, 24, 13, 11, 40, 1, 1, 2, 0, 1, 1),
    "stem": (2, 3, 37, 41, 16, 7, 7, 2, 3, 1, 1),
    "mnist": (5, 1, 28, 28, 32, 3, 3, 1, 1, 1, 1),
    "stem_tiles": (1, 3, 75, 80, 64, 7, 7, 2, 3, 1, 1),
    "mnist_tiles": (1, 1, 16, 14, 128, 3, 3, 1, 1, 1, 1),
    "image_3x3": (2, 3, 21, 30, 20, 3, 3, 1, 1, 1, 1),
    "image_dilated": (1, 2, 17, 19, 9, 3, 2, 2, (3, 1), (3, 1), 1),
    "image_wide_window": (2, 4, 16, 37, 24, 5, 8, 1, (2, 3), 1, 1),
    "image_channels": (1, 2, 15, 16, 130, 3, 3, 1, 1, 1, 1),
    "one_channel_5x5": (2, 1, 12, 15, 5, 5, 5, (1, 2), 2, 1, 1),
    "dilated": (2, 8, 20, 18, 8, 3, 3, 1, 2, 2, 1),
    "stride_over_kernel": (2, 8, 19, 23, 8, 2, 2, 3, 0, 1, 1),
    "pad_over_kernel": (1, 4, 6, 5, 4, 3, 3, 2, 4, 1, 1),
    "grouped": (2, 16, 9, 11, 24, 3, 3, 2, (1, 2), 2, 4),
    "grouped_wide": (2, 64, 9, 9, 64, 3, 3, 1, 1, 1, 2),
    "depthwise": (2, 24, 15, 13, 24, 3, 3, 1, 1, 1, 24),
    "depthwise_stride": (2, 16, 15, 13, 16, 5, 5, 2, 2, 1, 16),
    "depthwise_multiplier": (2, 6, 9, 11, 18, 3, 5, (1, 2), (1, 3), (2, 1), 6),
    "row": (2, 8, 1, 40, 16, 1, 5, 1, (0, 2), 1, 1),
    "one_pixel": (4, 32, 1, 1, 32, 1, 1, 1, 0, 1, 1),
    "wide": (1, 128, 8, 8, 130, 3, 3, 1, 1, 1, 1),
}


def make(
    case, device, dtype, *, bias=True, input_format=None, weight_format=None, requires_grad=True
):
    n, c, h, w, k, r, s, *rest = CASES[case]
    groups = rest[-1]

    def tensor(shape, memory_format=None):
        t = torch.randn(shape, device=device).to(dtype)
        if memory_format is not None:
            t = t.to(memory_format=memory_format)
        return t.requires_grad_(requires_grad)

    return (
        tensor((n, c, h, w), input_format),
        tensor((k, c // groups, r, s), weight_format),
        tensor((k,)) if bias else None,
        *rest,
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "formats", itertools.product(FORMATS, repeat=2), ids=["cc", "cl", "lc", "ll"]
)
def test_values(device, dtype, case, formats):
    for bias in (True, False):
        args = make(
            case, device, dtype, bias=bias, input_format=formats[0], weight_format=formats[1]
        )
        compare_with_native(F.conv2d, native, args)


@pytest.mark.parametrize("case", CASES)
def test_integers_are_exact(device, dtype, case):
    # Small enough that every order of summation is exact in every dtype.
    args = make(case, device, torch.float64, requires_grad=False)
    tensors = [(a * 100).round().remainder(3) - 1 for a in args[:3]]
    for memory_format in FORMATS:
        x, w, b = (t.to(dtype) for t in tensors)
        x = x.to(memory_format=memory_format).requires_grad_()
        w, b = w.requires_grad_(), b.requires_grad_()
        exact_in = [t.detach().double().requires_grad_() for t in (x, w, b)]
        y, exact = F.conv2d(x, w, b, *args[3:]), native(*exact_in, *args[3:])
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
        y, exact = F.conv2d(*args), native(*exact_args, *args[3:])
        cotangent = torch.randn_like(exact)
        ours = torch.autograd.grad(y, args[:3], cotangent.float())
        expected = torch.autograd.grad(exact, exact_args, cotangent)
        for a, e in zip((y, *ours), (exact, *expected), strict=True):
            error = (a.double() - e).abs().max()
            assert error <= 2e-3 * e.abs().max()


def test_layouts(device, dtype):
    w = torch.randn(6, 4, 3, 3, device=device).to(dtype)
    b = torch.randn(6, device=device).to(dtype)
    for _, x in layouts(torch.randn(2, 4, 7, 10, device=device).to(dtype)):
        compare_with_native(F.conv2d, native, (x.requires_grad_(), w, b, 1, 1))
    x = torch.randn(2, 4, 7, 10, device=device).to(dtype)
    for _, view in layouts(w):
        compare_with_native(F.conv2d, native, (x, view.requires_grad_(), b, 1, 1))
    for view in (x[:1].expand(3, -1, -1, -1), x[:, :1].expand(-1, 4, -1, -1), x.flip(0)[1:]):
        compare_with_native(F.conv2d, native, (view, w, b, 1, 1))
    # The cotangent in another format, and expanded.
    x.requires_grad_()
    for cotangent in (
        torch.randn(2, 6, 7, 10, device=device).to(dtype).to(memory_format=CHANNELS_LAST),
        torch.ones((), device=device, dtype=dtype).expand(2, 6, 7, 10),
    ):
        (ours,) = torch.autograd.grad(F.conv2d(x, w, b, 1, 1), x, cotangent)
        (exact,) = torch.autograd.grad(
            native(x.double(), w.double(), b.double(), 1, 1), x, cotangent.double()
        )
        torch.testing.assert_close(ours, exact.to(dtype))


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("kernel", [(3, 3), (2, 4), (1, 6), (5, 2)])
@pytest.mark.parametrize("dilation", [1, (2, 3)])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_padding_strings(device, padding, kernel, dilation):
    x = torch.randn(2, 3, 16, 17, device=device, requires_grad=True)
    w = torch.randn(4, 3, *kernel, device=device, requires_grad=True)
    compare_with_native(F.conv2d, native, (x, w, None, 1, padding, dilation))


def test_unbatched(device, dtype):
    for memory_format in FORMATS:
        x = torch.randn(4, 7, 8, device=device).to(dtype).requires_grad_()
        w = torch.randn(6, 4, 3, 3, device=device).to(dtype).to(memory_format=memory_format)
        compare_with_native(F.conv2d, native, (x, w.requires_grad_(), None, 2, 1))


def test_argument_forms(device):
    x, w = torch.randn(2, 4, 9, 9, device=device), torch.randn(4, 2, 3, 3, device=device)
    for kwargs in (
        {"stride": [2], "padding": (1,), "groups": 2},
        {"stride": [1, 2], "dilation": (2, 1), "groups": 2},
        {"bias": torch.randn(4, device=device), "padding": torch.Size([1, 2]), "groups": 2},
    ):
        torch.testing.assert_close(F.conv2d(x, w, **kwargs), native(x, w, **kwargs))


EMPTY = [(0, 4, 5, 5), (2, 0, 5, 5), (0, 0, 5, 5)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    w = torch.randn(6, shape[1], 3, 3, device=device).to(dtype).requires_grad_()
    b = torch.randn(6, device=device).to(dtype).requires_grad_()
    y, expected = F.conv2d(x, w, b), native(x, w, b)
    assert_same(y, expected)
    ours = torch.autograd.grad(y.sum(), (x, w, b))
    for grad, leaf in zip(ours, (x, w, b), strict=True):
        assert_same(grad, torch.zeros_like(leaf))


def test_special_values(device, dtype):
    for memory_format in FORMATS:
        for c in (1, 8):
            x = torch.zeros(2, c, 9, 12, device=device).to(dtype)
            x[0, 0, 2, 3], x[0, 0, 6, 11], x[1, 0, 8, 0] = float("nan"), float("inf"), -float("inf")
            x = x.to(memory_format=memory_format)
            w = torch.randn(5, c, 3, 3, device=device).to(dtype)
            for stride in (1, 2):
                # In float64: native's bfloat16 CPU kernel spreads NaN to pixels that see none.
                expected = native(x.double(), w.double(), None, stride, 1)
                y = F.conv2d(x, w, None, stride, 1)
                assert torch.equal(y.isnan(), expected.isnan())
                assert torch.equal(y.isinf(), expected.isinf())
            # The gradient of the input meets its own outputs only.
            x = torch.zeros(2, c, 9, 12, device=device, dtype=dtype)
            x = x.to(memory_format=memory_format).requires_grad_()
            for stride in (1, 2):
                y = F.conv2d(x, w, None, stride, 1)
                dy = torch.randn_like(y)
                dy[0, 0, 1, 2], dy[0, 3, 3, 4], dy[1, 0, 4, 0] = float("nan"), float("inf"), 0
                dy[1, 1, 4, 5] = -float("inf")
                (ours,) = torch.autograd.grad(y, x, dy)
                exact_x = x.detach().double().requires_grad_()
                exact = native(exact_x, w.double(), None, stride, 1)
                (expected,) = torch.autograd.grad(exact, exact_x, dy.double())
                assert torch.equal(ours.isnan(), expected.isnan())
                assert torch.equal(ours.isinf(), expected.isinf())
    # A NaN in one image reaches no other: no stray read is multiplied by zero.
    x = torch.randn(3, 4, 8, 8, device=device).to(dtype)
    x[1] = float("nan")
    y = F.conv2d(x, torch.randn(4, 4, 3, 3, device=device).to(dtype), None, 1, 1)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "case", ["odd", "grouped", "depthwise_multiplier", "pad_over_kernel", "one_channel_5x5"]
)
def test_gradients(device, case):
    _n, c, h, w, k, r, s, stride, padding, dilation, groups = CASES[case]
    h, w = min(h, (r - 1) * 2 + 3), min(w, (s - 1) * 2 + 2)
    c, k, groups = (c, k, groups) if groups == 1 else (c // 2, k // 2, groups // 2)

    def tensor(*shape):
        return torch.randn(*shape, device=device, dtype=torch.float64)

    inputs = [tensor(1, c, h, w), tensor(k, c // groups, r, s), tensor(k)]
    flags = subsets(3) if case == "odd" else [(True, True, True)]
    for flags_i in flags:
        leaves = [t.clone().requires_grad_(f) for t, f in zip(inputs, flags_i, strict=True)]
        gradcheck(
            lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups), tuple(leaves)
        )


def test_gradients_of_uneven_padding(device):
    x = torch.randn(1, 2, 4, 3, device=device, dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, 2, 4, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda x, w: F.conv2d(x, w, None, 1, "same"), (x, w))


def test_deterministic(device, dtype):
    args = make("wide", device, dtype)

    def run():
        y = F.conv2d(*args)
        return [y, *torch.autograd.grad(y.sum() * 0.37, args[:3])]

    for a, b in zip(run(), run(), strict=True):
        assert_same(a, b)


def test_func_transforms(device):
    x = torch.randn(3, 2, 5, 6, device=device, dtype=torch.float64)
    w = torch.randn(4, 2, 3, 3, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t, w).sin().sum()),
        lambda f: torch.func.grad(lambda t: f(x, w * t.sum()).sin().sum()),
        lambda f: torch.func.jacrev(lambda t: f(t, w)),
        lambda f: torch.func.jacfwd(lambda t: f(t, w)),
        lambda f: torch.func.vmap(lambda t: f(t, w)),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t, w).pow(2).sum())),
        lambda f: torch.func.hessian(lambda t: f(t, w).pow(3).sum()),
    ):
        torch.testing.assert_close(transform(F.conv2d)(x), transform(native)(x))


def test_opcheck(device):
    ops = torch.ops.warpwright
    for case in ("3x3", "odd", "depthwise"):
        for formats in ((None, None), (CHANNELS_LAST, None)):
            x, w, b, stride, padding, dilation, groups = make(
                case, device, torch.float64, input_format=formats[0], weight_format=formats[1]
            )
            pairs = [(v, v) if isinstance(v, int) else v for v in (stride, padding, dilation)]
            opcheck(ops.conv2d.default, (x, w, b, *pairs, groups))
            opcheck(ops.conv2d.default, (x[0], w, None, *pairs, groups))
            dy = torch.randn_like(F.conv2d(x, w, b, *pairs, groups))
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                opcheck(ops.conv2d_backward.default, (dy, x, w, *pairs, groups, mask))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    w = torch.randn(4, 3, 2, 3, device=device, requires_grad=True)
    b = torch.randn(4, device=device, requires_grad=True)

    def step(x):
        return F.conv2d(F.conv2d(x, w, b, padding="same"), w[:, :1], b, (2, 1), 1, groups=4).sin()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, h in ((4, 9), (5, 12)):
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
    x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    w = torch.randn(4, 3, 3, 3, device=device, requires_grad=True)
    b = torch.randn(4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=low):
        y, expected = F.conv2d(x, w, b, padding="same"), native(x, w, b, padding="same")
        assert y.dtype == expected.dtype == low
        assert F.conv2d(x.double(), w.double()).dtype == native(x.double(), w.double()).dtype
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32


@pytest.mark.parametrize("other", [torch.int64, torch.complex64])
def test_dtypes_of_native(other):
    x = torch.randint(-5, 5, (2, 3, 6, 6)).to(other)
    w = torch.randint(-5, 5, (4, 3, 3, 3)).to(other)
    assert_same(torch.view_as_real(F.conv2d(x, w, padding=1)) if other.is_complex else
                F.conv2d(x, w, padding=1),
                torch.view_as_real(native(x, w, padding=1)) if other.is_complex else
                native(x, w, padding=1))  # fmt: skip


def r(*shape):
    return torch.randn(*shape)


BAD = {
    "rank2": lambda f: f(r(4, 5), r(6, 4, 3, 3)),
    "rank5": lambda f: f(r(1, 2, 4, 5, 5), r(6, 4, 3, 3)),
    "weight_rank3": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3)),
    "weight_rank1": lambda f: f(r(2, 4, 5, 5), r(6)),
    "weight_rank5": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3, 3)),
    "padding": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), padding=-1),
    "stride": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), stride=-1),
    "stride_zero": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), stride=(1, 0)),
    "dilation": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), dilation=-1),
    "groups": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), groups=2),
    "groups_divide": lambda f: f(r(2, 12, 5, 5), r(8, 4, 3, 3), groups=3),
    "groups_zero": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), groups=0),
    "channels": lambda f: f(r(2, 5, 5, 5), r(6, 4, 3, 3)),
    "kernel": lambda f: f(r(2, 4, 2, 2), r(6, 4, 3, 3)),
    "kernel_dilated": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), dilation=(3, 1)),
    "bias": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), r(5)),
    "bias_rank": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), r(6, 1)),
    "bias_dtype": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), r(6).double()),
    "stride_three": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), stride=(1, 2, 3)),
    "padding_four": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), padding=(1, 1, 1, 1)),
    "same_stride": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), padding="same", stride=2),
    "same_rank": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3), padding="same"),
    "padding_name": lambda f: f(r(2, 4, 5, 5), r(6, 4, 3, 3), padding="full"),
    "no_output_channels": lambda f: f(r(2, 4, 5, 5), r(0, 4, 3, 3)),
    "no_rows": lambda f: f(r(2, 4, 0, 5), r(6, 4, 3, 3), padding=2),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_natives(case):
    with pytest.raises(RuntimeError) as expected:
        BAD[case](native)
    with pytest.raises(RuntimeError) as actual:
        BAD[case](F.conv2d)
    assert str(actual.value).split("\n")[0] == str(expected.value).split("\n")[0]


def test_errors():
    x, w = r(2, 4, 5, 5), r(6, 4, 3, 3)
    with pytest.raises(RuntimeError, match=r"Input type .* and weight type .* should be the same"):
        F.conv2d(x, w.double())
    with pytest.raises(RuntimeError, match="same device"):
        F.conv2d(x, w.to("meta"))
    with pytest.raises(RuntimeError, match="kernel of at least one element"):
        F.conv2d(x, r(6, 4, 0, 3))
    backward = torch.ops.warpwright.conv2d_backward
    mask = [True, True, True]
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape .*3, 3.*, got .*4, 3"):
        backward(r(2, 6, 4, 3), x, w, [1, 1], [0, 0], [1, 1], 1, mask)
