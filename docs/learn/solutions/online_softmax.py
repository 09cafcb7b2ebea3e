"""Answers to exercises/online_softmax.py."""

from __future__ import annotations

import math

State = tuple[float, float]
EMPTY: State = (float("-inf"), 0.0)


def state_of(block: list[float]) -> State:
    m = max(block, default=-math.inf)
    if m == -math.inf:  # -inf - -inf would be NaN
        return EMPTY
    return m, sum(math.exp(x - m) for x in block)


def merge(a: State, b: State) -> State:
    m = max(a[0], b[0])
    if m == -math.inf:
        return EMPTY
    # Each sum is rescaled to the common maximum. No exponent is above 0, so nothing overflows.
    return m, a[1] * math.exp(a[0] - m) + b[1] * math.exp(b[0] - m)
