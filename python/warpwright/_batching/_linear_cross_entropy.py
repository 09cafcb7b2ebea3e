"""Rules of linear_cross_entropy: rows, and the reduction per sample after them.

Weights per sample and gradients of the weight per sample run sample by sample. A fold would hold the
logits of all samples, or a gradient of all weights per chunk of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, into, one_by_one, out_of, results
from ._losses import MEAN, NONE


def _folds(dims: Dims, wanted: Any) -> bool:
    """`dims` are those of weight, bias and class_weight, `wanted` the mask of the gradients."""
    return all(d is None for d in dims) and not wanted[1] and not wanted[2]


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _counted(
    samples: int, target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Per sample, what a mean divides by; `target` has the rows of all samples."""
    if target.dim() == 2:
        return torch.full((samples,), target.shape[0] // samples, dtype=dtype, device=target.device)
    kept = target.ne(ignore_index)
    if class_weight is None or class_weight.shape[0] == 0:
        counted = kept.to(dtype)
    else:  # a label out of range must not index: the kernel reports it
        labels = target.long().clamp(0, class_weight.shape[0] - 1)
        counted = class_weight.to(dtype)[labels].masked_fill(~kept, 0)
    return counted.view(samples, target.shape[0] // samples).sum(1)


def _per_row(of_samples: Tensor, rows: int) -> Tensor:
    return of_samples.repeat_interleave(rows // of_samples.shape[0], 0)


def forward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    x, weight, bias, target, class_weight, reduction, ignore_index, smoothing, chunk, *rest = args
    dtype, wanted, z_loss, softcap, *returned = rest
    samples, op = info.batch_size, ops.linear_cross_entropy_forward
    if not _folds((dims[1], dims[2], dims[4]), wanted) or (reduction == NONE and wanted[0]):
        return one_by_one(op, samples, dims, args)
    accumulator = _accumulator(x)
    x, target = into(x, dims[0], samples, 0), into(target, dims[3], samples, 0)
    loss, total, *_, lse, argmax = op(
        x, weight, bias, target, class_weight, NONE, ignore_index, smoothing, chunk,
        dtype if reduction == NONE else accumulator, [False] * 3, z_loss, softcap, *returned,
    )  # fmt: skip
    of_rows = [out_of(t, samples, 0) for t in (lse, argmax)]
    if reduction == NONE:
        return results(out_of(loss, samples, 0), (total, None), *[(None, None)] * 3, *of_rows)
    gradient, of_total = None, None
    loss = loss.view(samples, x.shape[0] // samples).sum(1)
    scale = loss.new_ones(samples)
    if reduction == MEAN:
        total, of_total = _counted(samples, target, class_weight, ignore_index, accumulator), 0
        loss = loss / total
        # The backward divides the gradients of float16.
        scale = (total.ne(0).to(accumulator) if x.dtype == torch.float16 else total).reciprocal()
    if wanted[0]:
        gradient, _, _ = ops.linear_cross_entropy_backward(
            _per_row(scale, x.shape[0]), x, weight, bias, target, class_weight, NONE, ignore_index,
            smoothing, chunk, [True, False, False], z_loss, softcap, None,
        )  # fmt: skip
    return results(
        (loss.to(dtype), 0),
        (total, of_total),
        out_of(gradient, samples, 0),
        *[(None, None)] * 2,
        *of_rows,
    )


def backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    grad, x, weight, bias, target, class_weight, reduction, ignore_index, *rest, grad_lse = args
    samples, op, wanted = info.batch_size, ops.linear_cross_entropy_backward, rest[2]
    if not _folds((dims[2], dims[3], dims[5]), wanted):
        return one_by_one(op, samples, dims, args)
    accumulator = _accumulator(x)
    x, target = into(x, dims[1], samples, 0), into(target, dims[4], samples, 0)
    if reduction == NONE:
        grad = into(grad, dims[0], samples, 0)
    else:
        grad = front(grad, dims[0], samples).to(accumulator)
        if reduction == MEAN:
            grad = grad / _counted(samples, target, class_weight, ignore_index, accumulator)
        grad = _per_row(grad, x.shape[0])
    gradient, _, _ = op(
        grad, x, weight, bias, target, class_weight, NONE, ignore_index, *rest,
        into(grad_lse, dims[len(args) - 1], samples, 0),
    )  # fmt: skip
    return results(out_of(gradient, samples, 0), (None, None), (None, None))
