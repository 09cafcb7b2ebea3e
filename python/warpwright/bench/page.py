"""A record as one self-contained HTML page: no network, light and dark, readable on a phone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

try:
    from jinja2 import ChoiceLoader, Environment, PackageLoader
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "--html needs jinja2: pip install 'warpwright[pages]'", name=error.name
    ) from error

from markupsafe import Markup

from . import charts as live
from . import looks, plots
from .live import of_record
from .records import grouped, is_training_step, write
from .screen import notes_of

Row = dict[str, Any]


def environment() -> Environment:
    found = Environment(
        loader=ChoiceLoader(
            [PackageLoader(f"warpwright.{name}", "templates") for name in ("bench", "profile")]
        ),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["short"] = plots.short
    return found


def figure(draw: looks.Draw, alt: str, caption: str) -> dict[str, Any]:
    return {"html": Markup(looks.picture(draw, alt)), "caption": caption}


def cards(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One per op and pass: geometric mean of native / ours, and of floor / ours."""
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for key, impls in grouped(record).items():
        if {"warpwright", "native"} <= impls.keys():
            groups.setdefault((key[0], key[-1]), []).append((impls["warpwright"], impls["native"]))
    found = []
    for (op, which), pairs in groups.items():
        floors = [a["floor_ms"] / a["ms"] for a, _ in pairs if a["floor_ms"]]
        found.append(
            {
                "op": op.replace("scaled_dot_product_attention", "attention"),
                "pass": which,
                "ratio": _geomean([b["ms"] / a["ms"] for a, b in pairs]),
                "floor": _geomean(floors) if floors and not is_training_step(op) else None,
            }
        )
    return found


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _shown(row: Row, ours: Row | None) -> dict[str, Any]:
    ratio, css = "", ""
    if ours is not None and row is not ours:
        value = row["ms"] / ours["ms"]
        css = "good" if value >= 1.02 else "bad" if value <= 0.98 else ""
        ratio = f"{value:.2f}×"
        if "ratio_lo" in row:
            ratio += f" [{row['ratio_lo']:.2f}, {row['ratio_hi']:.2f}]"
    return {
        "workload": f"{row['case']} {row['dtype']} {row['layout']}",
        "pass": row["pass"],
        "impl": row["impl"],
        "ms": f"{row['ms']:.4f}",
        "ratio": ratio,
        "ratio_class": css,
        "floor": f"{row['floor_ms'] / row['ms']:.0%}" if row["floor_ms"] else "",
        "peak": "" if row["peak_mib"] is None else f"{row['peak_mib']:.1f}",
        "err": "" if row["err"] is None else f"{row['err']:.1e} ({row['err_native']:.1e})",
        "notes": "; ".join(notes_of(row)),
    }


def pictures(record: dict[str, Any]) -> dict[str, tuple[looks.Draw, str, str]]:
    """{name: (draw, alternative text, caption)} of what the record has rows for."""
    found: dict[str, tuple[looks.Draw, str, str]] = {}
    if plots.relative_times(record):
        found["bars"] = (
            lambda s: plots.bars(record, s),
            "Time of each implementation against native, by op",
            "Time of every implementation as a share of eager PyTorch’s, geometric mean over the workloads "
            "that it took part in. A click on a name in the legend shows it alone.",
        )
    if plots.roofline_points(record):
        found["roofline"] = (
            lambda s: plots.roofline(record, s),
            "Roofline scatter of every measured row",
            "Distance below the roof is what is left to gain. Ops that are all traffic are placed by a "
            "nominal operation count. Point at a row for its numbers; drag to move, Shift and the wheel to zoom.",
        )
    if plots.ladder_steps(record):
        found["ladder"] = (
            lambda s: plots.ladder(record, s),
            "Training steps from the slowest to the fastest implementation",
            "Whole training steps: load, forward, loss, backward, optimizer.",
        )
    return found


def bench_page(record: dict[str, Any]) -> str:
    groups = grouped(record)
    ops: dict[str, list[dict[str, Any]]] = {}
    for key, impls in groups.items():
        ours = impls.get("warpwright")
        ops.setdefault(key[0], []).extend(_shown(row, ours) for row in impls.values())
    moving = of_record(record)
    figures = [
        figure(*picture) | {"chart": name if name in moving else ""}
        for name, picture in pictures(record).items()
    ]
    shown = ("gpu", "driver", "torch", "cuda", "cudnn", "python", "warpwright", "threads")
    where = {k: record[k] for k in (*shown, "source_hash", "date") if record.get(k)}
    if record.get("peers"):
        where["peers"] = ", ".join(f"{name} {version}" for name, version in record["peers"].items())
    return (
        environment()
        .get_template("bench.html.j2")
        .render(
            title="warpwright beside native PyTorch",
            label=plots.label(record),
            record=record,
            workloads=len(groups),
            cards=cards(record),
            figures=figures,
            charts=list(moving.values()),
            library=live.library() if moving else "",
            ops=[{"name": name, "rows": rows} for name, rows in ops.items()],
            environment=where,
        )
    )


def write_bench_page(record: dict[str, Any], path: Path) -> None:
    """The page, and each picture next to it as PNG: ``page_bars.png``, ``page_bars_dark.png``."""
    write(path, bench_page(record))
    for name, (draw, _, _) in pictures(record).items():
        looks.save_png(draw, path.with_name(f"{path.stem}_{name}.png"))
        looks.save_png(draw, path.with_name(f"{path.stem}_{name}_dark.png"), looks.DARK)
