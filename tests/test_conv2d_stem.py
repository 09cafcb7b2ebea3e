"""conv2d of an image network's first convolution by wgmma: few channels, long rows, NHWC."""

import pytest
import torch

import warpwright.functional as F
from warpwright import explain
from warpwright.testing import compare_with_native

native = torch.nn.functional.conv2d
HALVES = [torch.bfloat16, torch.float16]
BOTH = ("forward", "grad_weight")
FORWARD = ("forward",)

# n, c, h, w, k, r, s, stride, padding, dilation; the directions that take the kernels.
CASES = {
    "resnet": ((3, 3, 224, 224, 64, 7, 7, 2, 3, 1), BOTH),
    "efficientnet": ((2, 3, 224, 224, 32, 3, 3, 2, 1, 1), BOTH),
    "mobilenet": ((2, 3, 160, 160, 16, 3, 3, 2, (1, 2), 1), FORWARD),
    "unet": ((2, 3, 96, 96, 64, 3, 3, 1, 1, 1), BOTH),
    "vgg": ((1, 3, 224, 224, 64, 3, 3, 1, 1, 1), BOTH),
    "two_strips": ((2, 3, 19, 320, 72, 5, 5, 2, 2, 1), BOTH),
    "ragged_strips": ((2, 1, 23, 403, 200, 7, 7, 2, 3, 1), FORWARD),
    "two_channels": ((2, 2, 40, 130, 8, 4, 3, (1, 2), (1, 0), 1), BOTH),
    "four_channels": ((2, 4, 40, 128, 64, 3, 4, 1, (1, 2), 1), FORWARD),
    "one_row": ((3, 3, 3, 257, 64, 3, 3, 2, 0, 1), BOTH),
    "dilated_rows": ((2, 3, 41, 128, 64, 5, 3, (3, 1), (2, 1), (3, 1)), BOTH),
    "wide_padding": ((2, 3, 12, 82, 64, 7, 7, 2, (6, 26), 1), BOTH),
    "many_images": ((150, 1, 5, 64, 16, 1, 3, 1, (0, 1), 1), BOTH),
}


def make(case, device, dtype, bias=True):
    n, c, h, w, k, r, s, *rest = CASES[case][0]
    x = torch.randn(n, c, h, w, device=device).to(dtype)
    weight = torch.randn(k, c, r, s, device=device).to(dtype)
    tensors = [t.to(memory_format=torch.channels_last) for t in (x, weight)]
    tensors.append(torch.randn(k, device=device).to(dtype) if bias else None)
    return [t if t is None else t.requires_grad_() for t in tensors] + rest


def choices(case, dtype=torch.bfloat16, format=torch.channels_last):
    """The directions whose kernel on an H200 is the one under test."""
    n, c, h, w, k, r, s, *rest = case
    x = torch.empty(n, c, h, w, dtype=dtype, device="meta").to(memory_format=format)
    weight = torch.empty(k, c, r, s, dtype=dtype, device="meta").to(memory_format=format)
    lines = explain("conv2d", x, weight, None, *rest, device="h200").splitlines()[1:]
    found = dict(line.split(maxsplit=1) for line in lines)
    return tuple(d for d, kernel in found.items() if "sm_90a few-channel kernel" in kernel)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_choice(case, dtype):
    shape, directions = CASES[case]
    assert choices(shape, dtype) == directions


def test_what_other_kernels_take():
    shape = CASES["resnet"][0]

    def changed(**to):
        names = "n", "c", "h", "w", "k", "r", "s", "stride", "padding", "dilation"
        return tuple((dict(zip(names, shape, strict=True)) | to).values())

    assert choices(shape, torch.float32) == ()
    assert choices(shape, format=torch.contiguous_format) == ()
    assert choices(changed(c=4)) == ()  # no channel of a padded pixel is free
    assert choices(changed(k=60)) == ()
    assert choices(changed(stride=1)) == ()  # 56 elements of a row of the window
    assert choices(changed(stride=3)) == ()
    assert choices(changed(dilation=2)) == ()
    assert choices(changed(w=100)) == ()  # 50 outputs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_values(case, dtype):
    x, weight, bias, *rest = make(case, "cuda", dtype)
    compare_with_native(F.conv2d, native, (x, weight, bias, *rest))
    compare_with_native(F.conv2d, native, (x.detach(), weight, None, *rest))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["resnet", "unet", "ragged_strips"])
def test_infinite_pixels(case):
    """The products have taps of weight zero beside the window; they must not make NaN of infinity."""
    x, weight, bias, *rest = make(case, "cuda", torch.float16)
    with torch.no_grad():
        x[0, 0, 2, 9] = torch.inf
        x[-1, -1, -1, -1] = -torch.inf
        x[0, 0, 1, 40] = torch.nan
        ours = F.conv2d(x, weight, bias, *rest)
        exact = native(x.double(), weight.double(), bias.double(), *rest)
        assert torch.equal(ours.isnan(), exact.isnan())
        assert torch.equal(ours.isinf(), exact.isinf())
    y = F.conv2d(x, weight, bias, *rest)
    (of_bias,) = torch.autograd.grad(y, bias, torch.ones_like(y), retain_graph=True)
    assert of_bias.isfinite().all()
    (ours,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    wide = weight.detach().double().requires_grad_()
    z = native(x.detach().double(), wide, None, *rest)
    (exact,) = torch.autograd.grad(z, wide, torch.ones_like(z))
    assert torch.equal(ours.isfinite(), exact.isfinite())


@pytest.mark.gpu
def test_repeats():
    x, weight, bias, *rest = make("resnet", "cuda", torch.bfloat16)

    def run():
        y = F.conv2d(x, weight, bias, *rest)
        return [y, *torch.autograd.grad(y, (weight, bias), torch.ones_like(y))]

    first = run()
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
