"""Timing: interleaved runs, median and quartiles, cold L2.

Two implementations that run one after the other in each round see the same clocks, temperature and
neighbours; the median over rounds drops the odd interruption.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

WARMUP_ROUNDS = 3
MIN_ROUNDS, MAX_ROUNDS = 7, 200


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, first and third quartile over the rounds."""

    ms: float
    ms_lo: float
    ms_hi: float
    rounds: int


def _summary(samples: list[float]) -> Timing:
    quartiles = statistics.quantiles(samples, n=4)
    return Timing(statistics.median(samples), quartiles[0], quartiles[2], len(samples))


class _Cuda:
    """Events around each call. The flush evicts L2 and gives the host time to run ahead, so that a
    short kernel is timed on the device and not on the way there."""

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush = torch.empty(max(4 * l2, 64 << 20), dtype=torch.int8, device="cuda")

    def run(
        self, functions: Mapping[str, Callable[[], object]], rounds: int
    ) -> dict[str, list[float]]:
        events: dict[str, list[Any]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                start = torch.cuda.Event(enable_timing=True)
                stop = torch.cuda.Event(enable_timing=True)
                self.flush.zero_()
                start.record()
                function()
                stop.record()
                events[name].append((start, stop))
        torch.cuda.synchronize()
        return {n: [a.elapsed_time(b) for a, b in pairs] for n, pairs in events.items()}


class _Cpu:
    def run(
        self, functions: Mapping[str, Callable[[], object]], rounds: int
    ) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                samples[name].append((time.perf_counter() - start) * 1e3)
        return samples


def interleaved(
    functions: Mapping[str, Callable[[], object]], device: str, seconds: float = 0.25
) -> dict[str, Timing]:
    """Times each function; the rounds share about `seconds` of measuring time."""
    clock = _Cuda() if device == "cuda" else _Cpu()
    warm = clock.run(functions, WARMUP_ROUNDS)
    round_ms = sum(min(samples) for samples in warm.values()) + 0.05 * len(functions)
    rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, int(seconds * 1e3 / round_ms)))
    return {name: _summary(samples) for name, samples in clock.run(functions, rounds).items()}


def peak_mib(function: Callable[[], object], device: str) -> float | None:
    """Memory that a call needs above what is allocated before it; None on the CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
