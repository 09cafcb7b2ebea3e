"""Times a call on all ranks: medians of the slowest rank, and the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Case:
    """``backward`` gets what ``forward`` returns; None: ``forward`` is the whole step.

    ``held_bytes`` says what the case holds outside of torch's caching allocator.
    """

    scheme: str
    impl: str
    ranks: int  # that share the work; each rank of several may also work alone
    forward: Callable[[], Any]
    backward: Callable[[Any], Any] | None = None
    held_bytes: Callable[[], int] | None = None


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: Case, device: torch.device, rounds: int, warm: int = 3) -> dict[str, Any]:
    """The row of a case. Each time is that of the slowest rank in its round."""
    peak = _peak_mib(case, device)
    times: list[tuple[float, float]] = []
    for i in range(rounds + warm):
        dist.barrier()
        wait(device)
        begin = time.perf_counter()
        out = case.forward()
        wait(device)
        middle = time.perf_counter()
        if case.backward is not None:
            case.backward(out)
            wait(device)
        del out
        end = time.perf_counter()
        slowest = torch.tensor((middle - begin, end - middle), device=device, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if i >= warm:
            times.append((slowest[0].item() * 1e3, slowest[1].item() * 1e3))
    totals = [sum(pair) for pair in times]
    row: dict[str, Any] = {"scheme": case.scheme, "impl": case.impl, "ranks": case.ranks}
    row |= {"ms": median(totals), "ms_lo": min(totals), "ms_hi": max(totals), "rounds": rounds}
    if case.backward is not None:
        row["forward_ms"] = median(pair[0] for pair in times)
        row["backward_ms"] = median(pair[1] for pair in times)
    return row | {"peak_mib": peak}


def _peak_mib(case: Case, device: torch.device) -> float | None:
    """Of one step, on the rank that holds most; None on CPUs."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    out = case.forward()
    if case.backward is not None:
        case.backward(out)
    wait(device)
    held = case.held_bytes() if case.held_bytes is not None else 0
    peak = torch.tensor((torch.cuda.max_memory_allocated(device) + held) / 2**20, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return round(peak.item(), 1)
