"""The teaching ladders: compiles every rung of one, checks it, measures it beside native torch.

    python benchmarks/ladders/run.py matmul [--size 4096x4096x4096] [--rung 4,6] [--json OUT]

Each rung is compiled for the GPU in the machine. It must give the exact bits on integers, or an error like native's.
Then it is timed in turns with native, as `python -m warpwright bench` does it. The ladder's page explains the rungs.
Put OUT at benchmarks/results/<gpu>/, under the name that the page's table names, and `python -m warpwright report`
fills the table in.

    --list              what each rung is, from its file
    --check             compile and check only
    --build [--arch A]  compile only, for sm_A (default: 90a); needs no GPU
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ladders.rungs import ROOT, BuildError, Rung, Source, arch_of_gpu, build, sources
from ladders.task import Problem, Size, Task, case_of

from warpwright.bench import guards, ladder
from warpwright.bench.measure import Timing, interleaved
from warpwright.bench.records import machine_header, save_records

Call = Callable[[], object]
DEVICE = "cuda"
SLOW = 4.0  # times native's: such rungs are timed among themselves, in fewer rounds
GUARD = 4096  # elements on either side of a result
SENTINEL = -7.0
ERROR_RULE = 1.5  # times native's error against float64


def task_of(name: str, rung: str) -> Task:
    return importlib.import_module(f"ladders.{name}.task").task_of(rung)


def _guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(a tensor like x full of NaN, the memory around it too)."""
    whole = torch.full((x.numel() + 2 * GUARD,), SENTINEL, device=x.device, dtype=x.dtype)
    inner = whole[GUARD:-GUARD].view(x.shape)
    inner.fill_(float("nan"))
    return inner, whole


def wrong(rung: Rung, task: Task, size: Size) -> str | None:
    """Why the rung's results are not right; None if they are, and nothing else was written."""
    problem = task.draw(size, DEVICE, integers_only=task.exact_bits)
    pairs = [_guarded(x) for x in problem.results]
    rung([*problem.inputs, *(inner for inner, _ in pairs)], problem.extents)
    torch.cuda.synchronize()
    native = [x.clone() for x in problem.native()]
    for (found, _), exact, theirs in zip(pairs, problem.exact(), native, strict=True):
        why = _difference(found, exact, theirs, task.exact_bits)
        if why is not None:
            return why
    for inner, whole in pairs:
        outside = torch.cat([whole[:GUARD], whole[GUARD + inner.numel() :]])
        if not bool((outside == SENTINEL).all()):
            return "wrote outside of its result"
    return None


def _difference(found: Tensor, exact: Tensor, theirs: Tensor, bits: bool) -> str | None:
    if bits:
        expected = exact.to(found.dtype)
        if torch.equal(found, expected):
            return None
        bad = (found != expected).nonzero()
        place = tuple(bad[0].tolist())
        return (
            f"{len(bad)} of {found.numel()} elements differ, the first at {place}: "
            f"{float(found[place])}, expected {float(expected[place])}"
        )
    error, native_error = guards.relative(found, exact), guards.relative(theirs, exact)
    if error <= ERROR_RULE * native_error + torch.finfo(found.dtype).eps:
        return None
    return f"error {error:.2e} against float64, native's is {native_error:.2e}"


def time_once(call: Call) -> float:
    """Milliseconds of the second call."""
    call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def expected_ms(rung: Rung, task: Task, size: Size) -> float:
    """By its rate at the task's probe."""
    problem = task.draw(task.probe, DEVICE)
    ms = time_once(lambda: rung([*problem.inputs, *problem.results], problem.extents))
    return ms * task.work(size) / task.work(task.probe)


def _errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return max(guards.relative(a, b) for a, b in zip(found, exact, strict=True))


class Measured:
    """The rungs of one task at one size: their errors, and which are slow."""

    def __init__(self, task: Task, size: Size, rungs: list[Rung], limit_ms: float) -> None:
        self.case, self.task = case_of(size), task
        self.problem: Problem = task.draw(size, DEVICE)
        self.skipped: dict[str, str] = {}
        guards.refuse_constant({str(i): x for i, x in enumerate(self.problem.inputs)})
        exact = self.problem.exact()
        self.errors = {"native": _errors(self.problem.native(), exact)}
        self.groups: dict[bool, dict[str, Call]] = {True: {}, False: {}}  # by: is slow
        native_ms = time_once(self.problem.native)
        for rung in rungs:
            try:
                ms = expected_ms(rung, task, size)
                if ms > limit_ms:
                    why = f"about {ms:.0f} ms a call at {self.case}, over --limit-ms {limit_ms:g}"
                    self.skipped[rung.name] = why
                    continue
                call = self._call_of(rung)
                for x in self.problem.results:
                    x.fill_(float("nan"))
                call()
            except ValueError as error:  # a size that it does not take
                self.skipped[rung.name] = f"{self.case}: {error}"
                continue
            guards.refuse_empty_results(self.problem.results)
            self.errors[rung.name] = _errors(self.problem.results, exact)
            self.groups[time_once(call) > SLOW * native_ms][rung.name] = call

    def _call_of(self, rung: Rung) -> Call:
        tensors = [*self.problem.inputs, *self.problem.results]
        return lambda: rung(tensors, self.problem.extents)

    def rows(self, record: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Native runs in every round of both groups, slow and fast."""
        traffic, flops = self.problem.bytes, self.problem.flops
        floor = max(traffic / record["copy_tbs"] / 1e9, flops / record["matmul_tflops"] / 1e9)
        rows: dict[str, dict[str, Any]] = {}
        with guards.clocks(DEVICE) as clocks:
            for is_slow, calls in self.groups.items():
                if is_slow and not calls:
                    continue
                start = time.monotonic()
                timings: dict[str, Timing] = interleaved(
                    {**calls, "native": self.problem.native},
                    DEVICE,
                    seconds * (4 if is_slow else 1),
                )
                for name, timing in timings.items():  # the fast group is second: its native stays
                    rows[name] = {
                        "op": self.task.op,
                        "case": self.case,
                        "dtype": self.task.dtype,
                        "layout": "rows",
                        "pass": self.task.direction,
                        "impl": name,
                        **timing.fields(None, False),
                        "native_ms": round(timings["native"].ms, 5),
                        "bytes": traffic,
                        "flops": flops,
                        "floor_ms": round(floor, 5),
                        "peak_mib": None,
                        "err": self.errors[name],
                        "err_native": self.errors["native"],
                        **clocks.since(start),
                    }
        return [rows[name] for name in sorted(rows, key=lambda n: (n == "native", n))]


def measure(
    task: Task,
    size: Size,
    rungs: list[Rung],
    record: dict[str, Any],
    limit_ms: float,
    seconds: float,
) -> None:
    """Adds the rows of one task at one size."""
    measured = Measured(task, size, rungs, limit_ms)
    for name, why in measured.skipped.items():
        record["skipped"].setdefault(name, {})[task.op] = why
    record["rows"] += measured.rows(record, seconds)


def show(record: dict[str, Any], console: Console) -> None:
    for (op, case), rows in ladder.groups(record).items():
        table = Table(title=f"{record['gpu']}, {op}, {case}, {rows[0]['dtype']}")
        for column in ("rung", "ms", "TB/s", "TFLOP/s", "native / this", "error", "native's"):
            table.add_column(column, justify="left" if column == "rung" else "right", no_wrap=True)
        for row in rows:
            table.add_row(
                ladder.title(row["impl"], "native"),
                f"{row['ms']:.4f}",
                f"{ladder.terabytes(row):.3g}",
                f"{ladder.tflops(row):.4g}",
                f"{ladder.share_of_native(row):.3f}",
                f"{row['err']:.1e}",
                f"{row['err_native']:.1e}",
            )
        console.print(table)


def chosen(name: str, text: str | None) -> list[Source]:
    """All of them, or those whose numbers were asked for."""
    found = sources(name)
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
    parser.add_argument("ladder", choices=[found.name for found in ladder.LADDERS])
    parser.add_argument("--size", action="append", help="as 4096x4096; may be repeated")
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


def _refusal(rung: Rung, task: Task, size: Size) -> str | None:
    try:
        return wrong(rung, task, size)
    except ValueError as error:  # a size that it does not take
        return str(error)


def check(name: str, libraries: dict[str, Path], console: Console) -> tuple[list[Rung], list[Any]]:
    """The rungs that are right, and what is wrong with the others."""
    good, failures = [], []
    for rung_name, path in libraries.items():
        rung, task = Rung(rung_name, path), task_of(name, rung_name)
        console.print(f"{rung_name}: ", end="")  # who it was, should the GPU stop here
        bad = {s: why for s in task.checked if (why := _refusal(rung, task, s)) is not None}
        for size, why in bad.items():
            case = case_of(size)
            failures.append({"op": task.op, "case": case, "impl": rung_name, "error": why})
            console.print(f"[red]{case}: {why}[/]")
        if not bad:
            good.append(rung)
            console.print(
                "integers bit-equal" if task.exact_bits else "errors not above 1.5 x native's"
            )
    return good, failures


def new_record(name: str, missing: Sequence[Source], failures: list[Any]) -> dict[str, Any]:
    found = ladder.named(name)
    record = machine_header(DEVICE)
    skipped = {s.name: {task_of(name, s.name).op: "needs sm_90a"} for s in missing}
    return record | {
        "suite": ladder.SUITE,
        "peak_tflops": ladder.peak_tflops(record["gpu"]),
        "op_hashes": {work.op: ladder.sources_hash(found, ROOT) for work in found.works},
        "peers": {"native": torch.__version__},
        "skipped": skipped,
        "failures": failures,
        "interrupted": False,
    }


def measure_all(name: str, good: list[Rung], record: dict[str, Any], options: Any) -> None:
    """Every task of the ladder, at the sizes asked for or at its own."""
    by_op: dict[str, list[Rung]] = {}
    for rung in good:
        by_op.setdefault(task_of(name, rung.name).op, []).append(rung)
    for rungs in by_op.values():
        task = task_of(name, rungs[0].name)
        sizes = [task.parse(text) for text in options.size or ()] or task.sizes
        for size in sizes:
            measure(task, size, rungs, record, options.limit_ms, options.seconds)
            if options.json:
                save_records(record, options.json)


def main() -> int:
    options = arguments()
    console = Console()
    found = chosen(options.ladder, options.rung)
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
    missing = [s for s in found if s.needs_sm90 and arch != "90a"]
    try:
        libraries = build(options.ladder, [s for s in found if s not in missing], arch)
    except BuildError as error:
        console.print(f"[red]{error}[/]", soft_wrap=True, highlight=False)
        return 2
    if options.build:
        console.print("\n".join(str(path) for path in libraries.values()))
        return 0
    good, failures = check(options.ladder, libraries, console)
    if options.check:
        return 1 if failures else 0
    record = new_record(options.ladder, missing, failures)
    measure_all(options.ladder, good, record, options)
    show(record, console)
    for name, why in record["skipped"].items():
        console.print(f"{name}: skipped: {'; '.join(why.values())}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
