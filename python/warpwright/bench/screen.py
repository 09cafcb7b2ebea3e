"""The terminal output of `bench`: one line per case and pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from .records import grouped

Row = dict[str, Any]
OURS = "warpwright"


def notes_of(row: Row) -> list[str]:
    """The notes that a reader of the row needs."""
    found = list(row.get("notes", []))
    if row.get("path", OURS) != OURS:
        found.append(f"ran: {row['path']}")
    if not row.get("steady", True):
        found.append("unsteady")
    found += [f"clocks: {reason}" for reason in row.get("throttled", [])]
    return found


def table_of(rows: Sequence[Row], title: str, last: int | None = None) -> Table:
    """One line per (case, pass): ours, native, the fastest other peer, our share of the floor."""
    table = Table(title=title)
    for column in ("op", "case", "dtype", "layout", "pass"):
        table.add_column(column)
    for column in ("ours ms", "native ms", "native/ours [95 %]"):
        table.add_column(column, justify="right")
    table.add_column("best other peer")
    for column in ("floor/ours", "MiB ours/native", "err/native's"):
        table.add_column(column, justify="right")
    table.add_column("notes")
    groups = [*grouped({"rows": rows}).items()]
    for key, impls in groups[-last:] if last else groups:
        if not {"warpwright", "native"} <= impls.keys():
            continue
        ours, native = impls["warpwright"], impls["native"]
        ratio = native["ms"] / ours["ms"]
        color = "green" if ratio >= 1 else "red" if ratio < 0.4 else "yellow"
        interval = (
            f" [{native['ratio_lo']:.2f}, {native['ratio_hi']:.2f}]" if "ratio" in native else ""
        )
        others = [r for n, r in impls.items() if n not in ("warpwright", "native")]
        best = min(others, key=lambda r: r["ms"], default=None)
        error = "" if ours["err"] is None else f"{ours['err'] / max(native['err'], 1e-30):.2f}"
        memory = ""
        if ours["peak_mib"] is not None:
            memory = f"{ours['peak_mib']:.0f}/{native['peak_mib']:.0f}"
        marks = notes_of(ours) + [
            f"{n}: {m}" for n, r in impls.items() if r is not ours for m in notes_of(r)
        ]
        table.add_row(
            *key,
            f"{ours['ms']:.4f}",
            f"{native['ms']:.4f}",
            f"[{color}]{ratio:.2f}[/]{interval}".replace(" [", " \\["),
            f"{best['impl']} {best['ms']:.4f}" if best else "",
            "" if not ours["floor_ms"] else f"{ours['floor_ms'] / ours['ms']:.0%}",
            memory,
            error,
            "; ".join(marks),
        )
    return table
