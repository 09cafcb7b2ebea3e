"""Shardings of quantisation and of the products of codes.

Rows and output features may be cut. A row's scale needs all of its features, so only codes that exist
already may be cut along them.
"""

from __future__ import annotations

from typing import Any

from ._table import P, R, Row, Rule, S, all_replicated

ADVICE = "Shard the input over its rows, or the weight over its output features."


def quantize_rows(x: Any, dtype: Any, per_tensor: bool) -> list[Row]:
    rows: list[Row] = [([R, R], [R])]
    if not per_tensor:
        rows += [([S(i), S(i)], [S(i)]) for i in range(x.ndim - 1)]
    return rows


def _is_one(scale: Any) -> bool:
    return scale is None or scale.shape.numel() == 1


def scaled_linear(
    x: Any, x_scale: Any, w: Any, w_scale: Any, bias: Any, out_dtype: Any, fast: bool
) -> list[Row]:
    last = x.ndim - 1
    of_weight = R if _is_one(w_scale) else S(0)
    rows: list[Row] = [all_replicated(1, 5)]
    for i in range(last):
        if _is_one(x_scale):
            rows.append(([S(i)], [S(i), R, R, R, R]))
        elif x_scale.ndim == x.ndim or last == 1:
            rows.append(([S(i)], [S(i), S(i), R, R, R]))
    rows.append(([S(last)], [R, R, S(0), of_weight, S(0)]))
    rows.append(([P], [S(last), R, S(1), R, P]))
    return rows


def _quantized(
    x: Any, w: Any, w_scale: Any, bias: Any, per_tensor: bool, fast: bool = False
) -> list[Row]:
    last = x.ndim - 1
    rows: list[Row] = [all_replicated(1, 4)]
    if not per_tensor:
        rows += [([S(i)], [S(i), R, R, R]) for i in range(last)]
    rows.append(([S(last)], [R, S(0), R if _is_one(w_scale) else S(0), S(0)]))
    return rows


RULES = {
    "quantize_rows": Rule(quantize_rows, advice=ADVICE),
    "scaled_linear": Rule(scaled_linear, kept=("weight",), advice=ADVICE),
    "linear_int8": Rule(_quantized, kept=("weight",), advice=ADVICE),
    "linear_fp8": Rule(_quantized, kept=("weight",), advice=ADVICE),
}
