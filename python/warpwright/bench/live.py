"""The live charts of a benchmark page: each op's time over native's, and the roofline.

A click on a name in the legend shows that implementation alone, and a bar or point tells its numbers.
The page's still pictures (``plots``) show the same without JavaScript.
"""

from __future__ import annotations

from typing import Any

from . import looks, plots
from .charts import ZOOM, Chart

Row = dict[str, Any]
BAR, GAP = 7, 9  # pixels of a bar's height, and between two ops
LONGEST = 3.0  # times native's; longer bars are cut at the chart's edge
CHOSEN: Row = {
    "name": "chosen",
    "select": {"type": "point", "fields": ["implementation"]},
    "bind": "legend",
}


def of_record(record: Row) -> dict[str, Chart]:
    """The charts by name, as far as the record has rows for them."""
    found = (bars(record), roofline(record))
    return {chart.name: chart for chart in found if chart is not None}


def _colours(impls: list[str], theme: looks.Theme) -> Row:
    return {
        "field": "implementation",
        "type": "nominal",
        "scale": {"domain": impls, "range": [looks.colour(impl, theme) for impl in impls]},
        "legend": {"orient": "top", "title": None, "columns": 4, "symbolOpacity": 1},
    }


def _theme(dark: bool) -> looks.Theme:
    return looks.DARK if dark else looks.LIGHT


def _opacity(chosen: float) -> Row:
    return {"condition": {"param": "chosen", "value": chosen}, "value": 0.08}


def bars(record: Row) -> Chart | None:
    """Per op and pass: the time of every implementation as a share of native's."""
    groups = plots.relative_times(record)
    if not groups:
        return None
    impls = looks.in_order({impl for times in groups.values() for impl in times})
    values: list[Row] = [
        {"op": f"{op} {which}", "implementation": impl, "share": round(times[impl], 4)}
        for (op, which), times in groups.items()
        for impl in impls
        if impl in times
    ]
    longest = max(min(value["share"], LONGEST) for value in values)
    x: Row = {
        "field": "share",
        "type": "quantitative",
        "title": "time / native's (shorter is faster)",
        "axis": {"orient": "top"},
        "scale": {"domain": [0, longest * 1.05]},
    }

    def spec(dark: bool) -> Row:
        theme = _theme(dark)
        bar = {
            "mark": {"type": "bar", "clip": True, "tooltip": True},
            "params": [CHOSEN],
            "encoding": {
                "y": {
                    "field": "op",
                    "type": "nominal",
                    "sort": None,
                    "title": None,
                    "axis": {"labelLimit": 240},
                },
                "yOffset": {"field": "implementation", "sort": impls},
                "x": x,
                "color": _colours(impls, theme),
                "opacity": _opacity(1),
            },
        }
        line = {
            "data": {"values": [{"native": 1}]},
            "mark": {"type": "rule", "strokeDash": [4, 3], "color": theme.muted},
            "encoding": {"x": {"field": "native", "type": "quantitative"}},
        }
        return {"height": len(groups) * (BAR * len(impls) + GAP), "layer": [bar, line]}

    return Chart("bars", values, spec(False), spec(True))


def roofline(record: Row) -> Chart | None:
    """Every row by its operations per byte and its rate, below the two measured roofs."""
    rows = [row for row in record["rows"] if row["bytes"]]
    if not rows:
        return None
    impls = looks.in_order({row["impl"] for row in rows})
    values: list[Row] = [
        {
            "op": f"{row['op']} {row['pass']}",
            "workload": f"{row['case']} {row['dtype']} {row['layout']}",
            "implementation": impl,
            "ms": round(row["ms"], 4),
            "operations per byte": round(intensity, 5),
            "TFLOP/s": round(rate, 6),
        }
        for row, (_, impl, intensity, rate) in zip(rows, plots.roofline_points(record), strict=True)
    ]
    (_, copy), (_, matmul) = plots.roofs(record)
    ridge = matmul / copy
    at = [value["operations per byte"] for value in values]
    ends = min(at) / 2, ridge, max(*at, ridge) * 2
    roof = [{"x": x, "y": min(x * copy, matmul)} for x in ends]

    rates = [value["TFLOP/s"] for value in values]
    heights = min(r for r in (*rates, matmul) if r > 0) / 2, max(*rates, matmul) * 2

    def axis(field: str, title: str, low: float, high: float) -> Row:
        return {
            "field": field,
            "type": "quantitative",
            "title": title,
            "scale": {"type": "log", "nice": False, "domain": [low, high]},
            "axis": {"tickCount": 6, "grid": False},
        }

    def spec(dark: bool) -> Row:
        theme = _theme(dark)
        x = axis("operations per byte", "operations per byte (fewest bytes)", ends[0], ends[2])
        y = axis("TFLOP/s", "achieved TFLOP/s", *heights)
        line = {
            "data": {"values": roof},
            "mark": {"type": "line", "color": theme.muted, "clip": True},
            "encoding": {"x": {**x, "field": "x"}, "y": {**y, "field": "y"}},
        }
        point = {
            "mark": {"type": "point", "size": 40, "filled": True, "tooltip": True, "clip": True},
            "params": [CHOSEN, {**ZOOM, "select": {**ZOOM["select"], "encodings": ["x", "y"]}}],
            "encoding": {
                "x": x,
                "y": y,
                "color": _colours(impls, theme),
                "opacity": _opacity(0.8),
                "tooltip": [{"field": field} for field in values[0]],
            },
        }
        return {"height": 420, "layer": [line, point]}

    return Chart("roofline", values, spec(False), spec(True))
