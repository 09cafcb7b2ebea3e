"""Handlers of the operators that need more than a table, or that no DTensor may reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Shard

from ..._ops import ops
from ._local import local, mesh_of, whole


def optimizer(name: str) -> Callable[..., Any]:
    def refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise RuntimeError(
            f"{name}: expected each tensor's local shard, tensor.to_local(), got a DTensor. The "
            "optimizers in warpwright.optim take DTensors."
        )

    return refuse


def kv_cache_append_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        "kv_cache_append_: expected each tensor's local shard, tensor.to_local(), got a DTensor: a "
        "copy of the cache with other placements would lose what is written."
    )


def max_pool2d_indices(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Positions within each plane: a shard over N or channels has its own planes."""
    codes, input_size, *window = args
    mesh, windows = mesh_of(args), (codes.dim() - 2, codes.dim() - 1)
    if any(isinstance(p, Shard) and p.dim in windows for p in codes.placements):
        raise RuntimeError(
            "max_pool2d_indices: codes: expected shards over N or channels, got "
            f"{codes.placements} of shape {tuple(codes.shape)}"
        )
    part = local(codes, mesh, codes.placements)
    size = [*part.shape[:-2], *input_size[-2:]]
    return whole(ops.max_pool2d_indices(part, size, *window), mesh, codes.placements, codes)


HANDLERS = {
    "kv_cache_append_": kv_cache_append_,
    "max_pool2d_indices": max_pool2d_indices,
    **{name: optimizer(name) for name in ("sgd_step_", "adam_step_", "grad_norm")},
}
