"""Ring attention: the ranks share a sequence, keys and values travel, queries stay.

Step s of rank r attends to the keys of rank r - s. Every rank sends its own keys straight to the rank
that needs them next. A step is a permutation of the ranks, and no data is forwarded. The transfer for
step s + 1 runs while step s computes (`transport`).

Blocks are merged by their log-sum-exps (o, l), in float32:
    l' = logaddexp(l, l_s),  o' = o exp(l - l') + o_s exp(l_s - l')

The backward of a block gets the merged out and lse. Its probabilities are then those of the whole row,
and the gradients of the blocks add up. A block's dK and dV return to the owner of the keys in the dtype
of k. The owner adds them in float32, in the order of steps: the result is the same at every run. The
last step of a sum rounds as it writes the result, so two ranks keep no float32 tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._ops import ops
from .layouts import Part, extent, part
from .transport import GRADIENTS, KEYS, Pair, Shapes, Transfer, Transport


@dataclass(frozen=True)
class Ring:
    """One call: who takes part, and how the work is cut."""

    group: dist.ProcessGroup
    layout: str
    is_causal: bool
    scale: float | None
    heads_at_once: int  # key heads that travel together
    transport: Transport

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def source(self, step: int) -> int:
        """The rank whose keys this rank uses in ``step``."""
        return (self.rank - step) % self.size

    def user(self, step: int) -> int:
        """The rank that uses this rank's keys in ``step``."""
        return (self.rank + step) % self.size

    def part(self, rank: int, source: int, length: int) -> Part | None:
        return part(self.layout, self.is_causal, rank, source, length)


@dataclass(frozen=True)
class Block:
    """One step for one group of heads: the operands of an attention call."""

    step: int
    q_heads: slice
    k_heads: slice
    part: Part | None  # None: this rank has no work in this step
    k: Tensor  # (B, heads at once, keys of the part, D); empty without a part
    v: Tensor


def _start(ring: Ring, k: Tensor, v: Tensor, heads: slice, step: int) -> Transfer:
    """Sends own keys and values to their user in ``step``, and receives those that this rank uses."""
    length = k.shape[2]
    send = receive = None
    theirs = ring.part(ring.user(step), ring.rank, length)
    if theirs is not None:  # a copy only if the heads and keys are not one piece of memory
        cut = (slice(None), heads, theirs.keys)
        send = k[cut].contiguous(), v[cut].contiguous()
    ours = ring.part(ring.rank, ring.source(step), length)
    if ours is not None:
        receive = Shapes.of(k, v, ring.heads_at_once, extent(ours.keys, length))
    return ring.transport.exchange(send, ring.user(step), receive, ring.source(step), KEYS)


def blocks(ring: Ring, q_heads: int, k: Tensor, v: Tensor) -> Iterator[Block]:
    """All blocks of this rank, in the order in which every rank takes them.

    The transfer of a block starts before the block before it is given out, and after that one's keys
    have come.
    """
    ring.transport.begin(Shapes.of(k, v, ring.heads_at_once, k.shape[2]))
    at_once, per_key = ring.heads_at_once, q_heads // k.shape[1]
    cuts = [slice(h, h + at_once) for h in range(0, k.shape[1], at_once)]
    units = [(heads, step) for heads in cuts for step in range(ring.size)]

    def start(i: int) -> Transfer | None:
        needs_transfer = i < len(units) and units[i][1] > 0
        return _start(ring, k, v, *units[i]) if needs_transfer else None

    pending = start(0)
    for i, (heads, step) in enumerate(units):
        ours = ring.part(ring.rank, ring.source(step), k.shape[2])
        keys = k[:, heads], v[:, heads]
        if pending is not None:
            keys = pending.wait() or (k[:, heads, :0], v[:, heads, :0])
        following = start(i + 1)
        in_q = slice(heads.start * per_key, heads.stop * per_key)
        yield Block(step, in_q, heads, ours, *keys)
        pending = following


def sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RunningSum:
    """The sum of parts of one tensor, each over some of its positions along dimension 2.

    It is wide between the parts. The last addition rounds as it writes: into memory that the caller
    has anyway. So the sum of two parts needs no wide memory.
    """

    def __init__(self, first: Tensor) -> None:
        self.total = first

    def add(self, at: slice, part: Tensor) -> None:
        self.total = self.total.to(sum_dtype(self.total))
        self.total[:, :, at] += part

    def finish(self, target: Tensor, at: slice, part: Tensor | None) -> None:
        """Writes the sum, with a last part if there is one, to ``target``."""
        if part is None:
            target.copy_(self.total)
            return
        torch.add(self.total[:, :, at], part, out=target[:, :, at])
        copy_others(target, self.total, at)


def copy_others(target: Tensor, source: Tensor, at: slice) -> None:
    """Copies the positions that are not in ``at``, which begins or ends with the tensor."""
    begin, end, _ = at.indices(target.shape[2])
    rest = slice(0, begin) if begin else slice(end, None)
    target[:, :, rest] = source[:, :, rest]


class RunningSoftmax:
    """The merged blocks ``(out, lse)`` of some heads; ``out`` is wide between the blocks."""

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out, lse

    def _merge(self, rows: slice, out: Tensor, lse: Tensor, target: Tensor) -> None:
        """Two passes over the rows: the second casts ``out`` as it reads it, and its result."""
        wide, held = sum_dtype(out), self.lse[:, :, rows]
        total = torch.logaddexp(held, lse)
        factor, part_factor = ((x - total).exp_().to(wide).unsqueeze(-1) for x in (held, lse))
        torch.addcmul(self.out[:, :, rows] * factor, out, part_factor, out=target[:, :, rows])
        held.copy_(total)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        self.out = self.out.to(sum_dtype(self.out))
        self._merge(rows, out, lse, self.out)

    def finish(self, target: Tensor, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merges the last block, and writes to ``target``."""
        self._merge(rows, out, lse, target)
        copy_others(target, self.out, rows)


def forward(ring: Ring, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse): as of one attention call over the keys of all ranks."""
    out = torch.empty_like(q) if q.shape[3] == v.shape[3] else q.new_empty(*q.shape[:3], v.shape[3])
    lses, running = [], RunningSoftmax(out, out)
    for block in blocks(ring, q.shape[1], k, v):
        last, target = block.step == ring.size - 1, out[:, block.q_heads]
        if block.part is not None:
            rows = block.part.rows
            part = ops.attention(
                *(q[:, block.q_heads, rows], block.k, block.v),
                *(None, 0.0, block.part.is_causal, ring.scale),
            )[:2]
            if block.step == 0:
                running = RunningSoftmax(*part)
            elif last:
                running.finish(target, rows, *part)
            else:
                running.add(rows, *part)
        if last:
            if block.part is None or ring.size == 1:
                target.copy_(running.out)
            lses.append(running.lse)
    return out, torch.cat(lses, 1) if len(lses) > 1 else lses[0]


class KeyGradients:
    """dK and dV of this rank's keys: sums over the parts that the ranks return."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self.ring, self.length = ring, k.shape[2]
        self.targets = torch.empty_like(k), torch.empty_like(v)
        self.sums: list[RunningSum] = []
        self.returning: tuple[Transfer, Block, Part | None] | None = None

    def add(self, block: Block, part: Pair | None) -> None:
        """A block's dK and dV. Those of other ranks' keys travel while the next block computes."""
        self.finish()
        ring = self.ring
        if block.step == 0:
            assert part is not None  # every rank attends to its own keys
            self.sums = [RunningSum(x) for x in part]
            if ring.size == 1:
                self._store(block, slice(None), (None, None))
            return
        theirs = ring.part(ring.user(block.step), ring.rank, self.length)
        receive = None
        if theirs is not None:
            keys = extent(theirs.keys, self.length)
            receive = Shapes.of(*self.targets, ring.heads_at_once, keys)
        send = (part[0].contiguous(), part[1].contiguous()) if part is not None else None
        source, user = ring.source(block.step), ring.user(block.step)
        transfer = ring.transport.exchange(send, source, receive, user, GRADIENTS)
        self.returning = (transfer, block, theirs)

    def finish(self) -> None:
        """Adds the part that was under way."""
        if self.returning is None:
            return
        transfer, block, theirs = self.returning
        self.returning = None
        keys = slice(None) if theirs is None else theirs.keys
        returned = transfer.wait()
        if block.step == self.ring.size - 1:
            self._store(block, keys, returned or (None, None))
        elif returned is not None:
            for total, x in zip(self.sums, returned, strict=True):
                total.add(keys, x)

    def _store(self, block: Block, keys: slice, parts: tuple[Tensor | None, Tensor | None]) -> None:
        for total, target, last in zip(self.sums, self.targets, parts, strict=True):
            total.finish(target[:, block.k_heads], keys, last)


def backward(
    ring: Ring, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of this rank's queries, keys and values."""
    dq = torch.empty_like(q)
    gradients, dq_sum = KeyGradients(ring, k, v), RunningSum(dq)
    no_state = torch.empty(0, dtype=torch.int64, device=q.device)
    for block in blocks(ring, q.shape[1], k, v):
        dq_part = dkv_part = None
        rows, heads = slice(None), block.q_heads
        if block.part is not None:
            rows = block.part.rows
            dq_part, dk_part, dv_part, _ = ops.attention_backward(
                *(grad_out[:, heads, rows], q[:, heads, rows], block.k, block.v, None),
                *(out[:, heads, rows], lse[:, heads, rows], no_state),
                *(0.0, block.part.is_causal, ring.scale, [True, True, True, False]),
            )
            dkv_part = dk_part, dv_part
        gradients.add(block, dkv_part)
        if block.step == 0:
            assert dq_part is not None  # every rank attends to its own keys
            dq_sum, dq_part = RunningSum(dq_part), None
        if block.step == ring.size - 1:
            dq_sum.finish(dq[:, heads], rows, dq_part)
        elif dq_part is not None:
            dq_sum.add(rows, dq_part)
    gradients.finish()
    return dq, *gradients.targets


class RingAttention(torch.autograd.Function):
    """Saves this rank's operands, out and lse; keys and values travel again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, lse = forward(ring, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        return *backward(ctx.ring, grad_out, *ctx.saved_tensors), None
