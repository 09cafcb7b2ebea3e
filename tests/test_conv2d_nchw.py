"""conv2d in NCHW on Hopper: which tensors are copied to NHWC, and every way to store planes."""

import pytest
import torch
from launches import launches
from test_conv2d_sm90 import CHANNELS_LAST, HALVES, choices

import warpwright.functional as F
from warpwright.testing import compare_with_native

native = torch.nn.functional.conv2d
NCHW = torch.contiguous_format
DIRECTIONS = ("forward", "grad_input", "grad_weight")

# n, c, h, w, k, r, s, stride, padding, dilation, groups. Planes of x and y that are stored by
# vectors of 8, 4, 2 and 1 pixels; tails of channels and pixels; each kind of kernel.
CASES = {
    "vectors_of_8": (4, 64, 24, 20, 72, 3, 3, 1, 1, 1, 1),
    "vectors_of_4": (8, 128, 14, 14, 128, 3, 3, 1, 1, 1, 1),
    "vectors_of_2": (5, 64, 9, 10, 136, 3, 3, 1, 1, 1, 1),
    "single_pixels": (9, 128, 7, 7, 192, 3, 3, 1, 1, 1, 1),
    "64_channels": (3, 64, 17, 19, 64, 3, 3, 1, 1, 1, 1),
    "odd_filters": (3, 64, 12, 12, 77, 3, 3, 1, 1, 1, 1),
    "strided": (4, 128, 28, 28, 128, 3, 3, 2, 1, 1, 1),
    "strided_odd": (3, 64, 15, 13, 128, 3, 3, 2, 1, 1, 1),
    "sampled_1x1": (4, 128, 28, 28, 256, 1, 1, 2, 0, 1, 1),
    "sampled_odd": (3, 64, 15, 17, 72, 1, 1, (3, 2), 0, 1, 1),
    "sampled_one_pixel": (9, 64, 2, 2, 64, 1, 1, 2, 0, 1, 1),
    "strided_1x1_padded": (4, 64, 15, 14, 64, 1, 1, 2, 1, 1, 1),
    "groups": (3, 128, 14, 18, 128, 3, 3, 1, 1, 1, 2),
    "1x1": (4, 128, 12, 14, 256, 1, 1, 1, 0, 1, 1),
    "1x1_tails": (3, 72, 8, 9, 192, 1, 1, 1, 0, 1, 1),
    "1x1_one_image": (1, 64, 8, 8, 64, 1, 1, 1, 0, 1, 1),
    "1x1_odd_planes": (6, 136, 7, 7, 64, 1, 1, 1, 0, 1, 1),
    "1x1_one_pixel": (70, 64, 1, 1, 72, 1, 1, 1, 0, 1, 1),
    "large": (16, 256, 28, 28, 256, 3, 3, 1, 1, 1, 1),
    "large_1x1": (16, 256, 56, 56, 64, 1, 1, 1, 0, 1, 1),
    "depthwise_5x5": (4, 96, 28, 28, 96, 5, 5, 1, 2, 1, 96),
    "depthwise_stride": (4, 96, 28, 27, 96, 3, 3, 2, 1, 1, 96),
    "stem": (2, 3, 40, 37, 64, 7, 7, 2, 3, 1, 1),
    "stem_odd": (2, 3, 21, 33, 20, 5, 4, 1, 2, 1, 1),
}


def make(case, dtype, bias=True):
    n, c, h, w, k, r, s, *rest = CASES[case]
    shapes = ((n, c, h, w), (k, c // rest[-1], r, s), (k,))
    x, weight, b = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    leaves = [t.requires_grad_() for t in (x, weight, b)]
    return (*leaves[:2], leaves[2] if bias else None, *rest)


def copied(kernel):
    """The tensors that a direction copies: "x, w", or none."""
    return kernel.split("NHWC copies of ")[1].rsplit(",", 1)[0] if "copies" in kernel else ""


def test_copies():
    """One pass per operand. D is stored in planes, except dgrad's of stride 2 and the weight's."""

    def of(*case):
        return tuple(copied(choices((256, *case), memory_format=NCHW)[d]) for d in DIRECTIONS)

    assert of(128, 28, 28, 128, 3, 3, 1, 1, 1, 1) == ("x, w", "w, y", "x, w, y")
    assert of(128, 56, 56, 128, 3, 3, 2, 1, 1, 1) == ("x, w", "x, w, y", "x, w, y")
    assert of(256, 14, 14, 1024, 1, 1, 1, 0, 1, 1) == ("x", "y", "x, y")
    assert of(256, 56, 56, 512, 1, 1, 2, 0, 1, 1) == ("x", "x, y", "x, y")
    assert of(256, 56, 56, 64, 1, 1, 1, 0, 1, 1) == ("", "", "")
    assert of(96, 28, 28, 96, 3, 5, 1, (1, 2), 1, 96) == ("x, y", "x, y", "x, y")
    assert of(96, 28, 28, 96, 5, 5, 1, 2, 1, 96) == ("", "", "")
    assert of(96, 28, 28, 96, 3, 3, 1, 1, 1, 96) == ("", "", "")
    assert of(3, 224, 224, 64, 7, 7, 2, 3, 1, 1) == ("", "", "")


def test_kernels():
    def of(*case, **kwargs):
        return list(choices(case, memory_format=NCHW, **kwargs).values())

    planes = of(256, 64, 56, 56, 64, 3, 3, 1, 1, 1, 1)
    assert ["stores NCHW" in kernel for kernel in planes] == [True, True, False]
    assert all("sm_90a 16-bit wgmma, windows by TMA" in kernel for kernel in planes)
    for kernel in of(256, 256, 56, 56, 64, 1, 1, 1, 0, 1, 1):
        assert "1x1 as a matrix product per image: sm_90a" in kernel
    assert "few-channel kernel, 16-bit mma.sync" in of(8, 3, 224, 224, 64, 7, 7, 2, 3, 1, 1)[0]
    # What TMA cannot take in rows stays in planes: odd channels, other types, channels of a group.
    for case in ((2, 63, 16, 16, 64, 3, 3, 1, 1, 1, 1), (2, 256, 14, 14, 256, 3, 3, 1, 1, 1, 32)):
        assert all("NCHW: element gathers" in kernel for kernel in of(*case))
    for dtype in (torch.float32, torch.float64):
        kernels = of(2, 64, 16, 16, 64, 3, 3, 1, 1, 1, 1, dtype=dtype)
        assert all("NCHW: element gathers" in kernel for kernel in kernels)


def test_a_strided_1x1_copies_what_it_reads():
    kernel = choices((256, 256, 56, 56, 512, 1, 1, 2, 0, 1, 1), memory_format=NCHW)["forward"]
    assert kernel.endswith("NHWC copies of x, 98 MiB")  # a quarter of its pixels


def test_1x1_without_copies_needs_whole_vectors():
    def forward(h, w, k):
        return choices((8, 64, h, w, k, 1, 1, 1, 0, 1, 1), memory_format=NCHW)["forward"]

    assert "matrix product per image" in forward(8, 9, 64)
    for odd in ((9, 9, 64), (8, 9, 72)):
        assert "matrix product per image" not in forward(*odd)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_values(case, dtype, bias):
    compare_with_native(F.conv2d, native, make(case, dtype, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["vectors_of_8", "single_pixels", "strided", "1x1_odd_planes"])
def test_bits_are_those_of_channels_last(case):
    """The same kernels see the same numbers."""
    *tensors, stride, padding, dilation, groups = make(case, torch.bfloat16)
    rest = (stride, padding, dilation, groups)
    last = [t.detach().contiguous(memory_format=CHANNELS_LAST) for t in tensors[:2]]
    last = [t.requires_grad_() for t in (*last, tensors[2].detach())]
    y, expected = F.conv2d(*tensors, *rest), F.conv2d(*last, *rest)
    assert y.is_contiguous()
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    x_grad, _, _ = torch.autograd.grad(y, tensors, dy)
    expected_x, _, _ = torch.autograd.grad(expected, last, dy)
    assert x_grad.is_contiguous()
    assert torch.equal(x_grad, expected_x)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["vectors_of_8", "1x1", "depthwise_5x5", "stem"])
def test_any_address(case):
    """Tensors that start 2 bytes after a multiple of 16."""
    args = make(case, torch.bfloat16)

    def shifted(t):
        return torch.cat((t.new_zeros(1), t.detach().flatten()))[1:].view(t.shape).requires_grad_()

    compare_with_native(F.conv2d, native, (*(shifted(t) for t in args[:3]), *args[3:]))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["vectors_of_8", "single_pixels", "1x1", "strided"])
@pytest.mark.parametrize("formats", [(NCHW, CHANNELS_LAST), (CHANNELS_LAST, NCHW)], ids=str)
def test_gradient_in_the_other_format(case, formats):
    x, weight, bias, *rest = make(case, torch.bfloat16)
    leaves = [t.detach().contiguous(memory_format=formats[0]) for t in (x, weight)]
    leaves = [t.requires_grad_() for t in (*leaves, bias.detach())]
    y = F.conv2d(*leaves, *rest)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    other = dy.contiguous(memory_format=formats[1])
    for a, e in zip(torch.autograd.grad(y, leaves, other), expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.gpu
def test_nan_and_infinity_stay_in_their_images():
    x = torch.randn(6, 64, 14, 14, device="cuda").bfloat16()
    x[2], x[4, 3, 5, 6] = float("nan"), float("inf")
    for size in (1, 3):
        w = torch.randn(64, 64, size, size, device="cuda").bfloat16()
        y = F.conv2d(x, w, None, 1, size // 2)
        expected = native(x.double(), w.double(), None, 1, size // 2)
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.isinf(), expected.isinf())


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["large", "large_1x1", "strided"])
def test_same_bits_every_time(case):
    x, weight, bias, *rest = make(case, torch.bfloat16)
    dy = torch.randn_like(F.conv2d(x, weight, bias, *rest))

    def run():
        y = F.conv2d(x, weight, bias, *rest)
        return [y, *torch.autograd.grad(y, (x, weight, bias), dy)]

    first = run()
    for _ in range(20):
        for a, e in zip(run(), first, strict=True):
            assert torch.equal(a, e)


@pytest.mark.gpu
def test_passes():
    """Launches that change a layout: both gradients share the copy of dy."""

    def passes(case):
        x, weight, _, *rest = make(case, torch.bfloat16, bias=False)
        y = F.conv2d(x, weight, None, *rest)
        dy = torch.randn_like(y)
        forward = launches(lambda: F.conv2d(x, weight, None, *rest))
        backward = launches(lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True))
        return [
            sum(way in name for name in names)
            for names in (forward, backward)
            for way in ("planes_to_rows", "rows_to_planes")
        ]

    assert passes("vectors_of_8") == [2, 0, 3, 1]  # x, w; dy, w, x, and dw back
    assert passes("strided") == [2, 0, 3, 2]  # dx back too
    assert passes("1x1_odd_planes") == [1, 0, 2, 0]
    assert passes("sampled_1x1") == [1, 0, 2, 1]
    assert passes("1x1") == [0, 0, 0, 0]
