"""Timing: interleaved runs, median and quartiles, cold L2, the ratio with its confidence interval.

Implementations that run one after the other in each round see the same clocks, temperature and
neighbours; the median over rounds drops the odd interruption.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

WARMUP_ROUNDS = 3
WARMUP_SECONDS = 0.025
MIN_ROUNDS, MAX_ROUNDS = 9, 200
LATE = 3.0  # times the seconds asked for: too slow to be measured again
PATIENCE_SECONDS = 10  # for MIN_ROUNDS; what takes longer gets three
# First and last third of the rounds may differ by this much, or by what the clock can't resolve.
STEADY = {"cuda": 0.03, "cpu": 0.10}
RESOLUTION_MS = 0.002
RESAMPLES = 1000


@dataclass(frozen=True)
class Timing:
    """Milliseconds: median, first and third quartile over the rounds."""

    ms: float
    ms_lo: float
    ms_hi: float
    rounds: int
    samples: tuple[float, ...] = field(default=(), repr=False)
    steady: bool = True

    def fields(self, ours: Timing | None, is_ours: bool) -> dict[str, Any]:
        """As a row of a record has them; the ratio is this time over `ours`."""
        found: dict[str, Any] = {
            "ms": round(self.ms, 5),
            "ms_lo": round(self.ms_lo, 5),
            "ms_hi": round(self.ms_hi, 5),
            "rounds": self.rounds,
            "steady": self.steady,
        }
        if ours is not None and not is_ours:
            ratio = (round(r, 4) for r in ratio_interval(self, ours))
            found |= dict(zip(("ratio", "ratio_lo", "ratio_hi"), ratio, strict=True))
        return found


def is_steady(samples: list[float], tolerance: float) -> bool:
    """Whether the first and the last third of the rounds have the same median."""
    third = max(1, len(samples) // 3)
    first, last = statistics.median(samples[:third]), statistics.median(samples[-third:])
    return abs(first - last) <= max(tolerance * statistics.median(samples), RESOLUTION_MS)


def _summary(samples: list[float], tolerance: float) -> Timing:
    quartiles = statistics.quantiles(samples, n=4)
    return Timing(
        statistics.median(samples),
        quartiles[0],
        quartiles[2],
        len(samples),
        tuple(samples),
        is_steady(samples, tolerance),
    )


def ratio_interval(theirs: Timing, ours: Timing) -> tuple[float, float, float]:
    """theirs.ms / ours.ms with its 95 % interval: whole rounds drawn again, both medians anew."""
    a, b = torch.tensor([theirs.samples, ours.samples], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(a), (RESAMPLES, len(a)), generator=generator)
    ratios = a[drawn].quantile(0.5, dim=1) / b[drawn].quantile(0.5, dim=1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return theirs.ms / ours.ms, low, high


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
    """Times each function; the rounds share about `seconds` of measuring time.

    Where the first and the last third of the rounds disagree it is measured once more, time
    allowing; what still disagrees is marked.
    """
    clock = _Cuda() if device == "cuda" else _Cpu()
    start = time.perf_counter()
    warm = clock.run(functions, WARMUP_ROUNDS)
    while time.perf_counter() - start < WARMUP_SECONDS:
        warm = clock.run(functions, WARMUP_ROUNDS)
    round_ms = sum(min(samples) for samples in warm.values()) + 0.05 * len(functions)
    fewest = MIN_ROUNDS if MIN_ROUNDS * round_ms < 1e3 * PATIENCE_SECONDS else 3
    rounds = min(MAX_ROUNDS, max(fewest, int(seconds * 1e3 / round_ms)))
    timings: dict[str, Timing] = {}
    for _ in range(2):
        start = time.perf_counter()
        samples = clock.run(functions, rounds)
        late = time.perf_counter() - start > LATE * max(seconds, 0.05)
        timings = {name: _summary(values, STEADY[device]) for name, values in samples.items()}
        if late or rounds < MIN_ROUNDS or all(timing.steady for timing in timings.values()):
            break
    return timings


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
