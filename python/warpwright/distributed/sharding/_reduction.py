"""Shardings of reductions: kept dimensions; for sums and maxima reduced ones, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ._table import P, R, Row, Rule, S

ADVICE = "A shard has no result of its own along a reduced dimension: shard a kept one."


def _rows(
    x: Any, dim: Any, keepdim: bool, over_shards: Placement | None, is_linear: bool
) -> list[Row]:
    """``over_shards``: what the results of shards along a reduced dimension are."""
    dims = [dim] if isinstance(dim, int) else (dim or range(x.ndim))
    reduced = {d % x.ndim for d in dims} if x.ndim else set()
    rows: list[Row] = [([R], [R])]
    if is_linear:
        rows.append(([P], [P]))
    for i in range(x.ndim):
        if i in reduced:
            if over_shards is not None:
                rows.append(([over_shards], [S(i)]))
        else:
            place = i if keepdim else i - len([d for d in reduced if d < i])
            rows.append(([S(place)], [S(i)]))
    return rows


def _rule(over_shards: Placement | None, is_linear: bool) -> Callable[..., list[Row]]:
    def rows(x: Any, dim: Any, keepdim: bool, *rest: Any) -> list[Row]:
        return _rows(x, dim, keepdim, over_shards, is_linear)

    return rows


def _squares(x: Any, dim: Any, correction: Any, keepdim: bool) -> list[Row]:
    return _rows(x, dim, keepdim, None, False)


RULES = {
    "sum": Rule(_rule(P, True)),
    "mean": Rule(_rule(None, True), advice=ADVICE),
    "amax": Rule(_rule(Partial("max"), False)),
    "logsumexp": Rule(_rule(None, False), advice=ADVICE),
    "var": Rule(_squares, advice=ADVICE),
    "std": Rule(_squares, advice=ADVICE),
}
