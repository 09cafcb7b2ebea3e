"""Records of several GPUs: ratios to native, which a slower GPU does not change by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .records import grouped, native_ratio
from .tables import Record, geomean, held_still, line, newest_by_op, whole_suites

Key = tuple[str, ...]


def newest_of_gpus(main: Path, records: dict[Path, Record]) -> dict[str, list[tuple[Path, Record]]]:
    """Each GPU's records with their newest ops, by short name; the GPU of `main` first."""
    mains = sorted(whole_suites(records), key=lambda path: path != main) or [main]
    return {
        records[path]["gpu"].removeprefix("NVIDIA "): newest_by_op(path, records) for path in mains
    }


def all_rows(parts: list[tuple[Path, Record]]) -> Record:
    """One record of them, for :func:`grouped`."""
    return {"rows": [row for _, part in parts for row in part["rows"]]}


def machines_table(gpus: Mapping[str, Record]) -> str:
    """A line per op and pass, a column per GPU: the geometric mean of native time over ours.

    Only workloads count that every GPU measured and on which none drifted.
    """
    ratios = {name: _steady_ratios(record) for name, record in gpus.items()}
    first, *others = ratios.values()
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in first:
        if all(key in other for other in others):
            groups.setdefault((key[0], key[-1]), []).append(key)
    lines = [line(["op", "pass", "workloads", *gpus]), "|" + "---|" * (3 + len(gpus))]
    for (op, which), keys in groups.items():
        means = [geomean([found[key] for key in keys]) for found in ratios.values()]
        lines.append(line([f"`{op}`", which, str(len(keys)), *(f"{m:.2f}×" for m in means)]))
    return "\n".join(lines)


def _steady_ratios(record: Record) -> dict[Key, float]:
    ratios = {}
    for key, impls in grouped(record).items():
        ratio = native_ratio(impls)
        if ratio is not None and held_still(impls):
            ratios[key] = ratio
    return ratios
