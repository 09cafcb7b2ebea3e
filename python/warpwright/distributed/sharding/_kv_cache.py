"""Shardings of attention over a cache: over heads, and over the batch if the table is cut with it."""

from __future__ import annotations

from typing import Any

from ._table import R, Row, Rule, S

ADVICE = "Shard the heads of query and cache alike, or the batch with a cache that every rank has."


def attention_with_kv_cache(
    query: Any, k_cache: Any, v_cache: Any, seqlens: Any, table: Any, *options: Any
) -> list[Row]:
    """Pages belong to no sequence: with a table, a cut batch needs the whole cache."""
    paged = table is not None
    whole, batch = R if paged else None, S(0) if paged else None
    cache = R if paged else S(0)
    return [
        ([R], [R, R, R, R, whole]),
        ([S(0)], [S(0), cache, cache, S(0), batch]),
        ([S(2)], [S(2), S(2), S(2), R, whole]),
    ]


def _heads_fit(args: list[Any], inputs: dict[str, Any]) -> bool:
    """Each rank's query heads are those of its key heads: no group of heads is cut in two."""
    ranks = 1
    for size, placement in zip(inputs["query"].mesh.shape, inputs["query"].placements, strict=True):
        ranks *= size if placement == S(2) else 1
    return args[1].shape[2] % ranks == 0


RULES = {
    "attention_with_kv_cache": Rule(
        attention_with_kv_cache,
        kept=("k_cache", "v_cache"),
        advice=ADVICE,
        divides=_heads_fit,
    ),
}
