"""Errors that name the rank that failed.

When a rank raises or dies, the others fail in their next collective, with "Connection closed by peer"
or a timeout. `guard` turns that into `RankFailed`, with the rank and its error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

BEAT = 0.25  # seconds between two signs of life
SILENT = 8  # beats without a sign, after which a rank counts as dead
LIMIT = 20.0  # seconds to find out which rank failed


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

    The others notice a failed rank when its process ends, as an uncaught exception ends it. If the
    process lives on, or hangs, their collectives end by the group's timeout. The error then names the
    rank that raised, or says that none reported an error.

    Args:
        name: a prefix of the keys in the store.
    Raises:
        RankFailed: a collective failed here because another rank did.
    """
    watch = _Watch(name)
    watch.thread.start()
    try:
        yield
    except Exception as error:
        if not _is_broken_connection(error):
            watch.report(watch.rank, f"raised {type(error).__name__}: {error}")
            raise
        raise watch.failed() from error
    else:
        watch.finish()
    finally:
        watch.stop()


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
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._beat, name="warpwright-guard", daemon=True)

    def stop(self) -> None:
        self.end.set()
        self.thread.join(timeout=4 * BEAT)

    def _beat(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, with the rank that held it
            while not self.end.is_set():
                self.beating.add(f"{self.prefix}/beat/{self.rank}", 1)
                self.end.wait(BEAT)

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
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        seen = {rank: (self._count("beat", rank), 0) for rank in others}
        while time.monotonic() < end:
            if self.store.check([f"{self.prefix}/error"]):
                rank, _, what = self.store.get(f"{self.prefix}/error").decode().partition("\n")
                return RankFailed(int(rank), f"rank {rank} {what}")
            time.sleep(BEAT)
            for rank, (before, silent) in seen.items():
                now = self._count("beat", rank)
                seen[rank] = (now, silent + 1 if now == before else 0)
            for rank, (_, silent) in seen.items():
                if silent >= SILENT and not self._count("done", rank):
                    self.report(rank, f"died: no sign of life for {SILENT * BEAT:g} s")
        return RankFailed(None, f"a collective failed; no rank reported an error in {LIMIT:g} s")

    def _count(self, what: str, rank: int) -> int:
        return self.store.add(f"{self.prefix}/{what}/{rank}", 0)
