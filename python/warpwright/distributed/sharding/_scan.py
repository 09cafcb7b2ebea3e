"""Shardings of scans: any dimension that is not scanned."""

from __future__ import annotations

from typing import Any

from ._table import P, R, Row, Rule, S

ADVICE = "A scan needs all of its dimension: shard another."


def cumsum(x: Any, dim: int, reverse: bool) -> list[Row]:
    """The op is linear, so partial sums may stay partial sums."""
    others = (i for i in range(x.ndim) if i != dim % x.ndim)
    return [([R], [R]), ([P], [P]), *(([S(i)], [S(i)]) for i in others)]


def linear_scan(
    gate: Any, x: Any, initial: Any, dim: int, reverse: bool, shifted: bool, levels: bool
) -> list[Row]:
    """The initial state has all dimensions but the scanned one."""
    dim %= x.ndim

    def row(result: Any, of_gate: Any, of_initial: Any) -> Row:
        return [result], [of_gate, result, None if initial is None else of_initial]

    others = (i for i in range(x.ndim) if i != dim)
    return [
        row(R, R, R),
        row(P, R, P),  # linear in the input and the initial state
        *(row(S(i), S(i), S(i if i < dim else i - 1)) for i in others),
    ]


def plain_scan(x: Any, dim: int, reverse: bool) -> list[Row]:
    """A scan that is not linear."""
    others = (i for i in range(x.ndim) if i != dim % x.ndim)
    return [([R], [R]), *(([S(i)], [S(i)]) for i in others)]


RULES = {
    "cumsum": Rule(cumsum, advice=ADVICE),
    "cumprod": Rule(plain_scan, advice=ADVICE),
    "logcumsumexp": Rule(plain_scan, advice=ADVICE),
    "linear_scan": Rule(linear_scan, advice=ADVICE),
}
