"""What a profile of several ranks needs: as many steps on each, because a step has collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ..bench.measure import MAX_ROUNDS, WARMUP_ROUNDS, Timing, pooled, samples

FEWEST = 3


def count() -> int:
    """How many ranks the program has; 1 without torch.distributed."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    return count() == 1 or dist.get_rank() == 0


def timed(step: Callable[[], object], device: str, seconds: float) -> Timing:
    """The step's timing. Rank 0 says how many rounds fit into ``seconds``."""
    took = min(samples(step, device, WARMUP_ROUNDS)) / 1e3
    rounds = [min(MAX_ROUNDS, max(FEWEST, int(seconds / max(took, 1e-6))))]
    dist.broadcast_object_list(rounds, src=0)
    return pooled(samples(step, device, rounds[0]), device)
