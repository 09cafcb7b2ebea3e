"""Shardings of softmax: any dimension but its own."""

from __future__ import annotations

from typing import Any

from ._table import R, Row, Rule, S

ADVICE = "A softmax needs all of its dimension: shard another."


def _rows(x: Any, dim: int, operands: int) -> list[Row]:
    others = (i for i in range(x.ndim) if i != dim % x.ndim)
    return [([R], [R] * operands), *(([S(i)], [S(i)] * operands) for i in others)]


def softmax(x: Any, dim: int, dtype: Any = None) -> list[Row]:
    return _rows(x, dim, 1)


def softmax_backward(dy: Any, y: Any, dim: int, dtype: Any) -> list[Row]:
    return _rows(y, dim, 2)


RULES = {
    "softmax": Rule(softmax, advice=ADVICE),
    "log_softmax": Rule(softmax, advice=ADVICE),
    "softmax_backward": Rule(softmax_backward, advice=ADVICE),
    "log_softmax_backward": Rule(softmax_backward, advice=ADVICE),
}
