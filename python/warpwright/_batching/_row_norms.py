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
    x: Tensor,
    shape: Sequence[int],
    vectors: Sequence[Any],
    eps: Any,
) -> tuple[Any, Any]:
    """The operator on all samples; weight and bias of each sample follow it."""
    samples = info.batch_size
    x = front(x, dims[0], samples)
    if all(d is None for d in dims[2 : 2 + len(vectors)]):
        found = op(x, shape, *vectors, eps)
        return results(*((t, 0) for t in found))
    y, *statistics = op(x.to(_wide(x)), shape, *(None for _ in vectors), eps)
    weight, *bias = vectors
    if weight is not None:
        y = y * _columns(weight, dims[2], samples, x)
    if bias and bias[0] is not None:
        y = y + _columns(bias[0], dims[3], samples, x)
    return results((y.to(x.dtype), 0), *((t, 0) for t in statistics))


def layer_norm(
    info: Any, dims: Dims, x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any]:
    return _affine(info, dims, ops.layer_norm, x, shape, (weight, bias), eps)


def rms_norm(
    info: Any, dims: Dims, x: Tensor, shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Any, Any]:
    return _affine(info, dims, ops.rms_norm, x, shape, (weight,), eps)


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
