"""Shardings of attention: over the batch and over heads. A sequence that is cut is refused.

Attention over a sequence that ranks share is ring attention, which computes block by block. A gather
of keys and values would undo what the cut is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._random import drawn_per_shard
from ._table import P, R, Row, Rule, S, picked

ADVICE = (
    "Attention is computed over the batch and over heads. For a sequence cut into shards use "
    "warpwright.distributed.context_parallel."
)

VARLEN_ADVICE = "Packed sequences are computed over heads. Shard the heads of all operands alike."


def _mask_at(mask: Any, dim: int) -> Any:
    """A mask that broadcasts over a dimension is whole on every rank."""
    return None if mask is None else S(dim) if mask.shape[dim] != 1 else R


def _shared_head(q: Any, k: Any) -> bool:
    """One head of keys and values for all heads of queries: each rank has it."""
    return bool(k.shape[1] == 1 and q.shape[1] != 1)


def _cuts(q: Any, k: Any, mask: Any) -> list[tuple[Any, Any, Any]]:
    """(queries, keys and values, mask) of each row of the table but the first."""
    return [
        (S(0), S(0), _mask_at(mask, 0)),
        (S(1), R if _shared_head(q, k) else S(1), _mask_at(mask, 1)),
    ]


def attention(q: Any, k: Any, v: Any, mask: Any, *options: Any) -> list[Row]:
    rows: list[Row] = [([R] * 3, [R] * 4)]
    rows += [([a, a, R], [a, b, b, m]) for a, b, m in _cuts(q, k, mask)]
    return rows


def attention_backward(
    do: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, philox: Any, *options: Any
) -> list[Row]:
    wanted: Sequence[bool] = options[3]
    rows: list[Row] = [(picked(wanted, R, R, R, R), [R] * 9)]
    for a, b, m in _cuts(q, k, mask):
        grads = a, b if b != R else P, b if b != R else P, m if m != R else P
        rows.append((picked(wanted, *grads), [a, a, b, b, m, a, a, R, a]))
    return rows


def _heads_fit(args: list[Any], inputs: dict[str, Any]) -> bool:
    """Each rank's query heads are those of its key heads: no group of heads is cut in two."""
    query, key = inputs["query"], inputs["key"]
    heads, kv_heads, parts = query.shape[1], key.shape[1], 1
    for size, placement in zip(query.mesh.shape, query.placements, strict=True):
        parts *= size if placement.is_shard(1) else 1
    if heads == kv_heads or parts == 1 or _shared_head(query, key):
        return True
    return bool(heads % parts == 0 and kv_heads % parts == 0)


def varlen(q: Any, k: Any, v: Any, *options: Any) -> list[Row]:
    """A sequence's tokens may be on several shards, so only heads are cut."""
    b = R if _shared_head(q, k) else S(1)
    return [([R, R], [R] * 5), ([S(1), S(0)], [S(1), b, b, R, R])]


def varlen_backward(
    do: Any, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, out: Any, lse: Any, *options: Any
) -> list[Row]:
    wanted: Sequence[bool] = options[7]
    b = R if _shared_head(q, k) else S(1)
    grads = S(1), b if b != R else P, b if b != R else P
    return [
        (picked(wanted, R, R, R), [R] * 9),
        (picked(wanted, *grads), [S(1), S(1), b, b, R, R, S(1), S(0), S(0)]),
    ]


def dropout_factors(philox: Any, *_: Any) -> list[Row]:
    return [([R], [R])]


RULES = {
    "attention": Rule(attention, kept=("query", "key", "value"), advice=ADVICE, divides=_heads_fit),
    "attention_backward": Rule(
        attention_backward, kept=("query", "key", "value"), advice=ADVICE, divides=_heads_fit
    ),
    "attention_dropout_factors": Rule(dropout_factors),
    "attention_varlen": Rule(
        varlen, kept=("query", "key", "value"), advice=VARLEN_ADVICE, divides=_heads_fit
    ),
    "attention_varlen_backward": Rule(
        varlen_backward, kept=("query", "key", "value"), advice=VARLEN_ADVICE, divides=_heads_fit
    ),
}
HANDLERS = {"attention": drawn_per_shard}
