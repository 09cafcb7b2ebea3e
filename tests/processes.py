"""Worlds of processes for tests of ``torch.distributed``: each rank is a process, with gloo on the CPU or NCCL on a GPU.

A test sends a function to all ranks and gets one result per rank::

    def total(rank, x):                      # at the top of a test file, so that it pickles
        x = x * (rank + 1)
        dist.all_reduce(x)
        return x

    def test_total(worlds):                  # the fixture is in conftest.py
        for y in worlds(3).run(total, torch.ones(2)):
            assert y.tolist() == [6, 6]

With NCCL rank r uses GPU r. Its arguments come there, new tensors are made there, and its results
come back to the CPU: a function needs no word about devices.

A file starts each world once. A rank that raises, dies or hangs ends the test with a `RankError` that
names the rank. The world then starts again for the next case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from gpu_sharing import without_mps

START_LIMIT = 120.0  # seconds, on a machine with more work than cores
CASE_LIMIT = 60.0
GROUP_TIMEOUT = 30.0  # of a collective
GRACE = 1.0  # for the other ranks, after one has failed


class RankError(AssertionError):
    """A rank raised, died or hung; the message has the rank and its traceback."""


class Outcome(NamedTuple):
    """What became of one rank: exactly one of the last three is set if it failed."""

    rank: int
    value: Any = None
    error: str | None = None  # the traceback of what it raised
    exit_code: int | None = None  # of a process that ended; -9 is SIGKILL
    hung: str | None = None  # the stacks of a process that did not answer in time

    @property
    def failed(self) -> bool:
        return (self.error, self.exit_code, self.hung) != (None, None, None)

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.exit_code is not None:
            return f"rank {self.rank} died with exit code {self.exit_code}"
        if self.hung is not None:
            return f"rank {self.rank} did not answer in time:\n{self.hung}"
        return f"rank {self.rank} answered"


def _serve(rank: int, size: int, backend: str, folder: str, pipe: Any) -> None:
    """A rank's life: answers cases until the test closes the pipe."""
    import torch
    import torch.distributed as dist

    stacks = os.open(Path(folder, f"stacks{rank}"), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(size)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.set_default_device(device)
        torch.backends.cudnn.allow_tf32 = False  # as in the process of the tests
    dist.init_process_group(
        backend,
        device_id=device,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT),
    )
    pipe.send_bytes(pickle.dumps((None, None)))
    while True:
        try:
            case = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args, kwargs = _moved(pickle.loads(case), device)
            torch.manual_seed(0)
            answer = pickle.dumps((_moved(function(rank, *args, **kwargs), "cpu"), None))
        except Exception:
            answer = pickle.dumps((None, traceback.format_exc()))
        pipe.send_bytes(answer)


def _moved(tree: Any, device: Any) -> Any:
    """The same containers with their tensors and modules on ``device``; None moves nothing."""
    import torch
    from torch.utils._pytree import tree_map

    def move(x: Any) -> Any:
        if isinstance(x, torch.nn.Module):
            return x.to(device)
        if isinstance(x, torch.Tensor):
            return x.detach().to(device).requires_grad_(x.requires_grad)
        return x

    return tree if device is None else tree_map(move, tree)


def _context(backend: str) -> Any:
    """A fork server that has imported torch: a rank then starts in 0.1 s and inherits no thread.

    A process whose parent has touched CUDA cannot use it, so NCCL's ranks start from nothing.
    """
    if backend == "nccl":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "warpwright", "pytest"])
    return context


class World:
    """``size`` ranks of one process group. Started at the first case, and again after a failure."""

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.processes: list[Any] = []

    def run(self, function: Any, *args: Any, limit: float = CASE_LIMIT, **kwargs: Any) -> list[Any]:
        """``function(rank, *args, **kwargs)`` on every rank; the values in the order of ranks.

        Everything is pickled. ``limit``: seconds. Raises `RankError` if a rank fails; the first one
        to fail stands first in the message.
        """
        outcomes = self._answers(function, args, kwargs, limit, GRACE)
        failures = [str(outcome) for outcome in outcomes if outcome.failed]
        if failures:
            raise RankError(f"{function.__name__} on {self.size} ranks: " + "\n".join(failures))
        return [outcome.value for outcome in sorted(outcomes)]

    def outcomes(
        self, function: Any, *args: Any, limit: float = CASE_LIMIT, **kwargs: Any
    ) -> list[Outcome]:
        """As `run`, for tests of failures: what became of each rank, in the order of ranks."""
        return sorted(self._answers(function, args, kwargs, limit, limit))

    def _start(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks")
        context = _context(self.backend)
        self.pipes = []
        # A rank that hangs is killed, and a client of MPS that dies at work ends the others.
        with mock.patch.dict(os.environ, without_mps(), clear=True):
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                arguments = (rank, self.size, self.backend, self.folder, theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.pipes.append(ours)
                self.processes.append(process)
        outcomes = self._collect(START_LIMIT, GRACE)
        if any(outcome.failed for outcome in outcomes):
            self.close()
            raise RankError("start: " + "\n".join(str(o) for o in outcomes if o.failed))

    def _answers(
        self, function: Any, args: Any, kwargs: Any, limit: float, grace: float
    ) -> list[Outcome]:
        if not self.processes:
            self._start()
        case = pickle.dumps(_moved((function, args, kwargs), "cpu"))
        for pipe in self.pipes:
            pipe.send_bytes(case)
        outcomes = self._collect(limit, grace)
        if any(outcome.failed for outcome in outcomes):
            self.close()  # collectives that one rank has not joined would meet the next case's
        return outcomes

    def _collect(self, limit: float, grace: float) -> list[Outcome]:
        """One outcome per rank, in the order in which they came."""
        outcomes: list[Outcome] = []
        waiting = dict(zip(self.pipes, range(self.size), strict=True))
        end = time.monotonic() + limit
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                outcomes.append(self._outcome(waiting.pop(pipe), pipe))
                if outcomes[-1].failed:
                    end = min(end, time.monotonic() + grace)
        outcomes += [Outcome(rank, hung=self._stacks(rank)) for rank in waiting.values()]
        return outcomes

    def _outcome(self, rank: int, pipe: Any) -> Outcome:
        try:
            value, error = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join()
            return Outcome(rank, exit_code=self.processes[rank].exitcode)
        return Outcome(rank, value, error)

    def _stacks(self, rank: int) -> str:
        """The Python stacks of a rank that hangs."""
        file = Path(self.folder, f"stacks{rank}")
        process = self.processes[rank]
        if not file.exists() or process.pid is None:
            return "(still starting)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        end = time.monotonic() + 1
        while not file.stat().st_size and time.monotonic() < end:
            time.sleep(0.01)
        return file.read_text()

    def close(self) -> None:
        """Ends the ranks."""
        if not self.processes:
            return
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes = []
        shutil.rmtree(self.folder, ignore_errors=True)


def _need_gpus(count: int) -> None:
    import pytest
    import torch

    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


class Worlds:
    """``worlds(n)``: the world of n ranks, the same object at each call. ``device``: of its tensors."""

    def __init__(self, backend: str = "gloo") -> None:
        self.backend, self.device = backend, "cuda" if backend == "nccl" else "cpu"
        self.started: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        if self.backend == "nccl":
            _need_gpus(size)
        return self.started.setdefault(size, World(size, self.backend))

    def close(self) -> None:
        for world in self.started.values():
            world.close()
