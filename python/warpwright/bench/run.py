"""Runs cases with ours and the peers interleaved. An interrupted or failed run keeps its rows."""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor

from ..testing import to_double
from . import guards
from .ahead import compile_ahead
from .cases import Case, joined
from .implementation import Implementation, Missing
from .measure import interleaved, peak_mib
from .optimizers import OptimizerCase, optimizer_cases, optimizer_rows
from .peers import (
    DEFAULT_PEERS,
    DEFAULT_STEP_PEERS,
    OURS,
    PEERS,
    leaves_of,
    parse_peers,
    prepare,
    prepare_ours,
)
from .records import (
    machine_header,
    matmul_tflops,
    memory_tbs,
    require_device,
    require_writable,
    save_csv,
    save_records,
)
from .screen import table_of
from .separate import workload_rows
from .shapes import CASES, QUICK_CASES
from .sources import op_hash, source_root
from .steps import Workload, mnist_workloads

Row = dict[str, Any]
Item = Case | Workload | OptimizerCase
SUITES = ("quick", "full", "model")
SHOWN_ROWS = 12  # in the live table


def _exact(case: Case, sample: dict[str, Any]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients and their cotangent in float64, on the case's sample of the data."""
    inputs = to_double(sample)
    # cuDNN's search would try every slow float64 algorithm for one result.
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        output = joined(case.run(torch.nn.functional, inputs))
        is_float = output.is_floating_point()  # codes have no gradient
        cotangent = torch.randn_like(output) if is_float else torch.zeros_like(output)
        leaves = leaves_of(inputs)
        grads = torch.autograd.grad(output, leaves, cotangent) if leaves else ()
    finally:
        torch.backends.cudnn.benchmark = benchmark
    return output.detach(), list(grads), cotangent


def _results(
    case: Case,
    inputs: dict[str, Any],
    implementations: dict[str, Implementation],
    failed: Callable[[str, Exception], None],
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, list[str]]]]:
    """Errors against float64, {impl: {"fwd": e, "bwd": e}}, and the faults of an impl's result.

    An implementation that raises here is reported and leaves.
    """
    sample = case.sample(inputs) if case.sample else inputs
    exact, exact_grads, part = _exact(case, sample)
    errors: dict[str, dict[str, float]] = {}
    notes: dict[str, dict[str, list[str]]] = {}
    ours: tuple[Tensor, list[Tensor]] | None = None
    cotangent: Tensor | None = None
    # Ours and native first: the others are compared with both.
    for name in dict.fromkeys([OURS.name, "native", *implementations]):
        try:
            if cotangent is None:
                output = joined(implementations[name].calls["fwd"]())
                cotangent = torch.zeros_like(output)
                guards.corner(cotangent, exact.shape).copy_(part)
                del output
            value, all_grads = implementations[name].results(cotangent)
            grads = [g for g in all_grads if g is not None]
            guards.refuse_empty_results([value, *grads])
        except (KeyboardInterrupt, guards.Refused):
            raise
        except Exception as error:
            if name in (OURS.name, "native"):
                raise
            failed(name, error)
            del implementations[name]
            continue
        corners = [
            guards.corner(g.detach(), e.shape) for g, e in zip(grads, exact_grads, strict=True)
        ]
        errors[name] = {
            "fwd": guards.relative(guards.corner(value, exact.shape), exact, case.kinked),
            "bwd": max(
                (
                    guards.relative(g, e, case.kinked)
                    for g, e in zip(corners, exact_grads, strict=True)
                ),
                default=0.0,
            ),
        }
        if ours is None:
            ours = value, corners
            continue
        pairs = [
            (ours[0], value, "fwd"),
            *((a, b, "bwd") for a, b in zip(ours[1], corners, strict=True)),
        ]
        known = {p: max(errors[n][p] for n in (OURS.name, "native")) for p in ("fwd", "bwd")}
        found = [(guards.disagreement(a, b, known[p], case.kinked), p) for a, b, p in pairs]
        notes[name] = {
            which: [text for text, p in found if text is not None and p == which]
            for which in ("fwd", "bwd")
        }
    return errors, notes


def case_rows(
    case: Case,
    device: str,
    ceilings: dict[str, Any],
    seconds: float,
    peers: Sequence[str] = ("native",),
    failures: list[Row] | None = None,
    clocks: guards.Clocks | None = None,
) -> list[Row]:
    """The rows of one case. A peer that raises goes into `failures`; ours and native raise."""
    inputs = case.make(device)
    guards.refuse_constant(inputs)

    def failed(name: str, error: Exception) -> None:
        if failures is not None:
            failures.append(failure(case, error, name))

    implementations = {OURS.name: prepare(OURS, case, inputs, device)}
    for name in peers:
        try:
            implementations[name] = prepare(PEERS[name], case, inputs, device)
        except Missing:
            continue
        except Exception as error:
            if name == "native":
                raise
            failed(name, error)
    errors, notes = _results(case, inputs, implementations, failed)

    rows = []
    for which in case.bytes:
        calls = {n: i.calls[which] for n, i in implementations.items() if which in i.calls}
        start = time.monotonic()
        timings = interleaved(calls, device, seconds * max(1.0, len(calls) / 2))
        flops = case.flops.get(which, 0.0)
        tflops = matmul_tflops(ceilings, case.dtype_name)
        if case.tf32 or case.split_tf32:  # split_tf32 takes three products per product
            products = 3 if case.split_tf32 else 1
            tflops = ceilings.get("tf32_tflops", tflops) / products
        moved = case.bytes[which]
        floor_ms = max(moved / memory_tbs(ceilings, moved) / 1e9, flops / tflops / 1e9)
        if device == "cpu":  # what one of them reached, the machine can reach
            floor_ms = min(floor_ms, *(timing.ms for timing in timings.values()))
        error_pass = "fwd" if which == "fwd" else "bwd"
        for name, timing in timings.items():
            wrong = notes.get(name, {}).get(error_pass, [])
            rows.append(
                {
                    "op": case.op,
                    "case": case.case,
                    "dtype": case.dtype_name,
                    "layout": case.layout,
                    "pass": which,
                    "impl": name,
                    **timing.fields(timings[OURS.name], name == OURS.name),
                    "bytes": int(case.bytes[which]),
                    "flops": int(flops),
                    "floor_ms": round(floor_ms, 5),
                    "peak_mib": peak_mib(calls[name], device),
                    "err": errors[name][error_pass],
                    "err_native": errors["native"][error_pass],
                    "agrees": not wrong,
                    **(clocks.since(start) if clocks else {}),
                    **({"notes": wrong} if wrong else {}),
                }
            )
    return rows


def failure(case: Item, error: BaseException, impl: str | None = None) -> Row:
    found = {
        "op": case.op,
        "case": case.case,
        "dtype": case.dtype_name,
        "error": f"{type(error).__name__}: {error}"[:2000],
    }
    return found if impl is None else {**found, "impl": impl}


def skipped(cases: Sequence[Case], peers: Sequence[str], device: str) -> dict[str, dict[str, str]]:
    """{peer: {op: why}} for ops of whose cases it skips all."""
    found: dict[str, dict[str, str]] = {}
    for name in peers:
        for op in dict.fromkeys(case.op for case in cases):
            reasons = [PEERS[name].skips(case, device) for case in cases if case.op == op]
            if all(reason is not None for reason in reasons):
                found.setdefault(name, {})[op] = str(reasons[0])
    return found


def mark_paths(rows: Iterable[Row], cases: Iterable[Case], device: str) -> None:
    """Finds the kernels that each case of ours runs, and writes them into its rows.

    Runs after all timing: launches can take longer once the profiler was on.
    """
    ours = {
        (r["op"], r["case"], r["dtype"], r["layout"], r["pass"]): r
        for r in rows
        if r["impl"] == OURS.name
    }
    for case in cases:
        key = (case.op, case.case, case.dtype_name, case.layout)
        wanted = [which for which in case.bytes if (*key, which) in ours]
        if not wanted:
            continue
        with case.precision():
            implementation = prepare_ours(case, case.make(device), device)
            for which in wanted:
                place = (*key, which)
                ran = guards.what_ran(implementation.calls[which], device)
                row = ours[place]
                row["path"] = ran.path
                if ran.foreign and ran.path != OURS.name:
                    row["foreign_kernels"] = list(ran.foreign)
        del implementation
        _free(device)


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


class Runner:
    """One run of a suite, with its record and terminal output."""

    def __init__(
        self,
        device: str,
        peers: Sequence[str],
        console: Console,
        seconds: float = 0.25,
        limit_s: float | None = None,
        autosave: Path | None = None,
        suite: str = "quick",
        step_peers: Sequence[str] | None = None,
    ) -> None:
        self.device, self.console, self.seconds = device, console, seconds
        self.autosave, self.limit_s = autosave, limit_s
        self.start = self.measuring_since = time.monotonic()
        self.interrupted = False
        self.record: Row = {}
        self.suite = suite
        asked = dict.fromkeys([*peers, *(step_peers or ())])
        self.missing = {n: why for n in asked if (why := PEERS[n].missing(device)) is not None}
        self.peers = [n for n in peers if n not in self.missing]
        steps = peers if step_peers is None else step_peers
        self.step_peers = [n for n in steps if n not in self.missing]

    def run(
        self,
        cases: Sequence[Case],
        workloads: Sequence[Workload | OptimizerCase] = (),
        again: Callable[[], tuple[Sequence[Case], Sequence[Workload | OptimizerCase]]]
        | None = None,
    ) -> Row:
        """Measures. After Ctrl-C or a failing case the record keeps the rows measured so far.

        `again` makes the same cases and workloads in another process: compilations are then done ahead.
        """
        torch.backends.cudnn.benchmark = True
        for name, why in self.missing.items():
            self.console.print(Text(f"{name}: missing: {why}", style="yellow"))
        self.record = record = machine_header(self.device)
        root = source_root()
        if root is not None:
            ops = {c.op for c in cases} | {w.op for w in workloads}
            record["op_hashes"] = {op: op_hash(op, root, self.device) for op in sorted(ops)}
        record["suite"] = self.suite
        record["peers"] = {
            n: PEERS[n].version for n in dict.fromkeys([*self.peers, *self.step_peers])
        }
        record["missing"] = dict(self.missing)
        record["skipped"] = skipped(cases, self.peers, self.device)
        record["failures"] = []
        record["interrupted"] = True  # as it is in the record of a killed run
        columns = (
            TextColumn("{task.description:<58}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        progress = Progress(*columns, console=self.console, transient=True)
        live = Live(progress, console=self.console, transient=True, refresh_per_second=4)
        with (
            live if self.console.is_terminal else contextlib.nullcontext(),
            guards.clocks(self.device) as clocks,
        ):
            task = progress.add_task("", total=len(cases) + len(workloads))
            try:
                if again is not None:
                    compile_ahead(again, self.device, self.peers, self.step_peers, progress, task)
                    progress.reset(task, total=len(cases) + len(workloads))
                self.measuring_since = time.monotonic()
                items: list[Item] = [*cases, *workloads]
                for i, item in enumerate(items):
                    progress.update(task, description=f"{item.op} {item.case} {item.dtype_name}")
                    self._one(item, self._seconds_for(i, len(cases) + len(workloads)), clocks)
                    if self.interrupted:  # a compiler caught the exception
                        raise KeyboardInterrupt
                    progress.advance(task)
                    if self.console.is_terminal:
                        live.update(Group(table_of(record["rows"], "", last=SHOWN_ROWS), progress))
                    if self.autosave is not None:
                        save_records(record, self.autosave)
                progress.update(task, description="which kernels ran")
                mark_paths(record["rows"], cases, self.device)
                record["interrupted"] = False
            except KeyboardInterrupt:
                self.console.print("interrupted: keeping the rows measured so far")
        record["seconds"] = round(time.monotonic() - self.start, 1)
        return record

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        self.interrupted = True
        raise KeyboardInterrupt

    def _seconds_for(self, done: int, total: int) -> float:
        """The measuring time per row: less if the run would exceed its limit."""
        if self.limit_s is None or done < 3:
            return self.seconds
        now = time.monotonic()
        expected = self.measuring_since - self.start + (now - self.measuring_since) / done * total
        return self.seconds if expected < self.limit_s else self.seconds / 4

    def _one(self, item: Item, seconds: float, clocks: guards.Clocks) -> None:
        failures = self.record["failures"]
        try:
            if isinstance(item, Workload):
                found = workload_rows(
                    item, self.device, self.record, seconds, self.step_peers, failures, clocks
                )
            elif isinstance(item, OptimizerCase):
                found = optimizer_rows(item, self.device, self.record, seconds, clocks)
            else:
                with item.precision():
                    found = case_rows(
                        item, self.device, self.record, seconds, self.peers, failures, clocks
                    )
            self.record["rows"] += found
        except Exception as error:  # the other items still run
            failures.append(failure(item, error))
        _free(self.device)


LIMITS = {"quick": 2.5, "full": 8.5, "model": 15.0}  # minutes
SECONDS = {("quick", "cpu"): 0.2}


def main(options: SimpleNamespace) -> int:
    """`warpwright bench`: measures, prints the table, writes record, CSV and page."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    suite = options.suite or ("full" if device == "cuda" else "quick")
    console = Console()
    try:
        require_device(device)
        peers = (
            tuple(PEERS)
            if options.peer == "all"
            else parse_peers(options.peer)
            if options.peer
            else DEFAULT_PEERS[suite, device]
        )
        cases, workloads = _chosen(suite, device, options)
        for path in (options.json, options.csv, options.html):
            if path is not None:
                require_writable(path)
    except (ValueError, OSError) as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        return 2
    if options.html is not None:
        from . import page  # raises before the measurement if a package is missing
    limit = options.limit if options.limit is not None else LIMITS[suite]
    runner = Runner(
        device,
        peers,
        console,
        options.seconds or SECONDS.get((suite, device), 0.25),
        60 * limit,
        options.json,
        suite,
        None if options.peer else DEFAULT_STEP_PEERS[device],
    )
    # A time limit from outside ends the run as Ctrl-C does.
    previous = [(n, signal.signal(n, runner.interrupt)) for n in (signal.SIGINT, signal.SIGTERM)]
    try:
        record = runner.run(cases, workloads, functools.partial(_chosen, suite, device, options))
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
    wide = Console(width=max(console.width, 200)) if not console.is_terminal else console
    wide.print(table_of(record["rows"], f"{record['gpu']}, torch {record['torch']}"))
    for found in record["failures"]:
        where = " ".join(str(found.get(k, "")) for k in ("op", "case", "impl"))
        console.print(Text(f"failed: {where}: {found['error']}", style="red"), soft_wrap=True)
    if options.json:
        save_records(record, options.json)
    if options.csv:
        save_csv(record, options.csv)
    if options.html:
        page.write_bench_page(record, options.html)
    console.print(f"{len(record['rows'])} rows in {record['seconds']:.0f} s")
    ours_failed = [f for f in record["failures"] if f.get("impl", OURS.name) == OURS.name]
    return 130 if record["interrupted"] else 1 if ours_failed else 0


def _chosen(
    suite: str, device: str, options: SimpleNamespace
) -> tuple[list[Case], list[Workload | OptimizerCase]]:
    if suite == "model":
        from .models import load_workloads

        cases: list[Case] = []
        workloads: list[Workload | OptimizerCase] = [*load_workloads(options.models, device)]
    else:
        cases = list(CASES if suite == "full" else QUICK_CASES)
        workloads = [*optimizer_cases(suite), *mnist_workloads(device)]
    known = dict.fromkeys([*(c.op for c in cases), *(w.op for w in workloads)])
    unknown = set(options.op) - known.keys()
    if unknown:
        raise ValueError(f"op: {', '.join(sorted(unknown))}: expected one of {', '.join(known)}")
    if options.op:
        cases = [c for c in cases if c.op in options.op]
        workloads = [w for w in workloads if w.op in options.op]
    if options.dtype:
        dtypes = {
            {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}.get(d, d)
            for d in options.dtype.split(",")
        }
        dtypes_known = {c.dtype_name for c in cases} | {w.dtype_name for w in workloads}
        if not dtypes <= dtypes_known:
            raise ValueError(
                f"--dtype: expected names out of {', '.join(sorted(dtypes_known))}; got {options.dtype!r}"
            )
        cases = [c for c in cases if c.dtype_name in dtypes]
        workloads = [w for w in workloads if w.dtype_name in dtypes]
    return cases, workloads
