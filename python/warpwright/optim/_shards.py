"""Parameters of FSDP2 and tensor parallelism: a DTensor is updated by its local shard.

A step is elementwise, so one launch over all local shards is the step of the whole tensors. Only the
norm for clipping needs the other ranks. State stays a DTensor, as torch.optim makes it, so that
distributed checkpoints hold it. The package torch.distributed.tensor is never imported here: without
it loaded there is no DTensor.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

PLAIN_TYPES = {Tensor, torch.nn.Parameter}
LOCAL_TENSOR, SPEC = attrgetter("_local_tensor"), attrgetter("_spec")
# (mesh, dimension of it) over which a tensor is cut into shards.
Cuts = tuple[tuple[Any, int], ...]


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is exactly a DTensor."""
    if type(tensor) in PLAIN_TYPES:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is getattr(module, "DTensor", None)


def local(tensor: Tensor) -> Tensor:
    """The shard of this rank, sharing its memory; any other tensor is its own.

    That is what ``to_local`` gives without gradients, as in a step.
    """
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined,no-any-return]


def locals_of(tensors: Collection[Tensor]) -> list[Tensor]:
    return _each(LOCAL_TENSOR, local, tensors)


def specs_of(tensors: Collection[Tensor]) -> list[Any]:
    """The mesh and placements of each; None of plain tensors. FSDP2 gives every step's gradient the same object."""
    return _each(SPEC, lambda tensor: getattr(tensor, "_spec", None), tensors)


def _each(of_dtensor: Any, of_any: Any, tensors: Collection[Tensor]) -> list[Any]:
    """A step asks several hundred tensors: of DTensors alone no Python function runs per tensor."""
    only_dtensors = len(set(map(type, tensors))) == 1 and is_dtensor(next(iter(tensors)))
    return list(map(of_dtensor if only_dtensors else of_any, tensors))


def cut_alike(a: Tensor, b: Tensor) -> bool:
    """Whether both are DTensors whose shards on each rank hold the same elements."""
    if not (is_dtensor(a) and is_dtensor(b)):
        return False
    x: Any = a
    y: Any = b
    if x.placements != y.placements or any(p.is_partial() for p in x.placements):
        return False
    if x.device_mesh != y.device_mesh or x.shape != y.shape:
        return False
    mine, other = local(a), local(b)
    return {type(mine), type(other)} <= PLAIN_TYPES and mine.shape == other.shape


def cuts_of(tensor: Tensor) -> Cuts:
    """The dimensions of the mesh whose ranks hold other elements; replicas are not among them."""
    if not is_dtensor(tensor):
        return ()
    sharded: Any = tensor
    return tuple(
        (sharded.device_mesh, dim)
        for dim, placement in enumerate(sharded.placements)
        if not placement.is_replicate()
    )


def norm_over_ranks(norms: Sequence[tuple[Cuts, Tensor]]) -> Tensor:
    """The 2-norm of all shards on all ranks, from this rank's norms of tensors cut alike.

    Every rank of a mesh must come here with the same cuts in the same order.
    """
    squares = []
    for cuts, norm in norms:
        square = norm.square()
        for mesh, dim in cuts:
            torch.distributed.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()
