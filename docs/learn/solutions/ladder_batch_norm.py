"""The arithmetic of the ladder of batch norm (docs/ladder-batch-norm.md)."""

from __future__ import annotations

import numpy as np

Moments = tuple[int, float, float]


def scaled_ms(ms: float, rows: int, all_rows: int) -> float:
    """Rung 1: its time at all rows, from that at some."""
    return ms * all_rows / rows


def sector_share(itemsize: int, stride_bytes: int) -> float:
    """Rung 2: used bytes per moved byte, if a lane reads one element and its neighbour is so far away."""
    # A sector has 32 bytes. Neighbours that are closer share it.
    return itemsize / min(32, max(itemsize, stride_bytes))


def passes(kind: str) -> int:
    """Reads and writes of x's size: "three walks" (rung 3), "moments" (rung 4), and "chain": moments, then

    ReLU and the addition of a residual as operations of their own, each of which reads all its operands and writes.
    """
    moments = 2 + 1
    return {"three walks": 3 + 1, "moments": moments, "chain": moments + 2 + 3}[kind]


def merge_moments(a: Moments, b: Moments) -> Moments:
    """(count, mean, sum of squared deviations) of two sets of numbers as one. A count may be 0."""
    count = a[0] + b[0]
    if count == 0:
        return a
    delta, share = b[1] - a[1], b[0] / count
    return count, a[1] + delta * share, a[2] + b[2] + delta**2 * a[0] * share


def mean_that_breaks() -> np.float32:
    """A mean for which np.mean(x * x) - np.mean(x) ** 2 in float32 misses a variance of 1 by half or more."""
    # Squares near 10^8 are rounded to multiples of 8.
    return np.float32(1e4)


def saved_ms(cached_bytes: float, tb_per_s: float) -> float:
    """Rung 5: the time in which memory would have delivered what the cache holds."""
    return cached_bytes / (tb_per_s * 1e12) * 1e3


def largest_on_chip(sms: int, smem_bytes_per_sm: int, own_bytes: int, itemsize: int) -> int:
    """Elements of x that the SMs hold together, if each keeps ``own_bytes`` for other things."""
    return sms * ((smem_bytes_per_sm - own_bytes) // itemsize)
