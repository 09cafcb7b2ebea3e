"""The arithmetic of the ladder of batch norm (docs/ladder-batch-norm.md)."""

from __future__ import annotations

import numpy as np

Moments = tuple[int, float, float]


def scaled_ms(ms: float, rows: int, all_rows: int) -> float:
    """Rung 1: its time at all rows, from that at some."""
    raise NotImplementedError


def sector_share(itemsize: int, stride_bytes: int) -> float:
    """Rung 2: used bytes per moved byte, if a lane reads one element and its neighbour is so far away."""
    raise NotImplementedError


def passes(kind: str) -> int:
    """Reads and writes of x's size: "three walks" (rung 3), "moments" (rung 4), and "chain": moments, then

    ReLU and the addition of a residual as operations of their own, each of which reads all its operands and writes.
    """
    raise NotImplementedError


def merge_moments(a: Moments, b: Moments) -> Moments:
    """(count, mean, sum of squared deviations) of two sets of numbers as one. A count may be 0."""
    raise NotImplementedError


def mean_that_breaks() -> np.float32:
    """A mean for which np.mean(x * x) - np.mean(x) ** 2 in float32 misses a variance of 1 by half or more."""
    raise NotImplementedError


def saved_ms(cached_bytes: float, tb_per_s: float) -> float:
    """Rung 5: the time in which memory would have delivered what the cache holds."""
    raise NotImplementedError


def largest_on_chip(sms: int, smem_bytes_per_sm: int, own_bytes: int, itemsize: int) -> int:
    """Elements of x that the SMs hold together, if each keeps ``own_bytes`` for other things."""
    raise NotImplementedError
