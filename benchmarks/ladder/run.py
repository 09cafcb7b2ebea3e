"""The teaching ladder of linear's matrix product: compiles every rung, checks it, measures it.

    python benchmarks/ladder/run.py [--shape 4096x4096x4096] [--rung 4,6] [--json OUT]

D = A B^T in bf16 with fp32 sums. Each rung is compiled for the GPU in the machine, must give
torch's bits on integers, and is then timed in turns with cuBLAS (torch.matmul), as `python -m
warpwright bench` does it. docs/ladder.md explains the rungs; put OUT at
benchmarks/results/<gpu>/ladder.json and `python -m warpwright report` fills its table in.

    --list              what each rung is, from its file
    --check             compile and check only
    --build [--arch A]  compile only, for sm_A (default: 90a); needs no GPU
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rungs import ROOT, BuildError, Rung, Source, arch_of_gpu, build, sources
from torch import Tensor

from warpwright.bench import guards, ladder
from warpwright.bench.measure import Timing, interleaved
from warpwright.bench.records import machine_header, save_records

Extents = tuple[int, int, int]
Call = Callable[[], object]
DEVICE = "cuda"
# Several tiles each way, no two extents alike, and one with a single tile of k. linear takes
# its sm_90a kernel for each of them.
CHECKED: tuple[Extents, ...] = ((2048, 4096, 64), (768, 512, 320), (512, 1536, 1024))
PROBE: Extents = (1024, 1024, 1024)  # tells how long a call of a large shape would take
SLOW = 4.0  # times cuBLAS's: such rungs are timed among themselves, in fewer rounds
GUARD_ROWS = 8
SENTINEL = -7.0


def flops(shape: Extents) -> int:
    m, n, k = shape
    return 2 * m * n * k


def integers(shape: Extents) -> tuple[Tensor, Tensor]:
    """Sums of such products are exact in fp32 in any order, so every rounding to bf16 is the same."""
    m, n, k = shape
    assert 9 * k < 2**24
    a, b = (torch.randint(-3, 4, (rows, k), device=DEVICE) for rows in (m, n))
    return a.bfloat16(), b.bfloat16()


def wrong(rung: Rung, shape: Extents) -> str | None:
    """Why the rung's result on integers is not torch's; None if it is, and nothing else was written."""
    m, n, _ = shape
    a, b = integers(shape)
    expected = (a.double() @ b.double().T).bfloat16()
    whole = torch.full((m + 2 * GUARD_ROWS, n), SENTINEL, device=DEVICE, dtype=torch.bfloat16)
    d = whole[GUARD_ROWS:-GUARD_ROWS]
    d.fill_(float("nan"))
    rung(a, b, d)
    torch.cuda.synchronize()
    if not torch.equal(d, expected):
        bad = (d != expected).nonzero()
        row, col = bad[0].tolist()
        return (
            f"{len(bad)} of {m * n} elements differ, the first at ({row}, {col}): "
            f"{float(d[row, col])}, expected {float(expected[row, col])}"
        )
    guards_intact = bool((torch.cat([whole[:GUARD_ROWS], whole[-GUARD_ROWS:]]) == SENTINEL).all())
    return None if guards_intact else "wrote outside of D"


def time_once(call: Call) -> float:
    """Milliseconds of the second call."""
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def expected_ms(rung: Rung, shape: Extents) -> float:
    """By its rate on PROBE."""
    m, n, k = PROBE
    a, b = (torch.randn(rows, k, device=DEVICE).bfloat16() for rows in (m, n))
    d = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    return time_once(lambda: rung(a, b, d)) * flops(shape) / flops(PROBE)


def measure(
    shape: Extents, rungs: list[Rung], record: dict[str, Any], limit_ms: float, seconds: float
) -> None:
    """Adds the rows of one shape. cuBLAS runs in every round of both groups, slow and fast."""
    m, n, k = shape
    case = f"{m}x{n}x{k}"
    a, b = torch.randn(m, k, device=DEVICE).bfloat16(), torch.randn(n, k, device=DEVICE).bfloat16()
    guards.refuse_constant({"a": a, "b": b})
    exact = a.double() @ b.double().T
    out = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)

    def native() -> None:
        torch.matmul(a, b.T, out=out)

    def call_of(rung: Rung) -> Call:
        return lambda: rung(a, b, out)

    native()
    err_native = guards.relative(out, exact)
    errors: dict[str, float] = {"native": err_native}
    groups: dict[bool, dict[str, Call]] = {True: {}, False: {}}  # by: is slow
    native_ms = time_once(native)
    for rung in rungs:
        ms = expected_ms(rung, shape)
        if ms > limit_ms:
            why = f"about {ms:.0f} ms a call at {case}, over --limit-ms {limit_ms:g}"
            record["skipped"].setdefault(rung.name, {})["linear"] = why
            continue
        call = call_of(rung)
        out.fill_(float("nan"))
        try:
            call()
        except ValueError as error:  # a shape that it does not take
            record["skipped"].setdefault(rung.name, {})["linear"] = f"{case}: {error}"
            continue
        guards.refuse_empty_results([out])
        errors[rung.name] = guards.relative(out, exact)
        groups[time_once(call) > SLOW * native_ms][rung.name] = call
    del exact

    traffic = 2 * (m * k + n * k + m * n)
    floor_ms = max(traffic / record["copy_tbs"] / 1e9, flops(shape) / record["matmul_tflops"] / 1e9)
    rows: dict[str, dict[str, Any]] = {}
    with guards.clocks(DEVICE) as clocks:
        for is_slow, calls in groups.items():
            if is_slow and not calls:
                continue
            start = time.monotonic()
            together = {**calls, "native": native}
            timings: dict[str, Timing] = interleaved(
                together, DEVICE, seconds * (4 if is_slow else 1)
            )
            for name, timing in timings.items():  # the fast group is second: its cuBLAS row stays
                rows[name] = {
                    "op": "linear",
                    "case": case,
                    "dtype": "bfloat16",
                    "layout": "rows",
                    "pass": "fwd",
                    "impl": name,
                    **timing.fields(None, False),
                    "native_ms": round(timings["native"].ms, 5),
                    "bytes": traffic,
                    "flops": flops(shape),
                    "floor_ms": round(floor_ms, 5),
                    "peak_mib": None,
                    "err": errors[name],
                    "err_native": err_native,
                    **clocks.since(start),
                }
    record["rows"] += [rows[name] for name in sorted(rows, key=lambda n: (n == "native", n))]


def show(record: dict[str, Any], console: Console) -> None:
    peak = record["peak_tflops"]
    for case, rows in ladder.shapes(record).items():
        table = Table(title=f"{record['gpu']}, {case}, bf16")
        for column in ("rung", "ms", "TFLOP/s", "% of cuBLAS", "% of peak", "error", "cuBLAS's"):
            table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
        for row in rows:
            table.add_row(
                ladder.title(row["impl"]),
                f"{row['ms']:.4f}",
                f"{ladder.tflops(row):.4g}",
                ladder.percent(ladder.share_of_cublas(row)),
                ladder.percent(ladder.tflops(row) / peak) if peak else "",
                f"{row['err']:.1e}",
                f"{row['err_native']:.1e}",
            )
        console.print(table)


def parse_shape(text: str) -> Extents:
    try:
        m, n, k = (int(part) for part in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected MxNxK") from None
    return m, n, k


def chosen(text: str | None) -> list[Source]:
    """All of them, or those whose numbers or names were asked for."""
    found = sources()
    if text is None:
        return found
    wanted = [int(part) for part in text.split(",")]
    unknown = sorted(set(wanted) - {int(s.name[:2]) for s in found})
    if unknown:
        raise SystemExit(f"--rung: {unknown}: expected numbers from 1 to {len(found)}")
    return [s for s in found if int(s.name[:2]) in wanted]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=parse_shape, action="append", help="MxNxK; may be repeated")
    parser.add_argument("--rung", help="numbers, comma-separated (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="measuring time of the fast rungs"
    )
    parser.add_argument("--limit-ms", type=float, default=1000, help="leave slower rungs out")
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--arch", default="90a")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console()
    found = chosen(options.rung)
    if options.list:
        for source in found:
            console.print(
                f"[bold]{source.name}[/]\n{source.header}\n", highlight=False, soft_wrap=True
            )
        return 0
    if not options.build and not torch.cuda.is_available():
        console.print("[red]no GPU here: --build compiles, --list explains[/]")
        return 2
    arch = options.arch if options.build else arch_of_gpu()
    skipped = {} if arch == "90a" else {s.name: "needs sm_90a" for s in found if s.needs_sm90}
    try:
        libraries = build([s for s in found if s.name not in skipped], arch)
    except BuildError as error:
        console.print(f"[red]{error}[/]", soft_wrap=True, highlight=False)
        return 2
    if options.build:
        console.print("\n".join(str(path) for path in libraries.values()))
        return 0

    good, failures = [], []
    for name, path in libraries.items():
        rung = Rung(name, path)
        console.print(f"{name}: ", end="")  # who it was, should the GPU stop here
        bad = {shape: why for shape in CHECKED if (why := wrong(rung, shape)) is not None}
        for shape, why in bad.items():
            case = "x".join(map(str, shape))
            failures.append({"op": "linear", "case": case, "impl": name, "error": why})
            console.print(f"[red]{case}: {why}[/]")
        if not bad:
            good.append(rung)
            console.print("integers bit-equal")
    if options.check:
        return 1 if failures else 0

    record = machine_header(DEVICE)
    record |= {
        "suite": ladder.SUITE,
        "peak_tflops": ladder.peak_tflops(record["gpu"]),
        "op_hashes": {"linear": ladder.sources_hash(ROOT)},
        "peers": {"native": torch.__version__},
        "skipped": {name: {"linear": why} for name, why in skipped.items()},
        "failures": failures,
        "interrupted": False,
    }
    for shape in options.shape or [(4096, 4096, 4096)]:
        measure(shape, good, record, options.limit_ms, options.seconds)
        if options.json:
            save_records(record, options.json)
    show(record, console)
    for name, why in record["skipped"].items():
        console.print(f"{name}: skipped: {why['linear']}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
