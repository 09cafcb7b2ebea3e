"""Layer norm, RMS norm, the addition before them and group norm in terms of ATen's operators, as `_aten` does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

native = torch.nn.functional


def _row_dims(input: Tensor, shape: list[int]) -> tuple[list[int], list[int]]:
    """The dimensions before the normalised ones, and these."""
    first = input.dim() - len(shape)
    return list(range(first)), list(range(first, input.dim()))


def layer_norm(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    output = native.layer_norm(input, shape, weight, bias, eps)
    accum = torch.promote_types(input.dtype, torch.float32)
    dims = _row_dims(input, shape)[1]
    var, mean = torch.var_mean(input.to(accum), dims, correction=0, keepdim=True)
    return output.to(dtype or input.dtype), mean, torch.rsqrt(var + eps)


def rms_norm(
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    eps: float | None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    accum = torch.promote_types(input.dtype, torch.float32)
    wide = input.to(accum)
    square = wide.pow(2).mean(_row_dims(input, shape)[1], keepdim=True)
    rstd = torch.rsqrt(square + (torch.finfo(accum).eps if eps is None else eps))
    output = wide * rstd
    return (output if weight is None else output * weight).to(dtype or input.dtype), rstd


def add_layer_norm(input: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, ...]:
    total = residual + input
    return total, *layer_norm(total, *args)


def add_rms_norm(input: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, ...]:
    total = residual + input
    return total, *rms_norm(total, *args)


def _norm_backward(
    grad: Tensor,
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    rows, columns = _row_dims(input, shape)
    wide, dy = input.to(rstd.dtype), grad.to(rstd.dtype)
    xhat = (wide if mean is None else wide - mean) * rstd
    grad_xhat = dy if weight is None else dy * weight
    dx = grad_xhat - xhat * (grad_xhat * xhat).mean(columns, keepdim=True)
    if mean is not None:
        dx = dx - grad_xhat.mean(columns, keepdim=True)
    like = rstd if weight is None else weight
    sums = [(dy * xhat), dy]
    if rows:
        sums = [value.sum(rows) for value in sums]
    return (
        (dx * rstd).to(input.dtype) if mask[0] else None,
        *(
            value.to(like.dtype) if wanted else None
            for value, wanted in zip(sums, mask[1:], strict=False)
        ),
    )


def layer_norm_backward(
    grad: Tensor,
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    return _norm_backward(grad, input, shape, weight, mean, rstd, mask)


def rms_norm_backward(
    grad: Tensor,
    input: Tensor,
    shape: list[int],
    weight: Tensor | None,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    return _norm_backward(grad, input, shape, weight, None, rstd, mask)


def _groups(input: Tensor, num_groups: int) -> tuple[int, int, int, int]:
    """Rows, groups, channels of one, elements of a channel: no -1, so also of nothing."""
    rows, channels, *sizes = input.shape
    return rows, num_groups, channels // num_groups, math.prod(sizes)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Native's mixes types on the CPU only.
    wide = input if weight is None else input.to(weight.dtype)
    output = native.group_norm(wide, num_groups, weight, bias, eps).to(input.dtype)
    accum = torch.promote_types(input.dtype, torch.float32)
    groups = input.to(accum).reshape(_groups(input, num_groups)).flatten(2)
    var, mean = torch.var_mean(groups, -1, correction=0)
    return output, mean, torch.rsqrt(var + eps)


def group_norm_backward(
    grad: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    groups = _groups(input, num_groups)
    dy, x = (t.to(rstd.dtype).reshape(groups) for t in (grad, input))
    scale = rstd[:, :, None, None]
    xhat = (x - mean[:, :, None, None]) * scale
    g = dy if weight is None else dy * weight.to(rstd.dtype).reshape(1, *groups[1:3], 1)
    dx = g - g.mean((2, 3), keepdim=True) - xhat * (g * xhat).mean((2, 3), keepdim=True)
    like = rstd if weight is None else weight
    vectors = ((dy * xhat).sum((0, 3)).flatten(), dy.sum((0, 3)).flatten())
    return (
        (dx * scale).to(input.dtype).reshape(input.shape) if mask[0] else None,
        *(
            v.to(like.dtype) if wanted else None
            for v, wanted in zip(vectors, mask[1:], strict=True)
        ),
    )


def _added(
    found: tuple[Tensor | None, ...],
    grad_sum: Tensor,
    dtype: torch.dtype,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradient of a sum, a copy for an addend of another dtype, and the norm's other results."""
    grad, *sums = found
    if grad is not None:
        grad = grad + grad_sum
    copies = mask[1] and dtype != grad_sum.dtype and grad is not None
    return grad, grad.to(dtype) if copies and grad is not None else None, *sums


def add_layer_norm_backward(
    grad_sum: Tensor,
    grad: Tensor,
    total: Tensor,
    shape: list[int],
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    wanted = [mask[0] or mask[1], *mask[2:]]
    found = _norm_backward(grad, total, shape, weight, mean, rstd, wanted)
    return _added(found, grad_sum, dtype, mask)


def add_rms_norm_backward(
    grad_sum: Tensor,
    grad: Tensor,
    total: Tensor,
    shape: list[int],
    weight: Tensor | None,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    wanted = [mask[0] or mask[1], *mask[2:]]
    found = _norm_backward(grad, total, shape, weight, None, rstd, wanted)
    return _added(found, grad_sum, dtype, mask)
