"""Sums of the traces per op and per module, and the bound of the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..bench.guards import OWN_KERNEL, OWN_OP, relative
from ..bench.measure import Timing, ratio_interval
from ..swap import SwapReport
from . import timeline
from .advice import Advice, advice
from .ranges import Amounts
from .runs import Run, Workload
from .trace import Joined, Label

Row = dict[str, Any]
SLOWEST = 3  # modules that the text names
OURS = ("fused", "swapped")  # the first of these that ran is compared with native


@dataclass
class ProfileReport:
    """The numbers of a profile: `str()` is a short text, `to_dict()` has all of them."""

    title: str
    environment: dict[str, Any]  # as a benchmark record's header, with the two ceilings
    runs: list[Row]
    ops: list[Row]
    modules: list[Row]
    kernels: list[Row]
    swap: dict[str, Any]
    check_failures: list[str]
    bound: dict[str, float]
    memory: dict[str, list[tuple[float, float]]]  # run -> (ms, MiB)
    speedup: float | None = None
    speedup_lo: float | None = None
    speedup_hi: float | None = None
    notes: list[str] = field(default_factory=list)
    # Of several ranks: bars of communication and compute, run by run, on rank 0's time axis.
    timeline: list[Row] = field(default_factory=list)
    # Our step in ms as the model is, and with model and images in channels_last; None: not measured.
    layouts: tuple[float, float] | None = None
    files: list[str] = field(default_factory=list)

    def run(self, name: str) -> Row | None:
        return next((r for r in self.runs if r["name"] == name), None)

    @property
    def ours(self) -> Row | None:
        found = (self.run(name) for name in OURS)
        return next((r for r in found if r is not None and r["ms"] is not None), None)

    @property
    def advice(self) -> list[Advice]:
        """The page's suggestions with their code, the largest saving first."""
        return advice(self)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "title": self.title,
            "environment": self.environment,
            "speedup": self.speedup,
            "speedup_lo": self.speedup_lo,
            "speedup_hi": self.speedup_hi,
            "bound": self.bound,
            "runs": self.runs,
            "ops": self.ops,
            "modules": self.modules,
            "kernels": self.kernels,
            "swap": self.swap,
            "check_failures": self.check_failures,
            "memory": self.memory,
            "notes": self.notes,
            "timeline": self.timeline,
            "layouts": None if self.layouts is None else list(self.layouts),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        lines = [f"{self.title} on {self.environment['gpu']}"]
        for run in self.runs:
            if run["error"]:
                lines.append(f"  {run['name']}: failed: {run['error']}")
            else:
                line = f"  {run['name']}: {run['ms']:.3f} ms per step"
                if "communication_ms" in run:
                    line += f", {run['communication_ms']:.3f} of communication"
                    line += f" ({run['hidden_ms']:.3f} beside compute)"
                lines.append(line)
        if self.speedup is not None and self.ours is not None:
            lines.append(
                f"  speed-up of {self.ours['name']} {self.speedup:.2f} [{self.speedup_lo:.2f}, {self.speedup_hi:.2f}]; "
                f"now {describe_bound(self.bound)}"
            )
        lines += self._slowest()
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    def _slowest(self) -> list[str]:
        """A line about the modules that take longest; those of a compiled run have no times."""
        run = self.ours["name"] if self.ours is not None else "native"
        timed = [row for row in self.modules if row["module"] and (row.get(run) or {}).get("ms")]
        slowest = sorted(timed, key=lambda row: -row[run]["ms"])[:SLOWEST]
        listed = []
        for row in slowest:
            native = (row.get("native") or {}).get("ms") if run != "native" else None
            beside = f", native {native:.3f}" if native else ""
            listed.append(f"{row['module']} ({row['op']}) {row[run]['ms']:.3f} ms{beside}")
        return [f"  slowest modules, {run}: {'; '.join(listed)}"] if listed else []


@dataclass
class Sum:
    """Work per step, of one label or several."""

    us: float = 0.0
    kernels: float = 0.0
    host_us: float = 0.0
    calls: float = 0.0
    own_us: float = 0.0

    def add(self, other: Sum) -> None:
        for name in ("us", "kernels", "host_us", "calls", "own_us"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def by_label(joined: Joined) -> dict[Label, Sum]:
    """Each label's work, per step. The sums over all labels are the trace's own totals."""
    steps = max(len(joined.steps), 1)
    found: dict[Label, Sum] = {}
    own = OWN_KERNEL if joined.device == "cuda" else OWN_OP
    for work in joined.work:
        total = found.setdefault(work.label, Sum())
        total.us += work.us / steps
        total.kernels += 1 / steps
        if own in work.name:
            total.own_us += work.us / steps
    for label, us in joined.host_us.items():
        found.setdefault(label, Sum()).host_us += us / steps
    for label, calls in joined.calls.items():
        found.setdefault(label, Sum()).calls += calls / steps
    return found


def _grouped(
    sums: dict[Label, Sum], key: Callable[[Label], tuple[str, ...]]
) -> dict[tuple[str, ...], Sum]:
    groups: dict[tuple[str, ...], Sum] = {}
    for label, value in sums.items():
        groups.setdefault(key(label), Sum()).add(value)
    return groups


def _floor(amounts: Amounts, labels: Iterable[Label], environment: Row) -> tuple[float, Row]:
    """(fewest microseconds, bytes and FLOPs) of the work of these labels."""
    us, total = 0.0, {"bytes": 0.0, "flops": 0.0}
    for label in labels:
        amount = amounts.get(label)
        if amount is not None:
            us += amount.floor_us(environment)
            total["bytes"] += amount.bytes
            total["flops"] += amount.flops
    return us, total


def _rate(amount: Row, us: float) -> str | None:
    if us and amount["flops"]:
        return f"{amount['flops'] / us / 1e6:.3g} TFLOP/s"
    if us and amount["bytes"]:
        gbs = amount["bytes"] / us / 1e3
        return f"{gbs:.3g} GB/s" if gbs < 999.5 else f"{gbs / 1e3:.3g} TB/s"
    return None


def _cells(run: Sum | None, floor_us: float, amount: Row) -> Row:
    if run is None:
        return {"ms": None, "kernels": 0, "host_ms": None, "roofline": None, "rate": None}
    return {
        "ms": run.us / 1e3,
        "kernels": round(run.kernels, 2),
        "host_ms": run.host_us / 1e3,
        "roofline": floor_us / run.us if floor_us and run.us else None,
        "rate": _rate(amount, run.us),
        "own_share": run.own_us / run.us if run.us else None,
    }


def _rows(
    key: Callable[[Label], tuple[str, ...]],
    names: tuple[str, ...],
    sums: dict[str, dict[Label, Sum]],
    amounts: Amounts,
    environment: Row,
    peaks: dict[str, dict[Label, int]],
) -> list[Row]:
    """One row per key, with the cells of each run that has joined ops. The slowest comes first."""
    groups = {name: _grouped(labels, key) for name, labels in sums.items()}
    keys = dict.fromkeys(k for g in groups.values() for k in g)
    rows: list[Row] = []
    for k in keys:
        floor_us, amount = _floor(amounts, (x for x in amounts if key(x) == k), environment)
        if environment.get("device") == "cpu":  # what one run reached, the machine can reach
            reached = [g[k].us for g in groups.values() if k in g and g[k].us]
            floor_us = min([floor_us, *reached])
        row: Row = dict(zip(names, k, strict=True))
        row["calls"] = round(max((g[k].calls for g in groups.values() if k in g), default=0), 2)
        row |= {name: int(value) for name, value in amount.items()}
        row["floor_ms"] = floor_us / 1e3
        for name, group in groups.items():
            cells = _cells(group.get(k), floor_us, amount)
            peak = [b for label, b in peaks[name].items() if key(label) == k]
            cells["peak_mib"] = max(peak) / 2**20 if peak else None
            row[name] = cells
        native, ours = row.get("native"), next((row[n] for n in OURS if n in row), None)
        row["speedup"] = None
        if not any(row[name]["ms"] for name in groups):
            continue
        if native and ours and native["ms"] and ours["ms"]:
            row["speedup"] = native["ms"] / ours["ms"]
        rows.append(row)
    return sorted(rows, key=lambda r: -max(r[n]["ms"] or 0 for n in groups))


def op_key(label: Label) -> tuple[str, ...]:
    return (label.op,)


def module_key(label: Label) -> tuple[str, ...]:
    return (label.module, label.op)


def _peaks(run: Run) -> dict[Label, int]:
    found: dict[Label, int] = {}
    for _, allocated, label in run.memory:
        found[label] = max(found.get(label, 0), allocated)
    return found


def bound_of(
    run: Run, sums: dict[Label, Sum], amounts: Amounts, environment: Row
) -> dict[str, float]:
    """Shares of the step: idle device, memory-bound ops, compute-bound ops, and other ops."""
    assert run.joined is not None
    assert run.timing is not None
    busy = run.joined.busy_us / max(len(run.joined.steps), 1)
    # The profiler slows the host, not the GPU: the step's time is measured without it.
    wall = max(run.timing.ms * 1e3, busy if run.joined.device == "cuda" else 0.0)
    if run.joined.device == "cpu":
        wall = max(wall, busy)
    shares = {"launch": max(0.0, 1 - busy / wall), "memory": 0.0, "compute": 0.0, "other": 0.0}
    total = sum(s.us for s in sums.values()) or 1.0
    for label, value in sums.items():
        amount = amounts.get(label)
        kind = "other" if amount is None else amount.bound(environment)
        shares[kind] += value.us / total * min(1.0, busy / wall)
    return shares


def describe_bound(bound: dict[str, float]) -> str:
    if not bound:
        return "not measured"
    words = {
        "launch": "launches and the host, while no kernel runs",
        "memory": "memory traffic",
        "compute": "matrix products",
        "other": "ops without a kernel of warpwright's",
    }
    kind = max(bound, key=lambda k: bound[k])
    return f"bound by {words[kind]} ({bound[kind]:.0%} of the step)"


def _ratio(native: Timing, ours: Timing) -> tuple[float, float, float]:
    fewest = min(len(native.samples), len(ours.samples))
    short = [Timing(t.ms, t.ms_lo, t.ms_hi, fewest, t.samples[:fewest]) for t in (native, ours)]
    return ratio_interval(short[0], short[1])


def _kernels(run: Run, top: int = 15) -> list[Row]:
    assert run.joined is not None
    steps = max(len(run.joined.steps), 1)
    totals: dict[tuple[str, Label], Sum] = {}
    for work in run.joined.work:
        total = totals.setdefault((work.name, work.label), Sum())
        total.us += work.us / steps
        total.kernels += 1 / steps
    slowest = sorted(totals.items(), key=lambda item: -item[1].us)[:top]
    return [
        {
            "run": run.name,
            "kernel": name,
            "op": label.op,
            "module": label.module,
            "direction": label.direction,
            "ms": total.us / 1e3,
            "launches": round(total.kernels, 2),
        }
        for (name, label), total in slowest
    ]


def summarise(
    title: str,
    workload: Workload,
    runs: dict[str, Run],
    amounts: Amounts,
    environment: Row,
    swap_report: SwapReport,
    errors: dict[str, dict[str, float]],
    check_failures: list[str],
) -> ProfileReport:
    good = {name: run for name, run in runs.items() if run.error is None and run.joined}
    sums = {name: by_label(run.joined) for name, run in good.items() if run.joined}
    # A compiled region has no ranges: its kernels belong to no single op.
    opened = {name: s for name, s in sums.items() if name != "compiled"}
    peaks = {name: _peaks(run) for name, run in good.items()}
    ops = _rows(op_key, ("op",), opened, amounts, environment, peaks)
    modules = _rows(module_key, ("module", "op"), opened, amounts, environment, peaks)
    _add_errors(ops, modules, errors)
    why = {e.name: ("swapped" if e.swapped else e.reason) for e in swap_report.entries}
    for row in modules:
        row["swap"] = why.get(row["module"])
    native = good.get("native")
    rows = [_run_row(run, native, sums.get(name)) for name, run in runs.items()]
    report = ProfileReport(
        title,
        environment,
        rows,
        ops,
        modules,
        [k for run in good.values() for k in _kernels(run)],
        swap_report.to_dict(),
        check_failures,
        {},
        {
            name: [((t - run.memory[0][0]) / 1e3, b / 2**20) for t, b, _ in run.memory]
            for name, run in good.items()
            if run.memory
        },
    )
    for name, run in good.items():
        if run.joined is not None:
            report.timeline += timeline.of_last_step(name, run.joined)
    ours = next((good[n] for n in OURS if n in good), None)
    if ours is not None and native is not None:
        assert native.timing is not None
        assert ours.timing is not None
        report.speedup, report.speedup_lo, report.speedup_hi = _ratio(native.timing, ours.timing)
        report.bound = bound_of(ours, sums[ours.name], amounts, environment)
        report.notes += _warnings(ours, native, opened[ours.name])
    return report


def _warnings(ours: Run, native: Run, sums: dict[Label, Sum]) -> list[str]:
    notes = []
    for run in (native, ours):
        if run.timing is not None and not run.timing.steady:
            notes.append(f"{run.name}: unsteady, the first and last steps differ by more than 5 %")
    if ours.output is not None and native.output is not None and ours.output.numel():
        found = relative(ours.output.double(), native.output)
        if found > 0.05:
            notes.append(
                f"{ours.name}: the first step's result differs from native's by {found:.1%}"
            )
    if not any(s.own_us for s in sums.values()):
        notes.append(f"{ours.name}: no kernel of warpwright's ran")
    return notes


def _add_errors(ops: list[Row], modules: list[Row], errors: dict[str, dict[str, float]]) -> None:
    worst: dict[str, Row] = {}
    for row in modules:
        found = errors.get(row["module"])
        row["error"] = found["error"] if found else None
        row["native_error"] = found["native_error"] if found else None
        if found and found["error"] >= worst.get(row["op"], {"error": -1})["error"]:
            worst[row["op"]] = found
    for row in ops:
        found = worst.get(row["op"])
        row["error"] = found["error"] if found else None
        row["native_error"] = found["native_error"] if found else None


def _run_row(run: Run, native: Run | None, sums: dict[Label, Sum] | None) -> Row:
    row: Row = {"name": run.name, "error": run.error, "ms": None}
    if run.timing is not None:
        row |= {
            "ms": run.timing.ms,
            "ms_lo": run.timing.ms_lo,
            "ms_hi": run.timing.ms_hi,
            "rounds": run.timing.rounds,
            "steady": run.timing.steady,
        }
        if native is not None and native.timing is not None:
            row["speedup"], row["speedup_lo"], row["speedup_hi"] = _ratio(native.timing, run.timing)
    if run.joined is not None and sums is not None:
        steps = max(len(run.joined.steps), 1)
        row |= {
            "work_ms": run.joined.work_us / steps / 1e3,
            "busy_ms": run.joined.busy_us / steps / 1e3,
            "sum_of_ops_ms": sum(s.us for s in sums.values()) / 1e3,
            "kernels": round(len(run.joined.work) / steps, 1),
            "peak_mib": run.peak_mib
            if run.peak_mib is not None
            else max((b for _, b, _ in run.memory), default=0) / 2**20,
            **timeline.amounts(run.joined),
        }
    row["trace"] = run.trace_path.name if run.trace_path else None
    return row
