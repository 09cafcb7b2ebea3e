"""The teaching ladder's results: docs/ladder.md's table and its record.

benchmarks/ladder/run.py measures: one row a rung (`impl` is the name of its file) and one of cuBLAS
through torch (`native`). `native_ms` is cuBLAS's median in the very rounds that the row was measured
in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .records import digest_of_sources

Row = dict[str, Any]
Record = dict[str, Any]
RESULT = "ladder.json"
SUITE = "ladder"
# Dense bf16 TFLOP/s of the data sheets, by what the GPU's name contains; the first match counts.
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200", 989.4),
    ("A100", 312.0),
)


def peak_tflops(gpu: str) -> float | None:
    return next((peak for name, peak in PEAK_TFLOPS if name in gpu), None)


def sources_hash(root: Path) -> str:
    """Identifies the sources of the rungs."""
    layers = [
        root / "csrc" / layer
        for layer in ("common", "device", "host", "tile", "gemm", "ops/linear")
    ]
    return digest_of_sources([*layers, root / "benchmarks" / "ladder"], root)


def is_stale(record: Record, root: Path) -> bool:
    return bool(record["op_hashes"]["linear"] != sources_hash(root))


def shapes(record: Record) -> dict[str, list[Row]]:
    """{case: its rows, rungs from the lowest up, cuBLAS last}."""
    found: dict[str, list[Row]] = {}
    for row in sorted(record["rows"], key=lambda r: (r["impl"] == "native", r["impl"])):
        found.setdefault(row["case"], []).append(row)
    return found


def tflops(row: Row) -> float:
    return float(row["flops"] / row["ms"] / 1e9)


def share_of_cublas(row: Row) -> float:
    return float(row["native_ms"] / row["ms"])


def percent(share: float) -> str:
    """The lowest rungs are below one percent."""
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def title(impl: str) -> str:
    """ "04_register_tile" -> "4 register tile"."""
    number, _, words = impl.partition("_")
    return "cuBLAS" if impl == "native" else f"{int(number)} {words.replace('_', ' ')}"


def table(rows: list[Row], peak: float | None) -> str:
    """One line per rung of one shape."""
    titles = ["rung", "ms", "TFLOP/s", "% of cuBLAS", "% of peak", "faster than the rung before"]
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|---:" * (len(titles) - 1) + "|"]
    before: Row | None = None
    for row in rows:
        rung = row["impl"] != "native"
        name = title(row["impl"])
        cells = [
            f"[{name}](../benchmarks/ladder/{row['impl']}.cu)" if rung else name,
            f"{row['ms']:.4g}",
            f"{tflops(row):.3g}",
            percent(share_of_cublas(row)) if rung else "",
            percent(tflops(row) / peak) if peak else "",
            f"{before['ms'] / row['ms']:.2f}×" if rung and before else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        before = row
    return "\n".join(lines)


def block(record: Record) -> str:
    """The tables of every shape."""
    parts = []
    for case, rows in shapes(record).items():
        m, n, k = case.split("x")
        parts += [f"{record['gpu']}, m × n × k = {m} × {n} × {k}:"]
        parts += [table(rows, record["peak_tflops"])]
    return "\n\n".join(parts)


def not_measured() -> str:
    return f"Not yet measured: there is no `benchmarks/results/*/{RESULT}`."
