"""Shardings of activations, dropout, rotary embeddings and pooling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._random import numbered
from ._table import R, Row, Rule, S, picked

POOL_ADVICE = "Pooling is computed over N and channels, not over H and W."


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


PACKED_ADVICE = (
    "The halves of a packed tensor are in its last dimension: shard another, or pass both."
)


def gated_activation(gate: Any, up: Any, activation: str) -> list[Row]:
    return alike(1, 2, window_dims=up is None)(gate)


def gated_activation_backward(
    dy: Any, gate: Any, up: Any, activation: str, mask: Sequence[bool]
) -> list[Row]:
    wanted = (mask[0], mask[1] and up is not None)
    rows = alike(2, 3, window_dims=up is None)(gate)
    return [(picked(wanted, *results), operands) for results, operands in rows]


def dropout(x: Any, p: float, place: Sequence[int] = ()) -> list[Row]:
    return [([out, R], operands) for (out,), operands in alike(1, 1)(x)]


def dropout_backward(dy: Any, philox: Any, p: float, place: Sequence[int] = ()) -> list[Row]:
    return [(results, [*operands, R]) for results, operands in alike(1, 1)(dy)]


def rotary_embedding(query: Any, key: Any, cos: Any, sin: Any, *_: Any) -> list[Row]:
    """By batch, heads or tokens. A table with a batch of 1 serves every shard of the batch."""
    tables = [R if table.shape[0] == 1 else S(0) for table in (cos, sin)]
    return [
        ([R] * 2, [R] * 4),
        ([S(0)] * 2, [S(0), S(0), *tables]),
        ([S(1)] * 2, [S(1), S(1), R, R]),
        ([S(2)] * 2, [S(2), S(2), S(1), S(1)]),
    ]


ROTARY_ADVICE = "Pairs of columns rotate together: shard the batch, the heads or the tokens."

RULES = {
    "rotary_embedding": Rule(rotary_embedding, advice=ROTARY_ADVICE),
    "gated_activation": Rule(gated_activation, advice=PACKED_ADVICE),
    "gated_activation_backward": Rule(gated_activation_backward, advice=PACKED_ADVICE),
    "activation": Rule(alike(1, 1)),
    "activation_backward": Rule(alike(1, 2)),
    "dropout": Rule(dropout),
    "dropout_backward": Rule(dropout_backward),
    "relu": Rule(alike(1, 1)),
    "relu_": Rule(alike(1, 1)),
    "relu_backward": Rule(alike(1, 2)),
    "max_pool2d": _pool(1, 1, "input"),
    "max_pool2d_with_codes": _pool(2, 1, "input"),
    "max_pool2d_backward": _pool(1, 2, "codes", shape_at=2),
    "max_pool2d_gather": _pool(1, 2, "codes"),
    "relu_max_pool2d": _pool(1, 1, "input"),
    "relu_max_pool2d_with_codes": _pool(2, 1, "input"),
    "global_avg_pool2d": _pool(1, 1, "input"),
    "global_avg_pool2d_backward": Rule(alike(1, 1, window_dims=2), advice=POOL_ADVICE),
}
HANDLERS = {"dropout": numbered, "dropout_backward": numbered}
