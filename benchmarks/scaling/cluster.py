"""Links between ranks, and what a collective costs: bytes that each rank sends, and seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from warpwright.distributed.sequence.cost import INFINIBAND, NVLINK, Hardware


@dataclass(frozen=True)
class Cluster:
    """Hosts of ``per_host`` GPUs. A collective that leaves its host runs at the slower link's rate."""

    inside: Hardware = NVLINK
    across: Hardware = INFINIBAND
    per_host: int = 8

    def link(self, ranks: int) -> Hardware:
        return self.inside if ranks <= self.per_host else self.across


@dataclass(frozen=True)
class Collective:
    sent: float  # bytes per rank
    seconds: float


NOTHING = Collective(0.0, 0.0)


def gather(cluster: Cluster, ranks: int, size: float) -> Collective:
    """All-gather to ``size`` bytes on each rank, or reduce-scatter from them, in a ring."""
    if ranks == 1:
        return NOTHING
    link = cluster.link(ranks)
    sent = (ranks - 1) / ranks * size
    return Collective(sent, (ranks - 1) * link.latency + sent / link.link)


def all_reduce(cluster: Cluster, ranks: int, size: float) -> Collective:
    """The bytes of a ring (reduce-scatter, then all-gather) with the latency of a tree."""
    if ranks == 1:
        return NOTHING
    link = cluster.link(ranks)
    sent = 2 * (ranks - 1) / ranks * size
    return Collective(sent, 2 * math.ceil(math.log2(ranks)) * link.latency + sent / link.link)
