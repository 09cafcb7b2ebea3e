"""relu_max_pool2d against the chain of native ops that it replaces."""

import itertools

import pytest
import torch
import torch.nn.functional as native
from common import assert_no_leak, gradcheck, layouts, opcheck
from test_max_pool2d import (
    BAD,
    INF,
    INTEGERS,
    NAN,
    SHAPES,
    WINDOWS,
    assert_func_transforms_agree,
    distinct,
)
from torch import nn

import warpwright.functional as F
import warpwright.nn as ours
from warpwright.testing import assert_same, compare_with_native

FORMATS = (torch.contiguous_format, torch.channels_last)


def chain(x, *args, **kwargs):
    return native.max_pool2d(torch.relu(x), *args, **kwargs)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_bit_equal_to_native(device, dtype, window, ceil_mode):
    kernel, stride, padding, dilation = window
    args = (kernel, stride, padding, dilation, ceil_mode)
    for shape, shift in itertools.product(SHAPES, (0, -110)):  # -110: few windows have a winner
        for name, x in layouts(distinct(shape, device, dtype) + shift):
            if shape != SHAPES[0] and name not in ("contiguous", "channels_last"):
                continue
            what = f"{shape} {name}"
            ours_x, native_x = x.detach().requires_grad_(), x.detach().requires_grad_()
            output, expected = F.relu_max_pool2d(ours_x, *args), chain(native_x, *args)
            assert_same(output, expected, what)
            assert_same(F.relu_max_pool2d(x, *args), expected.detach(), what)
            assert output.stride() == expected.stride()
            # Small integers: sums are exact in any order.
            cotangent = torch.randint(-4, 5, expected.shape, device=device).to(dtype)
            (grad,) = torch.autograd.grad(output, ours_x, cotangent)
            (expected_grad,) = torch.autograd.grad(expected, native_x, cotangent)
            # Native's gate makes a +0 of what it stops, wherever in a window that was.
            assert_same(grad + 0.0, expected_grad + 0.0, what)
            if name in ("contiguous", "channels_last"):
                assert grad.stride() == expected_grad.stride(), what


def test_error_rule(device, dtype):
    for shape in SHAPES:
        x = torch.randn(shape, device=device).to(dtype)
        for fmt in FORMATS:
            y = x.contiguous(memory_format=fmt).requires_grad_()
            compare_with_native(F.relu_max_pool2d, chain, (y, 3, 1, 1))


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_integers(integer):
    # As native, only on the CPU.
    info = torch.iinfo(integer)
    x = torch.randint(info.min, min(info.max, 2**40), (2, 9, 13, 9)).to(integer)
    lowest = torch.full((1, 2, 4, 4), info.min, dtype=integer)
    for case, fmt in itertools.product((x, lowest), FORMATS):
        case = case.contiguous(memory_format=fmt)
        for args in ((2,), (3, 2, 1), (3, 1, 1, 2)):
            assert_same(F.relu_max_pool2d(case, *args), chain(case, *args))


@pytest.mark.parametrize("window", [(2, 2, 0), (3, 2, 1), (3, 1, 1), (5, 3, 2)], ids=str)
def test_ties_nan_inf(device, dtype, window):
    """The first of equal maxima gets the gradient, nothing at or below 0 does, NaN passes."""
    pool = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1.0, 1.0, -1.0, -INF], device=device)
    for channels, fmt in ((1, FORMATS[0]), (3, FORMATS[1]), (16, FORMATS[1])):
        for choice in (pool, pool[1:], pool[2:3], pool[3:7], pool[3:5], pool[7:]):
            pick = torch.randint(len(choice), (2, channels, 12, 22), device=device)
            x = choice[pick].to(dtype).contiguous(memory_format=fmt)
            leaf, host = x.requires_grad_(), x.detach().cpu().requires_grad_()
            output, expected = F.relu_max_pool2d(leaf, *window), chain(host, *window)
            assert not output.signbit()[output == 0].any()
            assert_same(output.detach().cpu(), expected.detach() + 0.0)
            cotangent = torch.randint(-4, 5, expected.shape).to(dtype)
            (grad,) = torch.autograd.grad(output, leaf, cotangent.to(device))
            (expected_grad,) = torch.autograd.grad(expected, host, cotangent)
            assert torch.equal(grad.cpu(), expected_grad)


def test_large_window(device, dtype):
    # 15 * 17 = 255 taps are the last that fit a byte, 256 the first that don't.
    for shift in (0, -125):
        x = distinct((2, 8, 40, 37), device, dtype) + shift
        for kernel, fmt in itertools.product(((15, 17), (16, 16)), FORMATS):
            y = x.contiguous(memory_format=fmt)
            ours_x, native_x = y.clone().requires_grad_(), y.clone().requires_grad_()
            output, expected = (
                F.relu_max_pool2d(ours_x, kernel, 2, 5),
                chain(native_x, kernel, 2, 5),
            )
            assert_same(output, expected)
            ones = torch.ones_like(expected)
            assert_same(
                torch.autograd.grad(output, ours_x, ones)[0],
                torch.autograd.grad(expected, native_x, ones)[0],
            )


def test_window_without_taps(device):
    # ceil_mode with dilation: -inf as native, although a relu stands before it.
    for x in (torch.randn(1, 1, 1, 3), torch.randn(2, 8, 1, 3).to(memory_format=FORMATS[1])):
        x = x.to(device).requires_grad_()
        output = F.relu_max_pool2d(x, 3, 5, 1, 2, True)
        assert_same(output.detach().cpu(), chain(x.detach().cpu(), 3, 5, 1, 2, True))
        (grad,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(grad, torch.zeros_like(x))


def test_shapes(device):
    x = torch.randn(6, 9, 11, device=device)
    assert_same(F.relu_max_pool2d(x, 3), chain(x, 3))
    empty = torch.randn(0, 3, 8, 8, device=device, requires_grad=True)
    output = F.relu_max_pool2d(empty, 2)
    assert output.shape == (0, 3, 4, 4)
    assert torch.autograd.grad(output.sum(), empty)[0].shape == empty.shape


@pytest.mark.parametrize("window", [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2)], ids=str)
def test_gradients(device, window):
    for fmt in FORMATS:
        x = torch.randperm(2 * 2 * 6 * 5, device=device).double().reshape(2, 2, 6, 5) / 7 - 7.1
        x = x.contiguous(memory_format=fmt).requires_grad_()
        gradcheck(lambda t: F.relu_max_pool2d(t, *window), (x,))


def test_func_transforms(device):
    assert_func_transforms_agree(device, lambda t: F.relu_max_pool2d(t, 2), lambda t: chain(t, 2))


def test_opcheck(device):
    ops = torch.ops.warpwright
    for _, x in layouts(torch.randn(2, 4, 7, 6, device=device)):
        x = x.detach().requires_grad_()
        opcheck(ops.relu_max_pool2d.default, (x, 3, 2, 1))
        opcheck(ops.relu_max_pool2d_with_codes.default, (x, 3, 2, 1))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_compile(device, dynamic, fmt):
    def step(x):
        return F.relu_max_pool2d(F.relu_max_pool2d(x * 2, 3, 2, 1) - 1, 2)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, h in ((2, 12), (3, 17)):
        x = torch.randn(n, 4, h, 10, device=device).contiguous(memory_format=fmt).requires_grad_()
        expected, actual = step(x), compiled(x)
        assert_same(actual, expected)
        assert actual.stride() == expected.stride()
        assert_same(
            torch.autograd.grad(actual.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0]
        )


def test_keeps_no_activation(device):
    """For the backward: a byte an output and nothing of the input's size."""
    x = torch.randn(2, 3, 8, 8, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = F.relu_max_pool2d(x, 2)
    assert sum(t.nbytes for t in kept) == output.numel()
    assert_no_leak(lambda t: F.relu_max_pool2d(t, 2), x)


def test_autocast_keeps_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        x = torch.randn(1, 1, 4, 4, device=device)
        assert F.relu_max_pool2d(x, 2).dtype == torch.float32


@pytest.mark.parametrize(("args", "kwargs"), BAD, ids=str)
def test_bad_window(device, args, kwargs):
    x = torch.randn(2, 3, 8, 8, device=device)
    with pytest.raises(RuntimeError) as expected:
        chain(x, *args, **kwargs)
    with pytest.raises(expected.type) as error:
        F.relu_max_pool2d(x, *args, **kwargs)
    first_words = str(expected.value).split(":")[0].split(", but")[0]
    assert first_words in str(error.value)


def test_bad_shape_and_dtype(device):
    for shape in ((8, 8), (2, 0, 8, 8), (2, 3, 0, 8)):
        with pytest.raises(RuntimeError, match="3D or 4D"):
            F.relu_max_pool2d(torch.randn(shape, device=device), 2)
    for dtype in (torch.bool, torch.complex64):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            F.relu_max_pool2d(torch.ones(1, 1, 4, 4, device=device).to(dtype), 2)


def test_module(device):
    module = ours.ReLUMaxPool2d(3, stride=2, padding=1, ceil_mode=True)
    x = torch.randn(2, 4, 9, 10, device=device)
    assert_same(module(x), nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 2, 1, ceil_mode=True))(x))
    assert repr(module).startswith("warpwright.ReLUMaxPool2d(kernel_size=3, stride=2")
    with pytest.raises(ValueError, match="return_indices"):
        ours.ReLUMaxPool2d(2, return_indices=True)(x)
