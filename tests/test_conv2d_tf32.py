"""conv2d's sm_90a kernels in TF32: which calls take them, every tile and every way to store D."""

import itertools

import pytest
import torch
from launches import launches
from test_conv2d_nchw import CASES as NCHW_CASES
from test_conv2d_nchw import copied
from test_conv2d_sm90 import ALL, CASES, CHANNELS_LAST, IMAGE, choices

import warpwright.functional as F
from warpwright import explain

native = torch.nn.functional.conv2d
NCHW = torch.contiguous_format
FORMATS = {"nhwc": CHANNELS_LAST, "nchw": NCHW}
in_both_formats = pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
WINDOWS = "sm_90a TF32 wgmma, windows by TMA"
PLANES = "1x1 as a matrix product per image: sm_90a TF32 wgmma"
DIRECTIONS = ("forward", "grad_input", "grad_weight")

# n, c, h, w, k, r, s, stride, padding, dilation, groups; the directions that take the kernels.
# Channels need whole 16-byte vectors, those that wgrad reads whole chunks of 32.
OWN_CASES = {
    "vectors_of_4": ((2, 36, 12, 11, 44, 3, 3, 1, 1, 1, 1), IMAGE),
    "one_chunk": ((2, 32, 14, 14, 64, 3, 3, 1, 1, 1, 1), ALL),
    "three_chunks": ((3, 96, 9, 10, 100, 3, 3, 1, 1, 1, 1), ALL),
    "groups_of_32": ((3, 64, 14, 14, 128, 3, 3, 1, 1, 1, 2), ("forward", "grad_weight")),
    "phases_of_tails": ((3, 68, 15, 14, 36, 3, 3, 2, 1, 1, 1), IMAGE),
}
ALL_CASES = {
    **CASES,
    **OWN_CASES,
    # So few pixels that the estimate prefers the portable kernel for the weight.
    "stride_4x1": (CASES["stride_4x1"][0], IMAGE),
    "one_row": (CASES["one_row"][0], IMAGE),
}
# Whatever the sm_90a kernels do in planes, in sizes at their edges.
IN_PLANES = {
    **{name: case for name, case in NCHW_CASES.items() if not name.startswith(("depth", "stem"))},
    "1x1_vectors_of_4": (3, 36, 6, 10, 128, 1, 1, 1, 0, 1, 1),
    "1x1_filters": (3, 128, 6, 10, 44, 1, 1, 1, 0, 1, 1),
    "portable_in_rows": (16, 48, 28, 28, 48, 3, 3, 1, 1, 1, 1),
    "portable_in_rows_strided": (16, 48, 31, 28, 40, 3, 3, 3, 1, 1, 1),
}
# A tile of each kind, and some rounds of it.
LARGE = {
    "256x128": (64, 256, 14, 14, 256, 3, 3, 1, 1, 1, 1),
    "128x128": (64, 128, 28, 28, 128, 3, 3, 1, 1, 1, 1),
    "transposed": (16, 64, 56, 55, 64, 3, 3, 1, 1, 1, 1),
    "128x64": (64, 32, 28, 28, 40, 3, 3, 1, 1, 1, 1),
    "phases": (32, 128, 55, 57, 136, 3, 3, 2, 1, 1, 1),
    "grad_weight 128x64": (64, 64, 56, 56, 256, 1, 1, 1, 0, 1, 1),
    "grad_weight 128x128": (64, 512, 28, 28, 128, 1, 1, 1, 0, 1, 1),
    "planes": (16, 256, 28, 28, 128, 1, 1, 1, 0, 1, 1),
    "planes, grad_weight 64x128": (64, 64, 14, 14, 256, 1, 1, 1, 0, 1, 1),
    "planes, grad_weight 128x128": (16, 1024, 14, 14, 2048, 1, 1, 1, 0, 1, 1),
    "planes, 64 channels": (32, 64, 56, 56, 64, 1, 1, 1, 0, 1, 1),
}


@pytest.fixture(autouse=True)
def allowed():
    torch.backends.cudnn.allow_tf32 = True  # off again before the next test: conftest.py


def kernels(case, memory_format=CHANNELS_LAST):
    return choices(case, torch.float32, memory_format)


def make(case, device="cuda", bias=True, memory_format=CHANNELS_LAST, values=torch.randn):
    n, c, h, w, k, r, s, *rest = case
    x, weight, b = (
        values(*shape).to(device) for shape in ((n, c, h, w), (k, c // rest[-1], r, s), (k,))
    )
    leaves = [t.to(memory_format=memory_format).requires_grad_() for t in (x, weight)]
    return [*leaves, b.requires_grad_() if bias else None, *rest]


def run(function, args, cotangent=None):
    """The output and the gradients, for one cotangent of ours."""
    leaves = [t for t in args if isinstance(t, torch.Tensor)]
    y = function(*args)
    cotangent = torch.randn_like(y) if cotangent is None else cotangent.to(y.dtype)
    return [y, *torch.autograd.grad(y, leaves, cotangent)], cotangent


def exact(args, cotangent):
    double = [
        t.detach().double().contiguous().requires_grad_() if isinstance(t, torch.Tensor) else t
        for t in args
    ]
    return run(native, double, cotangent)[0]


def check(args):
    """By the bound of test_conv2d.py's test_tf32: which of native's kernels round depends on the
    shape."""
    ours, cotangent = run(F.conv2d, args)
    for a, e in zip(ours, exact(args, cotangent), strict=True):
        assert (a.double() - e).abs().max() <= 2e-3 * e.abs().max()
    return ours


# ---- which kernel ----


@pytest.mark.parametrize("case", ALL_CASES)
def test_choice(case):
    shape, directions = ALL_CASES[case]
    for direction, kernel in kernels(shape).items():
        assert (WINDOWS in kernel) == (direction in directions), kernel
        assert ("w transposed" in kernel) == (direction == "grad_input" and WINDOWS in kernel)


def test_only_if_tf32_is_allowed():
    case = CASES["3x3"][0]
    torch.backends.cudnn.allow_tf32 = False
    assert all("portable implicit GEMM, fp32 FMA" in kernel for kernel in kernels(case).values())
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        assert all("fp32 FMA" in kernel for kernel in kernels(case).values())


def test_why_not():
    def reasons(*case):
        return [kernel.rsplit("(", 1)[1].rstrip(")") for kernel in kernels(case).values()]

    limits = "stride, padding or dilation over TMA's limits"
    assert reasons(1, 64, 7, 7, 64, 3, 3, 1, 200, 1, 1) == [limits] * 3
    assert reasons(2, 64, 30, 30, 64, 3, 3, 3, 1, 1, 1)[1].startswith("the input gradient of str")
    assert reasons(2, 72, 9, 9, 64, 3, 3, 1, 1, 1, 1)[2] == "input channels are no multiple of 32"
    grouped = "channels of a group are no multiple of 32"
    assert reasons(2, 96, 14, 14, 96, 3, 3, 1, 1, 1, 6)[:2] == [grouped] * 2
    odd = "channels are not whole 16-byte vectors: element gathers"
    assert reasons(2, 66, 9, 9, 64, 3, 3, 1, 1, 1, 1)[0] == odd


def test_few_channels_and_depthwise_keep_their_kernels():
    for case in ((64, 1, 28, 28, 32, 3, 3, 1, 1, 1, 1), (8, 3, 64, 64, 64, 7, 7, 2, 3, 1, 1)):
        assert "few-channel kernel" in kernels(case)["forward"]
    depthwise = kernels((4, 96, 28, 28, 96, 3, 3, 1, 1, 1, 96))
    assert not any(WINDOWS in kernel for kernel in depthwise.values())


def test_tiles():
    """Each tile is some large case's."""

    def tiles(name, memory_format=CHANNELS_LAST):
        texts = kernels(LARGE[name], memory_format).values()
        return [text.split(", ", 2)[2 if WINDOWS in text else 1].split(", ")[0] for text in texts]

    ping_pong = "tile 128x128 ping-pong"
    for memory_format in FORMATS.values():
        assert tiles("256x128", memory_format)[:2] == ["tile 256x128"] * 2
        assert tiles("128x128", memory_format)[:2] == [ping_pong] * 2
    # In rows of channels they walk down the images: test_conv2d_row_walk.py.
    assert tiles("transposed", NCHW)[:2] == ["transposed tile 64x256 ping-pong"] * 2
    assert tiles("128x64", NCHW)[1] == "tile 128x64 ping-pong"
    assert tiles("phases")[1] == "tile 128x128 ping-pong"
    weight = {name: tiles(name)[2] for name in LARGE if not name.startswith("planes")}
    assert weight["256x128"] == "tile 128x256"
    assert tiles("transposed", NCHW)[2] == "tile 64x128 ping-pong"
    for tile in ("128x64", "128x128"):
        assert weight[f"grad_weight {tile}"] == f"tile {tile} ping-pong"
    of_planes = {name: tiles(name, NCHW) for name in LARGE if name.startswith("planes")}
    assert of_planes["planes"] == [ping_pong, ping_pong, "tile 128x64 ping-pong"]
    assert of_planes["planes, 64 channels"][:2] == ["tile 64x128 ping-pong"] * 2
    assert of_planes["planes, grad_weight 64x128"][2] == "tile 64x128 ping-pong"
    assert of_planes["planes, grad_weight 128x128"][2] == ping_pong


def test_planes():
    """Copies in NCHW, and which D the kernel stores in planes."""

    def of(*case):
        return list(kernels(case, NCHW).values())

    layer = of(64, 128, 28, 28, 128, 3, 3, 1, 1, 1, 1)
    assert [copied(kernel) for kernel in layer] == ["x, w", "y", "x, w, y"]
    assert ["stores NCHW" in kernel for kernel in layer] == [True, True, False]
    strided = of(64, 128, 56, 56, 128, 3, 3, 2, 1, 1, 1)
    assert [copied(kernel) for kernel in strided] == ["x, w", "x, y", "x, w, y"]
    one_tap = of(64, 256, 28, 28, 128, 1, 1, 1, 0, 1, 1)
    assert all(PLANES in kernel for kernel in one_tap)
    assert ["w transposed" in kernel for kernel in one_tap] == [False, True, False]
    weight = of(*IN_PLANES["portable_in_rows"])[2]
    assert weight.startswith("portable implicit GEMM")
    assert copied(weight) == "x, w, y"
    odd_planes = of(64, 512, 7, 7, 2048, 1, 1, 1, 0, 1, 1)
    assert [copied(kernel) for kernel in odd_planes] == ["x", "y", "x, y"]


def test_1x1_in_rows_is_a_matrix_product():
    x = torch.empty(64, 256, 28, 28).to(memory_format=CHANNELS_LAST)
    weight = torch.empty(512, 256, 1, 1).to(memory_format=CHANNELS_LAST)
    assert "matrix product: sm_90a TF32 wgmma" in explain("conv2d", x, weight, device="h200")


# ---- values ----


@pytest.mark.gpu
@pytest.mark.parametrize("case", ALL_CASES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@in_both_formats
def test_values(case, bias, memory_format):
    check(make(ALL_CASES[case][0], bias=bias, memory_format=memory_format))


@pytest.mark.gpu
@pytest.mark.parametrize("case", IN_PLANES)
def test_values_in_planes(case):
    check(make(IN_PLANES[case], memory_format=NCHW))


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
@in_both_formats
def test_every_tile(case, memory_format):
    check(make(LARGE[case], memory_format=memory_format))


def small_integers(*shape):
    return torch.randint(-1, 2, shape).float()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*ALL_CASES, *IN_PLANES])
@in_both_formats
def test_integers_are_exact(case, memory_format):
    """Products and sums that TF32 and its accumulators hold."""
    shape = ALL_CASES[case][0] if case in ALL_CASES else IN_PLANES[case]
    args = make(shape, memory_format=memory_format, values=small_integers)
    with torch.no_grad():
        cotangent = torch.randint_like(F.conv2d(*args), -1, 2)
    ours, _ = run(F.conv2d, args, cotangent)
    for a, e in zip(ours, exact(args, cotangent), strict=True):
        assert torch.equal(a.double(), e)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", itertools.permutations(FORMATS.values()), ids=str)
def test_gradient_in_the_other_format(formats):
    args = make((3, 64, 14, 18, 68, 3, 3, 1, 1, 1, 1), memory_format=formats[0])
    expected, cotangent = run(F.conv2d, args)
    other, _ = run(F.conv2d, args, cotangent.contiguous(memory_format=formats[1]))
    for a, e in zip(other, expected, strict=True):
        assert torch.equal(a, e)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["vectors_of_8", "single_pixels", "strided", "sampled_1x1", "1x1"])
def test_any_address(case):
    """Tensors that start 4 bytes after a multiple of 16."""
    args = make(IN_PLANES[case], memory_format=NCHW)

    def shifted(t):
        return torch.cat((t.new_zeros(1), t.detach().flatten()))[1:].view(t.shape).requires_grad_()

    check([*(shifted(t) for t in args[:3]), *args[3:]])


@pytest.mark.gpu
@in_both_formats
def test_nan_and_infinity_stay_in_their_images(memory_format):
    x = torch.randn(6, 64, 14, 14, device="cuda")
    x[2], x[4, 3, 5, 6] = float("nan"), float("inf")
    for size in (1, 3):
        w = torch.randn(64, 64, size, size, device="cuda")
        leaves = [t.to(memory_format=memory_format).requires_grad_() for t in (x, w)]
        args = [*leaves, None, 1, size // 2, 1, 1]
        ours, cotangent = run(F.conv2d, args)
        for a, e in zip(ours, exact(args, cotangent), strict=True):
            assert torch.equal(a.isnan(), e.isnan())
            assert torch.equal(a.isinf(), e.isinf())


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
@in_both_formats
def test_same_bits_every_time(case, memory_format):
    args = make(LARGE[case], memory_format=memory_format)
    first, cotangent = run(F.conv2d, args)
    for _ in range(20):
        for a, e in zip(run(F.conv2d, args, cotangent)[0], first, strict=True):
            assert torch.equal(a, e)


@pytest.mark.gpu
def test_bits_of_both_formats_are_the_same():
    """The same kernels see the same numbers."""
    shape = (16, 128, 14, 14, 128, 3, 3, 1, 1, 1, 1)
    planes = make(shape, memory_format=NCHW)
    rows = [
        t.detach().to(memory_format=CHANNELS_LAST).requires_grad_() if t.dim() == 4 else t
        for t in planes[:3]
    ]
    ours, cotangent = run(F.conv2d, planes)
    expected, _ = run(F.conv2d, [*rows, *planes[3:]], cotangent)
    for a, e in zip(ours[:3], expected[:3], strict=True):
        assert torch.equal(a, e)


@pytest.mark.gpu
def test_launches():
    def counts(shape, memory_format):
        args = make(shape, bias=False, memory_format=memory_format)
        y = F.conv2d(*args)
        dy = torch.randn_like(y)
        forward = launches(lambda: F.conv2d(*args))
        backward = launches(lambda: torch.autograd.grad(y, args[:2], dy, retain_graph=True))
        return [len(forward), len(backward)]

    shape = (8, 128, 28, 28, 128, 3, 3, 1, 1, 1, 1)
    # The transpose of w and the gradient of x; that of w, and the sum of its parts.
    assert counts(shape, CHANNELS_LAST) == [1, 4]
    # Copies of x and w; of dy, which both gradients read, of x, and of dw back.
    assert counts(shape, NCHW) == [3, 7]
    assert counts((8, 128, 28, 28, 128, 1, 1, 1, 0, 1, 1), NCHW) == [1, 4]
