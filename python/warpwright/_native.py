"""Our operators in terms of native's functions: what runs where no kernel of ours does.

Each function takes the arguments of its operator. Results that only a backward of ours reads are
left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._native_attention import (
    attention_varlen as attention_varlen,
)
from ._native_attention import (
    attention_with_kv_cache as attention_with_kv_cache,
)
from ._native_attention import (
    kv_cache_append_ as kv_cache_append_,
)
from ._native_attention import (
    scaled_dot_product_attention_extras as scaled_dot_product_attention_extras,
)
from ._native_attention import (
    scaled_dot_product_attention_lse as scaled_dot_product_attention_lse,
)

native = torch.nn.functional


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> tuple[Tensor]:
    return (native.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps),)


def batch_norm_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor]:
    return (native.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps),)


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False
) -> Tensor:
    padding = None if padding_idx < 0 else padding_idx
    return native.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


def embedding_renorm_(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> None:
    torch.embedding_renorm_(weight, indices, max_norm, norm_type)


Dtype = torch.dtype | None


def _in_dtype(output: Tensor, dtype: Dtype) -> Tensor:
    return output if dtype is None else output.to(dtype)


def layer_norm(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: Dtype = None,
) -> tuple[Tensor]:
    return (_in_dtype(native.layer_norm(input, shape, weight, bias, eps), dtype),)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor]:
    return (native.group_norm(input, num_groups, weight, bias, eps),)


def rms_norm(
    input: Tensor, shape: list[int], weight: Tensor | None, eps: float | None, dtype: Dtype = None
) -> tuple[Tensor]:
    return (_in_dtype(native.rms_norm(input, shape, weight, eps), dtype),)


def add_layer_norm(
    input: Tensor, residual: Tensor, *args: Any
) -> tuple[Tensor, Tensor, None, None]:
    total = residual + input
    return total, layer_norm(total, *args)[0], None, None


def add_rms_norm(input: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, Tensor, None]:
    total = residual + input
    return total, rms_norm(total, *args)[0], None


def activated(normalized: Tensor, activation: str, residual: Tensor | None = None) -> Tensor:
    """The activation of a batch norm with one; ``"none"`` has no residual."""
    if activation == "none":
        return normalized
    return ACTIVATIONS[activation](normalized if residual is None else normalized + residual)


def batch_norm_relu(input: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor]:
    return (activated(batch_norm(input, *args)[0], "relu", residual),)


def batch_norm_relu_update(input: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor]:
    return (activated(batch_norm_update(input, *args)[0], "relu", residual),)


def batch_norm_activation(input: Tensor, *args: Any) -> tuple[Tensor]:
    return (activated(batch_norm(input, *args[:-1])[0], args[-1]),)


def batch_norm_activation_update(input: Tensor, *args: Any) -> tuple[Tensor]:
    return (activated(batch_norm_update(input, *args[:-1])[0], args[-1]),)


def conv_transpose2d_cat(
    skip: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any
) -> Tensor:
    *windows, skip_first = rest if len(rest) == 6 else (*rest, True)  # its default
    upsampled = torch.conv_transpose2d(input, weight, bias, *windows)
    return torch.cat((skip, upsampled) if skip_first else (upsampled, skip), -3)


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
) -> tuple[Tensor]:
    convolved = torch.conv2d(input, weight, bias, *windows)
    output = native.batch_norm(convolved, None, None, norm_weight, norm_bias, True, 0.0, eps)
    return (activated(output, activation, residual),)


def conv2d_batch_norm_update(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    activation: str,
    *windows: Any,
) -> tuple[Tensor]:
    convolved = torch.conv2d(input, weight, bias, *windows)
    statistics = (running_mean, running_var)
    output = native.batch_norm(convolved, *statistics, norm_weight, norm_bias, True, momentum, eps)
    return (activated(output, activation, residual),)


def conv2d_batch_norm_relu_max_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    *windows: Any,
) -> tuple[Tensor]:
    convolved = torch.conv2d(input, weight, bias, *windows[:4])
    norm = norm_weight, norm_bias, None, None, True, eps
    return batch_norm_relu_max_pool2d(convolved, *norm, *windows[4:9])


def conv2d_batch_norm_relu_max_pool2d_update(
    input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any
) -> tuple[Tensor]:
    norm, windows = args[:6], args[6:]
    convolved = torch.conv2d(input, weight, bias, *windows[:4])
    return batch_norm_relu_max_pool2d_update(convolved, *norm, *windows[4:9])


def linear_cross_entropy(input: Tensor, *args: Any) -> Tensor:
    return linear_cross_entropy_extras(input, *args)[0]


def linear_cross_entropy_extras(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    chunk_rows: int | None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
    return_argmax: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, leading = input.flatten(0, -2) if input.dim() > 1 else input[None], input.shape[:-1]
    logits = native.linear(rows, weight, bias)
    labels = target.reshape(-1) if target.shape == leading else target.reshape(logits.shape)
    loss, lse, argmax = cross_entropy_extras(
        *(logits, labels, class_weight, reduction, ignore_index, label_smoothing),
        *(z_loss, softcap, return_lse, return_argmax, False),
    )
    return (
        loss.view(leading) if reduction == 0 else loss,
        None if lse is None else lse.view(leading),
        None if argmax is None else argmax.view(leading),
    )


def relu_max_pool2d(input: Tensor, *args: Any) -> Tensor:
    return torch.max_pool2d(torch.relu(input), *args)


def cross_entropy_extras(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    return_lse: bool,
    return_argmax: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dim = min(1, input.dim() - 1)
    accum = torch.promote_types(input.dtype, torch.float32)
    logits = softcap * torch.tanh(input.to(accum) / softcap) if softcap else input
    options = (reduction, ignore_index, label_smoothing)
    loss = torch.ops.aten.cross_entropy_loss(logits, target, weight, *options)
    lse = logits.to(accum).logsumexp(dim)
    if z_loss:
        labels = target.shape != input.shape
        counted = target != ignore_index if labels else torch.ones_like(lse, dtype=torch.bool)
        extra = z_loss * lse.square() * counted.reshape(lse.shape)
        if reduction != 0:
            extra = extra.sum()
        if reduction == 1:
            flat = target.clamp(0, input.shape[dim] - 1)
            weights = counted if weight is None or not labels else weight[flat] * counted
            extra = extra / weights.sum()
        loss = loss + extra
    argmax = input.argmax(dim) if return_argmax else None
    return loss.to(input.dtype), lse if return_lse else None, argmax


def batch_norm_relu_max_pool2d(input: Tensor, *args: Any) -> tuple[Tensor]:
    return (relu_max_pool2d(batch_norm(input, *args[:6])[0], *args[6:]),)


def batch_norm_relu_max_pool2d_update(input: Tensor, *args: Any) -> tuple[Tensor]:
    return (relu_max_pool2d(batch_norm_update(input, *args[:6])[0], *args[6:]),)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": native.gelu,
    "gelu_tanh": functools.partial(native.gelu, approximate="tanh"),
    "silu": native.silu,
    "hardswish": native.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def activation(input: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](input)


def dropout(input: Tensor, p: float, place: Sequence[int] = ()) -> tuple[Tensor]:
    """The operator's first result; no caller of native's reads the state, or has a shard."""
    return (native.dropout(input, p),)


def gated_activation(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def layer_scale_add(
    input: Tensor, residual: Tensor, scale: Tensor, sample_scale: Tensor | None = None
) -> Tensor:
    scaled = scale * input
    return residual + (scaled if sample_scale is None else scaled * sample_scale)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """The formula of arXiv 2104.09864; ``inverse`` is its transpose."""

    def turned(x: Tensor) -> Tensor:  # (x, y) -> (-y, x), or back
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        pair = (second, -first) if inverse else (-second, first)
        return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)

    size = cos.shape[-1]
    part = x if size == x.shape[-1] else x[..., :size]
    other = turned(part * sin) if inverse else turned(part) * sin
    result = (part * cos + other).to(x.dtype)
    return result if part is x else torch.cat((result, x[..., size:]), -1)


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    tables = (cos.unsqueeze(1), sin.unsqueeze(1))  # one for all heads
    return (
        _rotated(query, *tables, interleaved, inverse),
        _rotated(key, *tables, interleaved, inverse),
    )


def cumsum(
    input: Tensor, dim: int, reverse: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    if not reverse:
        return torch.cumsum(input, dim, dtype=dtype)
    return torch.cumsum(input.flip(dim), dim, dtype=dtype).flip(dim)


def _gates_of_levels(level: Tensor, dim: int, reverse: bool) -> Tensor:
    """exp(level - the level before it); 0 between equal infinities. The first gate is of no use."""
    before = level.roll(-1 if reverse else 1, dim)
    return torch.where((level == before) & level.isinf(), 0, (level - before).exp())


def linear_scan(
    gate: Tensor,
    input: Tensor,
    initial: Tensor | None,
    dim: int,
    reverse: bool = False,
    shifted: bool = False,
    levels: bool = False,
) -> Tensor:
    """One step at a time."""
    if levels:
        gate = _gates_of_levels(gate, dim, reverse)
    gates, inputs = list(gate.unbind(dim)), list(input.unbind(dim))
    if not inputs:
        return torch.empty_like(input)
    steps = range(len(inputs) - 1, -1, -1) if reverse else range(len(inputs))
    states = list(inputs)
    state = initial
    for t in steps:
        at = t + (1 if reverse else -1) if shifted else t
        if state is not None:
            states[t] = gates[at] * state + inputs[t]
        state = states[t]
    return torch.stack(states, dim)


def fft_conv(
    first: Tensor,
    second: Tensor,
    bias: Tensor | None,
    padding: list[int],
    groups: int,
    wanted: str = "output",
) -> Tensor:
    """Direct convolution of the padded input, or the gradient that ``wanted`` names."""
    dims = first.dim() - 2
    before, after = padding[:dims], padding[dims:]
    ones, zeros = [1] * dims, [0] * dims
    if wanted == "input":  # of the padded input, cut to the input
        full = torch.convolution(first, second, None, ones, zeros, ones, True, zeros, groups)
        for dim in range(dims):
            length = full.shape[dim + 2] - before[dim] - after[dim]
            full = full.narrow(dim + 2, before[dim], length)
        return full
    ends = [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair]
    padded = native.pad(first, ends)
    if wanted == "output":
        return torch.convolution(padded, second, bias, ones, zeros, ones, False, zeros, groups)
    # The gradient of the weight: a convolution of images as channels, group by group.
    taps = [p - s + 1 for p, s in zip(padded.shape[2:], second.shape[2:], strict=True)]
    weight = second.new_empty(second.shape[1], padded.shape[1] // groups, *taps)
    window = (None, ones, zeros, ones, False, zeros, groups, [False, True, False])
    return torch.ops.aten.convolution_backward(second, padded, weight, *window)[1]


def linear_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor]:
    return (ACTIVATIONS[activation](native.linear(input, weight, bias)),)


def mlp(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    activation: str,
) -> Tensor:
    hidden = ACTIVATIONS[activation](native.linear(input, weight1, bias1))
    return native.linear(hidden, weight2, bias2)
