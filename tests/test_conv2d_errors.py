"""conv2d's rounding errors in float32 against float64, with native's error as the yardstick.

Small images with many channels, whose sums a BLAS may add in one chain; the grouped convolutions of
ResNeXt-50; and which precision a setting allows.
"""

import pytest
import torch

import warpwright
import warpwright.functional as F
from warpwright.testing import compare_with_native

native = torch.nn.functional.conv2d
FORMATS = [torch.contiguous_format, torch.channels_last]
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=["nchw", "nhwc"])


def operands(device, shape, fmt=torch.contiguous_format):
    """Input, weight (of about unit gain) and bias; ``shape``: n, c, image, k, taps, groups."""
    torch.manual_seed(0)
    n, c, image, k, taps, groups = shape
    depth = c // groups * taps * taps
    tensors = (
        torch.randn(n, c, image, image).to(memory_format=fmt),
        torch.randn(k, c // groups, taps, taps).div(depth**0.5).to(memory_format=fmt),
        torch.randn(k),
    )
    return [t.to(device).requires_grad_() for t in tensors]


@pytest.fixture
def ieee(device):
    """cuDNN, if there is one, without TF32."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


# n, c, image, k, taps, stride, padding: what is left of 32 x 32 pixels in the last layers of a
# ResNet, and images whose size is no multiple of a vector.
SMALL = {
    "3x3": (2, 512, 3, 512, 3, 1, 1),
    "3x3 one image": (1, 512, 3, 512, 3, 1, 1),
    "2x2": (2, 512, 2, 512, 3, 1, 1),
    "1x1": (2, 512, 1, 512, 3, 1, 1),
    "1x1 many images": (33, 256, 1, 256, 3, 1, 1),
    "4x4": (4, 512, 4, 512, 3, 1, 1),
    "5x5 odd channels": (2, 515, 5, 509, 3, 1, 1),
    "3x3 to 2x2": (2, 256, 3, 512, 3, 2, 1),
    "2x2 to 1x1, one tap": (3, 256, 2, 512, 1, 2, 0),
    "1x1, one tap": (4, 2048, 1, 512, 1, 1, 0),
    "one output channel": (4, 512, 3, 1, 3, 1, 1),
    "one output pixel": (2, 256, 7, 10, 7, 1, 0),
}


@each_format
@pytest.mark.parametrize("case", SMALL)
def test_small_images(device, ieee, fmt, case):
    n, c, image, k, taps, stride, padding = SMALL[case]
    tensors = operands(device, (n, c, image, k, taps, 1), fmt)
    compare_with_native(F.conv2d, native, (*tensors, stride, padding))


@pytest.mark.parametrize("case", ["3x3", "1x1", "2x2 to 1x1, one tap", "1x1, one tap"])
@each_format
def test_small_images_without_onednn(fmt, case):
    """Ours in all directions: the products of a thin matrix are added in short runs."""
    n, c, image, k, taps, stride, padding = SMALL[case]
    tensors = operands("cpu", (n, c, image, k, taps, 1), fmt)
    exact = [t.detach().double().requires_grad_() for t in tensors]

    def run(function, inputs, cotangent):
        output = function(*inputs, stride, padding)
        return [output, *torch.autograd.grad(output, inputs, cotangent)]

    cotangent = torch.randn_like(native(*tensors, stride, padding))
    expected = run(native, exact, cotangent.double())
    with torch.backends.mkldnn.flags(enabled=False):
        ours = run(F.conv2d, tensors, cotangent)
    # A chain of so many products: its rounding errors are a random walk of as many steps of half an
    # ulp, of partial sums that grow as the square root. Runs of 64 are within the bound, one chain
    # of 512 is not.
    for result, reference in zip(ours[:2], expected[:2], strict=True):
        error = (result.double() - reference).pow(2).mean().sqrt()
        assert error <= 3e-7 * reference.pow(2).mean().sqrt()


# The 3 x 3 convolutions of ResNeXt-50 (32 x 4d) in its four stages: channels, image, stride.
RESNEXT = [
    (128, 56, 1),
    (256, 56, 2),
    (256, 28, 1),
    (512, 28, 2),
    (512, 14, 1),
    (1024, 14, 2),
    (1024, 7, 1),
]


@each_format
@pytest.mark.parametrize(("channels", "image", "stride"), RESNEXT)
def test_resnext_grouped(device, ieee, fmt, channels, image, stride):
    """Each gradient by itself: the errors of the other may not hide it."""
    batch = 16 if device == "cuda" else 1
    shape = (batch, channels, image, channels, 3, 32)
    x, weight, _ = operands(device, shape, fmt)
    compare_with_native(
        lambda x: F.conv2d(x, weight.detach(), None, stride, 1, 1, 32),
        lambda x: native(x, weight.detach().to(x.dtype), None, stride, 1, 1, 32),
        (x,),
    )
    compare_with_native(
        lambda w: F.conv2d(x.detach(), w, None, stride, 1, 1, 32),
        lambda w: native(x.detach().to(w.dtype), w, None, stride, 1, 1, 32),
        (weight,),
    )


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("batch", [64, 256])
def test_resnext_weight_gradient_of_many_pixels(fmt, batch):
    """A sum over up to 800,000 pixels, which a kernel must not add in one chain."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        x, weight, _ = operands("cuda", (batch, 128, 56, 128, 3, 32), fmt)
        compare_with_native(
            lambda w: F.conv2d(x.detach(), w, None, 1, 1, 1, 32),
            lambda w: native(x.detach().to(w.dtype), w, None, 1, 1, 1, 32),
            (weight,),
        )


# ---- settings ----


@pytest.mark.gpu
@each_format
@pytest.mark.parametrize("groups", [1, 4])
def test_tf32_is_cudnns(fmt, groups):
    """Without cuDNN native computes IEEE float32, whatever torch.backends.cudnn.allow_tf32 says."""
    x, weight, bias = operands("cuda", (4, 64, 16, 64, 3, groups), fmt)
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        compare_with_native(
            lambda *a: F.conv2d(*a, 1, 1, 1, groups),
            # Native without cuDNN loses the memory format of its operands.
            lambda *a: native(*a, 1, 1, 1, groups).contiguous(memory_format=fmt),
            (x, weight, bias),
        )


def test_explain_knows_that_tf32_is_cudnns():
    x, weight, _ = operands("cpu", (2, 64, 8, 64, 3, 1))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        assert "TF32" in warpwright.explain("conv2d", x, weight, device="cuda")
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        text = warpwright.explain("conv2d", x, weight, device="cuda")
    assert "TF32" not in text
    assert "fp32 FMA" in text


def test_explain_on_the_cpu():
    def paths(shape, stride=1, padding=1, fmt=torch.contiguous_format, enabled=True):
        x, weight, _ = operands("cpu", shape, fmt)
        with torch.backends.mkldnn.flags(enabled=enabled):
            text = warpwright.explain("conv2d", x, weight, None, stride, padding, 1, shape[-1])
        return [line.split(maxsplit=1)[1] for line in text.splitlines()[1:]]

    onednn = torch.backends.mkldnn.is_available()
    large = (4, 64, 28, 64, 3, 1)
    assert all(text.startswith("native's kernel") == onednn for text in paths(large))
    assert all("(oneDNN is off)" in text for text in paths(large, enabled=False))
    assert all("GEMM" in text for text in paths((1, 4, 4, 4, 3, 1)))  # too small to be worth it
    assert "at most 32 taps" in paths((64, 1, 28, 32, 3, 1))[0]
    depthwise = paths((1, 32, 112, 32, 3, 32), fmt=torch.channels_last)
    assert all(text.startswith("native's kernel") == onednn for text in depthwise)
    assert all("one input channel" in text for text in paths((1, 3, 64, 3, 3, 3)))
    # oneDNN pads all sides alike.
    assert "GEMM" in paths((4, 64, 28, 64, 2, 1), padding="same")[0]


@each_format
@pytest.mark.parametrize(
    ("shape", "stride", "padding"),
    [
        ((4, 64, 28, 64, 3, 1), 1, 1),
        ((4, 64, 28, 64, 1, 1), 2, 0),
        ((2, 32, 28, 32, 3, 32), 1, 1),
        ((2, 32, 28, 32, 3, 4), 2, 1),
        ((2, 8, 64, 1, 3, 1), 1, 1),
        ((1, 8, 64, 8, 3, 1), 1, 1),
        ((4, 64, 3, 64, 3, 1), 1, 0),
        ((4, 64, 28, 64, 2, 1), 1, "same"),
    ],
    ids=str,
)
def test_onednns_outputs_are_laid_out_as_ours(fmt, shape, stride, padding):
    """The same strides with oneDNN, without it, and as the Meta function promises."""
    x, weight, bias = operands("cpu", shape, fmt)
    args = (stride, padding, 1, shape[-1])

    def run():
        y = F.conv2d(x, weight, bias, *args)
        return [y, *torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))]

    with torch.backends.mkldnn.flags(enabled=False):
        expected = run()
    meta = F.conv2d(x.to("meta"), weight.to("meta"), bias.to("meta"), *args)
    results = run()
    assert results[0].stride() == meta.stride()
    for result, reference in zip(results, expected, strict=True):
        assert result.stride() == reference.stride()
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [2**31, 2**31 - 1, 2**20])
def test_output_beyond_memory(padding):
    """More pixels than an integer holds: an error, before anything counts them."""
    x, weight = torch.randn(2, 3, 6, 5), torch.randn(4, 3, 3, 2)
    with pytest.raises(RuntimeError, match=r"overflow|allocate|memory|at most"):
        F.conv2d(x, weight, None, 1, padding)
