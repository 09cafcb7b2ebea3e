"""From DTensors to this rank's part and back, for handlers: operators that communicate inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

Placements = tuple[Placement, ...]


def mesh_of(args: Iterable[Any]) -> DeviceMesh:
    """The mesh of the first DTensor."""
    return next(a.device_mesh for a in args if isinstance(a, DTensor))


def local(tensor: Tensor | None, mesh: DeviceMesh, placements: Placements) -> Any:
    """This rank's part of `tensor` under `placements`; a plain tensor is the same on all ranks."""
    if tensor is None:
        return None
    if not isinstance(tensor, DTensor):
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=_meta(tensor))
        part = tensor
    else:
        spec, part = tensor._spec, tensor._local_tensor
    if spec.placements == placements:
        return part
    wanted = DTensorSpec(mesh, placements, tensor_meta=spec.tensor_meta)
    return redistribute_local_tensor(part, spec, wanted)


def _meta(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def whole(part: Tensor, mesh: DeviceMesh, placements: Placements, like: Any = None) -> DTensor:
    """The DTensor of these parts. ``like``: its global shape, or a tensor with the same.

    A replicated result has its part's shape.
    """
    if like is None:
        meta = _meta(part)
    else:
        shape = torch.Size(like.shape if isinstance(like, Tensor) else like)
        stride = torch.empty(shape, device="meta").stride()
        if isinstance(like, Tensor) and like.shape == shape:
            stride = like.stride()
        meta = TensorMeta(shape, stride, part.dtype)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta)
    return DTensor(part, spec, requires_grad=False)  # type: ignore[call-arg]


def extent(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> tuple[Any, Any]:
    """(sizes, offsets) of this rank's part."""
    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)


def place_in_whole(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> list[int]:
    """The numbers of this rank's elements in the whole tensor, as the operator dropout takes them.

    The first number; then, from the outermost dimension that is not in one piece, how many elements a
    step along it passes in the part and in the whole.
    """
    sizes, offsets = extent(shape, mesh, placements)
    if 0 in sizes:
        return []
    levels: list[tuple[int, int]] = []
    first, run, pitch = 0, 1, 1
    for size, offset, whole in zip(*map(reversed, (sizes, offsets, shape)), strict=True):
        first += offset * pitch
        inner = levels[0] if levels else (1, 1)
        if size > 1 and run * inner[1] != pitch * inner[0]:  # it does not continue the inner one
            levels.insert(0, (run, pitch))
        run, pitch = run * size, pitch * whole
    return [first, *chain.from_iterable(levels)] if first or levels else []


def shard_of(spec: DTensorSpec) -> tuple[int, int]:
    """(index, count) of this rank's shard; replicas have the same index."""
    index, count = 0, 1
    coordinate = spec.mesh.get_coordinate() or [0] * spec.mesh.ndim
    for at, size, placement in zip(coordinate, spec.mesh.shape, spec.placements, strict=True):
        if isinstance(placement, Shard):
            index, count = index * size + at, count * size
    return index, count
