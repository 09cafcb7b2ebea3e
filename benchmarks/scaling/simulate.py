"""Predicts how training scales: FLOPs, bytes and time per rank for DP, FSDP, TP, ring attention and Ulysses.

    python benchmarks/scaling/simulate.py                          # the tables
    python benchmarks/scaling/simulate.py --write docs/scaling.md  # into the page, between its marks
    python benchmarks/scaling/simulate.py --measured FILE          # predictions next to a record

A record is a JSON object {"rows": [{"scheme", "ranks", "ms"}, ...]}; a scheme is one of the names that the tables have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling.cluster import Cluster
from scaling.measured import load, records, tables
from scaling.schemes import Step, data_parallel, fully_sharded, hybrid_sharded, tensor_parallel
from scaling.workloads import Workload, gpt2_small, llama3_8b, resnet50

from warpwright.distributed.sequence.cost import Shape, ring_cost, ulysses_cost, why_no_ulysses

RANKS = (2, 8, 64, 1024)
MEASURED = "<!-- measured -->", "<!-- end of measured -->"
BEGIN, END = "<!-- simulated -->", "<!-- end of simulated -->"
SHAPES = {
    "64k tokens, 32 heads": Shape(1, 32, 32, 65536, 128, True),
    "64k tokens, 32 heads, 8 key heads": Shape(1, 32, 8, 65536, 128, True),
    "1M tokens, 32 heads, 8 key heads": Shape(1, 32, 8, 2**20, 128, True),
}
MEASURED_SHAPES = {name: shape for name, shape in SHAPES.items() if shape.tokens <= 65536}
SIMULATED = "H200"  # whose recorded steps and rates the predictions start from
Scheme = Callable[[Workload, Cluster, int], Step]
Row = tuple[str, int, Step, float]  # scheme, ranks, step, share of linear scaling


def weak(name: str, scheme: Scheme, work: Workload, cluster: Cluster) -> Iterator[Row]:
    """Each rank brings a batch of its own."""
    for ranks in RANKS:
        step = scheme(work, cluster, ranks)
        yield f"{name}: {work.name}", ranks, step, work.seconds / step.seconds


def strong(name: str, scheme: Scheme, work: Workload, cluster: Cluster) -> Iterator[Row]:
    """The ranks share one batch; only ranks of one host."""
    for ranks in (n for n in RANKS if n <= cluster.per_host):
        step = scheme(work, cluster, ranks)
        yield f"{name}: {work.name}", ranks, step, work.seconds / ranks / step.seconds


def attention(name: str, shape: Shape, cluster: Cluster) -> Iterator[Row]:
    """Forward and backward of one attention call."""
    for form, cost in (("ring", ring_cost), ("Ulysses", ulysses_cost)):
        one = sum(c.seconds for c in cost(shape, 1, cluster.inside))
        for ranks in RANKS:
            if form == "Ulysses" and why_no_ulysses(shape.heads, shape.key_heads, ranks):
                continue
            both = cost(shape, ranks, cluster.link(ranks))
            seconds = sum(c.seconds for c in both)
            flops, sent = sum(c.flops for c in both), sum(c.sent for c in both)
            step = Step(flops, sent, seconds, seconds - sum(c.exposed for c in both))
            yield f"{form}: {name}", ranks, step, one / ranks / seconds


def rows(cluster: Cluster) -> Iterator[Row]:
    yield from weak("DP", data_parallel, resnet50(), cluster)
    yield from weak("DP", data_parallel, gpt2_small(), cluster)
    yield from weak("FSDP", fully_sharded, llama3_8b(), cluster)
    yield from weak("HSDP", hybrid_sharded, llama3_8b(), cluster)
    yield from strong("TP", tensor_parallel, llama3_8b(), cluster)
    for name, shape in SHAPES.items():
        yield from attention(name, shape, cluster)


def table(found: list[Row]) -> str:
    lines = [
        "| scheme | ranks | TFLOP | MB sent | ms | of them communication | of linear |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ranks, step, share in found:
        figures = (step.flops / 1e12, step.sent / 1e6, step.seconds * 1e3, step.exposed * 1e3)
        cells = " | ".join(
            f"{figure:.3g}" if figure < 1000 else f"{figure:.0f}" for figure in figures
        )
        lines.append(f"| {name} | {ranks} | {cells} | {share:.2f} |")
    return "\n".join(lines)


def sources() -> str:
    works = (resnet50(), gpt2_small(), llama3_8b())
    return "\n".join(f"- {w.name}: {w.flops / 1e12:.1f} TFLOP per step, {w.source}." for w in works)


def write(page: Path, marks: tuple[str, str], text: str) -> None:
    begin, end = marks
    before, _, rest = page.read_text().partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{page}: expected the marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def compare(found: list[Row], record: Path) -> str:
    """Predicted and measured milliseconds, and the largest miss.

    Rows of native torch and of schemes without a prediction are left out. The model has no host: where a
    step was captured, too, that row counts.
    """
    predicted = {(name, ranks): step.seconds * 1e3 for name, ranks, step, _ in found}
    lines = ["| scheme | ranks | predicted ms | measured ms | miss |", "|---|---|---|---|---|"]
    misses = []
    rows = json.loads(record.read_text())["rows"]
    captured = {(r["scheme"], r["ranks"]) for r in rows if r["impl"] == "warpwright_graph"}
    for row in rows:
        key = row["scheme"], row["ranks"]
        impl = "warpwright_graph" if key in captured else "warpwright"
        if key not in predicted or row["impl"] != impl:
            continue
        misses.append(predicted[key] / row["ms"] - 1)
        figures = f"{predicted[key]:.3g} | {row['ms']:.3g} | {misses[-1]:+.1%}"
        lines.append(f"| {key[0]} | {key[1]} | {figures} |")
    if not misses:
        raise ValueError(f"{record}: no row with a prediction")
    lines.append(f"\nLargest miss: {max(misses, key=abs):+.1%}")
    return "\n".join(lines)


def measured_text(found: list[Row]) -> str:
    """The tables of every record in benchmarks/scaling/results, the simulated GPU's first.

    Predictions stand next to the times of that GPU alone.
    """
    own = {path: SIMULATED in load(path)[0] for path in records()}
    paths = sorted(own, key=lambda path: not own[path])
    return "\n\n".join(tables(path, compare(found, path) if own[path] else "") for path in paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="a page with the marks of the tables")
    parser.add_argument("--measured", type=Path, help="a record of measured steps")
    options = parser.parse_args()
    found = list(rows(Cluster()))
    text = f"{sources()}\n\n{table(found)}"
    if options.write is not None:
        write(options.write, (BEGIN, END), text)
        write(options.write, MEASURED, measured_text(found))
    elif options.measured is not None:
        print(compare(found, options.measured))
    else:
        print(text)


if __name__ == "__main__":
    main()
