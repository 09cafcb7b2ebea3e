"""Tables of records in Markdown: a line per op and pass, per training step, per row.

Rows of an op whose sources have changed since it was measured carry a dagger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .measure import RESOLUTION_MS
from .records import grouped, is_training_step

Row = dict[str, Any]
Record = dict[str, Any]
Stale = Mapping[Path, set[str]]
WHOLE_SUITE = "full.json"
STALE = "†"
STALE_LINE = f"{STALE} measured before the op's sources last changed."
DRIFTING_LINE = (
    '"n of m" workloads: in the others our time or native\'s drifted during the run, or one is too '
    "short for the clock; the full table has them."
)


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def provenance(record: Record) -> str:
    precision = "bf16" if record["device"] == "cuda" else "fp32"
    cudnn = f", cuDNN {record['cudnn']}" if record["cudnn"] else ""
    rates = [
        f"copy {record['copy_tbs']:.3g} TB/s",
        f"{precision} matmul {record['matmul_tflops']:.3g} TFLOP/s",
    ]
    if "tf32_tflops" in record:
        rates.append(f"TF32 matmul {record['tf32_tflops']:.3g} TFLOP/s")
    return (
        f"{record['gpu']}, torch {record['torch']}{cudnn}, {record['date']}, "
        f"source {record['source_hash']}; {', '.join(rates)}, measured in the same run"
    )


def mark(op: str, stale: set[str]) -> str:
    return f"`{op}`{STALE if op in stale else ''}"


def _footnotes(record: Record, stale: set[str]) -> list[str]:
    lines = ["", provenance(record) + "."]
    if stale:
        lines += ["", STALE_LINE]
    return lines


def _peer_ms(impls: dict[str, Row]) -> list[float]:
    """Times of all implementations but ours."""
    return [row["ms"] for name, row in impls.items() if not name.startswith("warpwright")]


def summary_table(record: Record, stale: set[str]) -> str:
    """One record's :func:`op_lines` and where they come from."""
    return "\n".join([*op_lines(record, stale), *_footnotes(record, stale)])


def op_lines(record: Record, stale: set[str]) -> list[str]:
    """One line per op and pass: the number of workloads, and the range of native time over ours.

    Counts workloads with steady times only; the full table has the others.
    """
    groups: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for key, impls in grouped(record).items():
        if {"warpwright", "native"} <= impls.keys():
            groups.setdefault((key[0], key[-1]), []).append(impls)
    others = any(len(_peer_ms(impls)) > 1 for rows in groups.values() for impls in rows)
    drifting = False
    titles = ["op", "pass", "workloads", "native time / ours: geometric mean"]
    titles += ["slowest row", "fastest row"]
    if others:
        titles.append("fastest of all peers / ours")
    titles.append("share of the floor's speed")
    lines = [line(titles), "|" + "---|" * len(titles)]
    for (op, which), every in groups.items():
        rows = [r for r in every if held_still(r)]
        drifting |= len(rows) < len(every)
        count = str(len(every)) if len(rows) == len(every) else f"{len(rows)} of {len(every)}"
        cells = [mark(op, stale), which, count]
        if not rows:
            lines.append(line([*cells, *[""] * (len(titles) - len(cells))]))
            continue
        ratios = [r["native"]["ms"] / r["warpwright"]["ms"] for r in rows]
        cells.append(f"**{geomean(ratios):.2f}×**")
        cells += [f"{min(ratios):.2f}×", f"{max(ratios):.2f}×"]
        if others:
            best = [min(_peer_ms(r)) / r["warpwright"]["ms"] for r in rows]
            cells.append(f"{geomean(best):.2f}×")
        ours = [r["warpwright"] for r in rows]
        floors = [row["floor_ms"] / row["ms"] for row in ours if row["floor_ms"]]
        cells.append(f"{geomean(floors):.0%}" if floors and not is_training_step(op) else "")
        lines.append(line(cells))
    if drifting:
        lines += ["", DRIFTING_LINE]
    return lines


def step_lines(record: Record, stale: set[str]) -> list[str]:
    """One line per training step and layout: native, its fastest other form, ours."""
    titles = ["training step, ms", "workload", "layout", "native", "fastest other peer"]
    titles += ["ours, swapped", "ours at its fastest", "fastest of all peers / ours at its fastest"]
    lines = [line(titles), "|" + "---|" * len(titles)]
    for (op, case, _, layout, _), impls in grouped(record).items():
        ours = {n: r["ms"] for n, r in impls.items() if n.startswith("warpwright")}
        peers = {n: r["ms"] for n, r in impls.items() if n not in ours}
        if not ours or not peers:
            continue
        others = {n: ms for n, ms in peers.items() if n != "native"}
        cells = [mark(op, stale), case, layout]
        cells.append(milliseconds(peers["native"]) if "native" in peers else "")
        cells.append(fastest(others))
        cells.append(milliseconds(ours["warpwright"]) if "warpwright" in ours else "")
        cells.append(fastest(ours))
        cells.append(f"**{min(peers.values()) / min(ours.values()):.2f}×**")
        lines.append(line(cells))
    return lines


def fastest(ms: dict[str, float]) -> str:
    if not ms:
        return ""
    name = min(ms, key=lambda n: ms[n])
    return f"{milliseconds(ms[name])} ({name.removeprefix('warpwright_')})"


def milliseconds(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def held_still(impls: dict[str, Row]) -> bool:
    """Whether a ratio of the two times means something."""
    both = [impls[name] for name in ("warpwright", "native")]
    return all(row.get("steady", True) and row["ms"] > RESOLUTION_MS for row in both)


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _interval(native: Row, ours: Row) -> str:
    text = f"{native['ms'] / ours['ms']:.2f}×"
    if "ratio_lo" in native:
        text += f" [{native['ratio_lo']:.2f}, {native['ratio_hi']:.2f}]"
    return text


def full_table(record: Record, stale: set[str]) -> str:
    """Every row; the other peers' times share a column."""
    from .screen import notes_of

    titles = ["op", "workload", "dtype", "layout", "pass", "ours ms", "native ms"]
    titles += ["native / ours [95 %]", "other ms", "floor / ours", "peak MiB ours (native's)"]
    titles += ["max rel. error ours (native's)", "notes"]
    lines = [line(titles), "|" + "---|" * len(titles)]
    for key, impls in grouped(record).items():
        if not {"warpwright", "native"} <= impls.keys():
            continue
        ours, native = impls["warpwright"], impls["native"]
        rest = {n: r for n, r in impls.items() if n not in ("warpwright", "native")}
        notes = notes_of(ours) + [
            f"{n}: {x}" for n, r in impls.items() if r is not ours for x in notes_of(r)
        ]
        cells = [mark(key[0], stale), *key[1:], f"{ours['ms']:.4f}", f"{native['ms']:.4f}"]
        cells.append(_interval(native, ours))
        cells.append(", ".join(f"{name} {row['ms']:.4f}" for name, row in rest.items()))
        cells.append(f"{ours['floor_ms'] / ours['ms']:.0%}" if ours["floor_ms"] else "")
        memory = ours["peak_mib"] is not None and native["peak_mib"] is not None
        cells.append(f"{ours['peak_mib']:.0f} ({native['peak_mib']:.0f})" if memory else "")
        exact = ours["err"] is not None
        cells.append(f"{ours['err']:.1e} ({native['err']:.1e})" if exact else "")
        cells.append("; ".join(notes).replace("|", "/"))
        lines.append(line(cells))
    return "\n".join([*lines, *_footnotes(record, stale)])


def newest_by_op(main: Path, records: dict[Path, Record]) -> list[tuple[Path, Record]]:
    """The records of main's folder with the ops alone that no newer one has, main's ops first.

    Any other record counts as newer than the whole suite's.
    """
    paths = sorted(
        (p for p in records if p.parent == main.parent),
        key=lambda p: (p != main, records[p]["date"], p.name),
    )
    owner = {row["op"]: path for path in paths for row in records[path]["rows"]}
    parts = []
    for path in paths:
        rows = [row for row in records[path]["rows"] if owner[row["op"]] == path]
        if rows:
            parts.append((path, {**records[path], "rows": rows}))
    return parts


def whole_suites(records: dict[Path, Record]) -> list[Path]:
    """Of each folder with GPU records: the record of the whole suite, or the first one."""
    folders: dict[Path, list[Path]] = {}
    for path, record in records.items():
        if record["device"] == "cuda":
            folders.setdefault(path.parent, []).append(path)
    return [
        next((p for p in paths if p.name == WHOLE_SUITE), paths[0]) for paths in folders.values()
    ]


def newest_tables(main: Path, records: dict[Path, Record], stale: Stale, root: Path) -> str:
    """One GPU's ops, then its training steps, each from its newest record."""
    parts = newest_by_op(main, records)
    marked = {row["op"] for path, part in parts for row in part["rows"] if row["op"] in stale[path]}
    rows = [row for _, part in parts for row in part["rows"]]
    tables = []
    for lines, wanted in ((op_lines, False), (step_lines, True)):
        chosen = [row for row in rows if is_training_step(row["op"]) == wanted]
        if chosen:
            tables.append("\n".join(lines({"rows": chosen}, marked)))
    notes = [f"- {provenance(part)} (`{path.relative_to(root)}`)." for path, part in parts]
    tables.append("\n".join(notes))
    if marked:
        tables.append(STALE_LINE)
    return "\n\n".join(tables)
