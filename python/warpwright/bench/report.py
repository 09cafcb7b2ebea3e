"""Writes the measured tables of README.md and docs/ from benchmarks/results/.

A table stands between `<!-- results:NAME -->` and `<!-- /results -->`; everything between the two
lines is generated. A record whose source hash is not today's is marked stale.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _C
from . import overhead
from .records import load_records

Row = dict[str, Any]
_BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
_KEY = ("op", "case", "dtype", "layout", "pass")


def _pairs(record: dict[str, Any]) -> Iterator[tuple[Row, Row]]:
    """(ours, native) of each measured workload, in file order."""
    by_key: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in record["rows"]:
        by_key.setdefault(tuple(row[k] for k in _KEY), {})[row["impl"]] = row
    for impls in by_key.values():
        if {"warpwright", "native"} <= impls.keys():
            yield impls["warpwright"], impls["native"]


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _provenance(record: dict[str, Any]) -> str:
    stale = record["source_hash"] != _C.build_info()["source_hash"]
    return (
        f"{record['gpu']}, torch {record['torch']}, cuDNN {record['cudnn']}, {record['date']}, "
        f"source {record['source_hash']}{' (**stale**: the code has changed since)' if stale else ''}; "
        f"copy {record['copy_tbs']:.2f} TB/s, bf16 matmul {record['matmul_tflops']:.0f} TFLOP/s, "
        "both measured in the same run"
    )


def summary_table(record: dict[str, Any]) -> str:
    """One line an op and pass: how many workloads, and the range of native time over ours."""
    groups: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for ours, native in _pairs(record):
        groups.setdefault((ours["op"], ours["pass"]), []).append((ours, native))
    lines = [
        "| op | pass | workloads | native time / ours: geometric mean | slowest row | fastest row |",
        "|---|---|---|---|---|---|",
    ]
    for (op, which), pairs in groups.items():
        ratios = [native["ms"] / ours["ms"] for ours, native in pairs]
        lines.append(
            f"| `{op}` | {which} | {len(pairs)} | **{_geomean(ratios):.2f}×** "
            f"| {min(ratios):.2f}× | {max(ratios):.2f}× |"
        )
    return "\n".join([*lines, "", _provenance(record) + "."])


def full_table(record: dict[str, Any]) -> str:
    """Every row."""
    lines = [
        "| op | workload | dtype | layout | pass | ours ms | native ms | native / ours | floor / ours "
        "| max rel. error ours (native's) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ours, native in _pairs(record):
        floor = f"{ours['floor_ms'] / ours['ms']:.0%}" if ours["floor_ms"] else ""
        error = "" if ours["err"] is None else f"{ours['err']:.1e} ({native['err']:.1e})"
        lines.append(
            f"| `{ours['op']}` | {ours['case']} | {ours['dtype']} | {ours['layout']} | {ours['pass']} "
            f"| {ours['ms']:.4f} | {native['ms']:.4f} | {native['ms'] / ours['ms']:.2f}× | {floor} | {error} |"
        )
    return "\n".join([_provenance(record) + ".", "", *lines])


TABLES = {"summary": summary_table, "full": full_table, "overhead": overhead.table}
# Document -> the record of its tables; beside --results, where that does not name another.
DOCUMENTS = {"README.md": "", "docs/results.md": "", "docs/architecture.md": "overhead.json"}


def render(text: str, record: dict[str, Any]) -> str:
    """`text` with each results block replaced; an unknown table name raises KeyError."""
    return _BLOCK.sub(lambda m: f"{m[1]}{TABLES[m[2]](record)}\n{m[3]}", text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", type=Path, default=Path("."), help="the repository")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/h200/full.json"))
    parser.add_argument("--check", action="store_true", help="only say what is out of date")


def run(options: argparse.Namespace) -> int:
    """Rewrites the documents, or with --check says which ones are not what the results say."""
    differing = []
    for name, results in DOCUMENTS.items():
        path = options.root / name
        source = options.root / options.results
        source = source.with_name(results) if results else source
        if results and not source.exists():
            print(f"{name}: no {source.name} beside the results, left as it is")
            continue
        record = load_records(source)
        before = path.read_text()
        after = render(before, record)
        if before != after:
            differing.append(name)
            if not options.check:
                path.write_text(after)
    for name in differing:
        print(f"{name}: {'not what the results say' if options.check else 'rewritten'}")
    return 1 if options.check and differing else 0
