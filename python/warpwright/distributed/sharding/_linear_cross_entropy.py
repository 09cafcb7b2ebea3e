"""linear_cross_entropy over ranks: in chunks of rows. Each rank has a part of a chunk's logits.

The weight may be cut over classes, the input over rows. Each chunk takes one product, one exchange of
three numbers per row (`_vocabulary`) and the products of the gradients. The gradient by the input is
then a partial sum over the ranks that have other classes. The gradients by weight and bias are partial
sums over the ranks that have other rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ..._ops import ops
from . import _vocabulary
from ._local import Placements, local, mesh_of, whole
from ._losses import Cut, with_defaults
from ._vocabulary import MEAN, NONE, Loss, Rows, accumulator

R = Replicate()
CHUNK_ELEMENTS = 2**25  # of logits on one rank


@dataclass
class Call:
    """One call's operands on this rank; `cut` is that of the logits."""

    cut: Cut  # its z is not computed
    x: Tensor
    w: Tensor
    b: Tensor | None
    softcap: float
    chunk: int

    @property
    def mesh(self) -> DeviceMesh:
        return self.cut.mesh

    def placed(self, classes: Any, rows: Any) -> Placements:
        """`classes` on dimensions of the mesh that cut classes, `rows` on those that cut rows."""
        dims = self.cut.class_dims, self.cut.row_dims
        return tuple(
            classes if at in dims[0] else rows if at in dims[1] else R
            for at in range(self.mesh.ndim)
        )


def call_of(
    operands: Sequence[Any], options: Sequence[Any], chunk_rows: int, z_loss: float, softcap: float
) -> Call:
    """``operands``: input, weight, bias, target, class weights; ``options`` as in `_losses.cut_of`."""
    (x, w, b, target, weight), (reduction, ignore_index, smoothing) = operands, options
    mesh = mesh_of((w, x, target, b, weight))
    nowhere = (R,) * mesh.ndim
    of_w = w.placements if isinstance(w, DTensor) else nowhere
    of_x = x.placements if isinstance(x, DTensor) else nowhere
    if any(p not in (R, Shard(0)) for p in of_w):
        raise RuntimeError(
            "linear_cross_entropy: weight: expected (classes, features) that is whole or cut over "
            f"classes, Shard(0), got {tuple(of_w)}"
        )
    # A row's logits need the row: ranks with other classes share their rows.
    logits = tuple(
        Shard(1) if c == Shard(0) else Shard(0) if r == Shard(0) else R
        for c, r in zip(of_w, of_x, strict=True)
    )
    probabilities = target.is_floating_point()
    loss = Loss(
        local(weight, mesh, nowhere), reduction, int(ignore_index), max(0.0, smoothing), z_loss
    )
    shape = torch.Size((x.shape[0], w.shape[0]))
    cut = Cut(mesh, logits, shape, x, target, loss, 1, probabilities)
    if probabilities and cut.class_dims:
        raise RuntimeError(
            "linear_cross_entropy: target: expected labels with a weight that is cut over classes, "
            "got probabilities"
        )
    cut.target = local(target, mesh, logits if probabilities else cut.rows())
    part = local(x, mesh, cut.rows())
    own = local(b, mesh, tuple(Shard(0) if c == Shard(0) else R for c in of_w))
    ranks = math.prod(mesh.shape[at] for at in cut.class_dims)
    # The same on all ranks that share rows: each chunk has an exchange.
    chunk = chunk_rows or max(128, CHUNK_ELEMENTS // max(1, -(-w.shape[0] // ranks)))
    return Call(cut, part, local(w, mesh, tuple(of_w)), own, softcap, chunk)


class _Chunk:
    """Some rows: their logits, losses and gradients."""

    def __init__(self, call: Call, rows: Rows | None, target: Tensor, x: Tensor) -> None:
        self.call, self.rows, self.target, self.x = call, rows, target, x
        self.loss, self.classes = call.cut.loss, call.cut.classes
        self.z = ops.linear(x, call.w, call.b)
        self.slope: Tensor | None = None
        if call.softcap:
            t = (self.z.to(accumulator(self.z.dtype)) / call.softcap).tanh()
            self.z, self.slope = t * call.softcap, 1 - t * t
            if call.cut.probabilities:
                self.target = target.to(self.z.dtype)

    def losses(self) -> Tensor:
        """Of each row."""
        if self.rows is not None:
            losses, self.stats = _vocabulary.forward(self.z, self.rows, self.loss, self.classes, 1)
            return losses
        loss = self.loss
        found, self.stats, _ = ops.cross_entropy_forward(
            self.z, self.target, loss.weight, NONE, loss.ignore_index, loss.smoothing,
            accumulator(self.z.dtype), loss.z_loss,
        )  # fmt: skip
        return found  # type: ignore[no-any-return]

    def lse(self) -> Tensor:
        return self.stats[0] + self.stats[1].log()

    def argmax(self) -> Tensor:
        """The first class with the largest logit."""
        if self.classes.count == 0:
            value, index = torch.full_like(self.stats[0], -torch.inf), torch.zeros_like(self.target)
        else:
            value, index = self.z.max(1)
        if self.rows is None:
            return index
        values = self.classes.gather(value)
        indices = self.classes.gather(index + self.classes.first)
        return indices.gather(0, values.argmax(0, keepdim=True)).squeeze(0)

    def gradient(self, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
        """By this chunk's products; ``grad`` is by each row's loss."""
        loss = self.loss
        if self.rows is not None:
            dz = _vocabulary.backward(grad, self.z, self.rows, self.stats, loss, self.classes, 1)
        else:
            one = torch.ones((), dtype=self.stats.dtype, device=self.z.device)
            dz = ops.cross_entropy_backward(
                grad, self.z, self.target, loss.weight, self.stats, one, NONE, loss.ignore_index,
                loss.smoothing, [True, False], loss.z_loss,
            )[0]  # fmt: skip
        if grad_lse is not None:
            m, s = self.stats[0].unsqueeze(1), self.stats[1].unsqueeze(1)
            dz = dz + (self.z - m).exp() / s * grad_lse.unsqueeze(1)
        if self.slope is not None:
            dz = dz * self.slope
        return dz.to(self.x.dtype)


class _Gradients:
    """Of input, weight and bias: sums over chunks, in float32 for 16-bit operands."""

    def __init__(self, call: Call, mask: list[bool]) -> None:
        self.call, self.mask = call, mask
        wide = accumulator(call.x.dtype)
        self.x: list[Tensor] = []
        self.w = torch.zeros_like(call.w, dtype=wide) if mask[1] else None
        self.b = (
            torch.zeros(call.w.shape[:1], dtype=wide, device=call.x.device) if mask[2] else None
        )

    def add(self, dz: Tensor, x: Tensor) -> None:
        dx, dw, db = ops.linear_backward(dz, x, self.call.w, self.mask)
        if dx is not None:
            self.x.append(dx)
        if self.w is not None:
            self.w += dw
        if self.b is not None:
            self.b += db

    def results(self, dtype: torch.dtype, like: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
        """``dtype``: of the gradients of weight and bias; ``like``: the whole input and weight."""
        call = self.call
        mesh, x, w = call.mesh, *like
        of_x, of_w = call.placed(Partial(), Shard(0)), call.placed(Shard(0), Partial())
        dx = torch.cat(self.x) if self.x else torch.zeros_like(call.x)
        return (
            whole(dx, mesh, of_x, x.shape) if self.mask[0] else None,
            None if self.w is None else whole(self.w.to(dtype), mesh, of_w, w.shape),
            None if self.b is None else whole(self.b.to(dtype), mesh, of_w, w.shape[:1]),
        )


def _chunks(call: Call) -> Any:
    """(place, chunk) of this rank's rows."""
    cut = call.cut
    for begin in range(0, call.x.shape[0], call.chunk):
        place = slice(begin, begin + call.chunk)
        target = cut.target[place]
        rows = replace(cut, target=target, z=call.x).labelled() if cut.class_dims else None
        yield place, _Chunk(call, rows, target, call.x[place])


def _total(call: Call) -> Tensor:
    """The sum of the labels' weights, or the number of rows, of all ranks."""
    cut = call.cut
    if cut.probabilities:
        own = torch.full((), call.x.shape[0], dtype=accumulator(call.x.dtype), device=call.x.device)
    else:
        own = cut.labelled().weight.sum()
    return cut.summed(own)


def forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, w, b, target, weight, *options, chunk_rows, dtype, mask, z_loss, softcap, wants_lse, \
        wants_argmax = with_defaults(op, args)  # fmt: skip
    call = call_of((x, w, b, target, weight), options, chunk_rows, z_loss, softcap)
    cut, reduction = call.cut, options[0]
    mask = [False] * 3 if reduction == NONE else list(mask)
    total = _total(call) if reduction != NONE else torch.zeros(
        (), dtype=accumulator(call.x.dtype), device=call.x.device
    )  # fmt: skip
    # A float16 gradient of a mean would underflow: the backward divides, as without ranks.
    late = call.x.dtype == torch.float16
    divisor = total if reduction == MEAN and not late else torch.ones_like(total)
    gradients = _Gradients(call, mask)
    losses, lses, argmaxes = [], [], []
    for _, chunk in _chunks(call):
        losses.append(chunk.losses())
        if wants_lse:
            lses.append(chunk.lse())
        if wants_argmax:
            argmaxes.append(chunk.argmax())
        if any(mask):
            grad = (1 / divisor).expand(losses[-1].shape)
            gradients.add(chunk.gradient(grad, None), chunk.x)
    nothing = call.x.new_empty(0, dtype=total.dtype)
    loss = torch.cat([nothing, *losses])
    if reduction != NONE:
        loss = cut.summed(loss.sum())
        loss = loss / total if reduction == MEAN else loss
    mesh, per_row = call.mesh, (x.shape[0],)
    wide = torch.float32 if late else call.x.dtype
    return (
        whole(loss.to(dtype), mesh, cut.rows() if reduction == NONE else cut.nowhere,
              per_row if reduction == NONE else None),
        whole(total, mesh, cut.nowhere),
        *gradients.results(wide, (x, w)),
        whole(torch.cat([nothing, *lses]), mesh, cut.rows(), per_row) if wants_lse else None,
        whole(torch.cat([nothing.long(), *argmaxes]), mesh, cut.rows(), per_row)
        if wants_argmax else None,
    )  # fmt: skip


def backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad, x, w, b, target, weight, *options, chunk_rows, mask, z_loss, softcap, grad_lse = (
        with_defaults(op, args)
    )
    call = call_of((x, w, b, target, weight), options, chunk_rows, z_loss, softcap)
    cut, reduction = call.cut, options[0]
    dtype = accumulator(call.x.dtype)
    grad = local(grad, call.mesh, cut.rows() if reduction == NONE else cut.nowhere).to(dtype)
    if reduction == MEAN:
        grad = grad / _total(call)
    grad = grad.expand(call.x.shape[:1])
    by_lse = local(grad_lse, call.mesh, cut.rows())
    gradients = _Gradients(call, list(mask))
    for place, chunk in _chunks(call):
        chunk.losses()
        dz = chunk.gradient(grad[place], None if by_lse is None else by_lse[place])
        gradients.add(dz, chunk.x)
    return gradients.results(call.x.dtype, (x, w))


HANDLERS = {
    "linear_cross_entropy_forward": forward,
    "linear_cross_entropy_backward": backward,
}
