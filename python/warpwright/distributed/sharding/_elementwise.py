"""Shardings of relu and max pooling: any dimension that is not a window's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._table import R, Row, Rule, S

POOL_ADVICE = "Max pooling is computed over N and channels, not over H and W."


def alike(results: int, operands: int, window_dims: int = 0) -> Callable[..., list[Row]]:
    """Every tensor is cut along the same dimension, which is none of the last `window_dims`."""

    def rows(x: Any, *_: Any) -> list[Row]:
        dims = range(x.ndim - window_dims)
        return [
            ([R] * results, [R] * operands),
            *(([S(i)] * results, [S(i)] * operands) for i in dims),
        ]

    return rows


def _pool(results: int, operands: int, kept: str, shape_at: int | None = None) -> Rule:
    rows = alike(results, operands, window_dims=2)
    return Rule(rows, kept=(kept,), advice=POOL_ADVICE, shape_at=shape_at)


RULES = {
    "relu": Rule(alike(1, 1)),
    "relu_": Rule(alike(1, 1)),
    "relu_backward": Rule(alike(1, 2)),
    "max_pool2d": _pool(1, 1, "input"),
    "max_pool2d_with_codes": _pool(2, 1, "input"),
    "max_pool2d_backward": _pool(1, 2, "codes", shape_at=2),
    "max_pool2d_gather": _pool(1, 2, "codes"),
    "relu_max_pool2d": _pool(1, 1, "input"),
    "relu_max_pool2d_with_codes": _pool(2, 1, "input"),
}
