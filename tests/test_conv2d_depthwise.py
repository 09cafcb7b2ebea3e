"""conv2d's depthwise kernels: which calls take them, and windows, strides and sizes at their edges."""

import pytest
import torch
from test_conv2d_sm90 import CHANNELS_LAST, HALVES, choices, in_both_formats

import warpwright.functional as F
from warpwright.testing import compare_with_native

native = torch.nn.functional.conv2d
NCHW = torch.contiguous_format
DTYPES = [*HALVES, torch.float32]
ROWS, COLUMNS = "sm_90a depthwise kernel, FMA", "sm_90a depthwise kernel, 16-bit mma.sync"

# n, c, h, w, taps, stride, padding
CASES = {
    "3x3": (3, 24, 17, 13, 3, 1, 1),
    "5x5": (2, 24, 15, 19, 5, 1, 2),
    "7x7": (2, 40, 15, 30, 7, 1, 3),
    "3x3_stride": (3, 24, 17, 13, 3, 2, 1),
    "5x5_stride": (2, 24, 14, 18, 5, 2, 2),
    "7x7_stride": (2, 40, 15, 30, 7, 2, 3),
    "no_padding": (2, 72, 19, 23, 5, 1, 0),
    "no_padding_stride": (2, 72, 19, 23, 7, 2, 0),
    "odd_padding_stride": (5, 16, 20, 21, 5, 2, 1),
    "wide_padding": (2, 8, 6, 5, 7, 1, 6),
    "wide_padding_stride": (2, 8, 6, 5, 7, 2, 6),
    "padding_over_window": (2, 8, 6, 5, 3, 1, 4),
    "images_in_a_box": (9, 104, 7, 7, 5, 1, 2),
    "tail_of_channels": (5, 136, 14, 14, 5, 1, 2),
    "several_tiles_of_columns": (2, 8, 9, 301, 3, 1, 1),
    "several_tiles_stride": (1, 16, 9, 301, 7, 2, 3),
    "one_column": (2, 8, 7, 1, 5, 1, 2),
    "one_pixel": (2, 8, 1, 1, 3, 2, 1),
    "whole_vectors": (2, 16, 12, 16, 5, 1, 2),
}


def full(n, c, h, w, taps, stride, padding):
    """As choices() takes a case."""
    return (n, c, h, w, c, taps, taps, stride, padding, 1, c)


def make(case, dtype, bias=True, memory_format=CHANNELS_LAST):
    n, c, h, w, taps, stride, padding = CASES[case]
    x = torch.randn(n, c, h, w, device="cuda").to(dtype).to(memory_format=memory_format)
    weight = torch.randn(c, 1, taps, taps, device="cuda").to(dtype)
    tensors = [x, weight, torch.randn(c, device="cuda").to(dtype) if bias else None]
    leaves = [t if t is None else t.requires_grad_() for t in tensors]
    return [*leaves, stride, padding, 1, c]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choice(case, dtype):
    taps, stride = CASES[case][4:6]
    kernels = choices(full(*CASES[case]), dtype)
    for direction, kernel in kernels.items():
        # FMA does not keep up with the bytes of large windows.
        by_columns = taps > 3 and stride == 1 and dtype != torch.float32
        assert kernel.startswith(COLUMNS if by_columns else ROWS), direction
        assert ("flipped window" in kernel) == (direction == "grad_input" and stride == 1)
        assert ("sums in" in kernel) == (direction == "grad_weight")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choice_in_nchw(case, dtype):
    for kernel in choices(full(*CASES[case]), dtype, NCHW).values():
        assert "portable depthwise kernel" in kernel
        assert "copies" not in kernel


def test_reasons():
    def reason(direction, taps, stride, dtype=torch.bfloat16):
        kernel = choices(full(8, 64, 28, 28, taps, stride, taps // 2), dtype)[direction]
        return kernel.rsplit("(", 1)[1][:-1]

    assert reason("forward", 3, 1) == "3x3: FMA keeps up with the bytes"
    assert reason("grad_weight", 5, 2) == "stride 2: FMA keeps up with the bytes"
    assert reason("grad_input", 7, 1, torch.float32) == "float32: tensor cores would round"
    assert reason("forward", 7, 1) == "7x7: FMA would take longer than the bytes"


def test_why_not():
    def reasons(*case, **kwargs):
        return {kernel.rsplit("(", 1)[1][:-1] for kernel in choices(case, **kwargs).values()}

    assert reasons(2, 16, 14, 14, 32, 3, 3, 1, 1, 1, 16) == {"several outputs per channel"}
    assert reasons(2, 16, 14, 14, 16, 3, 5, 1, 1, 1, 16) == {"a window other than 3x3, 5x5, 7x7"}
    assert reasons(2, 16, 14, 14, 16, 3, 3, 3, 1, 1, 16) == {"a stride other than 1 and 2"}
    assert reasons(2, 16, 14, 14, 16, 3, 3, (1, 2), 1, 1, 16) == {"a stride other than 1 and 2"}
    assert reasons(2, 16, 14, 14, 16, 3, 3, 1, 1, 2, 16) == {"dilation"}
    odd = {"channels that are not whole 16-byte vectors"}
    assert reasons(2, 20, 14, 14, 20, 3, 3, 1, 1, 1, 20) == odd
    case = full(2, 20, 14, 14, 3, 1, 1)
    assert all(kernel.startswith(ROWS) for kernel in choices(case, torch.float32).values())
    assert reasons(*case, dtype=torch.float64) == {"float64"}


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@in_both_formats
def test_values(case, dtype, bias, memory_format):
    compare_with_native(F.conv2d, native, make(case, dtype, bias, memory_format))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
@in_both_formats
def test_integers_are_exact(case, dtype, memory_format):
    args = make(case, dtype, memory_format=memory_format)
    leaves = [((t * 100).round().remainder(3) - 1).detach().requires_grad_() for t in args[:3]]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    y, exact = F.conv2d(*leaves, *args[3:]), native(*exact_leaves, *args[3:])
    assert torch.equal(y.double(), exact.to(dtype).double())
    cotangent = torch.randint_like(exact, -1, 2)
    ours = torch.autograd.grad(y, leaves, cotangent.to(dtype))
    for a, e in zip(ours, torch.autograd.grad(exact, exact_leaves, cotangent), strict=True):
        assert torch.equal(a.double(), e.to(dtype).double())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_repeats_beside_a_busy_stream(case, dtype):
    """Other kernels on the same SMs delay loads from shared memory, which TMA fills again."""
    args = make(case, dtype)
    cotangent = torch.randn_like(F.conv2d(*args))

    def run():
        y = F.conv2d(*args)
        return y.detach(), *torch.autograd.grad(y, args[:3], cotangent)

    first = run()
    torch.cuda.synchronize()
    x, busy = torch.randn(1 << 20, device="cuda"), torch.cuda.Stream()
    wrong = torch.zeros(4, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(busy):
            for _ in range(4):
                x.sort()
                x.view(1024, 1024).softmax(-1)
        for _ in range(30):
            for i, (again, once) in enumerate(zip(run(), first, strict=True)):
                wrong[i] += (again != once).any()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0, 0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["3x3", "3x3_stride", "5x5", "5x5_stride", "7x7", "7x7_stride"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_meet_their_own_factors_only(case, dtype):
    """The kernels multiply zeros next to the image and past a row's end. Native does not."""
    args = make(case, dtype)
    x, w, b = (t.detach() for t in args[:3])
    x[0, 0, 5, -1], x[1, 1, 0, 0], x[1, 2, 7, 4] = float("inf"), -float("inf"), float("nan")
    leaves = [t.requires_grad_() for t in (x, w, b)]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    y, exact = F.conv2d(*leaves, *args[3:]), native(*exact_leaves, *args[3:])
    dy = torch.randn_like(exact)
    dy[0, 3, 0, 0], dy[1, 4, -1, -1], dy[1, 5, 2, 3] = float("inf"), -float("inf"), float("nan")
    ours = torch.autograd.grad(y, leaves, dy.to(dtype))
    for a, e in zip(
        (y, *ours), (exact, *torch.autograd.grad(exact, exact_leaves, dy)), strict=True
    ):
        assert torch.equal(a.isnan(), e.isnan())
        assert torch.equal(a.isposinf(), e.isposinf())
        assert torch.equal(a.isneginf(), e.isneginf())


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["3x3", "5x5", "7x7_stride"])
@in_both_formats
def test_any_address(case, memory_format):
    """Tensors that start one element after a multiple of 16 bytes."""
    *tensors, stride, padding, dilation, groups = make(case, torch.bfloat16, True, memory_format)

    def shifted(t):
        place = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
        return place.as_strided(t.shape, t.stride()).copy_(t.detach()).requires_grad_()

    args = [*(shifted(t) for t in tensors), stride, padding, dilation, groups]
    compare_with_native(F.conv2d, native, args)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(16, 96, 56, 56), (64, 960, 7, 7)], ids=["large", "small"])
@pytest.mark.parametrize("taps", [3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2])
@in_both_formats
def test_same_bits_every_time(case, taps, stride, memory_format):
    """Enough images that every SM has several, and comparable with native."""
    channels = case[1]
    x = torch.randn(case, device="cuda").bfloat16().to(memory_format=memory_format)
    w, b = torch.randn(channels, 1, taps, taps, device="cuda").bfloat16(), None
    leaves = [x.requires_grad_(), w.requires_grad_()]
    rest = (b, stride, taps // 2, 1, channels)
    compare_with_native(F.conv2d, native, (*leaves, *rest))
    dy = torch.randn_like(F.conv2d(*leaves, *rest))

    def run():
        y = F.conv2d(*leaves, *rest)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    first = run()
    for _ in range(10):
        for a, e in zip(run(), first, strict=True):
            assert torch.equal(a, e)
