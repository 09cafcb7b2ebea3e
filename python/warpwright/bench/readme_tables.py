"""README.md's tables: whole training steps, then one line per family of ops of the first GPU.

docs/results.md has the other GPUs' ops. With their columns the table was longer than a screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .machines import all_rows, newest_of_gpus
from .records import grouped, is_training_step, native_ratio
from .sources import folders_of
from .tables import (
    STALE,
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

MOST_NAMES = 3  # of ops in one line
Impls = Mapping[str, Mapping[str, Any]]


def summary(main: Path, records: dict[Path, Record], stale: Stale) -> str:
    """Every GPU's steps, and the ops of the GPU of `main`, each from its newest record."""
    gpus = newest_of_gpus(main, records)
    if not any(gpus.values()):
        return ""
    newest = {gpu: all_rows(parts) for gpu, parts in gpus.items()}
    old = {
        gpu: {row["op"] for path, part in parts for row in part["rows"] if row["op"] in stale[path]}
        for gpu, parts in gpus.items()
    }
    first = next(iter(newest))
    tables = [step_table(newest, old), op_table(newest[first], old[first])]
    dates = sorted(part["date"] for _, part in gpus[first])
    name, *others = dict.fromkeys(part["gpu"] for parts in gpus.values() for _, part in parts)
    more = f" The ops on {' and '.join(others)}, and every" if others else " Every"
    tables.append(
        f"{name}; torch {records[main]['torch']}, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}."
        f"{more} row with its floor, error and memory, the sources and the rates of each run: "
        "[docs/results.md](docs/results.md)."
    )
    if any(STALE in table for table in tables):
        tables.append(STALE_LINE)
    return "\n\n".join(filter(None, tables))


def step_table(newest: Mapping[str, Record], stale: Mapping[str, set[str]]) -> str:
    """One line per training step and layout: its largest workload."""
    # The ratio stands where a narrow window shows it.
    titles = ["training step, ms", "fastest of all peers / ours at its fastest", "GPU"]
    titles += ["native", "fastest other peer", "ours, swapped", "ours at its fastest"]
    titles.append("native / ours, both compiled")
    lines: list[list[str]] = []
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
                f"**{min(peers.values()) / min(ours.values()):.2f}×**",
                gpu,
            ]
            cells.append(milliseconds(peers["native"]) if "native" in peers else "")
            cells.append(fastest({n: ms for n, ms in peers.items() if n != "native"}))
            cells.append(milliseconds(ours["warpwright"]) if "warpwright" in ours else "")
            cells += [fastest(ours), _compiled_ratio(ours, peers)]
            lines.append(cells)
    if not lines:
        return ""
    if len({cells[2] for cells in lines}) == 1:
        titles[0] = f"training step on {lines[0][2]}, ms"
        for cells in (titles, *lines):
            del cells[2]
    return "\n".join([line(titles), "|" + "---|" * len(titles), *map(line, lines)])


def op_table(record: Record, stale: set[str]) -> str:
    """One line per family of ops. Counts workloads whose times held still."""
    # By the folders of the kernels: the ops, and by pass each workload's ratio and op.
    families: dict[tuple[str, ...], dict[str, None]] = {}
    ratios: dict[tuple[str, ...], dict[str, list[tuple[float, str]]]] = {}
    for key, impls in grouped(record).items():
        op, ratio = key[0], native_ratio(impls)
        if is_training_step(op) or ratio is None:
            continue
        folders = folders_of(op)
        families.setdefault(folders, {})[op] = None
        of_pass = ratios.setdefault(folders, {}).setdefault(key[-1], [])
        if held_still(impls):
            of_pass.append((ratio, op))
    if not ratios:
        return ""
    lines = [line(["native time / ours", "geometric mean", "slowest row"]), "|---|---|---|"]
    for folders, ops in families.items():
        means, slowest = _op_cells(ratios[folders], several=len(ops) > 1)
        is_old = means and not stale.isdisjoint(ops)
        lines.append(line([_names([*ops]), means + (STALE if is_old else ""), slowest]))
    return "\n".join(lines)


def _names(ops: list[str]) -> str:
    """All names, or two and a count, so that a line stays a line."""
    shown = ops if len(ops) <= MOST_NAMES else ops[:2]
    more = f" and {len(ops) - len(shown)} more" if len(shown) < len(ops) else ""
    return ", ".join(f"`{op}`" for op in shown) + more


def _op_cells(passes: Mapping[str, list[tuple[float, str]]], several: bool) -> list[str]:
    """The passes' geometric means, and the slowest workload, which names its op if there are several."""
    measured = {name: found for name, found in passes.items() if found}
    if not measured:
        return ["", ""]
    means = {name: geomean([ratio for ratio, _ in found]) for name, found in measured.items()}
    ratio, op, name = min((*row, name) for name, found in measured.items() for row in found)
    return [
        ", ".join(f"{name} {mean:.2f}×" for name, mean in means.items()),
        f"{ratio:.2f}× ({f'`{op}` ' if several else ''}{name})",
    ]


def _compiled_ratio(ours: Mapping[str, float], peers: Mapping[str, float]) -> str:
    """The fastest forms of both that `torch.compile` made, with and without a CUDA graph."""
    mine = [ms for name, ms in ours.items() if name.startswith("warpwright_compile")]
    theirs = [ms for name, ms in peers.items() if name.startswith("compile")]
    return f"{min(theirs) / min(mine):.2f}×" if mine and theirs else ""


def _ours(impls: Impls) -> dict[str, float]:
    return {name: row["ms"] for name, row in impls.items() if name.startswith("warpwright")}


def _peers(impls: Impls) -> dict[str, float]:
    return {name: row["ms"] for name, row in impls.items() if not name.startswith("warpwright")}
