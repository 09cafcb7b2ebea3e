"""Rules of cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, into, one_by_one, out_of, results

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction


class _Rows:
    """Input and target of all samples as one batch of rows, and the reduction per sample."""

    def __init__(self, samples: int, dims: Dims, x: Tensor, target: Tensor) -> None:
        self.samples = samples
        self.unbatched = x.dim() - (dims[0] is not None) == 1  # a sample is one row
        self.input = self.fold(x, dims[0])
        self.is_labels = not target.is_floating_point()
        self.target = self.fold(target, dims[1])

    def fold(self, x: Any, dim: int | None, at: int = 0) -> Any:
        if self.unbatched and x is not None:
            return front(x, dim, self.samples).movedim(0, at).contiguous()
        return None if x is None else into(x, dim, self.samples, at).contiguous()

    def unfold(self, x: Any, at: int = 0) -> tuple[Any, int | None]:
        return (x, None if x is None else at) if self.unbatched else out_of(x, self.samples, at)

    def summed(self, losses: Tensor) -> Tensor:
        """Per sample."""
        return losses.reshape(self.samples, -1).sum(1)

    def total_weight(self, weight: Tensor | None, ignore_index: int, like: Tensor) -> Tensor:
        if not self.is_labels:
            rows = self.input.numel() // max(1, self.input.shape[1]) // self.samples
            return like.new_full((self.samples,), rows)
        kept = self.target.ne(ignore_index)
        if weight is None:
            return self.summed(kept.to(like.dtype))
        of_rows = weight.to(like.dtype)[self.target.long().masked_fill(~kept, 0)]
        return self.summed(of_rows.masked_fill(~kept, 0))

    def spread(self, per_sample: Tensor, like: Tensor) -> Tensor:
        """A number per sample, for each of its rows."""
        per_row = per_sample.view(-1, *[1] * like.dim()).expand(-1, *like.shape)
        return per_row.flatten(0, 1) if like.dim() else per_row.contiguous()


def _folds(weight_dim: int | None, z_loss: float) -> bool:
    """Weights per sample are not folded, nor the z-loss, whose mean has another divisor."""
    return weight_dim is None and z_loss == 0.0


def cross_entropy_forward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    x, target, weight, reduction, ignore_index, smoothing, dtype, z_loss, _ = args
    op, samples = ops.cross_entropy_forward, info.batch_size
    rows = _Rows(samples, dims, x, target)
    settled = rows.unbatched and x.is_cuda  # native's rule for one ignored row on CUDA
    if not _folds(dims[2], z_loss) or settled or rows.input.numel() == 0:
        return one_by_one(op, samples, dims, args)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    losses, stats, _ = op(
        rows.input, rows.target, weight, NONE, ignore_index, smoothing,
        dtype if reduction == NONE else wide,
    )  # fmt: skip
    if reduction == NONE:
        total = losses.new_ones(samples, dtype=wide)
        return results(rows.unfold(losses), rows.unfold(stats, 1), (total, 0))
    total = rows.total_weight(weight, ignore_index, losses)
    loss = rows.summed(losses)
    loss = (loss / total if reduction == MEAN else loss).to(dtype)
    return results((loss, 0), rows.unfold(stats, 1), (total, 0))


def _of_rows(
    rows: _Rows, grad: Tensor, dim: int | None, total: Tensor, dim_total: int | None, reduction: int
) -> Tensor:
    """The gradient of the reduced losses as one of each row's loss."""
    if reduction == NONE:
        return rows.fold(grad, dim)
    per_sample = front(grad, dim, rows.samples)
    if reduction == MEAN:
        per_sample = per_sample.to(total.dtype) / front(total, dim_total, rows.samples)
    shape = rows.target.shape if rows.is_labels else rows.input.select(1, 0).shape
    repeat = max(1, shape.numel()) // rows.samples
    return per_sample.repeat_interleave(repeat, 0).view(shape)


def cross_entropy_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    grad, x, target, weight, stats, total, reduction, ignore_index, smoothing, mask, z_loss = args
    op, samples = ops.cross_entropy_backward, info.batch_size
    rows = _Rows(samples, dims[1:3], x, target)
    if not _folds(dims[3], z_loss) or rows.input.numel() == 0:
        return one_by_one(op, samples, dims, args)
    grads = op(
        _of_rows(rows, grad, dims[0], total, dims[5], reduction),
        rows.input,
        rows.target,
        weight,
        rows.fold(stats, dims[4], 1),
        total.new_ones(()),
        NONE,
        ignore_index,
        smoothing,
        mask,
    )
    return results(*(rows.unfold(g) for g in grads))


def cross_entropy_forward_gradient(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """The forward, and the backward of a gradient of ones."""
    x, target, weight, reduction, ignore_index, smoothing, dtype, z_loss = args
    (loss, *kept), at = cross_entropy_forward(info, (*dims, None), *args, False)
    ones = torch.ones((), dtype=dtype, device=x.device)
    options = reduction, ignore_index, smoothing, [True, False], z_loss
    (grad, _), at_grad = cross_entropy_backward(
        info, (None, *dims[:3], *at[1:], *(None for _ in options)), ones, x, target, weight, *kept,
        *options,
    )  # fmt: skip
    return (loss, *kept, grad), (*at, at_grad[0])


def cross_entropy_lse(info: Any, dims: Dims, x: Tensor, stats: Tensor) -> tuple[Tensor, int]:
    rows = front(stats, dims[1], info.batch_size)
    return rows.select(1, 0) + rows.select(1, 1).log(), 0


def cross_entropy_double_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    v, u, grad, x, target, weight, stats, total, reduction, *options, mask, z_loss = args
    op, samples = ops.cross_entropy_double_backward, info.batch_size
    rows = _Rows(samples, dims[3:5], x, target)
    if not _folds(dims[5], z_loss) or rows.input.numel() == 0:
        return one_by_one(op, samples, dims, args)
    per_row, grad_input, grad_target = op(
        rows.fold(v, dims[0]),
        rows.fold(u, dims[1]),
        _of_rows(rows, grad, dims[2], total, dims[7], reduction),
        rows.input,
        rows.target,
        weight,
        rows.fold(stats, dims[6], 1),
        total.new_ones(()),
        NONE,
        *options,
        mask,
    )
    grad_grad: tuple[Any, int | None] = (None, None)
    if mask[0] and reduction == NONE:
        grad_grad = rows.unfold(per_row)
    elif mask[0]:
        summed = rows.summed(per_row.to(total.dtype))
        if reduction == MEAN:
            summed = summed / front(total, dims[7], samples)
        grad_grad = summed.to(grad.dtype), 0
    return results(grad_grad, rows.unfold(grad_input), rows.unfold(grad_target))
