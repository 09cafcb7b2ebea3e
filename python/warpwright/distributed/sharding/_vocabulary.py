"""Cross-entropy of logits whose classes are cut over ranks, without a gather of the logits.

Every function sees this rank's part of the logits and the labels of all its rows. Per row it needs m,
the largest logit, s = sum(exp(z - m)), and t, the target's logit, over all classes. Ranks exchange
these numbers in one all-gather and merge them in the order of ranks, so that all get the same bits.
The backward needs no exchange. The method is Megatron-LM's (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._ops import ops

NONE, MEAN, SUM = 0, 1, 2  # at::Reduction
NO_LABEL = -100  # never a class: the kernels here ignore no row


@dataclass(frozen=True)
class Loss:
    """What a call asks for; ``weight`` has all classes."""

    weight: Tensor | None
    reduction: int
    ignore_index: int
    smoothing: float
    z_loss: float


@dataclass(frozen=True)
class Vocabulary:
    """The classes of this rank: ``count`` of ``total``, from ``first`` on."""

    mesh: DeviceMesh
    dims: tuple[int, ...]  # of the mesh, over which the classes are cut
    first: int
    count: int
    total: int

    def gather(self, part: Tensor) -> Tensor:
        """(ranks, ...): every rank's `part`, in the order of ranks."""
        found = part.unsqueeze(0)
        for dim in reversed(self.dims):
            found = all_gather_tensor(found.contiguous(), 0, (self.mesh, dim))
        return found


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class Rows:
    """The labels of some rows, and what follows from them alone."""

    labels: Tensor
    valid: Tensor  # neither ignored nor, on a GPU, outside of the classes
    bad: Tensor  # outside of the classes and not ignored
    here: Tensor  # the target is a class of this rank
    index: Tensor  # the target in this rank's classes; 0 for a target elsewhere
    weight: Tensor  # of the target; 0 for an ignored row


def rows_of(target: Tensor, loss: Loss, classes: Vocabulary, dtype: torch.dtype) -> Rows:
    labels = target.long()
    counted = labels.ne(loss.ignore_index)
    bad = counted & ((labels < 0) | (labels >= classes.total))
    if labels.device.type == "cpu" and bool(bad.any()):
        wrong = int(labels[bad][0])
        raise IndexError(f"Target {wrong} is out of bounds: expected 0 to {classes.total - 1}")
    valid = counted & ~bad
    offset = labels - classes.first
    here = valid & (offset >= 0) & (offset < classes.count)
    if loss.weight is None:
        weight = valid.to(dtype)
    else:
        weight = loss.weight.to(dtype)[labels.clamp(0, classes.total - 1)] * valid
    return Rows(labels, valid, bad, here, offset.masked_fill(~here, 0), weight)


def _local_weight(loss: Loss, classes: Vocabulary) -> Tensor | None:
    if loss.weight is None:
        return None
    return loss.weight[classes.first : classes.first + classes.count]


def _sum_of_weights(loss: Loss, classes: Vocabulary) -> Any:
    return classes.total if loss.weight is None else loss.weight.double().sum()


def _along(vector: Tensor, like: Tensor, dim: int) -> Tensor:
    return vector.view([-1 if i == dim else 1 for i in range(like.dim())])


def _picked(z: Tensor, rows: Rows, dim: int) -> Tensor:
    return z.gather(dim, rows.index.unsqueeze(dim)).squeeze(dim)


def _statistics(
    z: Tensor, rows: Rows, loss: Loss, classes: Vocabulary, dim: int
) -> tuple[Tensor, ...]:
    """m, s, t and, with smoothing, the weighted sum of the logits, of this rank's classes."""
    dtype = accumulator(z.dtype)
    if classes.count == 0:
        zeros = torch.zeros(rows.labels.shape, dtype=dtype, device=z.device)
        parts = [zeros - torch.inf, zeros, zeros]
        return (*parts, zeros) if loss.smoothing > 0 else (*parts,)
    stats = ops.cross_entropy_forward(z, rows.index, None, NONE, NO_LABEL, 0.0, dtype)[1]
    t = _picked(z, rows, dim).to(dtype).masked_fill(~rows.here, 0.0)
    if loss.smoothing <= 0:
        return stats[0], stats[1], t
    weight = _local_weight(loss, classes)
    if weight is None:
        return stats[0], stats[1], t, z.sum(dim, dtype=dtype)
    weighted = z.to(dtype) * _along(weight.to(dtype), z, dim)
    return stats[0], stats[1], t, weighted.sum(dim)


def forward(
    z: Tensor, rows: Rows, loss: Loss, classes: Vocabulary, dim: int
) -> tuple[Tensor, Tensor]:
    """(losses of the rows, (2, rows) with m and s of all classes), both in the accumulator's type."""
    gathered = classes.gather(torch.stack(_statistics(z, rows, loss, classes, dim)))
    m = gathered[:, 0].amax(0)
    s, t = torch.zeros_like(m), torch.zeros_like(m)
    for part in gathered:  # in the order of ranks: every rank gets the same bits
        s = s + part[1] * (part[0] - m).exp()
        t = t + part[2]
    lse = m + s.log()
    losses = (1 - loss.smoothing) * rows.weight * (lse - t)
    if loss.smoothing > 0:
        u = gathered[:, 3].sum(0)
        share = loss.smoothing / classes.total
        losses = losses + share * (_sum_of_weights(loss, classes) * lse - u).to(m.dtype)
    if loss.z_loss != 0:
        losses = losses + loss.z_loss * lse.square()
    losses = losses.masked_fill(~rows.valid, 0.0).masked_fill(rows.bad, torch.nan)
    return losses, torch.stack((m, s))


def backward(
    grad: Tensor, z: Tensor, rows: Rows, stats: Tensor, loss: Loss, classes: Vocabulary, dim: int
) -> Tensor:
    """The gradient by this rank's logits; ``grad`` is by each row's loss.

    With p = exp(z - m) / s, class weights w, smoothing e of V classes and the target y it is
    ``grad (mass p - (1 - e) w_y onehot - e / V w)``, and the z-loss is a part of mass.
    The kernel writes it for all elements but one per row. That one, the target or, for a target
    elsewhere, class 0, is written here: the kernel takes every row's label for one of its classes.
    """
    if classes.count == 0:
        return torch.zeros_like(z)
    m, s = stats[0], stats[1]
    smoothed = loss.smoothing > 0
    share = loss.smoothing / classes.total
    mass = (1 - loss.smoothing) * rows.weight
    if smoothed:
        mass = mass + share * _sum_of_weights(loss, classes)
    if loss.z_loss != 0:
        mass = mass + 2 * loss.z_loss * (m + s.log())
    mass = mass.to(m.dtype)
    grad = grad.masked_fill(~rows.valid, 0.0).masked_fill(rows.bad, torch.nan)
    # A smoothed label's row has its mass among the statistics; another's is a factor of grad.
    smoothed_here = smoothed and classes.count > 1
    kept = torch.stack((m, s, mass) if smoothed_here else (m, s))
    weight = _local_weight(loss, classes)
    one = torch.ones((), dtype=m.dtype, device=z.device)
    dz = ops.cross_entropy_backward(
        grad if smoothed else grad * mass, z, rows.index, weight if smoothed else None, kept, one,
        NONE, NO_LABEL, share * classes.count, [True, False],
    )[0]  # fmt: skip
    value = mass * ((_picked(z, rows, dim).to(m.dtype) - m).exp() / s)
    value = value - (1 - loss.smoothing) * rows.weight * rows.here
    if smoothed:
        value = value - (share if weight is None else share * weight.to(m.dtype)[rows.index])
    dz.scatter_(dim, rows.index.unsqueeze(dim), (grad * value).unsqueeze(dim).to(dz.dtype))
    return dz  # type: ignore[no-any-return]
