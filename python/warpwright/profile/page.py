"""The files of a profile: one self-contained page, pictures, CSV and JSON."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..bench import charts as live
from ..bench import looks, plots
from ..bench.page import environment as templates
from ..bench.page import figure
from ..bench.records import as_cells, write
from ..swap.report import NOTHING, PART
from . import charts
from .advice import advice
from .summary import ProfileReport, describe_bound

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
MAX_BARS = 14
SMALL = 0.004  # of the step: changes that no picture can show


def _names(report: ProfileReport) -> list[str]:
    """The runs that have a time for each op."""
    return [
        r["name"] for r in report.runs if r["name"] != "compiled" and r.get("work_ms") is not None
    ]


def _top_ops(report: ProfileReport) -> list[Row]:
    """The slowest ops, and all others as one row, so that the sum stays the sum."""
    names = _names(report)
    rest = report.ops[MAX_BARS:]
    if not rest:
        return report.ops
    other: Row = {"op": f"{len(rest)} others"}
    for name in names:
        other[name] = {"ms": sum(r[name]["ms"] or 0.0 for r in rest)}
    return [*report.ops[:MAX_BARS], other]


def waterfall_steps(report: ProfileReport) -> tuple[float, list[tuple[str, float]], float]:
    """Native's step, what each op adds or takes away (ms), and our step; they add up.

    The profiler slows a CPU: if a run's ops take longer than its step, those of both runs are scaled
    by the same factor, so that each change keeps its sign.
    """
    ours, native = report.ours, report.run("native")
    assert ours is not None
    assert native is not None
    rows = _top_ops(report)

    def part(row: Row, run: Row) -> float:
        return float(row[run["name"]]["ms"] or 0.0)

    totals = [(run["ms"], sum(part(row, run) for row in rows)) for run in (ours, native)]
    scale = min([1.0, *(step / total for step, total in totals if total)])
    changes = [(row["op"], scale * (part(row, ours) - part(row, native))) for row in rows]
    idle = (ours["ms"] - native["ms"]) - sum(change for _, change in changes)
    small = [c for c in changes if abs(c[1]) < SMALL * native["ms"]]
    if len(small) > 1:
        changes = [c for c in changes if c not in small]
        changes.append((f"{len(small)} small changes", sum(c[1] for c in small)))
    changes.append(("waiting and host", idle))
    changes.sort(key=lambda c: c[1])
    return native["ms"], changes, ours["ms"]


def waterfall(report: ProfileReport, style: looks.Style) -> Figure:
    start, changes, end = waterfall_steps(report)
    ours = report.ours
    assert ours is not None
    theme = style.theme
    figure_, axes = style.figure(1.3 + 0.27 * (len(changes) + 2))
    down, up = ("#009E73", "#D55E00") if theme is looks.LIGHT else ("#00B386", "#FF7F2A")
    names = ["native step"]
    axes.barh(0, start, 0.75, color=looks.colour("native", theme))
    axes.text(start, 0, f" {plots.short(start)} ms", va="center", fontsize=8)
    at, reach = start, start
    for i, (name, change) in enumerate(changes, start=1):
        axes.barh(i, change, 0.75, left=at, color=down if change < 0 else up)
        axes.plot([at, at], [i - 0.9, i], color=theme.muted, lw=0.7)
        edge = max(at, at + change)
        axes.text(edge, i, f" {change:+.3g}", va="center", fontsize=8)
        at += change
        reach = max(reach, edge)
        names.append(name)
    last = len(changes) + 1
    axes.barh(last, end, 0.75, color=looks.colour("warpwright", theme))
    axes.text(end, last, f" {plots.short(end)} ms", va="center", fontsize=8)
    names.append(f"{ours['name']} step")
    axes.set_yticks(range(last + 1), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, reach * (1.3 if style.narrow else 1.12))
    axes.set_xlabel("ms per step")
    axes.set_title(f"From native to {ours['name']}: what each op saves or costs", loc="left")
    if style.narrow:
        axes.set_title("What each op saves or costs", loc="left")
    plots._footer(figure_, report.environment, style)
    return figure_


def op_bars(report: ProfileReport, style: looks.Style) -> Figure:
    names, ops = _names(report), _top_ops(report)
    height = 0.8 / len(names)
    figure_, axes = style.figure(1.4 + 0.42 * len(ops))
    for j, name in enumerate(names):
        values = [row[name]["ms"] or 0.0 for row in ops]
        y = [i + (j - (len(names) - 1) / 2) * height for i in range(len(ops))]
        axes.barh(
            y,
            values,
            height * 0.95,
            color=looks.colour(name, style.theme),
            hatch=looks.HATCHES.get(name),
            linewidth=0,
            label=name,
        )
        for at, value in zip(y, values, strict=True):
            axes.text(value, at, f" {plots.short(value)}", va="center", fontsize=7)
    axes.set_yticks(range(len(ops)), [row["op"] for row in ops], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.margins(x=0.14)
    where = "GPU" if report.environment["device"] == "cuda" else "CPU"
    axes.set_xlabel(f"{where} time, ms per step (forward and backward)")
    axes.set_title("Time of each op", loc="left")
    axes.legend(loc="lower right", fontsize=8)
    plots._footer(figure_, report.environment, style)
    return figure_


def memory_lines(report: ProfileReport, style: looks.Style) -> Figure:
    figure_, axes = style.figure(3.4)
    dashes = {"native": "-", "swapped": "--", "fused": ":", "compiled": "-."}
    for name, points in report.memory.items():
        peak = max(m for _, m in points)
        axes.step(
            [t for t, _ in points],
            [m for _, m in points],
            where="post",
            color=looks.colour({"compiled": "compile"}.get(name, name), style.theme),
            ls=dashes[name],
            lw=1.6,
            label=f"{name}, peak {peak:,.0f} MiB",
        )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.5, lw=0.6)
    axes.set_xlabel("ms of host time, under the profiler")
    axes.set_ylabel("MiB allocated")
    axes.set_title("Memory over one step", loc="left")
    axes.legend(fontsize=8, loc="best")
    plots._footer(figure_, report.environment, style)
    return figure_


def as_record(report: ProfileReport) -> dict[str, Any]:
    """The ops and steps in the form of a benchmark record, for the pictures that both have."""
    impls = {"native": "native", "swapped": "warpwright", "fused": "warpwright_fused"}
    rows = [
        {
            "op": row["op"],
            "case": row["module"],
            "dtype": "float32",
            "layout": "rows",
            "pass": "fwd+bwd",
            "impl": impls[name],
            "ms": row[name]["ms"],
            "bytes": row["bytes"],
            "flops": row["flops"],
        }
        for row in report.modules
        for name in _names(report)
        if row["bytes"] and row[name]["ms"]
    ]
    rows += [
        {
            "op": f"{report.title}_step",
            "case": "step",
            "layout": "rows",
            "pass": "step",
            "impl": {**impls, "compiled": "compile"}[run["name"]],
            "ms": run["ms"],
            "bytes": 0,
            "flops": 0,
        }
        for run in report.runs
        if run["ms"] is not None
    ]
    return {**report.environment, "rows": rows}


def pictures(report: ProfileReport) -> dict[str, tuple[looks.Draw, str, str]]:
    """{name: (draw, alternative text, caption)}."""
    record = as_record(report)
    found: dict[str, tuple[looks.Draw, str, str]] = {}
    if report.ours is not None and report.run("native") is not None:
        found["waterfall"] = (
            lambda s: waterfall(report, s),
            "Waterfall from the native step time to ours, by op",
            "“Waiting and host” is what the step takes beyond its ops: launches, Python, synchronisation. "
            "Where the profiler slows a CPU, the ops' times are scaled to the step.",
        )
    found["ops"] = (
        lambda s: op_bars(report, s),
        "Time of each op, native and warpwright",
        "Forward and backward together, summed over the modules.",
    )
    found["ladder"] = (
        lambda s: plots.ladder(record, s),
        "Step time of each run, slowest first",
        "Whole steps, timed without the profiler, the runs taking turns.",
    )
    if plots.roofline_points(record):
        found["roofline"] = (
            lambda s: plots.roofline(record, s),
            "Roofline scatter of the modules",
            "One point a module and run. Ops that are all traffic are placed by a nominal operation count.",
        )
    if report.memory:
        found["memory"] = (
            lambda s: memory_lines(report, s),
            "Memory allocated over one step",
            "What PyTorch’s allocator holds during one step; on a CPU above the least in the step.",
        )
    return found


FLAME = (
    "Time by module, each level inside of the one above, one flame per run",
    "Time by module, a flame per run on one scale. A module is blue if it is faster in this run than natively, orange "
    "if it is slower, and grey if neither, as all of native's are. A fused module has the time of the layers that it "
    "computes, too. "
    "Times are the profiler's, which slows a CPU. Point at a bar for its numbers; drag to move, Shift and the wheel to zoom.",
)

TIMELINE = (
    "Communication and compute of one step on one time axis, two rows per run",
    "One step of rank 0, under the profiler. Communication with compute above it costs little: kernels of NCCL on a GPU, "
    "threads of gloo on a CPU, where a bar is from the call to the result.",
)


def live_charts(report: ProfileReport) -> dict[str, live.Chart]:
    """The charts that answer to the pointer, by name."""
    where = "GPU" if report.environment["device"] == "cuda" else "CPU"
    found = (
        charts.flame(report, _names(report), where),
        charts.timeline(report),
        charts.memory(report),
    )
    return {chart.name: chart for chart in found if chart is not None}


def render(report: ProfileReport) -> str:
    moving = live_charts(report)
    figures = []
    for name, (alt, caption) in {"flame": FLAME, "timeline": TIMELINE}.items():
        if name in moving:
            html = moving[name].picture(alt)
            figures.append({"html": html, "caption": caption, "chart": name})
    for name, picture in pictures(report).items():
        figures.append(figure(*picture) | {"chart": name if name in moving else ""})
    reasons: dict[tuple[str, str], list[str]] = {}
    for entry in report.swap["entries"]:
        if not entry["swapped"] and entry["reason"] != NOTHING and PART not in entry["reason"]:
            reasons.setdefault((entry["type"], entry["reason"]), []).append(
                entry["name"] or "(model)"
            )
    fusions = report.swap["fusions"]
    for fusion in fusions:
        if fusion["reason"]:
            chain = (fusion["chain"] or "chains of layers", fusion["reason"])
            reasons.setdefault(chain, []).append(fusion["block"] or "(model)")
    return (
        templates()
        .get_template("profile.html.j2")
        .render(
            title=f"{report.title}: warpwright beside native PyTorch",
            report=report,
            label=plots.label(report.environment),
            names=_names(report),
            ours=report.ours,
            figures=figures,
            charts=list(moving.values()),
            library=live.library() if moving else "",
            advice=advice(report),
            bound=describe_bound(report.bound),
            reasons=[(kind, why, names) for (kind, why), names in reasons.items()],
            fused=sum(not fusion["reason"] for fusion in fusions),
            where="GPU" if report.environment["device"] == "cuda" else "CPU",
        )
    )


def _csv(rows: list[Row], names: list[str]) -> str:
    """Nested cells of each run as columns `native.ms`, …"""
    text = io.StringIO()
    flat = []
    for row in rows:
        cells = {k: v for k, v in row.items() if k not in names}
        for name in names:
            cells |= {f"{name}.{k}": v for k, v in row[name].items()}
        flat.append(cells)
    columns = list(dict.fromkeys(k for row in flat for k in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(as_cells, flat))
    return text.getvalue()


def write_all(report: ProfileReport, folder: Path) -> None:
    names = _names(report)
    write(folder / "report.json", report.to_json() + "\n")
    write(folder / "ops.csv", _csv(report.ops, names))
    write(folder / "modules.csv", _csv(report.modules, names))
    drawn = pictures(report)
    for name, (draw, _, _) in drawn.items():
        looks.save_png(draw, folder / f"{name}.png")
        looks.save_png(draw, folder / f"{name}_dark.png", looks.DARK)
    for name, chart in live_charts(report).items():
        if name not in drawn:
            chart.save_png(folder / f"{name}.png")
            chart.save_png(folder / f"{name}_dark.png", looks.DARK)
    write(folder / "report.html", render(report))
    report.files = sorted(p.name for p in folder.iterdir())
