"""A training step measured with one process per implementation, so that peak memory means something.

All processes live for the whole workload. They prepare in parallel, a few at a time, because
compiling takes longer than measuring. Then they are timed one at a time, in several rounds, in both
directions. A drift of the clocks then affects all of them and shows as an unsteady row. Between the
rounds a process keeps only the weights.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from .attention_calls import attention_calls, masked
from .guards import Clocks, Refused
from .measure import Timing, pooled, samples, tf32_allowed
from .models import load_file
from .steps import (
    LOSS_TOLERANCE,
    TrainingStep,
    Variant,
    Workload,
    build_step,
    count_flops,
    failed,
    graphed,
    row_of,
    step_rows,
    variants,
)

Row = dict[str, Any]
FIRST_STEPS = 4  # whose losses are compared with native's
TURNS = 3
WARM_UP = 3  # steps before each turn's samples
SHARE_OF_SECONDS = 3  # one turn lasts about this many times the seconds per row
FEWEST, MOST = 5, 100  # samples per turn
LIMIT_S = 300.0  # for one answer
GIB_PER_PROCESS = 30  # of device memory while preparing
CORES_PER_PROCESS = 4


class _Worker:
    """In a process of its own: one implementation, and the commands that it answers."""

    def __init__(self, source: Path, place: tuple[str, str, str], impl: str, device: str) -> None:
        op, case, dtype = place
        (self.workload,) = (
            w
            for w in load_file(source, device)
            if (w.op, w.case, w.dtype_name) == (op, case, dtype)
        )
        self.impl, self.device = impl, device
        self.step: TrainingStep | None = None

    def prepare(self, peers: Sequence[str], threads: int) -> Row:
        """Builds and compiles the step, takes the first steps, and releases the memory."""
        from torch._inductor import config

        config.compile_threads = threads
        (variant,) = (v for v in variants(self.workload, peers, self.device) if v.impl == self.impl)
        start = time.monotonic()
        self.step = build_step(self.workload, variant, None, self.device)
        step = graphed(self.step) if variant.captured else self.step
        losses = [float(step()) for _ in range(FIRST_STEPS)]
        first_s = time.monotonic() - start
        del step
        self._release()
        return {"losses": losses, "first_s": round(first_s, 1)}

    def time(self, rounds: int | None, seconds: float) -> tuple[list[float], float | None]:
        """Samples, and the peak memory of the process; without `rounds` as many as fit."""
        assert self.step is not None
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        step: Callable[[], Any] = self.step
        if self.step.variant.captured:
            step = graphed(self.step, check=False)
        for _ in range(WARM_UP):
            step()
        # Before the samples, whose clock has a buffer of its own.
        peak = torch.cuda.max_memory_allocated() / 2**20 if self.device == "cuda" else None
        if rounds is None:
            quickest = min(samples(step, self.device, WARM_UP))
            rounds = min(MOST, max(FEWEST, int(1e3 * seconds / quickest)))
        taken = samples(step, self.device, rounds)
        del step
        self._release()
        return taken, peak

    def inspect(self) -> Row:
        """How attention was called; native counts the FLOPs. After all timing: profiling is slow."""
        assert self.step is not None
        try:
            found: Row = {"attention": attention_calls(self.step)}
            if self.impl == "native":
                found["flops"] = count_flops(self.step)
            return found
        finally:
            self._release()  # the next process needs the memory

    def _release(self) -> None:
        assert self.step is not None
        self.step.release()
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def _serve(
    connection: Connection, source: Path, place: tuple[str, str, str], impl: str, device: str
) -> None:
    """Answers (command, arguments) with (True, result) or (False, error) until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.backends.cudnn.benchmark = True
    worker: _Worker | None = None
    with tf32_allowed():
        while True:
            try:
                command, arguments = connection.recv()
            except EOFError:
                return
            try:
                if worker is None:
                    worker = _Worker(source, place, impl, device)
                answer = True, getattr(worker, command)(*arguments)
            except Exception as error:  # the parent reports it
                answer = False, f"{type(error).__name__}: {error}"[:2000]
            connection.send(answer)


class _Process:
    """The parent's end of one implementation."""

    def __init__(self, workload: Workload, variant: Variant, device: str) -> None:
        self.workload, self.variant = workload, variant
        self.first: Row = {}
        self.taken: list[float] = []
        self.peak: float | None = None
        self.seen: Row = {}
        context = multiprocessing.get_context("spawn")
        self.connection, self.child = context.Pipe()
        place = workload.op, workload.case, workload.dtype_name
        assert workload.source is not None
        self.process = context.Process(
            target=_serve,
            args=(self.child, workload.source, place, variant.impl, device),
            daemon=True,
        )

    def start(self) -> None:
        self.process.start()
        self.child.close()

    def ask(self, command: str, *arguments: Any) -> Any:
        """Raises RuntimeError with the child's error, TimeoutError, or EOFError if it is dead."""
        self.connection.send((command, arguments))
        if not self.connection.poll(LIMIT_S):
            raise TimeoutError(f"{command}: no answer within {LIMIT_S:.0f} s")
        try:
            good, answer = self.connection.recv()
        except EOFError:
            self.process.join(10)
            raise EOFError(f"{command}: the process ended, exit {self.process.exitcode}") from None
        if not good:
            raise RuntimeError(answer)
        return answer

    def end(self, patience_s: float = 0.0) -> None:
        """Lets a process that waits for a command leave; kills one that is still busy."""
        if self.process.pid is None:  # interrupted before its start
            return
        if patience_s:
            self.connection.close()
            self.process.join(patience_s)
        self.process.kill()
        self.process.join()


def preparing_at_once(device: str) -> int:
    """How many implementations may compile and take their first steps side by side."""
    by_cores = (os.cpu_count() or 1) // CORES_PER_PROCESS
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        by_cores = min(by_cores, free // (GIB_PER_PROCESS << 30))
    return max(1, by_cores)


def workload_rows(
    workload: Workload,
    device: str,
    ceilings: dict[str, Any],
    seconds: float,
    peers: Sequence[str] = ("native",),
    failures: list[Row] | None = None,
    clocks: Clocks | None = None,
) -> list[Row]:
    """The rows of one workload, in this process or in one process per implementation."""
    rows = separate_rows if workload.separate else step_rows
    found = [] if failures is None else failures
    return rows(workload, device, ceilings, seconds, peers, found, clocks)


def separate_rows(
    workload: Workload,
    device: str,
    ceilings: dict[str, Any],
    seconds: float,
    peers: Sequence[str],
    failures: list[Row],
    clocks: Clocks | None,
) -> list[Row]:
    """The rows of one workload. An implementation that fails goes into `failures`."""
    if workload.source is None:
        raise ValueError("workload.source: expected the file that makes the workload, got None")
    started: list[_Process] = []
    at_once = preparing_at_once(device)
    threads = max(1, (os.cpu_count() or 1) // at_once)
    pool = ThreadPoolExecutor(at_once)
    patience_s = 0.0
    try:
        # Each is in the list before it starts, so that an interrupt in between ends it too.
        for variant in variants(workload, peers, device):
            started.append(_Process(workload, variant, device))
            started[-1].start()
        running = [*started]

        def prepare(process: _Process) -> None:
            process.first = process.ask("prepare", peers, threads)

        jobs = [pool.submit(_attempt, prepare, p, running, failures) for p in started]
        for job in jobs:
            job.result()
        _refuse(running, failures)
        start = time.monotonic()
        _take_turns(running, failures, SHARE_OF_SECONDS * seconds)
        clock = clocks.since(start) if clocks else {}

        for process in running:
            try:
                process.seen = process.ask("inspect")
            except RuntimeError as error:  # what was timed stays
                failures.append(failed(workload, process.variant, error))
        patience_s = 5.0
        return _rows(workload, running, device, ceilings, clock)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.end(patience_s)
        # A thread that waited for an answer reads the pipe's end now, and may be the one that reaps.
        pool.shutdown()


def _take_turns(running: list[_Process], failures: list[Row], seconds: float) -> None:
    """Times one process after the other; all take the same number of samples per turn."""
    rounds: int | None = None

    def measure(process: _Process) -> None:
        nonlocal rounds
        taken, peak = process.ask("time", rounds, seconds)
        rounds = rounds or len(taken)
        process.taken += taken
        process.peak = peak if process.peak is None else max(peak, process.peak)

    for turn in range(TURNS):
        for process in running[:: 1 if turn % 2 == 0 else -1]:
            _attempt(measure, process, running, failures)


def _attempt(
    action: Callable[[_Process], None],
    process: _Process,
    running: list[_Process],
    failures: list[Row],
) -> None:
    try:
        action(process)
    except (RuntimeError, TimeoutError, EOFError, OSError) as error:
        failures.append(failed(process.workload, process.variant, error))
        running.remove(process)
        process.end()


def _refuse(running: list[_Process], failures: list[Row]) -> None:
    """Marks an implementation whose first losses are not native's; drops one that has none."""
    native = next((p.first["losses"] for p in running if p.variant.impl == "native"), None)
    for process in [*running]:
        losses = process.first["losses"]
        bad = [x for x in losses if x != x or x in (0.0, float("inf"))]
        if bad:
            error = Refused(f"a loss of the first steps is {bad[0]}")
            failures.append(failed(process.workload, process.variant, error))
            running.remove(process)
            process.end()
            continue
        tolerance = LOSS_TOLERANCE[process.workload.dtype_name]
        for i, (loss, expected) in enumerate(zip(losses, native or losses, strict=True)):
            if abs(loss - expected) > tolerance * abs(expected):
                process.variant.notes.append(f"loss {i} is {loss:.5f}, native's {expected:.5f}")


def _rows(
    workload: Workload,
    running: Sequence[_Process],
    device: str,
    ceilings: dict[str, Any],
    clock: Row,
) -> list[Row]:
    timings: dict[str, Timing] = {p.variant.impl: pooled(p.taken, device) for p in running}
    flops = next((p.seen["flops"] for p in running if "flops" in p.seen), 0)
    rows = []
    for process in running:
        attention = process.seen.get("attention", [])
        notes = [*process.variant.notes]
        if masked(attention):
            notes.append("attention gets a mask")
        timing, ours = timings[process.variant.impl], timings.get("warpwright")
        peak = process.peak
        rows.append(
            {
                **row_of(workload, process.variant, timing, ours, flops, ceilings, peak),
                "losses": process.first["losses"],
                "first_s": process.first["first_s"],
                "attention": attention,
                **clock,
                **({"notes": notes} if notes else {}),
            }
        )
    return rows
