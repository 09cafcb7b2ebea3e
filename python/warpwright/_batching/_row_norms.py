"""Rules of layer norm and RMS norm: samples are further rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, results


def _wide(x: Tensor) -> torch.dtype:
    """The dtype that the kernels compute in."""
    return torch.promote_types(x.dtype, torch.float32)


def _columns(v: Tensor, dim: int | None, samples: int, like: Tensor) -> Tensor:
    """A weight or bias, so that it broadcasts against ``like`` with the samples first."""
    if dim is None:
        return v.to(_wide(like))
    v = front(v, dim, samples)
    ones = [1] * (like.dim() - v.dim())
    return v.reshape(samples, *ones, *v.shape[1:]).to(_wide(like))


def _affine(
    info: Any,
    dims: Dims,
    op: Any,
    rows: Sequence[Tensor],
    shape: Sequence[int],
    vectors: Sequence[Any],
    eps: float | None,
    dtype: torch.dtype | None,
) -> tuple[Any, Any]:
    """The operator on all samples; weight and bias of each sample follow it.

    ``rows``: the operands with rows, the last of them in the widest dtype. ``op`` returns one result
    for each operand after the first, then the output and the statistics.
    """
    samples, count = info.batch_size, len(rows)
    rows = [front(x, d, samples) for x, d in zip(rows, dims[:count], strict=True)]
    first = count + 1  # of the vectors
    if all(d is None for d in dims[first : first + len(vectors)]):
        found = op(*rows, shape, *vectors, eps, dtype)
        return results(*((t, 0) for t in found))
    x = rows[-1]
    absent = (None for _ in vectors)
    if count == 1:
        sums: list[Tensor] = []
        y, *statistics = op(x.to(_wide(x)), shape, *absent, eps)
    else:
        sums = [rows[1] + rows[0]]
        norm = ops.layer_norm if len(vectors) > 1 else ops.rms_norm
        y, *statistics = norm(sums[0].to(_wide(x)), shape, *absent, eps)
    weight, *bias = vectors
    if weight is not None:
        y = y * _columns(weight, dims[first], samples, x)
    if bias and bias[0] is not None:
        y = y + _columns(bias[0], dims[first + 1], samples, x)
    every = (*sums, y.to(dtype or x.dtype), *statistics)
    return results(*((t, 0) for t in every))


def layer_norm(
    info: Any,
    dims: Dims,
    x: Tensor,
    shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    return _affine(info, dims, ops.layer_norm, (x,), shape, (weight, bias), eps, dtype)


def rms_norm(
    info: Any,
    dims: Dims,
    x: Tensor,
    shape: Sequence[int],
    weight: Any,
    eps: float | None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    return _affine(info, dims, ops.rms_norm, (x,), shape, (weight,), eps, dtype)


def add_layer_norm(
    info: Any,
    dims: Dims,
    x: Tensor,
    residual: Tensor,
    shape: Sequence[int],
    weight: Any,
    bias: Any,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    op, vectors = ops.add_layer_norm, (weight, bias)
    return _affine(info, dims, op, (x, residual), shape, vectors, eps, dtype)


def add_rms_norm(
    info: Any,
    dims: Dims,
    x: Tensor,
    residual: Tensor,
    shape: Sequence[int],
    weight: Any,
    eps: float | None,
    dtype: torch.dtype | None = None,
) -> tuple[Any, Any]:
    op = ops.add_rms_norm
    return _affine(info, dims, op, (x, residual), shape, (weight,), eps, dtype)


def _backward(
    info: Any,
    dims: Dims,
    op: Any,
    operands: Sequence[Tensor],
    shape: Sequence[int],
    weight: Any,
    statistics: Sequence[Tensor],
    mask: Sequence[bool],
) -> tuple[Any, Any]:
    samples = info.batch_size
    grad, x = (front(t, d, samples) for t, d in zip(operands, dims[:2], strict=True))
    saved = [front(t, d, samples) for t, d in zip(statistics, dims[4:], strict=False)]
    grad_input = None
    if mask[0] and dims[3] is None:
        grad_input = op(grad, x, shape, weight, *saved, [True] + [False] * (len(mask) - 1))[0]
    elif mask[0]:
        scaled = grad * _columns(weight, dims[3], samples, x)
        wanted = [True] + [False] * (len(mask) - 1)
        grad_input = op(scaled, x.to(scaled.dtype), shape, None, *saved, wanted)[0].to(x.dtype)
    rows = list(range(1, x.dim() - len(shape)))

    def summed(value: Tensor) -> Tensor:
        value = value.sum(rows) if rows else value
        return value if weight is None else value.to(weight.dtype)

    *mean, rstd = saved
    wide = x.to(rstd.dtype) - mean[0] if mean else x.to(rstd.dtype)
    dy = grad.to(rstd.dtype)
    sums = [summed(dy * wide * rstd) if mask[1] else None]
    if len(mask) > 2:
        sums.append(summed(dy) if mask[2] else None)
    return results(*((t, None if t is None else 0) for t in (grad_input, *sums)))


def layer_norm_backward(
    info: Any, dims: Dims, grad: Tensor, x: Tensor, shape: Sequence[int], weight: Any, *rest: Any
) -> tuple[Any, Any]:
    *statistics, mask = rest
    op = ops.layer_norm_backward
    return _backward(info, dims, op, (grad, x), shape, weight, statistics, mask)


def rms_norm_backward(
    info: Any, dims: Dims, grad: Tensor, x: Tensor, shape: Sequence[int], weight: Any, *rest: Any
) -> tuple[Any, Any]:
    *statistics, mask = rest
    op = ops.rms_norm_backward
    return _backward(info, dims, op, (grad, x), shape, weight, statistics, mask)


def _add_backward(
    info: Any,
    dims: Dims,
    op: Any,
    grad_sum: Tensor,
    operands: Sequence[Tensor],
    shape: Sequence[int],
    weight: Any,
    statistics: Sequence[Tensor],
    dtype: torch.dtype,
    mask: Sequence[bool],
) -> tuple[Any, Any]:
    """The norm's gradients, and then the sum's own."""
    any_sum = mask[0] or mask[1]
    at = 5 + len(statistics)  # of the statistics' end
    of_norm = (*dims[1:at], None)
    found, _ = _backward(
        info, of_norm, op, operands, shape, weight, statistics, [any_sum, *mask[2:]]
    )
    grad, *sums = found
    if grad is not None:
        grad = grad + front(grad_sum, dims[0], info.batch_size)
    copy = grad.to(dtype) if grad is not None and mask[1] and dtype != grad_sum.dtype else None
    every = (grad, copy, *sums)
    return results(*((t, None if t is None else 0) for t in every))


def add_layer_norm_backward(
    info: Any,
    dims: Dims,
    grad_sum: Tensor,
    grad: Tensor,
    total: Tensor,
    shape: Sequence[int],
    weight: Any,
    mean: Tensor,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: Sequence[bool],
) -> tuple[Any, Any]:
    op, statistics = ops.layer_norm_backward, (mean, rstd)
    return _add_backward(
        info, dims, op, grad_sum, (grad, total), shape, weight, statistics, dtype, mask
    )


def add_rms_norm_backward(
    info: Any,
    dims: Dims,
    grad_sum: Tensor,
    grad: Tensor,
    total: Tensor,
    shape: Sequence[int],
    weight: Any,
    rstd: Tensor,
    dtype: torch.dtype,
    mask: Sequence[bool],
) -> tuple[Any, Any]:
    op = ops.rms_norm_backward
    return _add_backward(
        info, dims, op, grad_sum, (grad, total), shape, weight, (rstd,), dtype, mask
    )
