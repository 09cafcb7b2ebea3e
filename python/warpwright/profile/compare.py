"""Two profiles compared: steps, ops and modules, as text and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .summary import OURS, describe_bound

Row = dict[str, Any]
CONDITIONS = ("gpu", "torch", "cudnn", "warpwright", "source_hash", "threads")


def load(path: Path) -> dict[str, Any] | None:
    """A profile's report.json; None if the file is another JSON document."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not {"runs", "modules", "swap"} <= found.keys():
        return None
    return found


def compared_runs(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, str]:
    """The run of each profile whose modules are compared: the same one, if both have one.

    Of several the one that a profile's headline is about; native if nothing else was profiled.
    """

    def first(names: set[str]) -> str:
        return next((name for name in OURS if name in names), "native")

    old, new = (
        {run["name"] for run in report["runs"] if run["ms"] is not None}
        for report in (before, after)
    )
    ours = first(old & new)
    return (ours, ours) if ours in old & new else (first(old), first(new))


def steps(before: dict[str, Any], after: dict[str, Any]) -> list[Row]:
    """Each run's step in both profiles, in ms."""
    old, new = ({r["name"]: r["ms"] for r in report["runs"]} for report in (before, after))
    return [
        {"run": name, "before": old.get(name), "after": new.get(name)}
        for name in dict.fromkeys([*old, *new])
    ]


def changes(before: dict[str, Any], after: dict[str, Any], above: float) -> list[Row]:
    """Every module and op of at least `above` ms in one of them, the largest change first.

    Modules are compared by name; one that is missing on a side takes no time there.
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    runs = compared_runs(before, after)
    for side, report, run in zip(("before", "after"), (before, after), runs, strict=True):
        for row in report["modules"]:
            cells = times.setdefault((row["module"], row["op"]), {"before": 0.0, "after": 0.0})
            cells[side] += row[run]["ms"] or 0.0
    found = [
        {"module": module, "op": op, **cells, "change": cells["after"] - cells["before"]}
        for (module, op), cells in times.items()
        if max(cells.values()) >= above
    ]
    return sorted(found, key=lambda row: -abs(row["change"]))


def differs(row: Row, tolerance: float) -> bool:
    return abs(row["change"]) > tolerance * max(row["before"], 1e-12)


def conditions(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What else differs between the two: the machine, versions, and unsteady runs."""
    old, new = before["environment"], after["environment"]
    found = [
        f"{name}: {old.get(name)} before, {new.get(name)} after"
        for name in CONDITIONS
        if old.get(name) != new.get(name)
    ]
    for side, report in (("before", before), ("after", after)):
        found += [f"{side}: {note}" for note in report["notes"]]
    return found


def relative(row: Row) -> str:
    return f"{row['after'] / row['before'] - 1:+.1%}" if row["before"] else "new"


def page(before: dict[str, Any], after: dict[str, Any], rows: list[Row], tolerance: float) -> str:
    from ..bench.page import environment

    return (
        environment()
        .get_template("compare.html.j2")
        .render(
            title=f"{after['title']}: two profiles compared",
            before=before,
            after=after,
            names=compared_runs(before, after),
            steps=steps(before, after),
            rows=[
                row | {"relative": relative(row), "differs": differs(row, tolerance)}
                for row in rows
            ],
            conditions=conditions(before, after),
            bounds=[describe_bound(report["bound"]) for report in (before, after)],
        )
    )


def compare(
    before: dict[str, Any],
    after: dict[str, Any],
    tolerance: float,
    above: float,
    html: Path | None,
    console: Console,
) -> int:
    """Prints what differs and writes the page; 1 if a module differs, 2 if none is in both."""
    for line in conditions(before, after):
        console.print(Text(line, style="yellow"))
    for row in steps(before, after):
        shown = [f"{row[k]:.3f}" if row[k] is not None else "-" for k in ("before", "after")]
        console.print(f"{row['run']}: {shown[0]} ms per step before, {shown[1]} after")
    old, new = compared_runs(before, after)
    console.print(f"modules: of the run {old}" + ("" if old == new else f" before and {new} after"))
    rows = changes(before, after, above)
    if not rows:
        console.print(f"[red]no module of at least {above} ms is in a record[/]")
        return 2
    beyond = [row for row in rows if differs(row, tolerance)]
    if beyond:
        table = Table("module", "op")
        for column in ("before, ms", "after, ms", "change, ms", "change"):
            table.add_column(column, justify="right")
        for row in beyond[:40]:
            table.add_row(
                Text(row["module"] or "(model)"),
                Text(row["op"]),
                *(f"{row[k]:.3f}" for k in ("before", "after")),
                Text(f"{row['change']:+.3f}", "red" if row["change"] > 0 else "green"),
                relative(row),
            )
        console.print(table)
    console.print(
        f"{len(rows) - len(beyond)} of {len(rows)} modules and ops of at least {above} ms are within "
        f"{tolerance:.0%}",
        soft_wrap=True,
    )
    if html is not None:
        from ..bench.records import write

        write(html, page(before, after, rows, tolerance))
        console.print(Text(str(html)))
    return 1 if beyond else 0
