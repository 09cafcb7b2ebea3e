"""One training step per scheme: FLOPs and bytes of a rank, and its predicted time."""

from __future__ import annotations

from dataclasses import dataclass

from .cluster import Cluster, Collective, all_reduce, gather
from .events import COMPUTE, LINK, Timeline
from .workloads import Workload

BUCKET = 25 * 2**20  # bytes: a bucket of gradients is reduced when it has as many
SLOWDOWN = 0.15  # seconds of compute that a second of hidden transfer costs; assumed


@dataclass(frozen=True)
class Step:
    """Of one rank."""

    flops: float
    sent: float  # bytes
    seconds: float
    compute: float  # seconds

    @property
    def exposed(self) -> float:
        """Seconds that communication adds."""
        return self.seconds - self.compute


class _Run:
    """A timeline, and the bytes sent on it."""

    def __init__(self) -> None:
        self.timeline, self.sent = Timeline(), 0.0

    def move(self, collective: Collective, after: float) -> float:
        self.sent += collective.sent
        return self.timeline.add(LINK, collective.seconds, after)

    def result(self, flops: float) -> Step:
        busy = self.timeline.busy[COMPUTE]
        return Step(flops, self.sent, self.timeline.end(SLOWDOWN), busy)


def data_parallel(work: Workload, cluster: Cluster, ranks: int) -> Step:
    """DDP: buckets of gradients are reduced while the backward goes on."""
    run = _Run()
    for layer in work.layers:
        run.timeline.add(COMPUTE, layer.forward / work.rate)
    waiting = 0.0
    for layer in reversed(work.layers):
        done = run.timeline.add(COMPUTE, layer.backward / work.rate)
        waiting += layer.parameters * work.gradient_bytes
        if waiting >= BUCKET:
            run.move(all_reduce(cluster, ranks, waiting), done)
            waiting = 0.0
    if waiting:
        run.move(all_reduce(cluster, ranks, waiting), done)
    return run.result(work.flops)


def fully_sharded(work: Workload, cluster: Cluster, ranks: int, shards: int | None = None) -> Step:
    """FSDP2: weights are gathered before each use, one layer ahead; gradients are scattered.

    ``shards``: ranks that share one copy of the weights (HSDP). Copies reduce their gradients across.
    """
    shards = shards or ranks
    copies = ranks // shards
    run = _Run()
    count = len(work.layers)
    passes = [(layer, layer.forward) for layer in work.layers]
    passes += [(layer, layer.backward) for layer in reversed(work.layers)]
    ends = [0.0, 0.0]  # of the kernels; a layer is gathered while the one before it computes
    gathered: list[float] = []
    for i in range(len(passes) + 1):
        if i < len(passes):
            size = passes[i][0].parameters * work.parameter_bytes
            gathered.append(run.move(gather(cluster, shards, size), ends[max(0, i - 1)]))
        if i == 0:
            continue
        layer, flops = passes[i - 1]
        done = run.timeline.add(COMPUTE, flops / work.rate, gathered[i - 1])
        ends[i:] = [done, done]
        if i > count:
            size = layer.parameters * work.gradient_bytes
            run.move(gather(cluster, shards, size), done)
            if copies > 1:
                run.move(_across(cluster, copies, size / shards), done)
    return run.result(work.flops)


def hybrid_sharded(work: Workload, cluster: Cluster, ranks: int) -> Step:
    """HSDP: the ranks of a host share one copy of the weights."""
    return fully_sharded(work, cluster, ranks, min(ranks, cluster.per_host))


def _across(cluster: Cluster, copies: int, size: float) -> Collective:
    """All-reduce between hosts: one rank per host takes part."""
    return all_reduce(Cluster(cluster.across, cluster.across, cluster.per_host), copies, size)


def tensor_parallel(work: Workload, cluster: Cluster, ranks: int) -> Step:
    """Each block: two all-reduces of the activations forward, two backward, and none hidden.

    The group shares one rank's batch. Sequence parallelism sends the same bytes.
    """
    run = _Run()
    activations = work.tokens * work.width * 2.0
    for direction in (lambda layer: layer.forward, lambda layer: layer.backward):
        for layer in work.layers[:-1]:
            for _ in range(2):
                done = run.timeline.add(
                    COMPUTE, direction(layer) / ranks / work.rate / 2, run.timeline.free[LINK]
                )
                run.move(all_reduce(cluster, ranks, activations), done)
        run.timeline.add(
            COMPUTE, direction(work.layers[-1]) / ranks / work.rate, run.timeline.free[LINK]
        )
    return run.result(work.flops / ranks)
