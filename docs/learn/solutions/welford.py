"""Answers to exercises/welford.py."""

from __future__ import annotations

import numpy as np

State = tuple[int, np.float32, np.float32]
EMPTY: State = (0, np.float32(0), np.float32(0))


def push(state: State, x: np.float32) -> State:
    count, mean, m2 = state
    count += 1
    delta = x - mean
    mean = mean + delta / np.float32(count)
    return count, mean, m2 + delta * (x - mean)


def merge(a: State, b: State) -> State:
    count = a[0] + b[0]
    if count == 0:
        return EMPTY
    delta = b[1] - a[1]
    share = np.float32(b[0] / count)  # one rounding; a[0] * b[0] could overflow a 32-bit integer
    return count, a[1] + delta * share, a[2] + b[2] + delta * delta * np.float32(a[0]) * share
