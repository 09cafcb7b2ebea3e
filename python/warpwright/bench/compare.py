"""`warpwright compare BEFORE AFTER`: which rows of two records differ.

For two runs of the same kernels that is how well the times repeat; for a kernel that was changed, what
the change gave. For records of two GPUs it compares native's time over each implementation's own, since
the times themselves differ by the GPU.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..profile import compare as profile
from .records import KEY, grouped, load_records, native_ratio, require_writable

# Header fields whose differences a reader must know before comparing.
CONDITIONS = ("gpu", "driver", "torch", "cuda", "cudnn")


def changes(
    before: dict[str, Any], after: dict[str, Any], above: float, impl: str | None = None
) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """(row before, row after, after / before - 1) of the rows that both have, the slowest first."""
    old, new = grouped(before), grouped(after)
    pairs = [
        (row, new[key][name])
        for key, rows in old.items()
        for name, row in rows.items()
        if name in new.get(key, {}) and impl in (None, name)
    ]
    found = [(a, b, b["ms"] / a["ms"] - 1) for a, b in pairs if min(a["ms"], b["ms"]) >= above]
    return sorted(found, key=lambda change: -change[2])


def ratio_changes(
    before: dict[str, Any], after: dict[str, Any], above: float, impl: str | None = None
) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """As changes(), of the ratio to native. Positive: `after`'s ratio is lower, so it is slower."""
    old, new = grouped(before), grouped(after)
    found = []
    for a, b, _ in changes(before, after, above, impl):
        key = tuple(a[k] for k in KEY)
        ratios = native_ratio(old[key], a["impl"]), native_ratio(new[key], b["impl"])
        if a["impl"] != "native" and ratios[0] is not None and ratios[1] is not None:
            found.append(
                (a | {"ratio": ratios[0]}, b | {"ratio": ratios[1]}, ratios[0] / ratios[1] - 1)
            )
    return sorted(found, key=lambda change: -change[2])


def conditions(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Reasons in the rows why two times of the same kernel may differ."""
    unsteady = [n for n, r in (("before", a), ("after", b)) if not r.get("steady", True)]
    found = [f"unsteady {' and '.join(unsteady)}"] if unsteady else []
    found += dict.fromkeys([*a.get("throttled", ()), *b.get("throttled", ())])
    clocks = a.get("sm_mhz"), b.get("sm_mhz")
    if found and all(clocks) and clocks[0] != clocks[1]:
        found.append(f"{clocks[0]:.0f} -> {clocks[1]:.0f} MHz")
    return ", ".join(found)


def _file_of(path: Path) -> Path:
    """The report in a folder that `profile --out` made, or the file itself."""
    return path / "report.json" if path.is_dir() else path


def main(options: SimpleNamespace) -> int:
    """Prints the rows that differ; 1 if there are any, 2 if nothing can be compared."""
    console = Console()
    paths = [_file_of(path) for path in (options.before, options.after)]
    profiles = [profile.load(path) for path in paths]
    try:
        if profiles.count(None) == 1:
            path = paths[profiles.index(None)]
            expected = "expected the report.json of a profile, as the other file"
            raise ValueError(f"{path}: {expected if path.exists() else 'no such file'}")
        if profiles[0] is not None and profiles[1] is not None:
            if options.impl is not None:
                raise ValueError(
                    "--impl: expected records of bench, got two report.json of profile"
                )
            if options.html is not None:
                require_writable(options.html)
            return profile.compare(
                profiles[0], profiles[1], options.tolerance, options.above, options.html, console
            )
        if options.html is not None:
            raise ValueError("--html: expected two report.json of profile, got records of bench")
        before, after = (load_records(path) for path in paths)
    except (OSError, ValueError) as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return 2
    for name in CONDITIONS:
        if before.get(name) != after.get(name):
            console.print(
                Text(f"{name}: {before.get(name)} before, {after.get(name)} after", style="yellow")
            )
    two_gpus = before["gpu"] != after["gpu"]
    compared = ratio_changes if two_gpus else changes
    found = compared(before, after, options.above, options.impl)
    if not found:
        console.print(f"[red]no row of at least {options.above} ms is in both records[/]")
        return 2
    if two_gpus:
        console.print(
            "two GPUs: native's time over the implementation's is compared, not the times"
        )
    beyond = [change for change in found if abs(change[2]) > options.tolerance]
    if beyond:
        table = Table()
        for column in ("op", "case", "dtype", "layout", "pass", "implementation"):
            table.add_column(column)
        unit, shown = ("native / it", "ratio") if two_gpus else ("ms", "ms")
        digits = 2 if two_gpus else 4
        for column in (f"before, {unit}", f"after, {unit}", "change"):
            table.add_column(column, justify="right")
        table.add_column("conditions")
        for a, b, change in beyond:
            table.add_row(
                *(Text(a[k]) for k in ("op", "case", "dtype", "layout", "pass", "impl")),
                f"{a[shown]:.{digits}f}",
                f"{b[shown]:.{digits}f}",
                f"[{'red' if change > 0 else 'green'}]{change:+.1%}[/]",
                conditions(a, b),
            )
        (console if console.is_terminal else Console(width=160)).print(table)
    clean = [change for change in found if not conditions(*change[:2])]
    within = sum(abs(change) <= options.tolerance for *_, change in clean)
    mean = math.exp(sum(math.log1p(change) for *_, change in found) / len(found)) - 1
    console.print(
        f"{len(found) - len(beyond)} of {len(found)} rows of at least {options.above} ms are within"
        f" {options.tolerance:.0%}, {within} of the {len(clean)} that were steady and not throttled;"
        f" geometric mean of the change {mean:+.1%}",
        soft_wrap=True,
    )
    return 1 if beyond else 0
