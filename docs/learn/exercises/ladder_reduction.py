"""The arithmetic of the ladder from a sum to cross-entropy (docs/ladder-reduction.md)."""

from __future__ import annotations

from collections.abc import Sequence


def atomic_ms(elements: int, ghz: float) -> float:
    """Rung 1: milliseconds for one addition per cycle of L2, which runs at ``ghz``."""
    raise NotImplementedError


def active_lanes(round_number: int) -> int:
    """Rung 2: how many of the 32 lanes of the block's first warp add in round 1, 2, ..., 8."""
    raise NotImplementedError


def instructions_allowed(bytes_per_lane: int, tb_per_s: float, sms: int, ghz: float) -> float:
    """Instructions of a warp that take as long as its bytes do. An SM issues four per cycle."""
    raise NotImplementedError


def warps_needed(bytes_in_flight: int, loads_per_lane: int, bytes_per_load: int) -> int:
    """Rung 4: warps of an SM, each lane with so many loads under way, that hold so many bytes."""
    raise NotImplementedError


def sum_of_ordered(sums: Sequence[float], tickets: Sequence[int]) -> float:
    """Rung 5: the total, the same for any tickets. ``tickets[b]``: when block b was done."""
    raise NotImplementedError


def longest_row(smem_bytes: int, own_bytes: int) -> int:
    """Rung 8: float32 columns, a multiple of 4, that fit beside the ``own_bytes`` of a block."""
    raise NotImplementedError


def chain_passes(reads_and_writes: Sequence[tuple[int, int]]) -> int:
    """Rung 9: passes over the logits of kernels with so many (reads, writes) of their size."""
    raise NotImplementedError
