"""Tables of a record of `measure.py`, for docs/scaling.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
RECORDS = Path(__file__).resolve().parent / "results"


def records() -> list[Path]:
    return sorted(RECORDS.glob("*.json"))


def load(path: Path) -> tuple[str, list[Row]]:
    """The GPU's name, and the rows."""
    record = json.loads(path.read_text())
    return record["gpu"], record["rows"]


def milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _sequences(rows: list[Row]) -> str:
    """Attention: times, the share of an ideal division of the one-GPU call, and memory."""
    lines = [
        "| attention | of | GPUs | forward ms | backward ms | of linear | MiB | of one GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = {
        row["scheme"].partition(": ")[2]: row
        for row in rows
        if row["scheme"].startswith("attention: ") and row["impl"] == "warpwright"
    }
    for row in rows:
        form, _, name = row["scheme"].partition(": ")
        if name not in alone or "forward_ms" not in row:
            continue
        one = alone[name]
        cells = [
            f"{form}: {name}" if form != "attention" else f"one call: {name}",
            row["impl"],
            str(row["ranks"]),
            milliseconds(row["forward_ms"]),
            milliseconds(row["backward_ms"]),
            f"{one['ms'] / row['ranks'] / row['ms']:.2f}",
            f"{row['peak_mib']:.0f}",
            f"{row['peak_mib'] / one['peak_mib']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _beside_native(rows: list[Row]) -> str:
    """What both ours and native ran, on as many GPUs."""
    lines = ["| step | GPUs | native ms | ours ms | native / ours |", "|---|---|---|---|---|"]
    found = {(row["scheme"], row["ranks"], row["impl"]): row for row in rows}
    for scheme, ranks, impl in found:
        how = impl.removeprefix("warpwright")
        theirs = found.get((scheme, ranks, f"native{how}"))
        if not impl.startswith("warpwright") or theirs is None:
            continue
        mine = found[scheme, ranks, impl]
        parts = [("ms", ", graph_step" if how else "")]
        if "forward_ms" in mine:
            parts = [("forward_ms", ", forward"), ("backward_ms", ", backward")]
        for field, words in parts:
            ratio = theirs[field] / mine[field]
            figures = f"{milliseconds(theirs[field])} | {milliseconds(mine[field])} | {ratio:.2f}"
            lines.append(f"| {scheme}{words} | {ranks} | {figures} |")
    return "\n".join(lines)


def tables(path: Path, predictions: str) -> str:
    gpu, rows = load(path)
    ranks = max(row["ranks"] for row in rows)
    parts = (f"{ranks} x {gpu}, NCCL.", _sequences(rows), _beside_native(rows), predictions)
    return "\n\n".join(part for part in parts if part)
