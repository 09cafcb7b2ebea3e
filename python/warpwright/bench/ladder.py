"""The teaching ladders' results: the tables of their pages, and their records.

benchmarks/ladders/run.py measures: one row per rung (`impl` is the name of its file) and one of native
torch. `native_ms` is native's median in the very rounds that the row was measured in.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sources import digest_of_files, files_in, with_includes

Row = dict[str, Any]
Record = dict[str, Any]
SUITE = "ladder"
FOLDER = Path("benchmarks") / "ladders"
# Dense bf16 TFLOP/s of the data sheets, by what the GPU's name contains; the first match counts.
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("A100", 312.0),
)


@dataclass(frozen=True)
class Work:
    """An operation of a ladder's rungs, and how its results are shown."""

    op: str
    native: str  # what native calls it
    extents: str  # in words, as the case has them
    passes: int = 0  # over the input, that the floor has; 0: bound by FLOPs


@dataclass(frozen=True)
class Ladder:
    name: str  # of its folder
    page: str  # of docs/
    result: str  # the record's name
    works: tuple[Work, ...]
    links: tuple[str, ...] = ()  # sources of csrc/ that the shipped rung calls

    def work(self, op: str) -> Work:
        return next(work for work in self.works if work.op == op)


LADDERS = (
    Ladder(
        "matmul",
        "ladder.md",
        "ladder.json",
        (Work("linear", "cuBLAS", "m × n × k"),),
    ),
    Ladder(
        "reduction",
        "ladder-reduction.md",
        "ladder_reduction.json",
        (
            Work("sum", "torch.sum", "rows × columns", passes=1),
            Work("softmax", "torch.softmax", "rows × columns", passes=2),
            Work("cross_entropy", "F.cross_entropy, both passes", "rows × classes", passes=2),
        ),
    ),
    Ladder(
        "scan",
        "ladder-scan.md",
        "ladder_scan.json",
        (Work("cumsum", "torch.cumsum", "elements", passes=2),),
    ),
    Ladder(
        "batch_norm",
        "ladder-batch-norm.md",
        "ladder_batch_norm.json",
        (Work("batch_norm", "F.batch_norm", "rows of 64 channels", passes=2),),
    ),
    Ladder(
        "attention",
        "ladder-attention.md",
        "ladder_attention.json",
        (Work("attention", "cuDNN", "heads × tokens"),),
        links=("ops/attention/cuda/sm90/row_stats.cu",),
    ),
    Ladder(
        "conv2d",
        "ladder-conv.md",
        "ladder_conv2d.json",
        (Work("conv2d", "cuDNN", "images × side"),),
    ),
)
RESULTS = tuple(ladder.result for ladder in LADDERS)


def named(name: str) -> Ladder:
    return next(ladder for ladder in LADDERS if ladder.name == name)


def of_record(record: Record) -> Ladder:
    """By the ops of its rows."""
    ops = set(record["op_hashes"])
    return next(ladder for ladder in LADDERS if ops <= {work.op for work in ladder.works})


def peak_tflops(gpu: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS if name in gpu), None)


def sources_hash(ladder: Ladder, root: Path) -> str:
    """Identifies the sources of the rungs."""
    csrc = root / "csrc"
    beside = {root / FOLDER / name for name in ("entry.cu", "checks.h")}
    linked = {csrc / path for path in ladder.links}
    files = files_in(root / FOLDER / ladder.name) | beside | linked
    return digest_of_files(with_includes(files, csrc), root)


def is_stale(record: Record, root: Path) -> bool:
    wanted = sources_hash(of_record(record), root)
    return any(found != wanted for found in record["op_hashes"].values())


def groups(record: Record) -> dict[tuple[str, str], list[Row]]:
    """{(op, case): its rows, rungs from the lowest up, native last}."""
    ops = [work.op for work in of_record(record).works]
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(
        record["rows"], key=lambda r: (ops.index(r["op"]), r["impl"] == "native", r["impl"])
    ):
        found.setdefault((row["op"], row["case"]), []).append(row)
    return found


def tflops(row: Row) -> float:
    return float(row["flops"] / row["ms"] / 1e9)


def terabytes(row: Row) -> float:
    """TB/s of the fewest bytes that the operation can move."""
    return float(row["bytes"] / row["ms"] / 1e9)


def share_of_native(row: Row) -> float:
    return float(row["native_ms"] / row["ms"])


def percent(share: float) -> str:
    """The lowest rungs are below one percent."""
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def title(impl: str, native: str) -> str:
    """ "04_register_tile" -> "4 register tile"."""
    number, _, words = impl.partition("_")
    return native if impl == "native" else f"{int(number)} {words.replace('_', ' ')}"


def size(work: Work, case: str) -> str:
    """ "rows × columns = 4 × 8"."""
    return f"{work.extents} = {case.replace('x', ' × ')}"


def _short(x: float) -> str:
    return f"{x:.2f}" if 0.01 <= x < 100 else f"{x:.2g}" if x < 0.01 else f"{x:.0f}"


def _titles(work: Work) -> list[str]:
    middle = (
        ["TB/s", "passes over the input", "native / this"]
        if work.passes
        else ["TFLOP/s", f"% of {work.native}", "% of peak"]
    )
    return ["rung", "ms", *middle, "faster than the rung before"]


def _figures(work: Work, row: Row, record: Record) -> list[str]:
    """The middle columns of a row."""
    rung, peak = row["impl"] != "native", record["peak_tflops"]
    if work.passes:
        one = row["bytes"] / work.passes / record["copy_tbs"] / 1e9  # ms, at the copy's rate
        ratio = f"{_short(share_of_native(row))}×" if rung else ""
        return [f"{terabytes(row):.3g}", _short(row["ms"] / one), ratio]
    share = percent(share_of_native(row)) if rung else ""
    return [f"{tflops(row):.3g}", share, percent(tflops(row) / peak) if peak else ""]


def table(ladder: Ladder, rows: list[Row], record: Record) -> str:
    """One line per rung of one operation and size."""
    work = ladder.work(rows[0]["op"])
    titles = _titles(work)
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    before: Row | None = None
    for row in rows:
        rung = row["impl"] != "native"
        name = title(row["impl"], work.native)
        cells = [
            f"[{name}](../{FOLDER / ladder.name / row['impl']}.cu)" if rung else name,
            f"{row['ms']:.4g}",
            *_figures(work, row, record),
            f"{before['ms'] / row['ms']:.2f}×" if rung and before else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        before = row
    return "\n".join(lines)


def block(record: Record) -> str:
    """The tables of every operation and size."""
    ladder = of_record(record)
    parts = []
    for (op, case), rows in groups(record).items():
        work = ladder.work(op)
        words = size(work, case) if len(ladder.works) == 1 else f"{op}, {size(work, case)}"
        parts += [f"{record['gpu']}, {words}:", table(ladder, rows, record)]
    return "\n\n".join(parts)


def not_measured(ladder: Ladder) -> str:
    return f"Not yet measured: there is no `benchmarks/results/*/{ladder.result}`."
