"""Communication and compute of one step on one time axis, for a model that several ranks train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .trace import Joined

Row = dict[str, Any]
Interval = tuple[float, float]
WAITS = ("c10d::", "_c10d_functional::")  # host ops that start a collective or wait for it
APART = 1 / 2000  # of the step: no picture shows a shorter gap


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The intervals in order, those that overlap or are at most ``gap`` apart as one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def overlap(a: Sequence[Interval], b: Sequence[Interval]) -> float:
    """The length of what is in both; each is a `union`."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def lanes(joined: Joined) -> dict[str, list[Interval]]:
    """{lane: intervals of all steps, in microseconds}."""
    work = [w for w in joined.work if not w.is_transfer and not w.name.startswith(WAITS)]
    return {
        "compute": union((w.start, w.start + w.us) for w in work),
        "communication": union((w.start, w.start + w.us) for w in joined.transfers),
    }


def amounts(joined: Joined) -> Row:
    """Milliseconds per step: of communication, and of it beside compute. Empty without any."""
    if not joined.transfers:
        return {}
    found, steps = lanes(joined), max(len(joined.steps), 1)
    total = sum(end - start for start, end in found["communication"])
    return {
        "communication_ms": total / steps / 1e3,
        "hidden_ms": overlap(found["compute"], found["communication"]) / steps / 1e3,
    }


def of_last_step(name: str, joined: Joined) -> list[Row]:
    """The bars of run ``name``, in milliseconds from the step's start."""
    if not joined.transfers or not joined.steps:
        return []
    begin, end = joined.steps[-1]
    rows = []
    for lane, intervals in lanes(joined).items():
        inside = [(a, b) for a, b in intervals if begin <= a <= end]
        rows += [
            {
                "run": name,
                "lane": lane,
                "start": round((a - begin) / 1e3, 4),
                "end": round((b - begin) / 1e3, 4),
            }
            for a, b in union(inside, APART * (end - begin))
        ]
    return rows
