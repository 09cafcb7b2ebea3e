"""README.md's tables: whole training steps, then one line per op; each GPU against its own native."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .machines import all_rows, newest_of_gpus
from .records import grouped, is_training_step, native_ratio
from .tables import (
    STALE_LINE,
    Record,
    Stale,
    fastest,
    geomean,
    held_still,
    line,
    mark,
    milliseconds,
)

Impls = Mapping[str, Mapping[str, Any]]


def summary(main: Path, records: dict[Path, Record], stale: Stale) -> str:
    """Every GPU's steps and ops, each from its newest record, the folder of `main` first."""
    gpus = newest_of_gpus(main, records)
    if not any(gpus.values()):
        return ""
    newest = {gpu: all_rows(parts) for gpu, parts in gpus.items()}
    old = {
        gpu: {row["op"] for path, part in parts for row in part["rows"] if row["op"] in stale[path]}
        for gpu, parts in gpus.items()
    }
    tables = [step_table(newest, old), op_table(newest, old)]
    dates = sorted(part["date"] for parts in gpus.values() for _, part in parts)
    names = dict.fromkeys(part["gpu"] for parts in gpus.values() for _, part in parts)
    each = "; each over its own workloads" if len(gpus) > 1 else ""
    tables.append(
        f"{' and '.join(names)}{each}; torch {records[main]['torch']}, "
        f"{' to '.join(dict.fromkeys([dates[0], dates[-1]]))}. Every row with its floor, error and "
        "memory, the sources and the rates of each run: [docs/results.md](docs/results.md)."
    )
    if any(old.values()):
        tables.append(STALE_LINE)
    return "\n\n".join(filter(None, tables))


def step_table(newest: Mapping[str, Record], stale: Mapping[str, set[str]]) -> str:
    """One line per training step and layout: its largest workload."""
    titles = ["training step, ms", "GPU", "native", "fastest other peer", "ours, swapped"]
    titles += ["ours at its fastest", "fastest of all peers / ours at its fastest"]
    lines = []
    for gpu, record in newest.items():
        largest: dict[tuple[str, str], tuple[str, Impls]] = {}
        for (op, case, _, layout, _), impls in grouped(record).items():
            if not is_training_step(op) or not _peers(impls) or not _ours(impls):
                continue
            known = largest.get((op, layout))
            if known is None or min(_ours(impls).values()) > min(_ours(known[1]).values()):
                largest[op, layout] = (case, impls)
        for (op, layout), (case, found) in largest.items():
            ours, peers = _ours(found), _peers(found)
            cells = [
                f"{mark(op, stale[gpu])} {case}{'' if layout == 'rows' else f' {layout}'}",
                gpu,
            ]
            cells.append(milliseconds(peers["native"]) if "native" in peers else "")
            cells.append(fastest({n: ms for n, ms in peers.items() if n != "native"}))
            cells.append(milliseconds(ours["warpwright"]) if "warpwright" in ours else "")
            cells.append(fastest(ours))
            cells.append(f"**{min(peers.values()) / min(ours.values()):.2f}×**")
            lines.append(line(cells))
    return "\n".join([line(titles), "|" + "---|" * len(titles), *lines]) if lines else ""


def op_table(newest: Mapping[str, Record], stale: Mapping[str, set[str]]) -> str:
    """One line per op. Counts workloads whose times held still."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}  # by op, GPU and pass
    for gpu, record in newest.items():
        for key, impls in grouped(record).items():
            ratio = native_ratio(impls)
            if is_training_step(key[0]) or ratio is None:
                continue
            of_pass = ratios.setdefault(key[0], {}).setdefault(gpu, {}).setdefault(key[-1], [])
            if held_still(impls):
                of_pass.append(ratio)
    if not ratios:
        return ""
    titles = ["native time / ours"]
    for gpu in newest:
        titles += [f"{gpu}: geometric mean", "slowest row"]
    lines = [line(titles), "|" + "---|" * len(titles)]
    for op, by_gpu in ratios.items():
        cells = [mark(op, {op} if any(op in old for old in stale.values()) else set())]
        for gpu in newest:
            passes = {name: found for name, found in by_gpu.get(gpu, {}).items() if found}
            cells.append(", ".join(f"{name} {geomean(r):.2f}×" for name, r in passes.items()))
            slowest = min((min(found) for found in passes.values()), default=None)
            cells.append("" if slowest is None else f"{slowest:.2f}×")
        lines.append(line(cells))
    return "\n".join(lines)


def _ours(impls: Impls) -> dict[str, float]:
    return {name: row["ms"] for name, row in impls.items() if name.startswith("warpwright")}


def _peers(impls: Impls) -> dict[str, float]:
    return {name: row["ms"] for name, row in impls.items() if not name.startswith("warpwright")}
