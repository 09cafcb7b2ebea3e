"""Mean and variance in one pass, as batch norm needs them, without subtracting two large numbers.

The state of some elements is (count, mean, m2): m2 is the sum of (x - mean)². No elements: (0, 0, 0). All numbers are
float32: convert nothing to float64.
"""

from __future__ import annotations

import numpy as np

State = tuple[int, np.float32, np.float32]
EMPTY: State = (0, np.float32(0), np.float32(0))


def push(state: State, x: np.float32) -> State:
    """The state with one more element (Welford)."""
    raise NotImplementedError


def merge(a: State, b: State) -> State:
    """The state of two parts together (Chan): two threads' results become one. Either may be empty."""
    raise NotImplementedError
