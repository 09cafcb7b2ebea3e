"""A convolution and what follows it, in terms of ATen's operators; see _aten."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _native
from ._aten import (
    batch_norm,
    batch_norm_backward,
    batch_norm_relu_max_pool2d,
    batch_norm_relu_max_pool2d_update,
    batch_norm_update,
    conv2d_backward,
    max_pool2d_backward,
    relu_mask,
)


def conv2d_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str,
    *windows: Any,
) -> tuple[Tensor, ...]:
    convolved = torch.conv2d(input, weight, bias, *windows)
    output, *kept = batch_norm(convolved, norm_weight, norm_bias, None, None, True, eps)
    output = _native.activated(output, activation, residual)
    return output, convolved, *kept, relu_mask(output, residual)


def conv2d_batch_norm_update(
    input: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    *norm, activation, stride, padding, dilation, groups = args
    convolved = torch.conv2d(input, weight, bias, stride, padding, dilation, groups)
    output, *kept = batch_norm_update(convolved, *norm)
    output = _native.activated(output, activation, residual)
    return output, convolved, *kept, relu_mask(output, residual)


def _no_moments(input: Tensor) -> Tensor:
    """Of the windows: a backward that finds none computes them."""
    return input.new_empty(0, dtype=torch.float64)


def conv2d_batch_norm_relu_max_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    *windows: Any,
) -> tuple[Tensor, ...]:
    convolved = torch.conv2d(input, weight, bias, *windows[:4])
    norm = norm_weight, norm_bias, None, None, True, eps
    results = batch_norm_relu_max_pool2d(convolved, *norm, *windows[4:])[:4]
    return *results, _no_moments(input)


def conv2d_batch_norm_relu_max_pool2d_update(
    input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    norm, windows = args[:6], args[6:]
    convolved = torch.conv2d(input, weight, bias, *windows[:4])
    results = batch_norm_relu_max_pool2d_update(convolved, *norm, *windows[4:])[:4]
    return *results, _no_moments(input)


def conv2d_batch_norm_relu_max_pool2d_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    codes: Tensor,
    moments: Tensor,
    *windows: Any,
) -> tuple[Tensor | None, ...]:
    conv, pool, wanted = windows[:4], windows[4:8], windows[8]
    stride, padding, dilation, groups = conv
    convolved = torch.conv2d(input, weight, bias, *conv)
    dz = max_pool2d_backward(grad, codes, list(convolved.shape), *pool, False)
    through_conv = any(wanted[:3])
    d_convolved, *norms = batch_norm_backward(
        dz, convolved, norm_weight, mean, rstd, True, [through_conv, *wanted[3:]]
    )
    if d_convolved is None:
        return None, None, None, *norms
    options = (stride, padding, dilation, groups, wanted[:3])
    return *conv2d_backward(d_convolved, input, weight, *options), *norms
