"""Shardings of embedding, those of native: shards of columns, of rows, and of indices.

A shard of rows gets all indices. DTensor's placement for it shifts the indices of its rows, masks
the others, and later adds up what the shards computed.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor.placement_types import _MaskPartial

from ._table import P, R, Row, Rule, S, all_replicated


def embedding(weight: Any, indices: Any, padding_idx: Any, by_freq: bool) -> list[Row]:
    dims = indices.ndim
    rows: list[Row] = [all_replicated(1, 2), ([S(dims)], [S(1), R])]
    masked = _MaskPartial(offset_shape=weight.shape, offset_dim=0)  # one for both: it has the mask
    rows.append(([masked], [S(0), masked]))
    return rows + [([S(i)], [R, S(i)]) for i in range(dims)]


def embedding_backward(
    grad: Any, indices: Any, num_weights: Any, padding_idx: Any, by_freq: bool
) -> list[Row]:
    """Frequencies count all positions, so indices are then not cut."""
    dims = indices.ndim
    rows: list[Row] = [all_replicated(1, 2), ([S(1)], [S(dims), R]), ([P], [P, R])]
    return rows if by_freq else rows + [([P], [S(i), S(i)]) for i in range(dims)]


def embedding_renorm_(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        "embedding_renorm_: expected each tensor's local shard, tensor.to_local(), got a DTensor: a "
        "copy of the weight with other placements would lose what is written."
    )


RULES = {
    "embedding": Rule(embedding),
    "embedding_backward": Rule(embedding_backward),
}
HANDLERS = {"embedding_renorm_": embedding_renorm_}
