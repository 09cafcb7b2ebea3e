"""The live charts of a profile: time by module as a flame, memory, and communication beside compute."""

from __future__ import annotations

from typing import Any

from ..bench import looks
from ..bench.charts import ZOOM, Chart
from .summary import ProfileReport

Row = dict[str, Any]
# (light, dark). Native's own bars are the measure and have no colour of a result.
KINDS = {
    "faster than native": ("#56B4E9", "#0072B2"),
    "slower than native": ("#E69F00", "#B35900"),
    "native, or no difference": ("#c9d1d9", "#59636e"),
}
LANES = {"compute": ("#56B4E9", "#0072B2"), "communication": ("#CC79A7", "#B0578A")}  # light, dark
BAR = 22  # pixels of height per level
DIFFERENCE = 0.02  # of the time: smaller ones are not coloured


def _kind(native: float, mine: float) -> str:
    """How a bar of `mine` milliseconds compares with native's of the same module; 0 if it has none."""
    if native and mine < (1 - DIFFERENCE) * native:
        return "faster than native"
    if native and mine > (1 + DIFFERENCE) * native:
        return "slower than native"
    return "native, or no difference"


def _tree(report: ProfileReport, names: list[str]) -> dict[tuple[str, ...], dict[str, float]]:
    """{path of modules, then op: milliseconds in each run}, parents before their children.

    A module's children are in the order in which the model has them, and all runs have the same order.
    """
    order = {entry["name"]: i for i, entry in enumerate(report.swap["entries"])}
    rows = sorted(report.modules, key=lambda row: order.get(row["module"], len(order)))
    found: dict[tuple[str, ...], dict[str, float]] = {(): dict.fromkeys(names, 0.0)}
    for row in rows:
        path = (*(row["module"].split(".") if row["module"] else ()), row["op"])
        for depth in range(len(path) + 1):
            times = found.setdefault(path[:depth], dict.fromkeys(names, 0.0))
            for name in names:
                times[name] += row[name]["ms"] or 0.0
    return found


def _places(
    tree: dict[tuple[str, ...], dict[str, float]], name: str
) -> dict[tuple[str, ...], float]:
    """Where each bar starts, in milliseconds: children follow each other from their parent's start."""
    starts: dict[tuple[str, ...], float] = {(): 0.0}
    filled: dict[tuple[str, ...], float] = {(): 0.0}
    for path in list(tree)[1:]:
        parent = path[:-1]
        starts[path] = filled[path] = filled[parent]
        filled[parent] += tree[path][name]
    return starts


def flame_values(report: ProfileReport, names: list[str]) -> list[Row]:
    """One bar per module or op and run, compared with native's bar of that module or op."""
    tree = _tree(report, names)
    depth = max(map(len, tree)) + 1
    values = []
    for position, name in enumerate(names):
        starts = _places(tree, name)
        for path, times in tree.items():
            if not times[name]:
                continue
            level = position * (depth + 1) + len(path)
            values.append(
                {
                    "label": (path[-1] if path else f"{name}: {times[name]:,.4g} ms"),
                    "name": ".".join(path) or report.title,
                    "run": name,
                    "start": round(starts[path], 5),
                    "end": round(starts[path] + times[name], 5),
                    "top": level,
                    "bottom": level + 0.92,
                    "kind": _kind(times.get("native", 0.0), times[name]),
                    **{f"{run} ms": f"{times[run]:.3f}" for run in names},
                }
            )
    return values


def flame(report: ProfileReport, names: list[str], where: str) -> Chart | None:
    """Time by module: each level inside of the one above, one flame per run, on the same scale."""
    values = flame_values(report, names)
    if not values:
        return None
    width = "(scale('x', datum.end) - scale('x', datum.start))"
    tooltip = [{"field": field, "type": "nominal"} for field in ("name", "run")]
    tooltip += [{"field": f"{run} ms", "type": "nominal"} for run in names]
    bars: dict[str, dict[str, Any]] = {
        "x": {"field": "start", "type": "quantitative", "title": f"ms of {where} time per step"},
        "y": {"field": "top", "type": "quantitative", "axis": None, "scale": {"reverse": True}},
    }

    def spec(dark: bool) -> dict[str, Any]:
        theme = looks.DARK if dark else looks.LIGHT
        colours: dict[str, Any] = {
            "domain": list(KINDS),
            "range": [pair[dark] for pair in KINDS.values()],
        }
        legend = {"orient": "top", "title": None}
        rect = {
            "mark": {"type": "rect", "stroke": theme.background, "strokeWidth": 0.7, "clip": True},
            "params": [ZOOM],
            "encoding": {
                **bars,
                "x2": {"field": "end"},
                "y2": {"field": "bottom"},
                "color": {"field": "kind", "type": "nominal", "scale": colours, "legend": legend},
                "tooltip": tooltip,
            },
        }
        text = {
            "transform": [{"calculate": "(datum.top + datum.bottom) / 2", "as": "middle"}],
            "mark": {
                "type": "text",
                "align": "left",
                "dx": 3,
                "fontSize": 11,
                "baseline": "middle",
                "clip": True,
                "color": theme.text,
                "limit": {"expr": f"max(1, {width} - 5)"},
                "tooltip": None,
            },
            "encoding": {
                "x": bars["x"],
                "y": {**bars["y"], "field": "middle"},
                "text": {"condition": {"test": f"{width} > 16", "field": "label"}, "value": ""},
            },
        }
        levels = max(value["bottom"] for value in values)
        return {"height": round(BAR * levels), "layer": [rect, text]}

    return Chart("flame", values, spec(False), spec(True))


def memory(report: ProfileReport) -> Chart | None:
    """Memory over one step, a line per run."""
    values = [
        {"run": name, "ms": round(at, 4), "MiB": round(held, 3)}
        for name, points in report.memory.items()
        for at, held in points
    ]
    if not values:
        return None
    names = list(report.memory)

    def spec(dark: bool) -> dict[str, Any]:
        theme = looks.DARK if dark else looks.LIGHT
        colours = [looks.colour({"compiled": "compile"}.get(n, n), theme) for n in names]
        dashes = [
            {"native": [], "swapped": [6, 3], "fused": [2, 2]}.get(n, [8, 3, 2, 3]) for n in names
        ]
        run = {"field": "run", "type": "nominal"}
        legend = {"orient": "top", "title": None, "symbolType": "stroke", "symbolSize": 300}
        return {
            "height": 300,
            "mark": {"type": "line", "interpolate": "step-after", "clip": True, "tooltip": True},
            "params": [ZOOM],
            "encoding": {
                "x": {"field": "ms", "type": "quantitative", "title": "ms of host time, under the profiler"},
                "y": {"field": "MiB", "type": "quantitative", "title": "MiB allocated"},
                "color": {**run, "scale": {"domain": names, "range": colours}, "legend": legend},
                "strokeDash": {**run, "scale": {"domain": names, "range": dashes}, "legend": legend},
            },
        }  # fmt: skip

    return Chart("memory", values, spec(False), spec(True))


def timeline(report: ProfileReport) -> Chart | None:
    """One step of rank 0: a row of the picture per run and lane. None for a single process."""
    if not report.timeline:
        return None
    values = [row | {"row": f"{row['run']}: {row['lane']}"} for row in report.timeline]
    order = list(dict.fromkeys(value["row"] for value in values))

    def spec(dark: bool) -> Row:
        theme = looks.DARK if dark else looks.LIGHT
        colours = {"domain": list(LANES), "range": [pair[dark] for pair in LANES.values()]}
        lane: Row = {"field": "lane", "type": "nominal"}
        return {
            "height": 34 * len(order),
            "mark": {"type": "bar", "stroke": theme.background, "strokeWidth": 0.3, "clip": True},
            "params": [ZOOM],
            "encoding": {
                "x": {
                    "field": "start",
                    "type": "quantitative",
                    "title": "ms from the step's start",
                },
                "x2": {"field": "end"},
                "y": {"field": "row", "type": "nominal", "title": None, "sort": order},
                "color": {**lane, "scale": colours, "legend": {"orient": "top", "title": None}},
                "tooltip": [{"field": f, "type": "nominal"} for f in ("row", "start", "end")],
            },
        }

    return Chart("timeline", values, spec(False), spec(True))
