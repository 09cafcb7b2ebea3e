"""conv2d of windows that tile the image: the patches of few channels as rows of a matrix product."""

import pytest
import torch

import warpwright.functional as F
from warpwright import explain
from warpwright.testing import compare_with_native

native = torch.nn.functional.conv2d
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
HALVES = [torch.bfloat16, torch.float16]

# n, c, h, w, k, window; what is left of the image is ignored, as by any convolution.
CASES = {
    "vit_b16": (4, 3, 224, 224, 768, (16, 16)),
    "runs_of_14": (2, 4, 112, 98, 384, (14, 14)),  # 4-byte accesses in NCHW
    "rest": (3, 3, 70, 75, 136, (16, 16)),
    "one_row": (5, 3, 16, 160, 64, (16, 16)),
    "one_patch": (40, 3, 16, 16, 256, (16, 16)),
    "not_square": (3, 5, 64, 96, 72, (8, 32)),
    "odd_runs": (2, 8 + 1, 33, 36, 64, (8, 9)),
    "one_channel": (4, 1, 128, 256, 192, (32, 16)),
}


def make(case, device, dtype, memory_format):
    n, c, h, w, k, window = CASES[case]
    x = torch.randn(n, c, h, w, device=device).to(dtype).to(memory_format=memory_format)
    weight = torch.randn(k, c, *window, device=device).to(dtype).to(memory_format=memory_format)
    bias = torch.randn(k, device=device).to(dtype)
    return [*(t.requires_grad_() for t in (x, weight, bias)), window]


def choices(n, c, h, w, k, window, stride=None, dtype=torch.bfloat16, format="nchw", **options):
    """The kernel of each direction on an H200."""
    x = torch.empty(n, c, h, w, dtype=dtype, device="meta").to(memory_format=FORMATS[format])
    weight = torch.empty(k, c, *window, dtype=dtype, device="meta")
    weight = weight.to(memory_format=FORMATS[format])
    text = explain("conv2d", x, weight, None, stride or window, **options, device="h200")
    return dict(line.split(maxsplit=1) for line in text.splitlines()[1:])


VIT = (128, 3, 224, 224, 768, (16, 16))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", HALVES)
def test_choice(format, dtype):
    found = choices(*VIT, dtype=dtype, format=format)
    copied = "the patches of x as rows" + ("; NHWC copies of y" if format == "nchw" else "")
    for kernel in found.values():
        assert "matrix product: sm_90a 16-bit wgmma" in kernel
        assert copied in kernel


def test_what_patches_are():
    n, c, h, w, k, window = VIT
    others = [
        choices(*VIT, dtype=torch.float32),
        choices(*VIT, stride=(16, 8)),  # overlapping windows
        choices(*VIT, padding=1),
        choices(*VIT, dilation=2),
        choices(n, 64, h, w, k, window, format="nhwc"),  # whole vectors of channels: TMA's im2col
        choices(n, c, h, w, k, (5, 5)),  # rows of 75 elements
    ]
    for found in others:
        assert not any("patches" in kernel for kernel in found.values())


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", CASES)
def test_values(case, dtype, format):
    x, weight, bias, window = make(case, "cuda", dtype, FORMATS[format])
    compare_with_native(F.conv2d, native, (x, weight, bias), {"stride": window})
    compare_with_native(F.conv2d, native, (x.detach(), weight, None), {"stride": window})


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_misaligned_image(format):
    """Accesses are as wide as the address allows."""
    n, c, h, w, _, window = CASES["vit_b16"]
    _, weight, bias, _ = make("vit_b16", "cuda", torch.bfloat16, FORMATS[format])
    for offset in (1, 2, 4):
        base = torch.randn(n * c * h * w + offset, device="cuda").bfloat16()[offset:]
        x = base.view(n, c, h, w) if format == "nchw" else base.view(n, h, w, c).permute(0, 3, 1, 2)
        compare_with_native(F.conv2d, native, (x, weight, bias), {"stride": window})


@pytest.mark.gpu
def test_repeats():
    x, weight, bias, window = make("vit_b16", "cuda", torch.bfloat16, torch.contiguous_format)

    def run():
        y = F.conv2d(x, weight, bias, window)
        return [y, *torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
