"""The arithmetic and the bits of the ladder of scans (docs/ladder-scan.md). Sums are np.float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def serial_ms(elements: int, cycles_per_element: float, ghz: float) -> float:
    """Rung 1: milliseconds of one thread."""
    return elements * cycles_per_element / (ghz * 1e9) * 1e3


def additions(exponent: int) -> tuple[int, int]:
    """(of rung 2, of a serial scan) for 2 ** exponent elements. Count as if rung 2 added in every pass to all."""
    return exponent * 2**exponent, 2**exponent - 1


def passes(rung: int) -> int:
    """Rungs 3, 4 and 6: how often as many bytes as the input has are read or written."""
    return {3: 4, 4: 3, 6: 2}[rung]


def lanes_per_bank(items: int, padding: int) -> int:
    """Rung 5: lane t reads word t (items + padding). The most lanes of a warp in one of 32 banks."""
    banks = [lane * (items + padding) % 32 for lane in range(32)]
    return max(map(banks.count, banks))


def look_back(
    totals: Sequence[np.float32], prefixes: Mapping[int, np.float32], tile: int
) -> np.float32:
    """Rung 6: the sum before ``tile``. Adds totals from right to left until a tile with a prefix.

    prefixes[t] is the sum up to and with tile t. Before tile 0 it is 0.
    """
    total = np.float32(0)
    for t in range(tile - 1, -1, -1):
        if t in prefixes:
            return total + prefixes[t]
        total = total + totals[t]
    return total


def two_that_differ() -> tuple[list[np.float32], set[int], set[int]]:
    """Totals, and two sets of tiles whose prefixes are known, with other bits before the last tile."""
    # Added to 1e8 alone, 4 rounds away. The sum of two such terms, 8, does not.
    return [np.float32(x) for x in (1e8, 4.0, 4.0, 0.0)], {0}, {0, 1}


def left_fold(
    totals: Sequence[np.float32], prefixes: Mapping[int, np.float32], tile: int
) -> np.float32:
    """Rung 7: the same sum, from the nearest prefix on from left to right."""
    start = max((t for t in prefixes if t < tile), default=-1)
    total = prefixes[start] if start >= 0 else np.float32(0)
    for t in range(start + 1, tile):
        total = total + totals[t]
    return total
