"""Batch norm with SiLU and Hardswish: what test_batch_norm_relu*.py do not ask of all forms."""

import pytest
import torch
import torch.nn.functional as native
from batch_norm_cases import parameters
from common import layouts, opcheck

import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native

ACTIVATIONS = ("silu", "hardswish")
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)


def fused(activation, *args, **kwargs):
    return getattr(F, f"batch_norm_{activation}")(*args, **kwargs)


def chain(activation, *args, **kwargs):
    return getattr(native, activation)(native.batch_norm(*args, **kwargs))


@each_activation
def test_opcheck(device, activation):
    ops = torch.ops.warpwright
    mean, var, weight, bias = parameters(4, device, torch.float32)
    weight.requires_grad_()
    bias.requires_grad_()
    for name, x in layouts(torch.randn(3, 4, 5, 2, device=device)):
        if name.startswith("offset"):
            continue
        x = x.detach().requires_grad_()
        forward = ops.batch_norm_activation.default
        opcheck(forward, (x, weight, bias, mean, var, False, 1e-5, activation))
        opcheck(forward, (x, weight, None, None, None, True, 1e-5, activation))
        stats = mean.clone(), var.clone()
        update = ops.batch_norm_activation_update.default
        opcheck(update, (x, weight, bias, *stats, 0.1, 1e-5, activation))
        _, save_mean, rstd = ops.batch_norm_activation(
            x, weight, bias, None, None, True, 1e-5, activation
        )
        grad = torch.randn_like(x).requires_grad_()
        for training, wanted in ((True, [True] * 3), (False, [True, False, True])):
            saved = save_mean.detach(), rstd.detach()
            opcheck(
                ops.batch_norm_activation_backward.default,
                (grad, x, weight, bias, *saved, training, 1e-5, activation, wanted),
            )


VALUES = (
    *(0.0, -0.0, 3.0, -3.0, 2.9999998, -2.9999998, 3.0000002, -3.0000002, 1.0, -1.0),
    *(20.0, -20.0, 87.0, -87.0, 89.0, -89.0, 104.0, -104.0, 1e4, -1e4, 3e38, -3e38),
    *(float("inf"), -float("inf"), float("nan")),
)


@each_activation
def test_special_values(device, dtype, activation):
    """The identity as a batch norm: the activation alone, over both ends of its range."""
    values = torch.tensor(VALUES).to(device, dtype)
    one = torch.ones(16, device=device, dtype=dtype)
    zero = torch.zeros_like(one)
    for fmt in (torch.contiguous_format, torch.channels_last):
        # Whole vectors: native's own result at NaN differs between a vector and the elements after.
        x = values[None, None, :, None].expand(2, 16, -1, 16).contiguous(memory_format=fmt)
        x.requires_grad_()
        output = fused(activation, x, zero, one, one, zero, eps=1e-30)
        expected = chain(activation, x, zero, one, one, zero, eps=1e-30)
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(x))
        (reference,) = torch.autograd.grad(expected, x, torch.ones_like(x))
        for mine, theirs in ((output, expected), (grad, reference)):
            assert torch.equal(mine.isnan(), theirs.isnan())
            finite = theirs.isfinite()
            assert torch.equal(mine.isfinite(), finite)
            torch.testing.assert_close(mine[finite], theirs[finite])


@each_activation
@pytest.mark.parametrize("shape", [(64, 40, 14, 14), (6, 8, 7, 7), (1500, 48)], ids=str)
def test_as_accurate_as_double(device, shape, activation):
    """One rounding: never worse than the chain, which rounds the normalised value too."""
    x = torch.randn(shape, device=device).bfloat16()
    args = (x, None, None, None, None, True)
    exact = chain(activation, x.double(), *args[1:])
    mine, theirs = fused(activation, *args), chain(activation, *args)
    assert_as_good_as_native(mine, theirs, exact, "output", factor=1.0)


def test_bad_activation(device):
    ops = torch.ops.warpwright
    x, stat = torch.ones(2, 3, 4, device=device), torch.ones(3, device=device)
    message = "batch_norm_activation: activation: expected silu or hardswish, got "
    for name in ("relu", "none", "", "SiLU"):
        for tensor in (x, x.to("meta")):
            with pytest.raises(RuntimeError, match=message + name):
                ops.batch_norm_activation(tensor, None, None, None, None, True, 1e-5, name)
        with pytest.raises(RuntimeError, match=message + name):
            ops.batch_norm_activation_backward(
                x, x, None, None, stat, stat, True, 1e-5, name, [True] * 3
            )
