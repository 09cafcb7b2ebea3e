"""Convolution by transforms against native's direct convolution."""

import pytest
import torch
from common import assert_no_leak, captured, gradcheck, layouts, opcheck, subsets
from torch.nn import functional as native

import warpwright
import warpwright.functional as F
from warpwright import _C, _native
from warpwright.testing import assert_same, compare_with_native, max_error

ops = torch.ops.warpwright

# (input, weight, padding, groups)
ROWS = [
    ((2, 3, 700), (3, 1, 120), 0, 3),
    ((2, 3, 700), (3, 1, 121), "same", 3),
    ((3, 4, 500), (4, 1, 300), "same", 4),
    ((1, 3, 3000), (3, 1, 900), "full", 3),
    ((3, 2, 5000), (2, 1, 1024), "causal", 2),
    ((2, 2, 9000), (2, 1, 4000), "causal", 2),
    ((1, 2, 20000), (2, 1, 9000), "causal", 2),
    ((1, 1, 70000), (1, 1, 66000), "causal", 1),
    ((2, 4, 600), (6, 4, 200), 17, 1),
    ((2, 4, 600), (6, 2, 200), "same", 2),
    ((2, 3, 400), (6, 1, 150), (300,), 3),
]
PLANES = [
    ((3, 4, 28, 28), (4, 1, 31, 31), "same", 4),
    ((2, 4, 28, 28), (4, 1, 51, 51), "same", 4),
    ((3, 2, 56, 56), (2, 1, 31, 31), "same", 2),
    ((2, 2, 56, 50), (2, 1, 51, 45), "same", 2),
    ((1, 2, 85, 85), (2, 1, 51, 51), "same", 2),
    ((1, 2, 200, 150), (2, 1, 40, 24), (7, 30), 2),
    ((2, 2, 120, 100), (2, 1, 90, 31), "valid", 2),
    ((2, 3, 40, 60), (4, 3, 20, 25), "full", 1),
    ((2, 4, 40, 30), (6, 2, 24, 16), "same", 2),
]
BIG = [
    ((1, 1, 160, 150), (1, 1, 96, 96), "valid", 1),
    ((2, 2, 40, 3000), (2, 1, 20, 400), "same", 2),
]


def direct(x, w, b, padding, groups):
    """Native's convolution for the paddings that only ours has."""
    run = {3: native.conv1d, 4: native.conv2d}[x.dim()]
    if padding == "full":
        padding = tuple(s - 1 for s in w.shape[2:])
    if padding == "causal":
        return run(native.pad(x, (w.shape[2] - 1, 0)), w, b, groups=groups)
    return run(x, w, b, padding=padding, groups=groups)


def ours(x, w, b, padding, groups):
    run = {3: F.fft_conv1d, 4: F.fft_conv2d}[x.dim()]
    return run(x, w, b, padding=padding, groups=groups)


def operands(device, dtype, x, w, grad=True):
    sizes = x, w, (w[0],)
    return [torch.randn(s, device=device).to(dtype).requires_grad_(grad) for s in sizes]


@pytest.fixture(autouse=True)
def exact_float32():
    """Native's float32 without TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("x", "w", "padding", "groups"), [*ROWS, *PLANES, *BIG])
def test_values(device, dtype, x, w, padding, groups):
    if device == "cpu" and x[-1] > 2000:  # those sizes choose among the GPU's kernels
        x, w = (*x[:-1], x[-1] // 10), (*w[:-1], w[-1] // 10)
    tensors = operands(device, dtype, x, w)

    def of(run):
        return lambda *t: run(*t, padding, groups).contiguous()

    if dtype == torch.float64:  # native is its own reference
        results = [of(run)(*tensors) for run in (ours, direct)]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
        grads = [torch.autograd.grad(y, tensors, torch.ones_like(y)) for y in results]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-9)
    else:
        compare_with_native(of(ours), of(direct), tensors, factor=3)


@pytest.mark.parametrize("which", subsets(3))
def test_subsets_of_gradients(device, which):
    for x, w in (((2, 3, 200), (3, 1, 90)), ((2, 2, 30, 20), (2, 1, 15, 17))):
        tensors = operands(device, torch.float64, x, w, grad=False)
        for tensor, wanted in zip(tensors, which, strict=True):
            tensor.requires_grad_(wanted)
        compare_with_native(
            lambda *t: ours(*t, "same", t[0].shape[1]),
            lambda *t: direct(*t, "same", t[0].shape[1]),
            tensors,
        )


def test_derivatives(device):
    """The operator is its own derivative, twice and in both modes."""
    x, w, b = operands(device, torch.float64, (2, 2, 7), (4, 1, 4))
    for padding in (0, 2, "same", "causal", "full", 5):
        gradcheck(lambda *t, p=padding: F.fft_conv1d(*t, padding=p, groups=2), (x, w, b))
    x, w, b = operands(device, torch.float64, (1, 2, 5, 4), (2, 2, 3, 2))
    gradcheck(lambda *t: F.fft_conv2d(*t, padding=1), (x, w, b))
    for wanted, sizes in (
        ("input", ((2, 4, 6), (4, 1, 3))),
        ("weight", ((2, 2, 8), (2, 4, 6))),
    ):
        first, second = (
            torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in sizes
        )
        gradcheck(lambda a, c, k=wanted: ops.fft_conv(a, c, None, [0, 0], 2, k), (first, second))


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_layouts(device, dtype, padding):
    x, w, b = operands(device, dtype, (2, 3, 40, 36), (3, 1, 20, 20), grad=False)
    expected = F.fft_conv2d(x, w, b, padding=padding, groups=3)
    for name, view in layouts(x):
        for other, kernel in layouts(w):
            found = F.fft_conv2d(view, kernel, b, padding=padding, groups=3)
            assert_same(found, expected, f"{name}, {other}")
            strides = F.conv2d(view, kernel, b, padding=padding, groups=3).stride()
            assert found.stride() == strides, f"{name}, {other}"
    rows, taps, b = operands(device, dtype, (2, 3, 400), (3, 1, 100), grad=False)
    expected = F.fft_conv1d(rows, taps, b, padding=padding, groups=3)
    for name, view in layouts(rows):
        found = F.fft_conv1d(view, taps, b, padding=padding, groups=3)
        assert_same(found, expected, name)
        assert found.is_contiguous()
    last = rows.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same(F.fft_conv1d(last, taps, b, padding=padding, groups=3), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_non_finite_values_stay(device, dtype, value, where):
    """Where direct convolution has them, other results as without them."""
    for sizes in (((2, 3, 900), (3, 1, 150)), ((2, 3, 40, 50), (3, 1, 21, 17))):
        x, w, b = operands(device, dtype, *sizes)
        output = ours(x, w, b, "valid", 3)
        cotangent = torch.randn_like(output)
        index = tuple(s // 2 for s in output.shape)
        before = [output, *torch.autograd.grad(output, (x, w), cotangent)]
        with torch.no_grad():
            spoilt = {"input": x, "weight": w, "gradient": cotangent}[where]
            place = index if where != "weight" else (1, 0, *(s // 3 for s in w.shape[2:]))
            spoilt[place] = value
        after = ours(x, w, b, "valid", 3)
        found = [after, *torch.autograd.grad(after, (x, w), cotangent)]
        theirs = direct(x, w, b, "valid", 3)
        exact = [theirs, *torch.autograd.grad(theirs, (x, w), cotangent)]
        for a, e, clean in zip(found, exact, before, strict=True):
            assert torch.equal(a.isfinite(), e.isfinite())
            assert torch.equal(a.isnan(), e.isnan())
            keep = a.isfinite()
            scale = clean[keep].double().abs().max() if keep.any() else 1.0
            assert max_error(a, e.double()) <= 8 * torch.finfo(dtype).eps * scale
        assert not found[0].isfinite().all() or where == "gradient"


def test_large_values_do_not_overflow(device):
    """A transform adds all elements; where their sum overflows, the tile is convolved directly."""
    x = torch.full((1, 1, 600), 3e38, device=device)
    x[..., ::2] = -3e38
    w = torch.zeros(1, 1, 120, device=device)
    w[..., 7] = 0.5
    found = F.fft_conv1d(x, w)
    assert_same(found, x[..., 7:488] * 0.5)


def test_causal(device):
    """A later input changes earlier outputs by rounding at most."""
    x, w, _ = operands(device, torch.float32, (1, 2, 3000), (2, 1, 700), grad=False)
    y = F.fft_conv1d(x, w, padding="causal", groups=2)
    x[..., 1500:] += 5
    moved = F.fft_conv1d(x, w, padding="causal", groups=2)
    torch.testing.assert_close(y[..., :1500], moved[..., :1500], rtol=0, atol=1e-3)
    assert (y[..., 1500:] - moved[..., 1500:]).abs().max() > 1


def test_repeats(device):
    for sizes in (((3, 4, 3000), (4, 1, 700)), ((3, 4, 28, 28), (4, 1, 31, 31))):
        x, w, b = operands(device, torch.float32, *sizes)

        def step(x=x, w=w, b=b):
            y = ours(x, w, b, "same", 4)
            return [y, *torch.autograd.grad(y.square().sum(), (x, w, b))]

        first = step()
        for _ in range(20):
            assert_same(step(), first)


@pytest.mark.gpu
def test_in_a_graph():
    x, w, b = operands("cuda", torch.float32, (4, 8, 28, 28), (8, 1, 31, 31), grad=False)

    def step():
        return [F.fft_conv2d(x, w, b, padding=15, groups=8)]

    expected = step()
    graph, results = captured(step)
    results[0].fill_(float("nan"))
    graph.replay()
    assert_same(results, expected)


def test_unbatched_and_empty(device):
    for sizes in (((3, 60), (3, 1, 20)), ((3, 20, 30), (3, 1, 11, 12))):
        x, w, b = operands(device, torch.float64, *sizes, grad=False)
        run = F.fft_conv1d if x.dim() == 2 else F.fft_conv2d
        assert_same(run(x, w, b, groups=3), run(x[None], w, b, groups=3)[0])
        none = x[None][:0].requires_grad_()
        weight = w.requires_grad_()
        y = run(none, weight, b, groups=3)
        assert y.shape[0] == 0
        y.sum().backward()
        assert none.grad.shape == none.shape
        assert not weight.grad.any()
    assert F.fft_conv1d(
        torch.zeros(2, 3, 8, device=device), torch.zeros(0, 3, 4, device=device)
    ).shape == (
        2,
        0,
        5,
    )


def test_one_tap_and_one_element(device):
    x, w, b = operands(device, torch.float64, (2, 3, 9), (4, 3, 1))
    compare_with_native(F.fft_conv1d, native.conv1d, (x, w, b))
    x, w, b = operands(device, torch.float64, (2, 3, 1), (3, 1, 1))
    compare_with_native(
        lambda *t: F.fft_conv1d(*t, groups=3), lambda *t: native.conv1d(*t, groups=3), (x, w, b)
    )
    x, w, b = operands(device, torch.float64, (2, 3, 1, 1), (3, 3, 1, 1))
    compare_with_native(
        lambda *t: F.fft_conv2d(*t, padding=2), lambda *t: native.conv2d(*t, padding=2), (x, w, b)
    )


def test_opcheck(device):
    x, w, b = operands(device, torch.float32, (2, 4, 30), (4, 2, 9))
    y = F.fft_conv1d(x, w, b, groups=2).detach().requires_grad_()
    opcheck(ops.fft_conv.default, (x, w, b, [0, 0], 2, "output"))
    opcheck(ops.fft_conv.default, (y, w, None, [0, 0], 2, "input"))
    opcheck(ops.fft_conv.default, (x, y, None, [0, 0], 2, "weight"))
    x, w, b = operands(device, torch.float32, (2, 4, 12, 10), (4, 1, 5, 5))
    x = x.contiguous(memory_format=torch.channels_last)
    opcheck(ops.fft_conv.default, (x, w, b, [2, 2, 2, 2], 4, "output"))


@pytest.mark.parametrize("wanted", ["output", "input", "weight"])
def test_native_form(device, wanted):
    """What export and GPUs without kernels run."""
    for groups, padding in ((1, [3, 1]), (2, [0, 4])):
        x, w, b = operands(device, torch.float64, (2, 4, 20), (6, 4 // groups, 7), grad=False)
        y = ops.fft_conv(x, w, b, padding, groups)
        args = {"output": (x, w, b), "input": (y, w, None), "weight": (x, y, None)}[wanted]
        found = ops.fft_conv(*args, padding, groups, wanted)
        torch.testing.assert_close(found, _native.fft_conv(*args, padding, groups, wanted))


def test_compiles(device):
    def step(x, w):
        return F.fft_conv1d(x, w, padding="causal", groups=3).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (100, 257):
        x, w, _ = operands(device, torch.float32, (2, 3, length), (3, 1, 40))
        for f in (step, compiled):
            x.grad = w.grad = None
            f(x, w).sum().backward()
        torch.testing.assert_close(compiled(x, w), step(x, w))


def test_autocast(device):
    x, w, b = operands(device, torch.float32, (2, 3, 100), (3, 1, 40))
    with torch.autocast(device, torch.bfloat16):
        y = F.fft_conv1d(x, w, b, groups=3)
    assert y.dtype == torch.bfloat16
    assert_same(y, F.fft_conv1d(x.bfloat16(), w.bfloat16(), b.bfloat16(), groups=3))


def test_no_leak(device):
    x, w, b = operands(device, torch.float32, (2, 3, 100), (3, 1, 40))
    assert_no_leak(lambda *t: F.fft_conv1d(*t, groups=3), x, w, b)


# ---- errors ----


def test_errors(device):
    x, w, b = operands(device, torch.float32, (2, 4, 30), (4, 4, 9), grad=False)
    for arguments, kind, text in (
        ({"stride": 2}, ValueError, r"stride: expected 1, .* got 2"),
        ({"dilation": (3,)}, ValueError, r"dilation: expected 1"),
        ({"padding": "round"}, ValueError, r"padding: expected .* 'causal', got 'round'"),
        ({"padding": -1}, RuntimeError, r"padding: expected numbers from 0"),
        ({"padding": (1, 2)}, RuntimeError, r"expected padding to be one number or 1"),
        ({"groups": 0}, RuntimeError, r"groups: expected a positive number, got 0"),
        ({"groups": 2}, RuntimeError, r"expected 8 channels"),
        ({"groups": 2.5}, TypeError, r"argument 'groups' must be int, not float"),
    ):
        with pytest.raises(kind, match=text):
            F.fft_conv1d(x, w, b, **arguments)
    with pytest.raises(RuntimeError, match=r"expected 1 to 30 elements .* got 31"):
        F.fft_conv1d(x, torch.zeros(4, 4, 31, device=device))
    with pytest.raises(RuntimeError, match=r"expected input of 2 \(unbatched\) or 3 dimensions"):
        F.fft_conv1d(x[0, 0], w)
    with pytest.raises(RuntimeError, match=r"fft_conv1d: weight: expected Float, got Double"):
        F.fft_conv1d(x, w.double())
    with pytest.raises(RuntimeError, match=r"fft_conv1d: weight: expected Int, got Float"):
        F.fft_conv1d(x.int(), w)
    with pytest.raises(NotImplementedError, match=r"fft_conv1d: input: expected float32"):
        F.fft_conv1d(x.int(), w.int())
    with pytest.raises(RuntimeError, match=r"bias: expected shape \[4\]"):
        F.fft_conv1d(x, w, b[:2])
    with pytest.raises(TypeError, match=r"argument 'weight' must be Tensor, not NoneType"):
        F.fft_conv1d(x, None)
    with pytest.raises(RuntimeError, match=r"wanted: expected 'output', 'input' or 'weight'"):
        ops.fft_conv(x, w, None, [0, 0], 1, "both")
    with pytest.raises(RuntimeError, match=r"padding: expected 2 numbers"):
        ops.fft_conv(x, w, None, [0], 1)


# ---- conv2d's algorithm ----


def test_algorithm_of_conv2d(device, dtype):
    x, w, b = operands(device, dtype, (2, 4, 40, 40), (4, 1, 31, 31), grad=False)
    window = {"padding": 15, "groups": 4}
    fft = F.conv2d(x, w, b, **window, algorithm="fft")
    assert_same(fft, F.fft_conv2d(x, w, b, **window))
    assert_same(F.conv2d(x, w, b, **window, algorithm="direct"), F.conv2d(x, w, b, **window))
    auto = F.conv2d(x, w, b, **window, algorithm="auto")
    assert any(torch.equal(auto, other) for other in (fft, F.conv2d(x, w, b, **window)))
    small = torch.randn(4, 1, 3, 3, device=device).to(dtype)
    for kwargs in ({"padding": 1, "groups": 4}, {"padding": 1, "groups": 4, "stride": 2}):
        assert_same(F.conv2d(x, small, **kwargs, algorithm="auto"), F.conv2d(x, small, **kwargs))
    with pytest.raises(ValueError, match=r"algorithm: expected 'direct', 'auto' or 'fft'"):
        F.conv2d(x, w, algorithm="winograd")
    with pytest.raises(ValueError, match=r"stride: expected 1"):
        F.conv2d(x, small, stride=2, groups=4, algorithm="fft")


def test_auto_takes_the_transform_only_if_it_pays():
    """By the model of an H100."""

    def pays(images, channels, size, taps, groups=None, dtype="float32"):
        groups = channels if groups is None else groups
        weight = [channels, channels // groups, taps, taps]
        pad = [(taps - 1) // 2] * 2 + [taps // 2] * 2
        call = _C.FftConvCall(dtype, [images, channels, size, size], weight, pad, groups)
        return _C.fft_conv_pays(call, False, _C.DeviceInfo())

    assert pays(64, 128, 56, 31)
    assert pays(64, 128, 56, 51)
    assert not pays(64, 128, 56, 3)
    assert not pays(64, 128, 56, 7)
    assert not pays(64, 256, 56, 3, groups=1, dtype="bfloat16")


def test_explain(device):
    x = torch.empty(64, 128, 56, 56, device="meta")
    w = torch.empty(128, 1, 31, 31, device="meta")
    text = warpwright.explain("fft_conv2d", x, w, padding=15, groups=128, device="cuda")
    for part in ("forward", "grad_input", "grad_weight", "planes in shared memory", "MiB", "ms"):
        assert part in text
    rows, taps = torch.empty(16, 64, 16384, device="meta"), torch.empty(64, 1, 256, device="meta")
    text = warpwright.explain("fft_conv1d", rows, taps, padding="causal", groups=64, device="cuda")
    assert "pairs of tiles in shared memory" in text
    x, w, b = operands(device, torch.float32, (2, 4, 30), (4, 4, 9), grad=False)
    assert "forward" in warpwright.explain("fft_conv1d", x, w, b)
