"""Batch norm with each activation, and the chain of native ops that it replaces."""

import pytest
import torch
import torch.nn.functional as native

import warpwright.functional as F

FORMS = ("relu", "add_relu", "silu", "hardswish")
every_form = pytest.mark.parametrize("form", FORMS)
TRAINING = pytest.mark.parametrize("training", [True, False])


def exact_hardswish(z):
    """Native's CUDA kernel multiplies float64 by a sixth that was rounded to float32. The CPU's does not."""
    if z.is_cuda and z.dtype == torch.float64:
        return native.hardswish(z.cpu()).to(z.device)
    return native.hardswish(z)


def chain(form):
    name = form.removeprefix("add_")
    activation = exact_hardswish if name == "hardswish" else getattr(native, name)

    def run(x, residual, *args, **kwargs):
        y = native.batch_norm(x, *args, **kwargs)
        return activation(y if residual is None else y + residual)

    return run


def fused(form):
    def run(x, residual, *args, **kwargs):
        added = () if residual is None else (residual,)
        return getattr(F, f"batch_norm_{form}")(x, *added, *args, **kwargs)

    return run


def on_copies(make, form, training, **kwargs):
    """Leaves the running statistics that it is given as they are."""
    function = make(form)

    def call(x, residual, weight, bias, mean, var):
        stats = (None, None) if mean is None else (mean.clone(), var.clone())
        if make is chain and weight is None and bias is not None:
            weight = torch.ones_like(bias)  # native's CUDA backward fails on a lone bias
        return function(x, residual, *stats, weight, bias, training, **kwargs)

    return call


def residual_like(x, form):
    return torch.randn_like(x).detach().requires_grad_() if form == "add_relu" else None
