"""conv2d's walks down the images (`cuda/row_walk/`): how they cut the images, and all their edges."""

import pytest
import torch
from test_conv2d_sm90 import CHANNELS_LAST, choices

import warpwright.functional as F

native = torch.nn.functional.conv2d
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}
DIRECTIONS = ("forward", "grad_input", "grad_weight")
WALKS = "walks down the images"

# images, input channels, height, width, filters, padding. Channels and filters are those of TF32,
# whose vectors have half as many elements as those of 16 bits. Few outputs would take other kernels,
# so the batches are large.
CASES = {
    "one strip of images": (9, 32, 14, 14, 64, 1),
    "shared halves": (1056, 32, 14, 14, 64, 1),
    "separate halves": (40, 32, 61, 64, 64, 1),
    "halves of 7": (2000, 32, 7, 7, 64, 1),
    "parts of a row": (16, 32, 66, 256, 64, 1),
    "parts that do not divide a row": (16, 32, 66, 255, 64, 1),
    "walks of some rows": (16, 32, 224, 56, 64, 1),
    "one row": (2000, 32, 1, 28, 64, 1),
    "one column": (4000, 32, 28, 1, 64, 1),
    "without padding": (528, 32, 30, 30, 64, 0),
    "padding 2": (528, 32, 26, 27, 64, 2),
    "padding 2 and an image of 1": (3000, 32, 1, 1, 64, 2),
    "few channels": (264, 16, 28, 28, 24, 1),
    "two chunks": (264, 64, 28, 28, 32, 1),
    "tails of channels": (264, 24, 28, 28, 72, 1),
    "two groups of filters": (264, 32, 28, 28, 128, 1),
}


@pytest.fixture(autouse=True)
def allowed():
    torch.backends.cudnn.allow_tf32 = True  # off again before the next test: conftest.py


def of_type(case, dtype):
    n, c, h, w, k, padding = CASES[case]
    return (n, c, h, w, k, padding) if dtype == torch.float32 else (n, 2 * c, h, w, k, padding)


def kernels(case, dtype):
    n, c, h, w, k, padding = of_type(case, dtype) if case in CASES else case
    return choices((n, c, h, w, k, 3, 3, 1, padding, 1, 1), dtype)


def integers(*shape, device="cuda"):
    return torch.randint(-2, 3, shape, device=device).double().to(memory_format=CHANNELS_LAST)


def make(case, dtype, device="cuda"):
    """Small integers: x, weight, bias, and the output's gradient."""
    n, c, h, w, k, padding = of_type(case, dtype)
    x, weight = integers(n, c, h, w, device=device), integers(k, c, 3, 3, device=device)
    bias = torch.randint(-2, 3, (k,), device=device).double()
    size = (n, k, h + 2 * padding - 2, w + 2 * padding - 2)
    return x, weight, bias, integers(*size, device=device)


def run(function, padding, x, weight, bias, dy):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves, padding=padding)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def weight_gradient(x, dy, padding):
    """From pairs of pixels alone: padding is not multiplied."""
    height, width = dy.shape[2:]
    grad = x.new_zeros(dy.shape[1], x.shape[1], 3, 3)
    for r in range(3):
        for s in range(3):
            top, left = max(padding - r, 0), max(padding - s, 0)
            rows = slice(top, min(height, x.shape[2] + padding - r))
            cols = slice(left, min(width, x.shape[3] + padding - s))
            pixels = x[
                :,
                :,
                top + r - padding : rows.stop + r - padding,
                left + s - padding : cols.stop + s - padding,
            ]
            grad[:, :, r, s] = torch.einsum("nkhw,nchw->kc", dy[:, :, rows, cols], pixels)
    return grad


# ---- which calls ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "tf32"])
def test_large_images_of_few_channels(dtype):
    channels = 64 if dtype == torch.bfloat16 else 32
    for direction, kernel in kernels((256, channels, 56, 56, 64, 1), dtype).items():
        assert WALKS in kernel, (direction, kernel)


def test_cuts():
    def cut(case, direction="grad_input"):
        return kernels(case, torch.float32)[direction].split("side by side")[0].split(": ")[1]

    assert cut("shared halves") == "8 rows of 14 outputs "
    assert cut("separate halves") == "2 rows of 64 outputs "
    assert cut("halves of 7") == "16 rows of 7 outputs "
    assert cut("parts of a row") == "1 parts of a row of 128 outputs "
    rows = kernels("walks of some rows", torch.float32)["grad_input"].split(" rows per walk")[0]
    assert int(rows.split()[-1]) < 224


def test_others_keep_their_kernels():
    for case in (
        (64, 64, 56, 56, 64, 3, 3, 2, 1, 1, 1),  # a stride
        (64, 64, 56, 56, 64, 3, 3, 1, 2, 2, 1),  # dilation
        (64, 64, 56, 56, 64, 5, 5, 1, 2, 1, 1),
        (64, 64, 56, 56, 64, 3, 3, 1, 3, 1, 1),  # more padding than taps
        (64, 128, 56, 56, 128, 3, 3, 1, 1, 1, 2),  # groups
        (64, 256, 56, 56, 256, 3, 3, 1, 1, 1, 1),  # weights beyond shared memory
    ):
        assert not any(WALKS in kernel for kernel in choices(case).values()), case
    nchw = choices((64, 64, 56, 56, 64, 3, 3, 1, 1, 1, 1), memory_format=torch.contiguous_format)
    assert not any(WALKS in kernel for kernel in nchw.values())


def test_many_short_segments_are_not_walked_for_the_weight():
    """A row of prime length has no equal parts, and narrow images are many loads per step."""
    for width in (1, 5, 67, 127):
        kernel = kernels((256, 64, 64, width, 64, 1), torch.bfloat16)["grad_weight"]
        assert WALKS not in kernel, width


def test_the_cases_are_walked():
    walked = [
        (case, direction, dtype)
        for case in CASES
        for dtype in (torch.bfloat16, torch.float32)
        for direction, kernel in kernels(case, dtype).items()
        if WALKS in kernel
    ]
    small = {"one strip of images", "padding 2 and an image of 1"}
    assert {case for case, _, _ in walked} >= set(CASES) - small
    for direction in DIRECTIONS:
        for dtype in (torch.bfloat16, torch.float32):
            assert sum(found[1:] == (direction, dtype) for found in walked) >= 5


# ---- values ----


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_integers_are_exact(case, dtype):
    x, weight, bias, dy = make(case, dtype)
    padding = CASES[case][-1]
    ours = run(F.conv2d, padding, *(t.to(dtype) for t in (x, weight, bias, dy)))
    for a, e in zip(ours, run(native, padding, x, weight, bias, dy), strict=True):
        assert torch.equal(a, e.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("case", ["shared halves", "separate halves", "without padding"])
def test_infinities_stay_where_they_belong(case, dtype):
    """Pixels next to another image or another walk are no part of a window."""
    x, weight, bias, dy = make(case, dtype)
    padding = CASES[case][-1]
    weight = weight.abs() + 1  # no infinity meets a zero
    dy = dy.abs() + 1
    n, c, h, w = x.shape
    for image, channel, row, col in (
        (0, 0, 0, 0),
        (n // 2, 3, h - 1, w - 1),
        (n - 1, c - 1, h // 2, 0),
    ):
        x[image, channel, row, col] = float("inf")
    ours = run(F.conv2d, padding, *(t.to(dtype) for t in (x, weight, bias, dy)))
    finite = x.nan_to_num(posinf=0)
    y = native(finite, weight, bias, padding=padding)
    reached = native((x == float("inf")).double(), torch.ones_like(weight), padding=padding) > 0
    assert torch.equal(ours[0].double(), y.to(dtype).double().masked_fill(reached, float("inf")))
    assert torch.equal(ours[2].double(), weight_gradient(x, dy, padding).to(dtype).double())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
def test_same_bits_every_time(dtype):
    x, weight, bias, dy = (torch.randn_like(t).to(dtype) for t in make("shared halves", dtype))
    first = run(F.conv2d, 1, x, weight, bias, dy)
    for _ in range(50):
        for a, e in zip(run(F.conv2d, 1, x, weight, bias, dy), first, strict=True):
            assert torch.equal(a, e)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("shape", [(1056, 64, 14, 14, 64), (8, 256, 14, 14, 256)], ids=["walk", ""])
def test_shortcut(dtype, shape):
    """dgrad that adds the shortcut's gradient. Neither the walks nor TF32 have such a kernel."""
    n, c, h, w, k = shape
    x, weight, dy, addend = (
        integers(*size).to(dtype)
        for size in ((n, c, h, w), (k, c, 3, 3), (n, k, h, w), (n, c, h, w))
    )
    window = ([1, 1], [1, 1], [1, 1], 1, [True, False, False])
    dx = torch.ops.warpwright.conv2d_backward(dy, x, weight, *window, addend)[0]
    exact = torch.nn.grad.conv2d_input(x.shape, weight.double(), dy.double(), padding=1)
    assert torch.equal(dx, (exact + addend.double()).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("channels", [24, 64])
def test_statistics(dtype, channels):
    """A batch norm's statistics, taken while the outputs are stored."""
    x = torch.randn(40, 64, 112, 112, device="cuda").to(dtype).to(memory_format=CHANNELS_LAST)
    weight = (
        torch.randn(channels, 64, 3, 3, device="cuda").to(dtype).to(memory_format=CHANNELS_LAST)
    )
    bias = 3 * torch.randn(channels, device="cuda").to(dtype)
    assert WALKS in kernels((40, 64, 112, 112, channels, 1), dtype)["forward"]
    mean, var = (torch.zeros(channels, device="cuda") for _ in range(2))
    y = F.conv2d_batch_norm(
        x, weight, bias, 1, 1, running_mean=mean, running_var=var, momentum=1.0, training=True
    )
    convolved = F.conv2d(x, weight, bias, padding=1).double()
    var_exact, mean_exact = torch.var_mean(convolved, dim=(0, 2, 3))
    torch.testing.assert_close(
        mean.double(), mean_exact, rtol=0, atol=1e-5 * convolved.abs().max().item()
    )
    torch.testing.assert_close(var.double(), var_exact, rtol=1e-5, atol=0)
    exact = torch.nn.functional.batch_norm(convolved, None, None, training=True)
    torch.testing.assert_close(y.double(), exact, rtol=1e-2, atol=1e-2)
