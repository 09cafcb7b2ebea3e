"""Products with a short k: 1x1 convolutions of few channels, and linear (csrc/gemm/short_k_sm90.cuh)."""

import pytest
import torch
from conv_norms import CHANNELS_LAST, plan_line
from launches import launches

import warpwright.functional as F
from warpwright import explain
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional
HALVES = [torch.bfloat16, torch.float16]
KERNEL = "short k"

# images, c, k, side: every k and every number of columns per warp, whole and with columns beyond
# the output; rows that are no multiple of 16. Batch norm keeps none of them on chip.
SHAPES = {
    "8_to_8": (120, 8, 8, 161),
    "16_to_16": (120, 16, 16, 113),
    "24_to_24": (120, 24, 24, 93),
    "32_to_40": (120, 32, 40, 71),
    "40_to_64": (110, 40, 64, 57),
    "24_to_72": (90, 24, 72, 53),
    "16_to_96": (70, 16, 96, 53),
    "24_to_144": (60, 24, 144, 49),
    "32_to_192": (50, 32, 192, 43),
    "8_to_200": (50, 8, 200, 43),
    "40_to_240": (41, 40, 240, 43),
    "32_to_256": (43, 32, 256, 41),
}
every_shape = pytest.mark.parametrize("name", SHAPES)
every_type = pytest.mark.parametrize("dtype", HALVES)
# The same extents with fewer rows.
SMALL = {name: (3, c, k, 77) for name, (_, c, k, _) in SHAPES.items()}


def conv_lines(n, c, k, side, dtype=torch.bfloat16, memory_format=CHANNELS_LAST, device="h200"):
    x = torch.empty(n, c, side, side, dtype=dtype, device="meta").to(memory_format=memory_format)
    w = torch.empty(k, c, 1, 1, dtype=dtype, device="meta").to(memory_format=memory_format)
    text = explain("conv2d", x, w, device=device)
    return dict(line.split(maxsplit=1) for line in text.splitlines()[1:])


def test_which_convolutions_take_it():
    for shape in (*SHAPES.values(), *SMALL.values()):
        assert KERNEL in conv_lines(*shape)["forward"], shape
    lines = conv_lines(256, 96, 24, 56)  # dx has the filters as k
    assert KERNEL in lines["grad_input"]
    assert KERNEL not in lines["forward"]
    assert KERNEL not in lines["grad_weight"]
    for shape in ((256, 48, 96, 56), (256, 20, 96, 56), (256, 16, 100, 56), (256, 16, 264, 56)):
        assert KERNEL not in conv_lines(*shape)["forward"], shape
    few_rows = (8, 16, 96, 28)
    assert KERNEL not in conv_lines(*few_rows)["forward"]
    assert KERNEL not in conv_lines(256, 16, 96, 56, torch.float32)["forward"]


def test_which_statistics_it_takes():
    for shape in SHAPES.values():
        assert "as it stores rows" in plan_line("statistics", *shape), shape


@pytest.mark.parametrize(
    ("n", "columns"),
    [(8, 16), (24, 24), (40, 48), (72, 24), (96, 48), (144, 48), (192, 48), (200, 32), (256, 32)],
)
def test_columns_of_a_warp(n, columns):
    assert f"{columns} columns per warp" in conv_lines(256, 16, n, 56)["forward"]


def tensors(shape, dtype, bias=False, integers=False, mean=0.0):
    n, c, k, side = shape
    torch.manual_seed(7)

    def random(*sizes):
        if integers:
            return torch.randint(-3, 4, sizes, device="cuda").to(dtype)
        return torch.randn(sizes, device="cuda").to(dtype)

    x = (random(n, c, side, side) + mean).to(memory_format=CHANNELS_LAST)
    w = random(k, c, 1, 1).to(memory_format=CHANNELS_LAST)
    if mean != 0:
        w = w.abs()
    made = [x, w, random(k)] if bias else [x, w]
    return [t.requires_grad_() for t in made]


def short_kernels(function):
    return sum("short_k_kernel" in name for name in launches(function))


@pytest.mark.gpu
@every_shape
@every_type
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients(name, dtype, bias):
    inputs = tensors(SMALL[name], dtype, bias)
    assert short_kernels(lambda: F.conv2d(*inputs)) == 1
    compare_with_native(F.conv2d, native.conv2d, inputs)


@pytest.mark.gpu
@every_shape
@every_type
def test_input_gradients_of_few_filters(name, dtype):
    """The weight's rows are then along k."""
    n, c, k, side = SMALL[name]
    x, w = tensors((n, k, c, side), dtype)
    y = F.conv2d(x, w)
    dy = torch.randn_like(y)
    gradient = lambda: torch.autograd.grad(y, x, dy, retain_graph=True)  # noqa: E731
    assert short_kernels(gradient) == 1
    compare_with_native(F.conv2d, native.conv2d, [x, w])


@pytest.mark.gpu
@every_shape
def test_integers_are_exact(name, monkeypatch):
    inputs = tensors(SMALL[name], torch.bfloat16, bias=True, integers=True)
    found = F.conv2d(*inputs)
    exact = native.conv2d(*(t.detach().double() for t in inputs))
    assert_same(found, exact.to(found.dtype))
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    assert short_kernels(lambda: F.conv2d(*inputs)) == 0
    assert_same(F.conv2d(*inputs), found)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [16896, 16897, 16911, 100_003])
def test_linear_with_pitches_and_tails(rows):
    """Rows of a wider matrix, whose other elements are NaN: the kernel reads none of them."""
    wide = torch.full((rows + 1, 40), torch.nan, device="cuda", dtype=torch.bfloat16)
    x = wide[:rows, 8:32]
    x.copy_(torch.randn(rows, 24, device="cuda"))
    w = torch.randn(104, 24, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(104, device="cuda", dtype=torch.bfloat16)
    assert short_kernels(lambda: F.linear(x, w, bias)) == 1
    for weight in (w, w.T.contiguous().T):  # both majors
        compare_with_native(F.linear, native.linear, [x, weight, bias])
        compare_with_native(F.linear, native.linear, [x, weight])


@pytest.mark.gpu
def test_no_row_reaches_another():
    """NaN and infinities stay in their rows, to the last one."""
    x, w = (t.detach() for t in tensors(SMALL["24_to_144"], torch.bfloat16))
    expected = F.conv2d(x, w)
    rows = x.permute(0, 2, 3, 1).reshape(-1, 24)
    bad = [0, 7, 15, 16, 4000, len(rows) - 9, len(rows) - 1]
    rows[bad[::2]], rows[bad[1::2]] = torch.nan, torch.inf
    found = F.conv2d(x, w).permute(0, 2, 3, 1).reshape(-1, 144)
    assert not found[bad].isfinite().all(1).any()
    keep = torch.ones(len(rows), dtype=torch.bool, device="cuda")
    keep[bad] = False
    assert torch.equal(found[keep], expected.permute(0, 2, 3, 1).reshape(-1, 144)[keep])


def normalised(x, w, bias=None):
    """Output of the fused op, and the statistics that it took: mean and unbiased variance."""
    k = w.shape[0]
    mean, var = torch.zeros(k, device="cuda"), torch.ones(k, device="cuda")
    y = F.conv2d_batch_norm(
        x, w, bias, running_mean=mean, running_var=var, training=True, momentum=1.0
    )
    return y, mean, var


@pytest.mark.gpu
@every_shape
@every_type
@pytest.mark.parametrize("mean", [0.0, 8.0])
def test_statistics(name, dtype, mean):
    """Those of the rounded output, also with a mean far from zero."""
    x, w = (t.detach() for t in tensors(SHAPES[name], dtype, mean=mean))
    assert short_kernels(lambda: normalised(x, w)) == 1
    y, found_mean, found_var = normalised(x, w)
    rows = F.conv2d(x, w).permute(0, 2, 3, 1).reshape(-1, w.shape[0]).double()
    var, exact_mean = torch.var_mean(rows, 0)
    deviation = var.sqrt()
    assert ((found_mean - exact_mean).abs() <= 2.0**-20 * (deviation + exact_mean.abs())).all()
    assert ((found_var - var).abs() <= 2.0**-18 * var).all()
    expected = (rows - exact_mean) / (var * (1 - 1 / len(rows)) + 1e-5).sqrt()
    found = y.permute(0, 2, 3, 1).reshape(expected.shape).double()
    assert ((found - expected).abs() <= 2.0**-7 * (1 + expected.abs())).all()


@pytest.mark.gpu
def test_statistics_with_a_bias():
    """The kernel takes no statistics then; another one does."""
    x, w, bias = (t.detach() for t in tensors(SHAPES["16_to_96"], torch.bfloat16, bias=True))
    assert short_kernels(lambda: normalised(x, w, bias)) == 0
    _, mean, var = normalised(x, w, bias)
    rows = F.conv2d(x, w, bias).permute(0, 2, 3, 1).reshape(-1, 96).double()
    exact_var, exact_mean = torch.var_mean(rows, 0)
    assert ((mean - exact_mean).abs() <= 2.0**-20 * (1 + exact_mean.abs())).all()
    assert ((var - exact_var).abs() <= 2.0**-18 * exact_var).all()


@pytest.mark.gpu
@every_shape
def test_repeats_have_the_same_bits(name):
    x, w = (t.detach() for t in tensors(SHAPES[name], torch.bfloat16))
    first = normalised(x, w)
    for _ in range(5):
        for got, want in zip(normalised(x, w), first, strict=True):
            assert torch.equal(got, want)
