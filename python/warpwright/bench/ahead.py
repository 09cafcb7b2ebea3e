"""Compiles for the peers that compile, in parallel processes, before anything is timed.

Inductor keeps its code on disk, where the process that measures finds it. One after the other, the
full suite's compilations would take longer than its measurements. Inductor also makes choices by
timing kernels. They are not kept, because on a device that several processes share they would be
wrong.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch
from rich.progress import Progress, TaskID

from .cases import Case
from .implementation import Missing
from .measure import tf32_allowed
from .optimizers import OptimizerCase
from .peers import PEERS, prepare
from .steps import Workload, build_step, variants

Item = Case | Workload | OptimizerCase
MakeItems = Callable[[], tuple[Sequence[Case], Sequence[Workload | OptimizerCase]]]
# max-autotune chooses by timing alone.
PEER = "compile"
FEWEST = 4  # cases; fewer take no longer than starting a process. A training step does
MOST_PROCESSES = 8  # each holds one case on the device


def processes_for(items: int) -> int:
    return min(MOST_PROCESSES, (os.cpu_count() or 1) // 2, items)


def compiles(item: Item, device: str, peers: Sequence[str], step_peers: Sequence[str]) -> bool:
    if isinstance(item, Case):
        return PEER in peers and PEERS[PEER].skips(item, device) is None
    # A separate workload's processes already compile in parallel.
    return isinstance(item, Workload) and PEER in step_peers and not item.separate


def compile_ahead(
    make_items: MakeItems,
    device: str,
    peers: Sequence[str],
    step_peers: Sequence[str],
    progress: Progress,
    task: TaskID,
) -> None:
    """`make_items` can be pickled and gives the same items in every process.

    What fails here is left to the run that measures, which reports it.
    """
    items = _items(make_items)
    wanted = [i for i, item in enumerate(items) if compiles(item, device, peers, step_peers)]
    processes = processes_for(len(wanted))
    few = len(wanted) < FEWEST and not any(isinstance(items[i], Workload) for i in wanted)
    if few or processes < 2:
        return
    progress.update(task, total=len(wanted), description=f"compiling, {processes} processes")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin) as pool:
        jobs = [pool.submit(_compile, make_items, i, device, step_peers) for i in wanted]
        try:
            for job in as_completed(jobs):
                job.exception()
                progress.advance(task)
        except BrokenProcessPool:
            pass
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():  # deep in a compiler, for minutes
                process.kill()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _items(make_items: MakeItems) -> list[Item]:
    cases, workloads = make_items()
    return [*cases, *workloads]


def _begin() -> None:
    torch.backends.cudnn.benchmark = True  # as where it is measured
    from torch._inductor import config

    config.compile_threads = 1
    config.autotune_local_cache = False


def _compile(make_items: MakeItems, index: int, device: str, step_peers: Sequence[str]) -> None:
    item = _items(make_items)[index]
    if isinstance(item, Case):
        with item.precision():
            try:
                implementation = prepare(PEERS[PEER], item, item.make(device), device)
            except Missing:
                return
            for which in item.bytes:
                implementation.calls[which]()
    elif isinstance(item, Workload):
        torch.manual_seed(0)
        state = item.model().state_dict()
        for variant in variants(item, step_peers, device):
            if variant.peer == PEER and not variant.captured:
                torch._dynamo.reset()
                with tf32_allowed():
                    build_step(item, variant, state, device)()
    if device == "cuda":
        torch.cuda.synchronize()
