"""Cross-entropy over ranks: rows, classes or both may be cut.

Unlike native's, a mean over rows that are cut divides by the labels of all ranks: the ranks' sums and
weights are added before the division. Native averages the ranks' means, which is another number if
the ranks ignore unequal numbers of labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..._ops import ops
from . import _vocabulary
from ._local import Placements, extent, local, mesh_of, whole
from ._vocabulary import MEAN, NONE, Loss, Rows, Vocabulary

R = Replicate()


@dataclass
class Cut:
    """How the logits of a call are cut, and this rank's part of its operands."""

    mesh: DeviceMesh
    logits: Placements
    shape: torch.Size  # of all logits
    z: Tensor
    target: Tensor
    loss: Loss
    dim: int  # of the classes
    probabilities: bool

    @property
    def row_dims(self) -> tuple[int, ...]:
        """Dimensions of the mesh over which rows are cut."""
        return tuple(
            at for at, p in enumerate(self.logits) if isinstance(p, Shard) and p.dim != self.dim
        )

    @property
    def class_dims(self) -> tuple[int, ...]:
        return tuple(
            at for at, p in enumerate(self.logits) if isinstance(p, Shard) and p.dim == self.dim
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(n for i, n in enumerate(self.shape) if i != self.dim)

    def rows(self, before: int = 0) -> Placements:
        """Placements of a tensor per row, with `before` more dimensions in front."""

        def at(p: Any) -> Any:
            if not isinstance(p, Shard) or p.dim == self.dim:
                return R
            return Shard(p.dim - (p.dim > self.dim) + before)

        return tuple(at(p) for p in self.logits)

    @property
    def nowhere(self) -> Placements:
        return (R,) * self.mesh.ndim

    @property
    def classes(self) -> Vocabulary:
        sizes, offsets = extent(self.shape, self.mesh, self.logits)
        total = self.shape[self.dim]
        first = offsets[self.dim]
        return Vocabulary(self.mesh, self.class_dims, first, sizes[self.dim], total)

    def labelled(self) -> Rows:
        dtype = _vocabulary.accumulator(self.z.dtype)
        return _vocabulary.rows_of(self.target, self.loss, self.classes, dtype)

    def summed(self, values: Tensor) -> Tensor:
        """The sum over all ranks that have other rows."""
        for at in self.row_dims:
            values = all_reduce(values, "sum", (self.mesh, at))
        return values


def cut_of(
    x: Tensor, target: Tensor, weight: Tensor | None, options: Sequence[Any], z_loss: float
) -> Cut:
    """``options``: reduction, ignore_index, label_smoothing. A partial sum of logits is added up."""
    reduction, ignore_index, smoothing = options
    mesh = mesh_of((x, target, weight))
    dim = 1 if x.dim() > 1 else 0
    placements = x.placements if isinstance(x, DTensor) else (R,) * mesh.ndim
    placements = tuple(p if isinstance(p, Shard) else R for p in placements)
    probabilities = target.is_floating_point()
    loss = Loss(
        local(weight, mesh, (R,) * mesh.ndim),
        reduction,
        int(ignore_index),
        max(0.0, smoothing),
        z_loss,
    )
    z = local(x, mesh, placements)
    cut = Cut(mesh, placements, x.shape, z, target, loss, dim, probabilities)
    if probabilities and cut.class_dims:
        raise RuntimeError(
            f"cross_entropy: target: expected labels with logits of shape {tuple(x.shape)} whose "
            "classes are cut into shards, got probabilities"
        )
    cut.target = local(target, mesh, placements if probabilities else cut.rows())
    return cut


def forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, target, weight, reduction, ignore, smoothing, dtype, z_loss, _ = with_defaults(op, args)
    cut = cut_of(x, target, weight, (reduction, ignore, smoothing), z_loss)
    loss, stats, total = forward_of(cut)
    per_row = reduction == NONE
    return (
        whole(loss.to(dtype), cut.mesh, cut.rows() if per_row else cut.nowhere,
              cut.row_shape if per_row else None),
        whole(stats, cut.mesh, cut.rows(1), (stats.shape[0], *cut.row_shape)),
        whole(total, cut.mesh, cut.nowhere),
    )  # fmt: skip


def forward_of(cut: Cut) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, row statistics, sum of weights): this rank's rows, or the sum or mean of all."""
    wide = _vocabulary.accumulator(cut.z.dtype)
    loss = cut.loss
    if cut.class_dims:
        rows = cut.labelled()
        losses, stats = _vocabulary.forward(cut.z, rows, loss, cut.classes, cut.dim)
        total = rows.weight.sum()
        if loss.reduction == NONE:
            return losses, stats, total
        result = losses.sum()
    else:
        reduction = NONE if loss.reduction == NONE else _vocabulary.SUM
        result, stats, total = ops.cross_entropy_forward(
            cut.z, cut.target, loss.weight, reduction, loss.ignore_index, loss.smoothing, wide,
            loss.z_loss,
        )  # fmt: skip
        if loss.reduction == NONE:
            return result, stats, total
    if cut.row_dims:
        result, total = cut.summed(torch.stack((result, total)))
    return (result / total if loss.reduction == MEAN else result), stats, total


def backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, x, target, weight, stats, total, *options, mask, z_loss = with_defaults(op, args)
    cut = cut_of(x, target, weight, options, z_loss)
    dz, dq = _backward(cut, grad, stats, total, mask)
    return (
        None if dz is None else whole(dz, cut.mesh, cut.logits, x),
        None if dq is None else whole(dq, cut.mesh, cut.logits, target),
    )


def _backward(
    cut: Cut, grad: Tensor, stats: Tensor, total: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    loss = cut.loss
    grad = local(grad, cut.mesh, cut.rows() if loss.reduction == NONE else cut.nowhere)
    stats = local(stats, cut.mesh, cut.rows(1)).contiguous()
    total = local(total, cut.mesh, cut.nowhere)
    if not cut.class_dims:
        found = ops.cross_entropy_backward(
            grad, cut.z, cut.target, loss.weight, stats, total, loss.reduction,
            loss.ignore_index, loss.smoothing, mask, loss.z_loss,
        )  # fmt: skip
        return found[0], found[1]
    rows = cut.labelled()
    per_row = grad.to(total.dtype)
    if loss.reduction == MEAN:
        per_row = per_row / total
    per_row = per_row.expand(rows.labels.shape)
    return _vocabulary.backward(per_row, cut.z, rows, stats, loss, cut.classes, cut.dim), None


def backward_inplace(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grad, x, target, weight, stats, total, *options, z_loss = with_defaults(op, args)
    cut = cut_of(x, target, weight, options, z_loss)
    if any(p.is_partial() for p in x.placements):
        raise RuntimeError("cross_entropy_backward_: input: expected shards, got a partial sum")
    dz, _ = _backward(cut, grad, stats, total, [True, False])
    assert dz is not None
    x._local_tensor.copy_(dz)


def forward_gradient(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward, and the backward of a gradient of ones."""
    x, target, weight, reduction, ignore, smoothing, dtype, z_loss = with_defaults(op, args)
    options = reduction, ignore, smoothing
    results = ops.cross_entropy_forward(x, target, weight, *options, dtype, z_loss)
    grad = torch.ones_like(results[0])
    gradient = ops.cross_entropy_backward(
        grad, x, target, weight, *results[1:], *options, [True, False], z_loss
    )[0]
    return (*results, gradient)


def scale_inplace(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gradient, factor = args
    mesh = mesh_of(args)
    part = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    ops.cross_entropy_scale_(part, local(factor, mesh, (R,) * mesh.ndim))


def lse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, stats = args
    mesh = mesh_of(args)
    dim = 1 if x.dim() > 1 else 0
    if x.requires_grad and torch.is_grad_enabled() and Shard(dim) in x.placements:
        raise RuntimeError(
            "cross_entropy: return_lse: expected logits that need no gradient or whose classes are "
            f"whole on every rank, got {x.placements}: a gradient through lse would gather them"
        )
    placements = stats.placements
    part = stats._local_tensor
    rows = tuple(Shard(p.dim - 1) if isinstance(p, Shard) else R for p in placements)
    shape = tuple(n for i, n in enumerate(x.shape) if i != dim)
    return whole(part.select(0, 0) + part.select(0, 1).log(), mesh, rows, shape)


def double_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    v, u, grad, x, target, weight, stats, total, *options, mask, z_loss = with_defaults(op, args)
    cut = cut_of(x, target, weight, options, z_loss)
    if cut.class_dims:
        raise RuntimeError(
            "cross_entropy: a second derivative: expected logits whose classes are whole on every "
            f"rank, got {x.placements}"
        )
    mesh, loss = cut.mesh, cut.loss
    per_row = loss.reduction == NONE
    rows = cut.rows() if per_row else cut.nowhere
    by_grad, by_x, by_target = ops.cross_entropy_double_backward(
        local(v, mesh, cut.logits), local(u, mesh, cut.logits), local(grad, mesh, rows), cut.z,
        cut.target, loss.weight, local(stats, mesh, cut.rows(1)).contiguous(),
        local(total, mesh, cut.nowhere), *options, mask, z_loss,
    )  # fmt: skip
    if by_grad is not None and not per_row:
        by_grad = cut.summed(by_grad)
    return (
        None if by_grad is None else whole(by_grad, mesh, rows, grad),
        None if by_x is None else whole(by_x, mesh, cut.logits, x),
        None if by_target is None else whole(by_target, mesh, cut.logits, target),
    )


def with_defaults(op: Any, args: tuple[Any, ...]) -> list[Any]:
    """With the defaults of trailing arguments, which the dispatcher leaves out."""
    return [*args, *(a.default_value for a in op._schema.arguments[len(args) :])]


HANDLERS = {
    "cross_entropy_forward": forward,
    "cross_entropy_backward": backward,
    "cross_entropy_backward_": backward_inplace,
    "cross_entropy_forward_gradient": forward_gradient,
    "cross_entropy_scale_": scale_inplace,
    "cross_entropy_lse": lse,
    "cross_entropy_double_backward": double_backward,
}
