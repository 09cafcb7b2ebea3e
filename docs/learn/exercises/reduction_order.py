"""A block's sum: which order, which bits, and how much rounding?"""

from __future__ import annotations

import numpy as np


def block_sum(x: np.ndarray, threads: int) -> np.float32:
    """The float32 sum of ``x`` as a block of ``threads`` computes it; a power of two, and it divides ``len(x)``.

    Thread t adds x[t], x[t + threads], x[t + 2 * threads], ... in this order. Then, for offset = threads / 2,
    threads / 4, ..., 1, thread t < offset adds the sum of thread t + offset to its own. Every addition rounds to
    float32.
    """
    raise NotImplementedError


def longest_chain(n: int, threads: int) -> int:
    """How many additions the unluckiest element goes through on its way to the result.

    The rounding error is at most about so many times eps / 2 times the sum of the absolute values.
    """
    raise NotImplementedError


def not_associative() -> tuple[float, float, float]:
    """Three float32 numbers a, b, c with (a + b) + c different from a + (b + c)."""
    raise NotImplementedError
