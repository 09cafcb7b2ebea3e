"""The arithmetic and the bits of the ladder of scans (docs/ladder-scan.md). Sums are np.float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def serial_ms(elements: int, cycles_per_element: float, ghz: float) -> float:
    """Rung 1: milliseconds of one thread."""
    raise NotImplementedError


def additions(exponent: int) -> tuple[int, int]:
    """(of rung 2, of a serial scan) for 2 ** exponent elements. Count as if rung 2 added in every pass to all."""
    raise NotImplementedError


def passes(rung: int) -> int:
    """Rungs 3, 4 and 6: how often as many bytes as the input has are read or written."""
    raise NotImplementedError


def lanes_per_bank(items: int, padding: int) -> int:
    """Rung 5: lane t reads word t (items + padding). The most lanes of a warp in one of 32 banks."""
    raise NotImplementedError


def look_back(
    totals: Sequence[np.float32], prefixes: Mapping[int, np.float32], tile: int
) -> np.float32:
    """Rung 6: the sum before ``tile``. Adds totals from right to left until a tile with a prefix.

    prefixes[t] is the sum up to and with tile t. Before tile 0 it is 0.
    """
    raise NotImplementedError


def two_that_differ() -> tuple[list[np.float32], set[int], set[int]]:
    """Totals, and two sets of tiles whose prefixes are known, with other bits before the last tile."""
    raise NotImplementedError


def left_fold(
    totals: Sequence[np.float32], prefixes: Mapping[int, np.float32], tile: int
) -> np.float32:
    """Rung 7: the same sum, from the nearest prefix on from left to right."""
    raise NotImplementedError
