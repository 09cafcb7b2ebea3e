import itertools

import pytest
import torch
import torch.nn.functional as native
from common import gradcheck, layouts, opcheck

import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
INF, NAN = float("inf"), float("nan")

# (kernel, stride, padding, dilation): why it is here.
WINDOWS = [
    (2, 2, 0, 1),  # unrolled, pairs
    (2, 2, 1, 1),  # unrolled, left padding
    (3, 2, 1, 1),  # unrolled, overlapping
    (3, 2, 0, 1),
    (3, 1, 1, 1),  # overlapping, stride 1
    (2, 3, 0, 1),  # inputs that no window covers
    ((3, 2), (2, 1), (1, 0), 1),
    (3, 2, 1, 2),  # dilation
    ((2, 3), (1, 4), (0, 1), (3, 2)),
    (1, 1, 0, 1),
]
# (N, C, H, W): vectors of channels with and without a tail, odd and even planes, rows shorter and
# longer than a CPU vector, planes of several tiles of a GPU thread in either direction, of fewer
# windows a row than cover an input, and of rows that share sectors.
SHAPES = [
    (2, 3, 9, 11),
    (1, 16, 8, 8),
    (2, 8, 14, 14),
    (3, 5, 7, 38),
    (1, 1, 5, 5),
    (2, 24, 7, 6),
    (2, 3, 21, 48),
    (2, 5, 9, 3),
    (2, 3, 6, 28),
]


def distinct(shape, device, dtype):
    """No ties and no rounding: every value is exact in every dtype."""
    n = torch.Size(shape).numel()
    return (torch.randperm(n, device=device) % 251 - 125).to(dtype).reshape(shape)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_bit_equal_to_native(device, dtype, window, ceil_mode):
    kernel, stride, padding, dilation = window
    args = (kernel, stride, padding, dilation, ceil_mode)
    for shape in SHAPES:
        for name, x in layouts(distinct(shape, device, dtype)):
            if shape != SHAPES[0] and name not in ("contiguous", "channels_last"):
                continue
            what = f"{shape} {name}"
            ours_x = x.detach().requires_grad_()
            native_x = x.detach().requires_grad_()
            expected, expected_indices = native.max_pool2d(native_x, *args, return_indices=True)
            assert_same(F.max_pool2d(x, *args), expected.detach(), what)
            ours = F.max_pool2d(ours_x, *args)
            both, indices = F.max_pool2d_with_indices(ours_x, *args)
            assert_same(ours, expected, what)
            assert_same(both, expected, what)
            assert_same(indices, expected_indices, what)
            assert ours.stride() == expected.stride()
            assert indices.stride() == expected.stride()
            # Small integers: sums are exact in any order.
            cotangent = torch.randint(-4, 5, expected.shape, device=device).to(dtype)
            (grad,) = torch.autograd.grad(ours, ours_x, cotangent)
            (expected_grad,) = torch.autograd.grad(expected, native_x, cotangent)
            assert_same(grad, expected_grad, what)
            assert grad.stride() == expected_grad.stride(), what
            (grad,) = torch.autograd.grad(both, ours_x, cotangent)
            assert_same(grad, expected_grad, what)


def test_error_rule(device, dtype):
    for shape in SHAPES:
        x = torch.randn(shape, device=device).to(dtype)
        for fmt in (torch.contiguous_format, torch.channels_last):
            y = x.contiguous(memory_format=fmt).requires_grad_()
            compare_with_native(F.max_pool2d, native.max_pool2d, (y, 3, 1, 1))


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_integers(integer):
    # As native, only on the CPU.
    info = torch.iinfo(integer)
    x = torch.randint(info.min, min(info.max, 2**40), (2, 9, 13, 9)).to(integer)
    lowest = torch.full((1, 2, 4, 4), info.min, dtype=integer)
    for case, fmt in itertools.product((x, lowest), (torch.contiguous_format, torch.channels_last)):
        case = case.contiguous(memory_format=fmt)
        for args in ((2,), (3, 2, 1), (3, 1, 1, 2)):
            assert_same(
                F.max_pool2d(case, *args, return_indices=True),
                native.max_pool2d(case, *args, return_indices=True),
            )


@pytest.mark.gpu
def test_integers_are_refused_on_cuda():
    x = torch.ones(1, 1, 4, 4, dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="not implemented for 'Int'"):
        F.max_pool2d(x, 2)


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)], ids=str)
def test_ties_nan_inf(device, dtype, window):
    pool = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, 1.0, -INF], device=device)
    for channels, fmt in (
        (1, torch.contiguous_format),
        (3, torch.channels_last),
        (16, torch.channels_last),
    ):
        for choice in (pool, pool[1:], pool[2:3], pool[3:7]):
            pick = torch.randint(len(choice), (2, channels, 12, 22), device=device)
            x = choice[pick].to(dtype).contiguous(memory_format=fmt)
            ours = F.max_pool2d_with_indices(x, *window)
            expected = native.max_pool2d(x.cpu(), *window, return_indices=True)
            assert_same(ours[0].cpu(), expected[0])
            assert torch.equal(ours[1].cpu(), expected[1])


def test_large_window(device, dtype):
    # 15 * 17 = 255 taps are the last that fit a byte, 256 the first that don't.
    x = distinct((2, 8, 40, 37), device, dtype)
    for kernel in ((15, 17), (16, 16), (40, 30)):
        for fmt in (torch.contiguous_format, torch.channels_last):
            y = x.contiguous(memory_format=fmt)
            ours_x, native_x = y.clone().requires_grad_(), y.clone().requires_grad_()
            ours = F.max_pool2d(ours_x, kernel, 2, 5, return_indices=True)
            expected = native.max_pool2d(native_x, kernel, 2, 5, return_indices=True)
            assert_same(ours, expected)
            ones = torch.ones_like(expected[0])
            assert_same(
                torch.autograd.grad(ours[0], ours_x, ones)[0],
                torch.autograd.grad(expected[0], native_x, ones)[0],
            )


def test_window_without_taps(device):
    # ceil_mode with dilation: the only window has no tap inside. Native then writes its gradient
    # out of bounds; ours goes nowhere.
    for x in (
        torch.randn(1, 1, 1, 3),
        torch.randn(2, 8, 1, 3).to(memory_format=torch.channels_last),
    ):
        x = x.to(device).requires_grad_()
        output, indices = F.max_pool2d(x, 3, 5, 1, 2, True, True)
        # Native's channels_last CUDA kernel calls that place 0, its others the window's first one.
        expected, expected_indices = native.max_pool2d(x.detach().cpu(), 3, 5, 1, 2, True, True)
        assert_same(output.detach().cpu(), expected)
        assert torch.equal(indices.cpu(), expected_indices)
        (grad,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(grad, torch.zeros_like(x))


def test_shapes(device):
    x = torch.randn(6, 9, 11, device=device)
    assert_same(
        F.max_pool2d(x, 3, return_indices=True), native.max_pool2d(x, 3, return_indices=True)
    )
    empty = torch.randn(0, 3, 8, 8, device=device, requires_grad=True)
    for fmt in (torch.contiguous_format, torch.channels_last):
        output = F.max_pool2d(empty.contiguous(memory_format=fmt), 2)
        assert output.shape == (0, 3, 4, 4)
    (grad,) = torch.autograd.grad(output.sum(), empty)
    assert grad.shape == empty.shape
    y = torch.randn(2, 3, 8, 8, device=device)
    for view in (
        y.transpose(0, 1),
        y[:, ::2],
        y.permute(0, 2, 3, 1),
        y[:, :1].expand(-1, 4, -1, -1),
    ):
        assert_same(F.max_pool2d(view, 2), native.max_pool2d(view, 2))
        assert F.max_pool2d(view, 2).stride() == native.max_pool2d(view, 2).stride()


def test_unpool_round_trip(device):
    x = torch.rand(2, 3, 8, 8, device=device)
    output, indices = F.max_pool2d(x, 2, return_indices=True)
    assert_same(F.max_pool2d(native.max_unpool2d(output, indices, 2), 2), output)


@pytest.mark.parametrize("window", [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2)], ids=str)
def test_gradients(device, window):
    for channels_last in (False, True):
        x = torch.randperm(2 * 2 * 6 * 5, device=device).double().reshape(2, 2, 6, 5) / 7
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        gradcheck(lambda t: F.max_pool2d(t, *window), (x.requires_grad_(),))
        gradcheck(lambda t: F.max_pool2d_with_indices(t, *window, True)[0], (x.requires_grad_(),))


def assert_func_transforms_agree(device, ours, theirs):
    """torch.func on two functions of images."""
    x = torch.randn(3, 2, 6, 6, device=device, dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sin().sum()),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t).sum())),
        lambda f: lambda t: torch.func.hessian(lambda s: f(s).pow(3).sum())(t[:1]),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))


def test_func_transforms(device):
    assert_func_transforms_agree(
        device, lambda t: F.max_pool2d(t, 2), lambda t: native.max_pool2d(t, 2)
    )


def test_opcheck(device):
    ops = torch.ops.warpwright
    for name, x in layouts(torch.randn(2, 4, 7, 6, device=device)):
        channels_last = name == "channels_last"
        x = x.detach().requires_grad_()
        for op in (ops.max_pool2d, ops.max_pool2d_with_codes, ops.max_pool2d_with_indices):
            opcheck(op.default, (x, 3, 2, 1))
        output, codes = ops.max_pool2d_with_codes(x, 3, 2, 1)
        window = ([3, 3], [2, 2], [1, 1], [1, 1], channels_last)
        grad = torch.randn_like(output).requires_grad_()
        opcheck(ops.max_pool2d_backward.default, (grad, codes, list(x.shape), *window))
        opcheck(ops.max_pool2d_gather.default, (x, codes, *window))
        opcheck(ops.max_pool2d_indices.default, (codes, list(x.shape), *window))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compile(device, dynamic, fmt):
    def step(x):
        output, indices = F.max_pool2d(x * 2, 3, 2, 1, return_indices=True)
        return F.max_pool2d(output, 2), indices

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, h in ((2, 12), (3, 17)):
        x = torch.randn(n, 4, h, 10, device=device).contiguous(memory_format=fmt).requires_grad_()
        expected, actual = step(x), compiled(x)
        assert_same(actual, expected)
        assert actual[0].stride() == expected[0].stride()
        assert_same(
            torch.autograd.grad(actual[0].sum(), x)[0], torch.autograd.grad(expected[0].sum(), x)[0]
        )


def test_autocast_keeps_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert F.max_pool2d(torch.randn(1, 1, 4, 4, device=device), 2).dtype == torch.float32


# (arguments after the input, keyword arguments): each is an error of native's with the same type
# and message.
BAD = [
    ((0,), {}),
    (((2, 2, 2),), {}),
    ((2,), {"stride": 0}),
    ((2,), {"stride": -1}),
    ((2,), {"stride": (1, 1, 1)}),
    ((2,), {"dilation": 0}),
    ((2,), {"dilation": (1, 1, 1)}),
    ((2,), {"padding": 2}),
    ((2,), {"padding": -1}),
    ((2,), {"padding": (0, 0, 0)}),
    ((3,), {"padding": 2, "dilation": 2}),
    ((-1,), {}),
    ((9,), {}),
]


@pytest.mark.parametrize(("args", "kwargs"), BAD, ids=str)
def test_bad_window(device, args, kwargs):
    x = torch.randn(2, 3, 8, 8, device=device)
    with pytest.raises(RuntimeError) as expected:
        native.max_pool2d(x, *args, **kwargs)
    with pytest.raises(expected.type) as ours:
        F.max_pool2d(x, *args, **kwargs)
    first_words = str(expected.value).split(":")[0].split(", but")[0]
    assert first_words in str(ours.value)


@pytest.mark.parametrize("shape", [(8, 8), (1, 2, 3, 8, 8), (2, 0, 8, 8), (0, 8, 8), (2, 3, 0, 8)])
def test_bad_shape(device, shape):
    with pytest.raises(RuntimeError, match="3D or 4D"):
        F.max_pool2d(torch.randn(shape, device=device), 2)


def test_bad_dtype_and_codes(device):
    for dtype in (torch.bool, torch.complex64):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            F.max_pool2d(torch.ones(1, 1, 4, 4, device=device).to(dtype), 2)
    ops = torch.ops.warpwright
    codes = torch.zeros(1, 1, 2, 2, dtype=torch.uint8, device=device)
    window = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape .*2, 2.* got .*3, 3"):
        ops.max_pool2d_backward(torch.ones(1, 1, 3, 3, device=device), codes, [1, 1, 4, 4], *window)
    with pytest.raises(RuntimeError, match=r"codes: expected Byte .* got Int"):
        ops.max_pool2d_backward(
            torch.ones(1, 1, 2, 2, device=device), codes.int(), [1, 1, 4, 4], *window
        )
