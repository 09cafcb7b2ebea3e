"""The heart of a single-pass scan: a tile looks back for the sum of all tiles before it.

Every tile publishes the sum of its own elements at once. Later it publishes its inclusive prefix: the sum of its
own and all earlier tiles. How many prefixes are there when a tile looks differs from run to run. The result may
not differ, not in one bit.
"""

from __future__ import annotations

import numpy as np


def exclusive_prefix(
    tile: int, sums: list[np.float32], published: dict[int, np.float32]
) -> np.float32:
    """The float32 sum of all tiles before ``tile``, with the same bits for every ``published``.

    Args:
        tile: this tile's index; tile 0 has the prefix 0.
        sums: the sums of tiles 0 to ``tile`` - 1.
        published: tile index -> its inclusive prefix, for the tiles that have published it. Read the one nearest
            to ``tile``, and none of the sums before it: a real kernel saves the time.
    """
    raise NotImplementedError


def traffic() -> dict[str, int]:
    """Global traffic of each way to scan E bytes, as a multiple of E. Replace the zeros."""
    return {
        "scan the tiles, scan their sums, add the sums": 0,
        "reduce the tiles, scan their sums, scan with them": 0,
        "single pass with look-back": 0,
    }
