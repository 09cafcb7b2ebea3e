"""Shardings of squeeze-and-excitation: images; the layers are on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._table import P, R, Row, Rule, S, picked

ADVICE = "Squeeze-and-excitation is computed over images: shard N, and replicate the layers."


def _present(*tensors: Any) -> list[Any]:
    return [None if tensor is None else R for tensor in tensors]


def squeeze_excitation(x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *_: Any) -> list[Row]:
    layers = _present(w1, b1, w2, b2)
    return [([R] * 4, [R, *layers]), ([S(0)] * 4, [S(0), *layers])]


def squeeze_excitation_backward(
    dy: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any, *rest: Any
) -> list[Row]:
    layers, mask = _present(w1, b1, w2, b2), rest[-1]
    wanted: Sequence[bool] = [
        *(bool(mask[0]), bool(mask[1]), bool(mask[2]) and b1 is not None),
        *(bool(mask[3]), bool(mask[4]) and b2 is not None),
    ]
    return [
        (picked(wanted, R, R, R, R, R), [R, R, *layers, R, R, R]),
        (picked(wanted, S(0), P, P, P, P), [S(0), S(0), *layers, S(0), S(0), S(0)]),
    ]


KEPT = ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
RULES = {
    "squeeze_excitation": Rule(squeeze_excitation, kept=KEPT, advice=ADVICE),
    "squeeze_excitation_backward": Rule(squeeze_excitation_backward, kept=KEPT, advice=ADVICE),
}
