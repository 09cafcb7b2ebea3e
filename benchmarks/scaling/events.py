"""A discrete-event simulation of one rank: a queue for its kernels and a queue for its transfers."""

from __future__ import annotations

from dataclasses import dataclass, field

COMPUTE, LINK = "compute", "link"


@dataclass
class Timeline:
    """Tasks in the order in which the host enqueues them. Each queue runs its tasks in that order."""

    free: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, LINK: 0.0})
    busy: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, LINK: 0.0})

    def add(self, queue: str, seconds: float, after: float = 0.0) -> float:
        """The end of a task that starts when its queue is free and the time is ``after``."""
        self.free[queue] = max(self.free[queue], after) + seconds
        self.busy[queue] += seconds
        return self.free[queue]

    def end(self, slowdown: float = 0.0) -> float:
        """Of the last task. ``slowdown``: compute that a second of hidden transfer costs, in seconds."""
        last = max(self.free.values())
        return last + slowdown * self.hidden(last)

    def hidden(self, last: float) -> float:
        """Seconds of transfer while a kernel runs: all but the time in which no kernel does."""
        return max(0.0, self.busy[LINK] - (last - self.busy[COMPUTE]))
