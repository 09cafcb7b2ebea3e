"""Shardings of layer_scale_add: samples; the factors of the channels are on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._table import P, R, Row, Rule, S, picked

ADVICE = "Channels are scaled on every rank: shard the samples, and replicate the scale."


def _has_samples(x: Any, scale: Any) -> bool:
    """Whether the first dimension is not that of the channels."""
    return x.ndim > 0 and (scale.ndim < x.ndim or scale.shape[0] == 1)


def layer_scale_add(x: Any, residual: Any, scale: Any, sample_scale: Any = None) -> list[Row]:
    rows: list[Row] = [([R], [R] * 4)]
    if _has_samples(x, scale):
        rows.append(([S(0)], [S(0), S(0), R, S(0)]))
    return rows


def layer_scale_add_backward(
    dy: Any, x: Any, scale: Any, sample_scale: Any, mask: Sequence[bool]
) -> list[Row]:
    rows: list[Row] = [(picked(mask, R, R), [R] * 4)]
    if _has_samples(x, scale):
        rows.append((picked(mask, S(0), P), [S(0), S(0), R, S(0)]))
    return rows


RULES = {
    "layer_scale_add": Rule(layer_scale_add, kept=("scale",), advice=ADVICE),
    "layer_scale_add_backward": Rule(layer_scale_add_backward, kept=("scale",), advice=ADVICE),
}
