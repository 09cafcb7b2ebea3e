"""Batch norm with an activation has the derivatives of the chain that it replaces, and keeps less for them."""

import pytest
import torch
from batch_norm_cases import parameters
from batch_norm_relu_cases import TRAINING, chain, every_form, fused, on_copies, residual_like
from common import (
    assert_compiles_with_running_stats,
    assert_func_transforms_agree,
    assert_no_leak,
    gradcheck,
    layouts,
    opcheck,
    subsets,
)

import warpwright.functional as F
from warpwright.testing import assert_same


@TRAINING
@pytest.mark.parametrize("needs", subsets(4), ids=str)
def test_gradients(device, training, needs):
    for shape, fmt in (((3, 2, 2, 2), torch.channels_last), ((2, 2, 3), torch.contiguous_format)):
        mean, var, weight, bias = parameters(2, device, torch.float64)
        x = torch.randn(shape, device=device, dtype=torch.float64).contiguous(memory_format=fmt)
        residual = torch.randn_like(x)
        tensors = (x, weight, bias, residual)
        inputs = [t.requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]

        def function(x, weight, bias, residual, mean=mean, var=var):
            stats = (mean.clone(), var.clone())
            return F.batch_norm_add_relu(x, residual, *stats, weight, bias, training, eps=0.1)

        gradcheck(function, inputs)
        if any(needs[:3]):
            gradcheck(lambda x, w, b, f=function: f(x, w, b, torch.zeros_like(x)), inputs[:3])


@pytest.mark.parametrize("form", ["relu", "silu", "hardswish"])
@TRAINING
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradients_without_residual(device, training, needs, form):
    for shape, fmt in (((3, 2, 2, 2), torch.channels_last), ((2, 2, 3), torch.contiguous_format)):
        mean, var, weight, bias = parameters(2, device, torch.float64)
        x = torch.randn(shape, device=device, dtype=torch.float64).contiguous(memory_format=fmt)
        inputs = [t.requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]

        def function(x, weight, bias, mean=mean, var=var):
            stats = mean.clone(), var.clone()
            return fused(form)(x, None, *stats, weight, bias, training, eps=0.1)

        gradcheck(function, inputs)


@every_form
@TRAINING
def test_double_backward_matches_native(device, training, form):
    mean, var, weight, bias = parameters(4, device, torch.float64)
    x = torch.randn(5, 4, 3, 3, device=device, dtype=torch.float64)
    residual = torch.randn_like(x)

    def second(f):
        tensors = (x, weight, bias, residual)[: 4 if form == "add_relu" else 3]
        leaves = [t.clone().requires_grad_() for t in tensors]
        added = leaves[3] if form == "add_relu" else None
        output = on_copies(f, form, training)(leaves[0], added, *leaves[1:3], mean, var)
        grads = torch.autograd.grad(output.pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)

    torch.testing.assert_close(second(fused), second(chain))


@every_form
def test_func_transforms(device, form):
    x = torch.randn(3, 4, 2, 3, device=device, dtype=torch.float64)
    _, _, weight, bias = parameters(4, device, torch.float64)
    assert_func_transforms_agree(
        fused(form),
        chain(form),
        lambda f, stats: (
            lambda t: f(t, t.cos() if form == "add_relu" else None, *stats, weight, bias, True)
        ),
        x,
    )


@every_form
def test_forward_ad_of_parameters(device, form):
    x = torch.randn(3, 4, 5, device=device, dtype=torch.float64)
    added = (torch.randn_like(x),) if form == "add_relu" else ()
    rest = () if added else (None,)
    mean, var, weight, bias = parameters(4, device, torch.float64)
    for training in (True, False):
        results = [
            torch.func.jvp(
                lambda *a, f=f, tr=training: on_copies(f, form, tr)(x, *rest, *a, mean, var),
                (*added, weight, bias),
                (*(x for _ in added), bias, weight),
            )
            for f in (fused, chain)
        ]
        torch.testing.assert_close(results[0], results[1])


def test_opcheck(device):
    ops = torch.ops.warpwright
    mean, var, weight, bias = parameters(4, device, torch.float32)
    weight.requires_grad_()
    bias.requires_grad_()
    for name, x in layouts(torch.randn(3, 4, 5, 2, device=device)):
        if name.startswith("offset"):
            continue
        x = x.detach().requires_grad_()
        for residual in (None, torch.randn_like(x).requires_grad_()):
            opcheck(
                ops.batch_norm_relu.default, (x, residual, weight, bias, mean, var, False, 1e-5)
            )
            opcheck(
                ops.batch_norm_relu.default, (x, residual, weight, None, None, None, True, 1e-5)
            )
            stats = mean.clone(), var.clone()
            opcheck(
                ops.batch_norm_relu_update.default, (x, residual, weight, bias, *stats, 0.1, 1e-5)
            )
            _, save_mean, rstd, mask = ops.batch_norm_relu(
                x, residual, weight, bias, None, None, True, 1e-5
            )
            assert (mask.numel() == 0) == (residual is None)
            grad = torch.randn_like(x).requires_grad_()
            for training, wanted in (
                (True, [True] * 4),
                (False, [True, False, True, False]),
                (True, [False, False, False, True]),
            ):
                saved = save_mean.detach(), rstd.detach(), mask
                opcheck(
                    ops.batch_norm_relu_backward.default,
                    (grad, x, weight, bias, *saved, training, wanted),
                )


@every_form
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compile(device, dynamic, fmt, form):
    # float64: evaluation is native's while compiling, and the gradient is a sum that cancels.
    _, _, weight, bias = parameters(4, device, torch.float64)
    weight.requires_grad_()
    bias.requires_grad_()

    def step(x, mean, var):
        residual = x.cos() if form == "add_relu" else None
        y = fused(form)(x * 2, residual, mean, var, weight, bias, training=True)
        return fused(form)(y, residual, mean, var, weight, bias)

    assert_compiles_with_running_stats(step, (weight, bias), fmt, dynamic)


@every_form
def test_deterministic(device, form):
    x = torch.randn(64, 24, 28, 28, device=device)
    for fmt in (torch.contiguous_format, torch.channels_last):
        y = x.contiguous(memory_format=fmt).requires_grad_()
        residual = residual_like(y, form)
        runs = []
        for _ in range(3):
            output = fused(form)(y, residual, None, None, training=True)
            leaves = (y,) if residual is None else (y, residual)
            runs.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
        for run in runs[1:]:
            assert_same(run, runs[0])


@every_form
def test_results_are_freed(device, form):
    x = torch.randn(4, 3, 5, 5, device=device, requires_grad=True)
    assert_no_leak(lambda t: fused(form)(t, residual_like(t, form), None, None, training=True), x)


@every_form
def test_keeps_no_activation(device, form):
    """The graph holds the input, the parameters and vectors of one value per channel. With a
    residual it also holds one byte per 16 bytes of input."""
    x = torch.randn(8, 16, 12, 12, device=device, requires_grad=True)
    residual = residual_like(x, form)
    bytes_of_mask = 0 if residual is None else x.numel() * 4 // 16
    kept = []

    def keep(t):
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        fused(form)(x, residual, None, None, training=True)
    own = {t.data_ptr(): t.nbytes for t in kept if t.numel() and t.data_ptr() != x.data_ptr()}
    assert sum(own.values()) == 2 * 16 * 4 + bytes_of_mask
