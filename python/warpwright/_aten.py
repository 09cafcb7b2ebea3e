"""Our operators in terms of ATen's, their backward operators too.

Each function takes the arguments of its operator and gives all its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _native

native, aten = torch.nn.functional, torch.ops.aten

# ---- products ----


def linear_backward(
    grad: Tensor,
    input: Tensor | None,
    weight: Tensor | None,
    mask: list[bool],
    float32_mask: Sequence[bool] = (False, False, False),
) -> tuple[Tensor | None, ...]:
    if any(float32_mask):
        grads = linear_backward(grad, input, weight, mask)
        return tuple(
            g.float() if wide and g is not None else g
            for g, wide in zip(grads, float32_mask, strict=True)
        )
    rows = grad.flatten(0, -2) if grad.dim() > 1 else grad[None]
    grad_input = grad_weight = None
    if mask[0] and weight is not None:
        grad_input = grad @ weight if weight.dim() == 2 else grad[..., None] * weight
    if mask[1] and input is not None:
        columns = input.flatten(0, -2) if input.dim() > 1 else input[None]
        grad_weight = rows.t() @ columns
    return grad_input, grad_weight, rows.sum(0) if mask[2] else None


def split_qkv(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (third.unflatten(-1, (heads, -1)) for third in qkv.chunk(3, -1))
    return query, key, value


def softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return aten._softmax_backward_data(grad, output, dim, output.dtype).to(input_dtype)


def log_softmax_backward(
    grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    return aten._log_softmax_backward_data(grad, output, dim, output.dtype).to(input_dtype)


def linear_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str, keep: bool = False
) -> tuple[Tensor, Tensor]:
    z = native.linear(input, weight, bias)
    return _native.ACTIVATIONS[activation](z), z if keep else z.new_empty(0)


def _smooth_backward(grad: Tensor, z: Tensor, activation: str) -> Tensor:
    """The gradient of SiLU or a GELU at ``z``."""
    if activation == "silu":
        return aten.silu_backward(grad, z)
    form = "tanh" if activation == "gelu_tanh" else "none"
    return aten.gelu_backward(grad, z, approximate=form)


def linear_activation_backward(
    grad: Tensor, kept: Tensor, activation: str, bias_gradient: bool, float32_bias: bool = False
) -> tuple[Tensor, Tensor | None]:
    if float32_bias:
        dz, db = linear_activation_backward(grad, kept, activation, bias_gradient)
        return dz, db if db is None else db.float()
    if activation == "relu":  # the output is kept, of the others the pre-activation
        dz = aten.threshold_backward(grad, kept, 0)
    else:
        dz = _smooth_backward(grad, kept, activation)
    return dz, dz.flatten(0, -2).sum(0) if bias_gradient and dz.dim() > 1 else (
        dz.clone() if bias_gradient else None
    )


def conv2d_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    mask: list[bool],
    addend: Tensor | None = None,
    float32_parameters: bool = False,
) -> tuple[Tensor | None, ...]:
    single = input.dim() == 3
    pair = [_pair(value) for value in (stride, padding, dilation)]
    operands = (grad[None], input[None]) if single else (grad, input)
    found = aten.convolution_backward(
        *operands, weight, [weight.shape[0]], *pair, False, [0, 0], groups, mask
    )
    dx = found[0][0] if single and mask[0] else found[0]
    parameters = found[1:]
    if float32_parameters:
        parameters = tuple(grad if grad is None else grad.float() for grad in parameters)
    grads = (dx if addend is None else dx + addend, *parameters)
    return tuple(grad if wanted else None for grad, wanted in zip(grads, mask, strict=True))


def conv_transpose2d_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    groups: int,
    dilation: list[int],
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    single = input.dim() == 3
    windows = [_pair(value) for value in (stride, padding, dilation)]
    operands = (grad[None], input[None]) if single else (grad, input)
    channels = [weight.shape[1] * groups]
    found = aten.convolution_backward(
        *operands, weight, channels, *windows, True, _pair(output_padding), groups, mask
    )
    grads = (found[0][0] if single and mask[0] else found[0], *found[1:])
    return tuple(grad if wanted else None for grad, wanted in zip(grads, mask, strict=True))


def _pair(value: Any) -> list[int]:
    return [*value] if len(value) == 2 else [*value] * 2


# ---- batch norm ----


def _per_channel(vector: Tensor | None, like: Tensor) -> Any:
    return 1 if vector is None else vector.view([1, -1] + [1] * (like.dim() - 2))


def _statistics(
    input: Tensor, mean: Tensor | None, var: Tensor | None, training: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Mean and reciprocal deviation as our ops keep them, of the batch or the running statistics."""
    accum = torch.promote_types(input.dtype, torch.float32)
    if training or mean is None or var is None:
        dims = [0, *range(2, input.dim())]
        var, mean = torch.var_mean(input.to(accum), dims, correction=0)
    return mean.to(accum), torch.rsqrt(var.to(accum) + eps)


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output = _native.batch_norm(input, weight, bias, mean, var, training, eps)[0]
    return (output, *_statistics(input, mean, var, training, eps))


def batch_norm_update(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    output = _native.batch_norm_update(input, *args)[0]
    return (output, *_statistics(input, None, None, True, args[-1]))


def batch_norm_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    dims = [0, *range(2, input.dim())]
    dy = grad.to(mean.dtype)
    xhat = (input.to(mean.dtype) - _per_channel(mean, input)) * _per_channel(rstd, input)
    by_weight, by_bias = (dy * xhat).sum(dims), dy.sum(dims)
    dx = dy
    if training:
        count = input.numel() // input.shape[1]
        dx = dy - (_per_channel(by_bias, input) + xhat * _per_channel(by_weight, input)) / count
    dx = dx * _per_channel(rstd, input) * _per_channel(weight, input)
    like = mean if weight is None else weight
    return (
        dx.to(input.dtype) if mask[0] else None,
        by_weight.to(like.dtype) if mask[1] else None,
        by_bias.to(like.dtype) if mask[2] else None,
    )


def _mask_places(output: Tensor) -> tuple[Tensor, Tensor, int]:
    """The byte and the bit of each element of ``output``, in memory order; and the number of bytes.

    The mask's layout is batch_norm.h's: a bit per element, a byte per 16 bytes of ``output``.
    """
    vec = 16 // output.element_size()
    batch, channels = output.shape[:2]
    spatial = output.numel() // max(batch * channels, 1)
    element = torch.arange(output.numel(), device=output.device)
    if spatial == 1 or not output.is_contiguous():
        if channels % vec:
            return element, element * 0, output.numel()
        return element // vec, element % vec, output.numel() // vec
    vectors = spatial // vec if spatial % vec == 0 else (spatial + 2 * vec - 2) // vec
    plane = element // spatial
    first = plane * spatial // vec  # the vector in which the plane starts
    return plane * vectors + element // vec - first, element % vec, batch * channels * vectors


def _in_memory_order(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous() or tensor.dim() < 4:
        return tensor.flatten()
    return tensor.movedim(1, -1).flatten()


def relu_mask(output: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return output.new_empty(0, dtype=torch.uint8)
    place, bit, count = _mask_places(output)
    positive = (_in_memory_order(output) > 0).to(torch.int64)
    bytes_ = torch.zeros(count, dtype=torch.int64, device=output.device)
    return bytes_.index_add(0, place, positive << bit).to(torch.uint8)


def batch_norm_relu(
    input: Tensor, residual: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, mean, rstd = batch_norm(input, *args)
    output = torch.relu(output if residual is None else output + residual)
    return output, mean, rstd, relu_mask(output, residual)


def batch_norm_relu_update(
    input: Tensor, residual: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    output, mean, rstd = batch_norm_update(input, *args)
    output = torch.relu(output if residual is None else output + residual)
    return output, mean, rstd, relu_mask(output, residual)


def batch_norm_activation(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, mean, rstd = batch_norm(input, *args[:-1])
    return _native.activated(output, args[-1]), mean, rstd


def batch_norm_activation_update(input: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    output, mean, rstd = batch_norm_update(input, *args[:-1])
    return _native.activated(output, args[-1]), mean, rstd


def batch_norm_activation_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    eps: float,
    activation: str,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    z = _normalized(input, weight, bias, mean, rstd)
    if activation == "silu":
        dy = torch.ops.aten.silu_backward(grad, z)
    else:
        dy = torch.ops.aten.hardswish_backward(grad, z)
    return batch_norm_backward(dy, input, weight, mean, rstd, training, wanted)


def _normalized(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    y = (input.to(mean.dtype) - _per_channel(mean, input)) * _per_channel(rstd, input)
    y = y * _per_channel(weight, input)
    return (y if bias is None else y + _per_channel(bias, input)).to(input.dtype)


def batch_norm_relu_backward(
    grad: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    mask: Tensor,
    training: bool,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    if mask.numel() == 0:
        positive = _normalized(input, weight, bias, mean, rstd) > 0
    else:
        place, bit, _ = _mask_places(input)
        flat = (mask[place].to(torch.int64) >> bit) & 1 == 1
        if input.is_contiguous() or input.dim() < 4:
            positive = flat.view(input.shape)
        else:
            positive = flat.view(input.movedim(1, -1).shape).movedim(-1, 1)
    dy = torch.where(positive, grad, 0.0)
    found = batch_norm_backward(dy, input, weight, mean, rstd, training, wanted[:3])
    return (*found, dy if wanted[3] else None)


# ---- pooling ----

Window = tuple[Any, Any, Any, Any]  # kernel, stride, padding, dilation


def _window(window: tuple[Any, ...]) -> tuple[list[int], ...]:
    kernel, stride, padding, dilation = (
        list(value) if isinstance(value, (tuple, list)) else [value] for value in window
    )
    return tuple(_pair(value) for value in (kernel, stride or kernel, padding, dilation))


def _grid(codes: Tensor, window: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Row and column of the first tap of each output's window, as tensors that broadcast."""
    _, stride, padding, _ = _window(window)
    rows = torch.arange(codes.shape[-2], device=codes.device) * stride[0] - padding[0]
    columns = torch.arange(codes.shape[-1], device=codes.device) * stride[1] - padding[1]
    return rows[:, None], columns[None]


def _no_tap(codes: Tensor) -> Tensor:
    return codes == (255 if codes.dtype == torch.uint8 else -1)


def max_pool2d_with_codes(
    input: Tensor,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    window = (kernel, stride, padding, dilation)
    output, index = aten.max_pool2d_with_indices(input, *_window(window), ceil_mode)
    (_, width), (_, _, _, (down, across)) = input.shape[-2:], _window(window)
    row, column = _grid(output, window)
    kernel = _window(window)[0]
    tap = (index // width - row) // down * kernel[1] + (index % width - column) // across
    return output, tap.to(torch.uint8 if kernel[0] * kernel[1] <= 255 else torch.int32)


def _unless_positive(maxima: Tensor, codes: Tensor) -> Tensor:
    """Codes after a relu: a window without a positive tap has no maximum."""
    none = torch.full_like(codes, 255 if codes.dtype == torch.uint8 else -1)
    return torch.where(maxima <= 0, none, codes)


def relu_max_pool2d_with_codes(input: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    maxima, codes = max_pool2d_with_codes(input, *args)
    return torch.relu(maxima), _unless_positive(maxima, codes)


def max_pool2d_indices(
    codes: Tensor,
    size: Sequence[int],
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    channels_last: bool,
) -> Tensor:
    window = (kernel, stride, padding, dilation)
    columns = _window(window)[0][1]
    down, across = _window(window)[3]
    row, column = _grid(codes, window)
    tap = torch.where(_no_tap(codes), 0, codes).to(torch.int64)
    return (row + tap // columns * down) * size[-1] + column + tap % columns * across


def max_pool2d_backward(grad: Tensor, codes: Tensor, size: list[int], *args: Any) -> Tensor:
    index = torch.where(_no_tap(codes), 0, max_pool2d_indices(codes, size, *args)).flatten(-2)
    grads = torch.where(_no_tap(codes), 0.0, grad).flatten(-2)
    image = grad.new_zeros([*size[:-2], size[-2] * size[-1]])
    return image.scatter_add(-1, index, grads).view(size)


def max_pool2d_gather(source: Tensor, codes: Tensor, *args: Any) -> Tensor:
    index = torch.where(_no_tap(codes), 0, max_pool2d_indices(codes, source.shape, *args)).flatten(
        -2
    )
    found = source.flatten(-2).gather(-1, index).view(codes.shape)
    return torch.where(_no_tap(codes), 0.0, found)


def _batch_norm_relu_pool(
    input: Tensor, normalized: tuple[Tensor, Tensor, Tensor], window: tuple[Any, ...], save: bool
) -> tuple[Tensor, ...]:
    output, mean, rstd = normalized
    maxima, places = max_pool2d_with_codes(output, *window)
    codes = _unless_positive(maxima, places)
    if not save:
        return torch.relu(maxima), mean, rstd, codes.new_empty(0), input.new_empty(0)
    return (
        torch.relu(maxima),
        mean,
        rstd,
        codes,
        max_pool2d_gather(input, places, *window[:4], False),
    )


def batch_norm_relu_max_pool2d(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _batch_norm_relu_pool(input, batch_norm(input, *args[:6]), args[6:11], args[11])


def batch_norm_relu_max_pool2d_update(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _batch_norm_relu_pool(input, batch_norm_update(input, *args[:6]), args[6:11], args[11])


def batch_norm_relu_max_pool2d_backward(
    grad: Tensor,
    input: Tensor,
    codes: Tensor,
    winners: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    training: bool,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    dy = max_pool2d_backward(
        grad, codes, list(input.shape), kernel, stride, padding, dilation, False
    )
    return batch_norm_backward(dy, input, weight, mean, rstd, training, wanted)


def relu_backward(grad: Tensor, output: Tensor) -> Tensor:
    return aten.threshold_backward(grad, output, 0)


def activation_backward(grad: Tensor, kept: Tensor, activation: str) -> Tensor:
    if activation == "sigmoid":
        return aten.sigmoid_backward(grad, kept)
    if activation == "tanh":
        return aten.tanh_backward(grad, kept)
    return _smooth_backward(grad, kept, activation)


def gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, activation: str, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    packed = up is None
    if up is None:
        gate, up = gate.chunk(2, -1)
    wanted = (mask[0], mask[0]) if packed else mask
    of_gate = _smooth_backward(grad * up, gate, activation) if wanted[0] else None
    of_up = grad * _native.ACTIVATIONS[activation](gate) if wanted[1] else None
    if not packed or of_gate is None or of_up is None:
        return of_gate, of_up
    return torch.cat((of_gate, of_up), -1), None


def layer_scale_add_backward(
    grad: Tensor, input: Tensor, scale: Tensor, sample_scale: Tensor | None, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if sample_scale is not None:
        grad = grad * sample_scale
    of_input = (grad * scale).to(input.dtype) if mask[0] else None
    of_scale = (grad * input).sum_to_size(scale.shape).to(scale.dtype) if mask[1] else None
    return of_input, of_scale


def global_avg_pool2d_backward(
    grad: Tensor, height: int, width: int, channels_last: bool
) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    repeated = (grad / (height * width)).expand(*grad.shape[:-2], height, width)
    return repeated.clone(memory_format=layout)
