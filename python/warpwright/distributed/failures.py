"""Errors that name the rank that failed.

When a rank raises or dies, the others fail in their next collective, with "Connection closed by peer"
or a timeout. `guard` turns that into `RankFailed`, with the rank and its error.

NCCL has no such error: a kernel waits on the GPU for the rank that will not come. There the guard's thread
looks at the other ranks, too. It aborts the communicators, which ends the kernels, and raises in the
guarded thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

BEAT = 0.25  # seconds between two signs of life
SILENT = 8  # beats without a sign, after which a rank counts as dead
LIMIT = 20.0  # seconds to find out which rank failed
# With NCCL no collective has failed yet: a rank's threads may stand still while it compiles.
SILENT_NCCL = 80


class RankFailed(RuntimeError):
    """Another rank failed. ``rank`` is which, or None if that was not found."""

    def __init__(self, rank: int | None, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@contextlib.contextmanager
def guard(name: str = "guard") -> Iterator[None]:
    """``with guard(): train()`` ends with `RankFailed` on every rank but the one that failed.

    All ranks of the default process group enter it, after ``init_process_group``. A rank that raises
    writes its error to the group's store; the first one counts. To show that it lives, each rank has
    a thread that writes a counter every quarter of a second.

    With gloo the others notice a failed rank when its process ends, as an uncaught exception ends it.
    If the process lives on, or hangs, their collectives end by the group's timeout. The error then
    names the rank that raised, or says that none reported an error.

    With NCCL the block ends when its work on the GPU has. The others notice a rank that raised at
    once, and one without a sign of life after 20 s. Their process groups are then aborted.

    Args:
        name: a prefix of the keys in the store.
    Raises:
        RankFailed: a collective failed here because another rank did.
    """
    watch = _Watch(name)
    watch.thread.start()
    try:
        yield
        if watch.nccl:
            torch.cuda.synchronize()
    except Exception as error:
        if watch.failure is not None:
            raise watch.failure from error
        if not _is_broken_connection(error):
            watch.report(watch.rank, f"raised {type(error).__name__}: {error}")
            raise
        raise watch.failed() from error
    else:
        watch.finish()
    finally:
        watch.stop()


class _Stopped(Exception):
    """Raised in the guarded thread by the guard's own."""


def _is_broken_connection(error: Exception) -> bool:
    """Whether a collective failed. Gloo raises a RuntimeError that names its source file."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


class _Watch:
    """This rank's signs of life in the store, and what the store says of the others."""

    entered = 0  # blocks so far; the same on all ranks

    def __init__(self, name: str) -> None:
        _Watch.entered += 1
        self.prefix = f"warpwright/{name}/{self.entered}"
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        # A connection serves one thread at a time.
        store: Any = _get_default_store()
        self.store, self.beating = store.clone(), store.clone()
        self.nccl = "nccl" in str(dist.get_backend_config())
        self.failure: RankFailed | None = None  # of another rank, found by the thread
        self.guarded = threading.get_ident()
        self.end, self.stopping = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self._beat, name="warpwright-guard", daemon=True)

    def stop(self) -> None:
        with self.stopping:
            self.end.set()
            _raise_in(self.guarded, None)
        self.thread.join(timeout=4 * BEAT)

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, with the rank that held it
            seen = self._others()
            while not self.end.is_set():
                self.beating.add(f"{self.prefix}/beat/{self.rank}", 1)
                if self.nccl and self.failure is None:
                    failure = self._look(self.beating, seen, SILENT_NCCL)
                    if failure is not None and failure.rank != self.rank:
                        self.failure = failure
                        self._interrupt()
                self.end.wait(BEAT)

    def _interrupt(self) -> None:
        with self.stopping:
            if self.end.is_set():
                return
            _raise_in(self.guarded, _Stopped)
        from torch.distributed.distributed_c10d import _abort_process_group

        _abort_process_group()

    def report(self, rank: int, what: str) -> None:
        """Writes what became of a rank, unless something is written already."""
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(f"{self.prefix}/error", "", f"{rank}\n{what}")

    def finish(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.store.add(f"{self.prefix}/done/{self.rank}", 1)

    def failed(self) -> RankFailed:
        """Waits until the store has an error, or a rank has written no counter for too long."""
        try:
            return self._failed()
        except RuntimeError as error:
            return RankFailed(None, f"a rank failed, and the group's store with it: {error}")

    def _failed(self) -> RankFailed:
        end = time.monotonic() + LIMIT
        seen = self._others()
        while time.monotonic() < end:
            failure = self._look(self.store, seen, SILENT)
            if failure is not None:
                return failure
            time.sleep(BEAT)
        return RankFailed(None, f"a collective failed; no rank reported an error in {LIMIT:g} s")

    def _others(self) -> dict[int, tuple[int, int]]:
        """Per rank: its counter, and for how many looks it has stood still."""
        return {rank: (0, 0) for rank in range(self.ranks) if rank != self.rank}

    def _look(
        self, store: Any, seen: dict[int, tuple[int, int]], silent_looks: int
    ) -> RankFailed | None:
        """Another rank's error. There is one, too, if a rank's counter has not moved for long."""
        if store.check([f"{self.prefix}/error"]):
            rank, _, what = store.get(f"{self.prefix}/error").decode().partition("\n")
            return RankFailed(int(rank), f"rank {rank} {what}")
        for rank, (before, silent) in seen.items():
            now = store.add(f"{self.prefix}/beat/{rank}", 0)
            seen[rank] = (now, silent + 1 if now == before else 0)
            entered = now > 0 or not self.nccl  # with NCCL a rank may still be on its way
            if (
                entered
                and silent >= silent_looks
                and not store.add(f"{self.prefix}/done/{rank}", 0)
            ):
                what = f"died: no sign of life for {silent_looks * BEAT:g} s"
                store.compare_set(f"{self.prefix}/error", "", f"{rank}\n{what}")
        return None


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raises ``error`` in another thread, at its next Python instruction; None takes that back."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error is not None else None
    )
