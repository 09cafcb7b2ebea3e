"""Softmax in one pass over the row: maximum and sum at once.

The state of some elements x is (m, s): m their maximum, s the sum of exp(x - m). No elements: (-inf, 0).
"""

from __future__ import annotations

State = tuple[float, float]
EMPTY: State = (float("-inf"), 0.0)


def state_of(block: list[float]) -> State:
    """The state of a block's elements. Some may be -inf, as masked scores are; so may all."""
    raise NotImplementedError


def merge(a: State, b: State) -> State:
    """The state of both parts together, from their states alone."""
    raise NotImplementedError
