"""Attributes the kernels of a Chrome trace to ops and modules.

A runtime call with the same correlation id launches a kernel. The call is inside ranges of its
thread. Our ranges name op and module. The autograd engine's ranges have a sequence number, which leads
to the forward op that made the node, and so to the forward's range. On a CPU the ops themselves are
the work: the time of each, without that of the ops it calls.

Every kernel gets a label. One outside of all ranges gets the name of the outermost op.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "warpwright.profile/"
STEP = PREFIX + "step"
ENGINE = "autograd::engine::evaluate_function: "
ACCUMULATE = "accumulate gradients"
OUTSIDE = "outside of any op"
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
TRANSFERS = ("nccl", "gloo:")
SPANS = ("cpu_op", "user_annotation", *LAUNCHES)

Event = dict[str, Any]


def op_range(op: str, module: str) -> str:
    return f"{PREFIX}{op}@{module}"


def module_range(module: str) -> str:
    return f"{PREFIX}@{module}"


def phase_range(phase: str) -> str:
    return f"{PREFIX}{phase}@"


@dataclass(frozen=True)
class Label:
    """What a piece of work was done for; direction is "fwd", "bwd" or "" outside of the model."""

    op: str
    module: str = ""
    direction: str = ""


@dataclass
class Span:
    """A range of host time on one thread, and the span around it."""

    event: Event
    parent: Span | None = None
    children_us: float = 0.0  # host ops directly inside

    @property
    def name(self) -> str:
        return str(self.event["name"])

    @property
    def start(self) -> float:
        return float(self.event["ts"])

    @property
    def end(self) -> float:
        return self.start + float(self.event.get("dur", 0.0))

    def chain(self) -> Iterable[Span]:
        span: Span | None = self
        while span is not None:
            yield span
            span = span.parent


@dataclass
class Work:
    """A kernel, copy or fill on a GPU, or an op's own time on a CPU."""

    label: Label
    name: str
    start: float  # microseconds
    us: float

    @property
    def is_transfer(self) -> bool:
        """Between ranks: a kernel of NCCL, or what a thread of gloo does."""
        return self.name.startswith(TRANSFERS)


@dataclass
class Joined:
    """One trace, understood."""

    steps: list[tuple[float, float]]  # host start and end of each step, microseconds
    work: list[Work]
    host_us: dict[Label, float]  # host time of ops, each one's own
    calls: dict[Label, int]  # entered ranges
    memory: list[tuple[float, int, Label]] = field(default_factory=list)  # us, bytes, label
    device: str = "cpu"
    transfers: list[Work] = field(default_factory=list)  # between ranks; on a GPU also in `work`

    @property
    def work_us(self) -> float:
        return sum(w.us for w in self.work)

    @property
    def busy_us(self) -> float:
        """Time in which at least one piece of work ran; a CPU's ops run one after the other."""
        if self.device == "cpu":
            return self.work_us
        total, reached = 0.0, float("-inf")
        for w in sorted(self.work, key=lambda w: w.start):
            end = w.start + w.us
            total += max(0.0, end - max(w.start, reached))
            reached = max(reached, end)
        return total


def load(path: Path) -> list[Event]:
    return list(json.loads(path.read_text())["traceEvents"])


def _spans(events: Iterable[Event]) -> dict[Any, list[Span]]:
    """{thread: spans by start}, each with its parent."""
    threads: dict[Any, list[Span]] = {}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in SPANS:
            threads.setdefault((event["pid"], event["tid"]), []).append(Span(event))
    for spans in threads.values():
        spans.sort(key=lambda s: (s.start, -s.end))
        stack: list[Span] = []
        for span in spans:
            while stack and stack[-1].end <= span.start:
                stack.pop()
            span.parent = stack[-1] if stack else None
            if span.parent is not None and span.event["cat"] == "cpu_op":
                host = next((s for s in span.parent.chain() if s.event["cat"] == "cpu_op"), None)
                if host is not None:
                    host.children_us += span.end - span.start
            stack.append(span)
    return threads


def _own(name: str) -> Label | None:
    """The label in the name of one of our op ranges; None for other names."""
    if not name.startswith(PREFIX) or "@" not in name:
        return None
    op, _, module = name.removeprefix(PREFIX).partition("@")
    return Label(op, module, "fwd") if op else None


def _forward_label(span: Span) -> Label:
    """By our innermost op range; else the outermost op inside the innermost module's range."""
    op: str | None = None
    for s in span.chain():
        found = _own(s.name)
        if found is not None:
            phase = not found.module and found.op in PHASES
            return Label(found.op) if phase else found
        if s.name.startswith(PREFIX + "@"):
            return Label(op or OUTSIDE, s.name.removeprefix(PREFIX + "@"), "fwd")
        if s.event["cat"] == "cpu_op":
            op = s.name.removeprefix("aten::")
    return Label(op or OUTSIDE)


PHASES = ("optimizer", "zero_grad", "loss")


class _Labels:
    """Labels for spans; knows which forward op each autograd node comes from."""

    def __init__(self, threads: dict[Any, list[Span]]) -> None:
        self.forward: dict[int, Label] = {}
        self.known: dict[int, Label] = {}
        for spans in threads.values():
            for span in spans:
                number = span.event.get("args", {}).get("Sequence number")
                if number is None or any(s.name.startswith(ENGINE) for s in span.chain()):
                    continue
                # Later ops overwrite: ops that make no node only peek at the next number.
                self.forward[number] = _forward_label(span)

    def of(self, span: Span) -> Label:
        if id(span) not in self.known:
            self.known[id(span)] = self._find(span)
        return self.known[id(span)]

    def _find(self, span: Span) -> Label:
        for s in span.chain():
            if not s.name.startswith(ENGINE):
                continue
            node = s.name.removeprefix(ENGINE)
            if "AccumulateGrad" in node:
                return Label(ACCUMULATE, "", "bwd")
            forward = self.forward.get(s.event.get("args", {}).get("Sequence number", -1))
            if forward is not None:
                return Label(forward.op, forward.module, "bwd")
            return Label(node, "", "bwd")
        return _forward_label(span)


def join(events: Iterable[Event]) -> Joined:
    """Labels everything that ran inside the steps."""
    events = list(events)
    threads = _spans(events)
    labels = _Labels(threads)
    everything = [span for spans in threads.values() for span in spans]
    steps = sorted((s.start, s.end) for s in everything if s.name == STEP)

    def in_step(time: float) -> bool:
        index = bisect.bisect_right(steps, (time, float("inf"))) - 1
        return index >= 0 and time <= steps[index][1]

    device = "cuda" if any(e.get("cat") == "kernel" for e in events) else "cpu"
    host_us: dict[Label, float] = {}
    calls: dict[Label, int] = {}
    work: list[Work] = []
    transfers: list[Work] = []
    launches: dict[Any, Span] = {}
    for span in everything:
        category = span.event["cat"]
        if category in LAUNCHES:
            correlation = span.event.get("args", {}).get("correlation")
            if correlation is not None:
                launches[correlation] = span
        if not in_step(span.start):
            continue
        if category == "cpu_op":
            label = labels.of(span)
            own = max(0.0, span.end - span.start - span.children_us)
            host_us[label] = host_us.get(label, 0.0) + own
            if device == "cpu" and own > 0:
                work.append(Work(label, span.name, span.start, own))
            if span.name.startswith(ENGINE) and label.op == ACCUMULATE:
                calls[label] = calls.get(label, 0) + 1
        elif device == "cpu" and span.name.startswith(TRANSFERS):
            transfers.append(Work(Label(OUTSIDE), span.name, span.start, span.end - span.start))
        elif _own(span.name) is not None:
            label = _forward_label(span)
            calls[label] = calls.get(label, 0) + 1
    if device == "cuda":
        for event in events:
            if event.get("cat") in WORK and event.get("ph") == "X":
                launch = launches.get(event.get("args", {}).get("correlation"))
                if launch is None or not in_step(launch.start):
                    continue
                work.append(
                    Work(labels.of(launch), event["name"], float(event["ts"]), float(event["dur"]))
                )
        transfers = [w for w in work if w.is_transfer]
    memory = _memory(events, threads, labels, in_step)
    return Joined(steps, work, host_us, calls, memory, device, transfers)


def _memory(
    events: Iterable[Event], threads: dict[Any, list[Span]], labels: _Labels, in_step: Any
) -> list[tuple[float, int, Label]]:
    """The allocated bytes after each allocation, on the GPU if there is one, with its label."""
    found = [e for e in events if e.get("name") == "[memory]" and in_step(float(e["ts"]))]
    on_gpu = [e for e in found if e["args"].get("Device Type") == 1]
    starts = {thread: [s.start for s in spans] for thread, spans in threads.items()}
    result = []
    for event in sorted(on_gpu or found, key=lambda e: float(e["ts"])):
        thread, time = (event["pid"], event["tid"]), float(event["ts"])
        index = bisect.bisect_right(starts.get(thread, []), time) - 1
        span = threads[thread][index] if index >= 0 else None
        while span is not None and span.end < time:
            span = span.parent
        label = labels.of(span) if span is not None else Label(OUTSIDE)
        result.append((time, int(event["args"]["Total Allocated"]), label))
    return result
