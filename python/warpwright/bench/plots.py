"""The pictures of benchmark and profile pages, as SVG for a page and PNG for a document.

Each picture is drawn for a light and a dark page and, if asked for, for
the width of a phone. It names the machine, versions, date and source hash.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .._catalog import OPS
from . import ladder as teaching_ladder
from .looks import HATCHES, Style, colour, in_order, marker
from .records import grouped, is_training_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]


def label(record: dict[str, Any]) -> str:
    """Machine, versions, date and source hash."""
    parts = [str(record["gpu"]), f"torch {record['torch']}"]
    if record.get("cudnn"):
        parts.append(f"cuDNN {record['cudnn']}")
    parts += [str(record["date"]), f"source {record['source_hash']}"]
    return " · ".join(parts)


def _footer(figure: Figure, record: dict[str, Any], style: Style) -> None:
    text = label(record)
    if style.narrow:
        words = text.split(" · ")
        text = " · ".join(words[:2]) + "\n" + " · ".join(words[2:])
    figure.supxlabel(text, fontsize=7, color=style.theme.muted, x=0.5)


def _plain(value: float, _: Any) -> str:
    return f"{value:g}"


def operations(row: Row) -> float:
    """FLOPs, or the catalog's nominal operations for an op without products."""
    if row["flops"]:
        return float(row["flops"])
    nominal = OPS[row["op"]].operations if row["op"] in OPS else 1.0
    size = {"float64": 8, "float32": 4}.get(row["dtype"], 2)
    return nominal * row["bytes"] / size


def roofline_points(record: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """(op, impl, FLOPs per byte, TFLOP/s) of every row that has bytes."""
    return [
        (row["op"], row["impl"], operations(row) / row["bytes"], operations(row) / row["ms"] / 1e9)
        for row in record["rows"]
        if row["bytes"]
    ]


def roofs(record: dict[str, Any]) -> tuple[tuple[str, float], tuple[str, float]]:
    """(name, TB/s) and (name, TFLOP/s) of the two roofs.

    On a CPU, whose caches are faster than its memory and whose clock follows the load, a row may reach
    more than the measured rates. What one row reached, the machine can reach: the roof is raised.
    """
    copy, matmul = ("copy", record["copy_tbs"]), ("matmul", record["matmul_tflops"])
    if record.get("device") != "cpu":
        return copy, matmul
    points = [(x, rate) for _, _, x, rate in roofline_points(record)]
    most = max((rate for _, rate in points), default=0.0)
    if most > matmul[1]:
        matmul = ("most reached", most)
    ridge = matmul[1] / copy[1]
    fastest = max((rate / x for x, rate in points if x < ridge), default=0.0)
    return (("most reached", fastest) if fastest > copy[1] else copy), matmul


def short(ms: float) -> str:
    """Three digits, and no exponent for seconds."""
    return f"{ms:,.0f}" if ms >= 999.5 else f"{ms:.3g}"


def roofline(record: dict[str, Any], style: Style, impls: Sequence[str] = ()) -> Figure:
    """Intensity and achieved rate of every row, below the two measured roofs."""
    points = [p for p in roofline_points(record) if not impls or p[1] in impls]
    theme = style.theme
    figure, axes = style.figure(4.6 if style.narrow else 5.4)
    (copy_name, copy), (matmul_name, matmul) = roofs(record)
    xs = [p[2] for p in points]
    low, high = min(xs) / 2, max([*xs, matmul / copy]) * 2
    ridge = matmul / copy
    axes.plot([low, ridge, high], [low * copy, matmul, matmul], color=theme.muted, lw=1.5)
    middle = math.sqrt(low * ridge)
    axes.annotate(
        f"{copy_name} {copy:.3g} TB/s",
        (middle, middle * copy),
        (-6, 8),
        textcoords="offset points",
        ha="right",
        color=theme.muted,
        fontsize=8,
    )
    axes.text(
        high,
        matmul * 1.12,
        f"{matmul_name} {matmul:.3g} TFLOP/s",
        color=theme.muted,
        fontsize=8,
        ha="right",
    )
    for impl in dict.fromkeys(p[1] for p in points):
        mine = [p for p in points if p[1] == impl]
        ours = impl == "warpwright"
        axes.scatter(
            [p[2] for p in mine],
            [p[3] for p in mine],
            s=34 if ours else 22,
            marker=marker(impl),
            color=colour(impl, theme) if ours else "none",
            edgecolors=colour(impl, theme),
            linewidths=1.2,
            alpha=0.9,
            label=impl,
            zorder=3 if ours else 2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_plain))
        axis.set_minor_formatter(NullFormatter())
        axis.set_major_locator(LogLocator(numticks=8))
    axes.set_xlim(low, high)
    axes.grid(alpha=0.5, lw=0.6)
    axes.set_xlabel("operations per byte (fewest bytes)")
    axes.set_ylabel("achieved TFLOP/s")
    axes.set_title("Roofline: every measured row", loc="left")
    axes.legend(loc="lower right", fontsize=8)
    _footer(figure, record, style)
    return figure


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def relative_times(record: dict[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """{(op, pass): {impl: geometric mean of its time over native's, over cases with both}}."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = {}
    for key, impls in grouped(record).items():
        if "native" not in impls or is_training_step(key[0]):
            continue
        for impl, row in impls.items():
            group = ratios.setdefault((key[0], key[-1]), {})
            group.setdefault(impl, []).append(row["ms"] / impls["native"]["ms"])
    return {k: {i: _geomean(v) for i, v in impls.items()} for k, impls in ratios.items()}


def bars(record: dict[str, Any], style: Style) -> Figure:
    """Per op and pass: the time of every implementation as a share of native's."""
    groups = relative_times(record)
    impls = in_order({i for v in groups.values() for i in v})
    count = sum(len(v) for v in groups.values())
    figure, axes = style.figure(1.7 + 0.17 * count + 0.12 * len(groups))
    at, ticks, longest = 0.0, [], 0.0
    seen: set[str] = set()
    for (op, which), values in groups.items():
        top = at
        for impl in impls:
            if impl not in values:
                continue
            axes.barh(
                at,
                values[impl],
                0.85,
                color=colour(impl, style.theme),
                label=impl if impl not in seen else None,
            )
            seen.add(impl)
            axes.text(values[impl], at, f" {values[impl]:.2f}", va="center", fontsize=7)
            longest = max(longest, min(values[impl], 3.0))
            at += 1
        short = op.replace("scaled_dot_product_attention", "attention")
        ticks.append(
            ((top + at - 1) / 2, f"{short}\n{which}" if style.narrow else f"{short} {which}")
        )
        at += 0.8
    axes.axvline(1, color=style.theme.muted, lw=1, ls="--")
    axes.set_yticks([t for t, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.15)
    axes.set_ylim(at - 0.5, -0.9)
    axes.set_xlabel("time / native's (shorter is faster; geometric mean over workloads)")
    if style.narrow:
        axes.set_xlabel("time / native's (shorter is faster)")
    axes.set_title("Time against eager PyTorch", loc="left")
    figure.legend(loc="outside upper right", ncols=2 if style.narrow else 6, fontsize=8)
    _footer(figure, record, style)
    return figure


def ladder_steps(record: dict[str, Any]) -> dict[str, list[tuple[str, str, float]]]:
    """{workload: [(impl, layout, ms), slowest first]} of the training steps."""
    found: dict[str, list[tuple[str, str, float]]] = {}
    for row in record["rows"]:
        if is_training_step(row["op"]):
            name = f"{row['op'].removesuffix('_step')} {row['case']}"
            found.setdefault(name, []).append((row["impl"], row["layout"], row["ms"]))
    return {name: sorted(rows, key=lambda r: -r[2]) for name, rows in found.items()}


def _panels(
    style: Style, groups: Mapping[Any, Sized], base: float, bar: float
) -> tuple[Figure, Sequence[Axes]]:
    """A panel of horizontal bars per group, with a height in inches for its number of bars."""
    heights = [len(rows) for rows in groups.values()]
    figure, grid = style.figure(
        base + bar * sum(heights) + 0.55 * len(heights),
        nrows=len(heights),
        height_ratios=heights,
        squeeze=False,
    )
    return figure, grid[:, 0]


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Bars from top to bottom."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()


def ladder(record: dict[str, Any], style: Style) -> Figure:
    """Whole training steps, from the slowest implementation to the fastest.

    Speeds are relative to native's faster layout, for the layouts in which native ran.
    """
    ladders = ladder_steps(record)
    figure, panels = _panels(style, ladders, 1.1, 0.27)
    for axes, (name, rows) in zip(panels, ladders.items(), strict=True):
        slowest = rows[0][2]
        native = {layout: ms for impl, layout, ms in rows if impl == "native"}
        for i, (impl, layout, ms) in enumerate(rows):
            axes.barh(
                i, ms, 0.8, color=colour(impl, style.theme), hatch=HATCHES.get(impl), linewidth=0
            )
            speed = f" · {min(native.values()) / ms:.2f}×" if layout in native else ""
            axes.text(ms, i, f" {short(ms)} ms{speed}", va="center", fontsize=8)
        names = [i if layout == "rows" else f"{i} {layout}" for i, layout, _ in rows]
        _name_bars(axes, names)
        axes.set_xlim(0, slowest * (1.55 if style.narrow else 1.25))
        axes.set_title(name, loc="left", fontsize=10)
    panels[-1].set_xlabel("ms per step · speed (eager PyTorch in its faster layout: 1×)")
    if style.narrow:
        panels[-1].set_xlabel("ms per step · speed (native: 1×)")
    _footer(figure, record, style)
    return figure


def largest_steps(record: dict[str, Any]) -> dict[str, dict[str, tuple[str, float]]]:
    """{step: {"native", "peer", "ours": (impl, ms)}}: each step's largest workload, its fastest of each kind."""
    found: dict[str, dict[str, tuple[str, float]]] = {}
    for name, rows in ladder_steps(record).items():
        step: dict[str, tuple[str, float]] = {}
        for impl, _, ms in rows:  # the fastest is last
            kind = "native" if impl == "native" else "peer"
            step["ours" if impl.startswith("warpwright") else kind] = (impl, ms)
        known = found.get(name.split()[0])
        if "ours" in step and (known is None or known["ours"][1] < step["ours"][1]):
            found[name.split()[0]] = step
    return found


def steps(record: dict[str, Any], style: Style) -> Figure:
    """Whole training steps: native, its fastest other peer, and ours at its fastest."""
    found = largest_steps(record)
    bars_of = {
        name: [step[k] for k in ("native", "peer", "ours") if k in step]
        for name, step in found.items()
    }
    figure, axes = style.figure(1.5 + 0.23 * sum(map(len, bars_of.values())) + 0.2 * len(bars_of))
    at, ticks = 0.0, []
    for name, step in bars_of.items():
        ticks.append((at + (len(step) - 1) / 2, name))
        best = min((ms for impl, ms in step if not impl.startswith("warpwright")), default=0.0)
        for impl, ms in step:
            ours = impl.startswith("warpwright")
            kind = "warpwright" if ours else "native" if impl == "native" else "compile"
            axes.barh(at, ms, 0.85, color=colour(kind, style.theme))
            lead = f" · {best / ms:.2f}× the best peer" if ours and best else ""
            axes.text(
                ms,
                at,
                f" {ms:.3g} ms {'' if style.narrow else impl}{lead}",
                va="center",
                fontsize=8,
            )
            at += 1
        at += 0.8
    axes.set_yticks([t for t, _ in ticks], [name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(at - 0.5, -0.9)
    axes.set_xlim(0, 1.3 * max(ms for step in bars_of.values() for _, ms in step))
    axes.set_xlabel("ms per training step (shorter is faster)")
    axes.set_title("Whole training steps", loc="left")
    _footer(figure, record, style)
    return figure


def rungs(record: dict[str, Any], style: Style) -> Figure:
    """A teaching ladder: each rung's rate, native's and the data sheet's peak as lines."""
    found = teaching_ladder.of_record(record)
    shapes = teaching_ladder.groups(record)
    figure, panels = _panels(style, shapes, 1.3, 0.3)
    theme = style.theme
    for axes, ((op, case), rows) in zip(panels, shapes.items(), strict=True):
        work = found.work(op)
        rate_of = teaching_ladder.terabytes if work.passes else teaching_ladder.tflops
        unit = "TB/s" if work.passes else "TFLOP/s"
        steps = [row for row in rows if row["impl"] != "native"]
        rates = [rate_of(row) for row in steps]
        native = next((row for row in rows if row["impl"] == "native"), None)
        lines = [(work.native, rate_of(native), "native")] if native else []
        top = record["copy_tbs"] if work.passes else record["peak_tflops"]
        lines += [("copy" if work.passes else "peak", top, "")] if top else []
        low = min([*rates, *(rate for _, rate, _ in lines)]) / 2
        axes.barh(range(len(steps)), rates, 0.8, color=colour("warpwright", theme), linewidth=0)
        for i, (row, rate) in enumerate(zip(steps, rates, strict=True)):
            share = teaching_ladder.percent(teaching_ladder.share_of_native(row))
            # Inside the bar if it fits: long bars end at the lines.
            inside = rate > 8 * low
            axes.text(
                rate / 1.06 if inside else rate * 1.06,
                i,
                f"{rate:.3g} {unit} · {share} of {work.native}",
                color=theme.background if inside else theme.text,
                ha="right" if inside else "left",
                va="center",
                fontsize=8,
            )
        for text, rate, impl in lines:
            line = colour(impl, theme) if impl else theme.muted
            axes.axvline(rate, color=line, lw=1.2, ls="--", label=f"{text} {rate:.3g} {unit}")
        _name_bars(axes, [teaching_ladder.title(row["impl"], work.native) for row in steps])
        axes.set_xscale("log")
        axes.set_xlim(low, 1.3 * max([*rates, *(rate for _, rate, _ in lines)]))
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        words = teaching_ladder.size(work, case)
        axes.set_title(words if len(found.works) == 1 else f"{op}, {words}", loc="left", fontsize=9)
        axes.legend(loc="lower left", bbox_to_anchor=(0.45, 1.0), ncols=2, fontsize=8)
        axes.set_xlabel(f"{unit}, logarithmic")
    _footer(figure, record, style)
    return figure
