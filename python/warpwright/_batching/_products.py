"""Rules of linear and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, images, into, one_by_one, out_of, per_sample, results


def linear(info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Any) -> tuple[Tensor, int]:
    samples = info.batch_size
    x = front(x, dims[0], samples)
    if dims[1] is None and (bias is None or dims[2] is None):
        return ops.linear(x, weight, bias), 0
    if dims[1] is None:
        y = ops.linear(x, weight)
    else:
        rows = x.reshape(samples, -1, x.shape[-1])
        y = torch.bmm(rows, front(weight, dims[1], samples).mT).view(*x.shape[:-1], -1)
    if bias is None:
        return y, 0
    bias = front(bias, dims[2], samples)
    return y + bias.view(samples, *[1] * (y.dim() - 2), -1), 0


def linear_backward(
    info: Any,
    dims: Dims,
    grad: Tensor,
    x: Any,
    weight: Any,
    mask: Sequence[bool],
    float32_mask: Sequence[bool] = (False, False, False),
) -> tuple[Any, Any]:
    samples = info.batch_size
    grad = front(grad, dims[0], samples)
    rows = grad.reshape(samples, -1, grad.shape[-1])
    grads: list[Tensor | None] = [None, None, None]
    if mask[0] and dims[2] is None:
        wanted = [True, False, False]
        grads[0] = ops.linear_backward(grad, None, weight, wanted, float32_mask)[0]
    elif mask[0]:
        product = torch.bmm(rows, front(weight, dims[2], samples))
        grads[0] = product.view(*grad.shape[:-1], -1)
    if mask[1]:
        inputs = front(x, dims[1], samples).reshape(samples, rows.shape[1], -1)
        grads[1] = torch.bmm(rows.mT, inputs)
    if mask[2]:
        grads[2] = rows.sum(1)
    for i, gradient in enumerate(grads):
        if float32_mask[i] and gradient is not None:
            grads[i] = gradient.float()
    return results(*((g, None if g is None else 0) for g in grads))


def linear_activation(
    info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> tuple[Any, Any]:
    samples = info.batch_size
    if dims[1] is not None or (bias is not None and dims[2] is not None):
        return one_by_one(ops.linear_activation, samples, dims, (x, weight, bias, *rest))
    y, before = ops.linear_activation(front(x, dims[0], samples), weight, bias, *rest)
    return results((y, 0), (before, 0 if before.numel() or not y.numel() else None))


def linear_activation_backward(
    info: Any,
    dims: Dims,
    grad: Tensor,
    kept: Tensor,
    activation: str,
    bias_gradient: bool,
    float32_bias: bool = False,
) -> tuple[Any, Any]:
    samples = info.batch_size
    rows = front(grad, dims[0], samples), front(kept, dims[1], samples)
    dz, _ = ops.linear_activation_backward(*rows, activation, False)
    dtype = torch.float32 if float32_bias else dz.dtype
    columns = dz.reshape(samples, -1, dz.shape[-1])
    bias = columns.sum(1, dtype=dtype) if bias_gradient else None
    return results((dz, 0), (bias, None if bias is None else 0))


def mlp_hidden_gradient(
    info: Any, dims: Dims, grad: Tensor, weight: Tensor, kept: Tensor, activation: str
) -> tuple[Any, Any]:
    """Only the trace of a compilation calls it, and no transform does."""
    args = (grad, weight, kept, activation)
    return one_by_one(ops.mlp_hidden_gradient, info.batch_size, dims, args)


def linear_quantized(info: Any, dims: Dims, x: Tensor, *weight: Any) -> tuple[Tensor, int]:
    """Rows; a bias per sample is added after the product."""
    samples, (codes, scales, zeros, bias, *form) = info.batch_size, weight
    if any(d is not None for d in dims[1:4]):
        return one_by_one(ops.linear_quantized, samples, dims, (x, *weight))
    x = front(x, dims[0], samples)
    if bias is None or dims[4] is None:
        return ops.linear_quantized(x, codes, scales, zeros, bias, *form), 0
    y = ops.linear_quantized(x, codes, scales, zeros, None, *form)
    bias = front(bias, dims[4], samples)
    return y + bias.view(samples, *[1] * (y.dim() - 2), -1), 0


def linear_quantized_backward(
    info: Any, dims: Dims, grad: Tensor, *weight: Any
) -> tuple[Tensor, int]:
    if any(d is not None for d in dims[1:4]):
        op = ops.linear_quantized_backward
        return one_by_one(op, info.batch_size, dims, (grad, *weight))
    return ops.linear_quantized_backward(front(grad, dims[0], info.batch_size), *weight), 0


def conv2d(
    info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Any, *windows: Any
) -> tuple[Tensor, int]:
    samples, *window, groups = info.batch_size, *windows
    channels = x.dim() - (3 if dims[0] is None else 4)  # a sample's dimension of channels
    if dims[1] is None and (bias is None or dims[2] is None):
        y = ops.conv2d(images(x, dims[0], samples), weight, bias, *window, groups)
        return per_sample(y, channels == 0, samples), 0
    if dims[1] is None:
        y, _ = conv2d(info, (*dims[:2], None), x, weight, None, *windows)
        bias = front(bias, dims[2], samples)[..., None, None]
        return y + (bias if channels == 0 else bias.unsqueeze(1)), 0
    y = ops.conv2d(
        into(x, dims[0], samples, channels),
        into(weight, dims[1], samples, 0),
        into(bias, dims[2], samples, 0),
        *window,
        groups * samples,
    )
    return y.unflatten(channels, (samples, -1)), channels


def conv2d_backward(
    info: Any, dims: Dims, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Any, Any]:
    samples, *window, groups, mask, addend, float32 = info.batch_size, *rest
    channels = grad.dim() - (3 if dims[0] is None else 4)
    grads: list[tuple[Tensor | None, int | None]] = [(None, None)] * 3
    if mask[2]:
        bias = front(grad, dims[0], samples).sum(((1,) if channels == 1 else ()) + (-2, -1))
        grads[2] = bias.float() if float32 else bias, 0
    shared = mask[0] and dims[2] is None  # the input's gradient needs no groups
    if shared:
        grad_input = ops.conv2d_backward(
            images(grad, dims[0], samples),
            images(x, dims[1], samples),
            weight,
            *window,
            groups,
            [True, False, False],
        )[0]
        grads[0] = per_sample(grad_input, channels == 0, samples), 0
    if mask[1] or (mask[0] and not shared):
        grad_input, grad_weight, _ = ops.conv2d_backward(
            into(grad, dims[0], samples, channels),
            into(x, dims[1], samples, channels),
            into(weight, dims[2], samples, 0),
            *window,
            groups * samples,
            [mask[0] and not shared, mask[1], False],
            None,
            float32,
        )
        grads[1] = out_of(grad_weight, samples, 0)
        if not shared:
            grads[0] = out_of(grad_input, samples, channels)
    if addend is not None and mask[0]:
        grads[0] = front(*grads[0], samples) + front(addend, dims[-2], samples), 0
    return results(*grads)


def conv_transpose2d(
    info: Any, dims: Dims, x: Tensor, weight: Tensor, bias: Any, *windows: Any
) -> tuple[Tensor, int]:
    samples, (*window, groups, dilation) = info.batch_size, windows
    channels = x.dim() - (3 if dims[0] is None else 4)  # a sample's dimension of channels
    if dims[1] is None and (bias is None or dims[2] is None):
        y = ops.conv_transpose2d(images(x, dims[0], samples), weight, bias, *windows)
        return per_sample(y, channels == 0, samples), 0
    if dims[1] is None:
        y, _ = conv_transpose2d(info, (*dims[:2], None), x, weight, None, *windows)
        bias = front(bias, dims[2], samples)[..., None, None]
        return y + (bias if channels == 0 else bias.unsqueeze(1)), 0
    y = ops.conv_transpose2d(
        into(x, dims[0], samples, channels),
        into(weight, dims[1], samples, 0),
        into(bias, dims[2], samples, 0),
        *window,
        groups * samples,
        dilation,
    )
    return y.unflatten(channels, (samples, -1)), channels


def conv_transpose2d_cat(
    info: Any, dims: Dims, skip: Tensor, x: Tensor, weight: Tensor, bias: Any, *rest: Any
) -> tuple[Tensor, int]:
    samples, (*windows, skip_first) = info.batch_size, rest
    if dims[2] is None and (bias is None or dims[3] is None):  # N
        operands = images(skip, dims[0], samples), images(x, dims[1], samples)
        y = ops.conv_transpose2d_cat(*operands, weight, bias, *rest)
        single = x.dim() == (3 if dims[1] is None else 4)
        return per_sample(y, single, samples), 0
    y, at = conv_transpose2d(info, dims[1:], x, weight, bias, *windows)
    both = front(skip, dims[0], samples), y.movedim(at, 0)
    return torch.cat(both if skip_first else both[::-1], -3), 0


def conv_transpose2d_backward(
    info: Any, dims: Dims, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any
) -> tuple[Any, Any]:
    samples, (*window, groups, dilation, mask) = info.batch_size, rest
    channels = grad.dim() - (3 if dims[0] is None else 4)
    grads: list[tuple[Tensor | None, int | None]] = [(None, None)] * 3
    if mask[2]:
        bias = front(grad, dims[0], samples).sum(((1,) if channels == 1 else ()) + (-2, -1))
        grads[2] = bias, 0
    shared = mask[0] and dims[2] is None  # the input's gradient needs no groups
    if shared:
        operands = images(grad, dims[0], samples), images(x, dims[1], samples), weight
        only_input = [True, False, False]
        grad_input = ops.conv_transpose2d_backward(*operands, *rest[:-1], only_input)[0]
        grads[0] = per_sample(grad_input, channels == 0, samples), 0
    if mask[1] or (mask[0] and not shared):
        grad_input, grad_weight, _ = ops.conv_transpose2d_backward(
            into(grad, dims[0], samples, channels),
            into(x, dims[1], samples, channels),
            into(weight, dims[2], samples, 0),
            *window,
            groups * samples,
            dilation,
            [mask[0] and not shared, mask[1], False],
        )
        grads[1] = out_of(grad_weight, samples, 0)
        if not shared:
            grads[0] = out_of(grad_input, samples, channels)
    return results(*grads)


def fft_conv(
    info: Any,
    dims: Dims,
    first: Tensor,
    second: Tensor,
    bias: Any,
    padding: Sequence[int],
    groups: int,
    wanted: str,
) -> tuple[Tensor, int]:
    samples = info.batch_size
    if wanted == "output" and bias is not None and dims[2] is not None:
        y, at = fft_conv(info, (*dims[:2], None), first, second, None, padding, groups, wanted)
        terms = front(bias, dims[2], samples)
        shape = (samples, 1, -1, *[1] * len(padding[::2]))
        return y.movedim(at, 0) + terms.view(shape), 0
    if wanted != "weight" and dims[1] is None:  # N
        x = front(first, dims[0], samples).flatten(0, 1)
        y = ops.fft_conv(x, second, bias, padding, groups, wanted)
        return y.unflatten(0, (samples, -1)), 0
    # The samples are groups: of the channels of images, of the rows of a weight.
    x = into(first, dims[0], samples, 1)
    w = into(second, dims[1], samples, 1 if wanted == "weight" else 0)
    repeated = None if bias is None else bias.repeat(samples)
    y = ops.fft_conv(x, w, repeated, padding, groups * samples, wanted)
    at = 0 if wanted == "weight" else 1
    return y.unflatten(at, (samples, -1)), at
