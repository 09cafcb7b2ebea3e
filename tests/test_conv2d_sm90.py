"""conv2d's sm_90a kernels: which calls take them, and shapes at the edges of their tiles."""

import pytest
import torch

import warpwright.functional as F
from warpwright import explain
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.conv2d
CHANNELS_LAST = torch.channels_last
HALVES = [torch.bfloat16, torch.float16]
in_both_formats = pytest.mark.parametrize(
    "memory_format", [CHANNELS_LAST, torch.contiguous_format], ids=["nhwc", "nchw"]
)
ALL = ("forward", "grad_input", "grad_weight")
FORWARD = ("forward",)
IMAGE = ("forward", "grad_input")
WEIGHT = ("forward", "grad_weight")

# n, c, h, w, k, r, s, stride, padding, dilation, groups; the directions that take the kernels.
CASES = {
    "3x3": ((2, 64, 16, 16, 64, 3, 3, 1, 1, 1, 1), ALL),
    "one_image": ((1, 64, 17, 23, 64, 3, 3, 1, 1, 1, 1), ALL),
    "tails": ((3, 72, 11, 13, 136, 3, 3, 1, 1, 1, 1), IMAGE),
    "few_channels": ((2, 40, 12, 10, 24, 3, 3, 1, 1, 1, 1), IMAGE),
    "odd_filters": ((2, 64, 9, 9, 77, 3, 3, 1, 1, 1, 1), FORWARD),
    "many_filters": ((2, 128, 15, 17, 320, 3, 3, 1, 1, 1, 1), ALL),
    "window_5x3": ((2, 64, 14, 12, 128, 5, 3, 1, (2, 0), 1, 1), ALL),
    "even_window": ((2, 64, 13, 12, 64, 2, 4, 1, (0, 1), 1, 1), ALL),
    "dilated": ((2, 64, 20, 18, 64, 3, 3, 1, (2, 3), (2, 3), 1), ALL),
    "wide_padding": ((1, 64, 6, 5, 64, 3, 3, 1, (5, 4), 1, 1), ALL),
    "stride_2": ((3, 128, 14, 15, 128, 3, 3, 2, 1, 1, 1), ALL),
    "stride_1x2": ((2, 64, 14, 15, 128, 3, 3, (1, 2), 1, 1, 1), ALL),
    "stride_4x1": ((2, 64, 18, 9, 64, 5, 3, (4, 1), (2, 1), 1, 1), ALL),
    "stride_and_dilation": ((2, 64, 17, 19, 64, 3, 3, 2, 3, (2, 3), 1), ALL),
    "stride_over_window": ((4, 64, 40, 41, 64, 3, 1, 2, 0, 1, 1), ALL),
    "stride_3": ((2, 64, 43, 41, 64, 3, 3, 3, 1, 1, 1), WEIGHT),
    "1x1_stride": ((4, 192, 33, 35, 64, 1, 1, 2, 0, 1, 1), ALL),
    "1x1_padded": ((2, 64, 9, 9, 64, 1, 1, 1, 1, 1, 1), ALL),
    "groups": ((2, 256, 9, 10, 256, 3, 3, 1, 1, 1, 2), ALL),
    "groups_stride": ((2, 128, 29, 30, 128, 3, 3, 2, 1, 1, 2), ALL),
    "one_row": ((2, 64, 1, 40, 64, 1, 5, 1, (0, 2), 1, 1), ALL),
    "no_rest": ((4, 64, 32, 32, 64, 3, 3, 1, 1, 1, 1), ALL),
}


def make(case, device, dtype, bias=True, memory_format=CHANNELS_LAST):
    n, c, h, w, k, r, s, *rest = CASES[case][0]
    x = torch.randn(n, c, h, w, device=device).to(dtype).to(memory_format=memory_format)
    weight = torch.randn(k, c // rest[-1], r, s, device=device).to(dtype)
    tensors = [x, weight.to(memory_format=memory_format)]
    tensors.append(torch.randn(k, device=device).to(dtype) if bias else None)
    return [t if t is None else t.requires_grad_() for t in tensors] + rest


def choices(case, dtype=torch.bfloat16, memory_format=CHANNELS_LAST):
    """The kernel of each direction on an H200."""
    n, c, h, w, k, r, s, *rest = case
    x = torch.empty(n, c, h, w, dtype=dtype, device="meta").to(memory_format=memory_format)
    weight = torch.empty(k, c // rest[-1], r, s, dtype=dtype, device="meta")
    weight = weight.to(memory_format=memory_format)
    text = explain("conv2d", x, weight, None, *rest, device="h200")
    lines = dict(line.split(maxsplit=1) for line in text.splitlines()[1:])
    lines.pop("with_shortcut", None)  # tests/test_conv2d_join.py
    return lines


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", HALVES)
def test_choice(case, dtype):
    shape, directions = CASES[case]
    for direction, kernel in choices(shape, dtype).items():
        windows, walks = "windows by TMA" in kernel, "walks down" in kernel
        assert windows + walks == ("sm_90a 16-bit wgmma" in kernel)
        # A walk also takes input channels that are no multiple of 64.
        assert windows + walks == (direction in directions) or (walks and shape[1] % 64 != 0)


def test_why_not():
    def reasons(*case, **kwargs):
        return {kernel.rsplit("(", 1)[1] for kernel in choices(case, **kwargs).values()}

    base = (2, 64, 16, 16, 64, 3, 3, 1, 1, 1, 1)
    for dtype in (torch.float32, torch.float64):
        assert reasons(*base, dtype=dtype) == {"NHWC with whole 16-byte vectors of channels)"}
        assert reasons(*base, dtype=dtype, memory_format=torch.contiguous_format) == {
            "NCHW: element gathers along the rows of the image)"
        }
    limits = {"stride, padding or dilation over TMA's limits)"}
    assert reasons(1, 64, 7, 7, 64, 3, 3, 1, 200, 1, 1) == limits
    assert reasons(1, 64, 400, 400, 64, 3, 3, 1, 128, 128, 1) == limits
    assert choices((2, 64, 30, 30, 64, 3, 3, 3, 1, 1, 1))["grad_input"].endswith(
        "(the input gradient of strides over 2x2)"
    )
    assert choices((2, 72, 9, 9, 64, 3, 3, 1, 1, 1, 1))["grad_weight"].endswith(
        "(input channels are no multiple of 64)"
    )
    resnext = choices((2, 256, 14, 14, 256, 3, 3, 1, 1, 1, 32))
    assert all("portable implicit GEMM" in kernel for kernel in resnext.values())


def test_tiles():
    """Of layers of ResNet-50, 256 images."""

    def tile(direction, *case):
        return choices((256, *case))[direction].split("tile ")[1].split(" (")[0]

    layer_2 = (128, 28, 28, 128, 3, 3, 1, 1, 1, 1)
    layer_3 = (256, 14, 14, 256, 3, 3, 1, 1, 1, 1)
    assert tile("forward", *layer_2) == "128x128 ping-pong, 6 stages"
    assert tile("grad_input", *layer_3) == "256x128, 4 stages"
    assert tile("grad_weight", *layer_3) == "128x256, 4 stages, split-k 7"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@in_both_formats
def test_values(case, dtype, bias, memory_format):
    compare_with_native(F.conv2d, native, make(case, "cuda", dtype, bias, memory_format))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", HALVES)
@in_both_formats
def test_integers_are_exact(case, dtype, memory_format):
    args = make(case, "cuda", dtype, memory_format=memory_format)
    x, w, b = ((t * 100).round().remainder(3) - 1 for t in args[:3])
    leaves = [t.detach().to(memory_format=torch.preserve_format) for t in (x, w, b)]
    leaves = [t.requires_grad_() for t in leaves]
    exact_leaves = [t.detach().double().requires_grad_() for t in leaves]
    y, exact = F.conv2d(*leaves, *args[3:]), native(*exact_leaves, *args[3:])
    assert_same(y.double(), exact.to(dtype).double())
    cotangent = torch.randint_like(exact, -1, 2)
    ours = torch.autograd.grad(y, leaves, cotangent.to(dtype))
    for a, e in zip(ours, torch.autograd.grad(exact, exact_leaves, cotangent), strict=True):
        assert torch.equal(a.double(), e.to(dtype).double())


@pytest.mark.gpu
def test_large_enough_for_every_tile():
    """Output tiles for several rounds of the GPU, and pixels that wgrad splits."""
    for case in (
        (8, 64, 56, 56, 64, 3, 3, 1, 1, 1, 1),
        (16, 256, 28, 28, 256, 3, 3, 1, 1, 1, 1),
        (16, 128, 57, 55, 136, 3, 3, 2, 1, 1, 1),
        (64, 512, 7, 7, 512, 3, 3, 1, 1, 1, 1),
    ):
        n, c, h, w, k, r, s, *rest = case
        x = torch.randn(n, c, h, w, device="cuda").bfloat16().to(memory_format=CHANNELS_LAST)
        weight = torch.randn(k, c, r, s, device="cuda").bfloat16()
        args = (x.requires_grad_(), weight.requires_grad_(), None, *rest)
        compare_with_native(F.conv2d, native, args)


@pytest.mark.gpu
def test_same_bits_every_time():
    x = torch.randn(16, 128, 28, 28, device="cuda").bfloat16().to(memory_format=CHANNELS_LAST)
    w = torch.randn(128, 128, 3, 3, device="cuda").bfloat16().to(memory_format=CHANNELS_LAST)
    b = torch.randn(128, device="cuda").bfloat16()
    leaves = [t.requires_grad_() for t in (x, w, b)]
    for stride in (1, 2):
        y = F.conv2d(*leaves, stride, 1)
        dy = torch.randn_like(y)

        def run(stride=stride, dy=dy):
            y = F.conv2d(*leaves, stride, 1)
            return [y, *torch.autograd.grad(y, leaves, dy)]

        first = run()
        for _ in range(20):
            for a, e in zip(run(), first, strict=True):
                assert torch.equal(a, e)
