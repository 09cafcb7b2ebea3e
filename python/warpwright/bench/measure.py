"""Timing: interleaved runs, median and quartiles, cold L2, the ratio with its confidence interval.

Implementations that run one after the other in each round see the same clocks, temperature and
neighbours; the median over rounds drops the odd interruption.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# No GPU's clock passes 2 GHz by much: a wait of so many cycles lasts about a millisecond or longer.
CYCLES_PER_MS = 2_000_000
LONGEST_LEAD_MS = 2.0
RESAMPLES = 1000


@contextlib.contextmanager
def tf32_allowed(wanted: bool = True) -> Iterator[None]:
    """Inside, float32 products may round to TF32, if that is `wanted`; else all stays as it is."""
    if not wanted:
        yield
        return
    previous = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = previous


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
        """The fields of a record's row. The ratio is this time over `ours`."""
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
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(
        statistics.median(samples),
        quartiles[0],
        quartiles[2],
        len(samples),
        tuple(samples),
        is_steady(samples, tolerance),
    )


def ratio_interval(theirs: Timing, ours: Timing) -> tuple[float, float, float]:
    """theirs.ms / ours.ms with its 95 % interval, by a bootstrap over whole rounds."""
    a, b = torch.tensor([theirs.samples, ours.samples], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(a), (RESAMPLES, len(a)), generator=generator)
    ratios = a[drawn].quantile(0.5, dim=1) / b[drawn].quantile(0.5, dim=1)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return theirs.ms / ours.ms, low, high


class _Cuda:
    """Events around each call, L2 flushed before it.

    With `hide_host` the device waits before each call while the host launches it. The time is then the
    device's work only, however slow the host is.
    """

    def __init__(self, hide_host: bool) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.flush = torch.empty(max(4 * l2, 64 << 20), dtype=torch.int8, device="cuda")
        self.hide_host = hide_host
        self.host_ms: dict[str, float] = {}  # the quickest launch of each function so far

    def run(
        self, functions: Mapping[str, Callable[[], object]], rounds: int
    ) -> dict[str, list[float]]:
        events: dict[str, list[Any]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                start = torch.cuda.Event(enable_timing=True)
                stop = torch.cuda.Event(enable_timing=True)
                self.flush.zero_()
                if self.hide_host and name in self.host_ms:
                    lead = min(1.25 * self.host_ms[name], LONGEST_LEAD_MS)
                    torch.cuda._sleep(int(lead * CYCLES_PER_MS))
                start.record()
                began = time.perf_counter()
                function()
                host_ms = (time.perf_counter() - began) * 1e3
                stop.record()
                self.host_ms[name] = min(host_ms, self.host_ms.get(name, host_ms))
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
    functions: Mapping[str, Callable[[], object]],
    device: str,
    seconds: float = 0.25,
    hide_host: bool = True,
) -> dict[str, Timing]:
    """Times each function; the rounds share about `seconds` of measuring time.

    On a GPU it is the device's time; with `hide_host=False` it includes waits for the host's launches.
    If the first and the last third of the rounds disagree, they are measured again, if time allows.
    A function that still disagrees is marked as unsteady.
    """
    clock = _Cuda(hide_host) if device == "cuda" else _Cpu()
    start = time.perf_counter()
    took: list[float] = []
    while len(took) < WARMUP_ROUNDS or time.perf_counter() - start < WARMUP_SECONDS:
        before = time.perf_counter()
        clock.run(functions, rounds=1)
        took.append(time.perf_counter() - before)
    round_ms = 1e3 * max(min(took), 1e-6)
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


def samples(function: Callable[[], object], device: str, rounds: int) -> list[float]:
    """Milliseconds per call, the host's launches included."""
    clock = _Cuda(hide_host=False) if device == "cuda" else _Cpu()
    return clock.run({"": function}, rounds)[""]


def pooled(taken: Sequence[float], device: str) -> Timing:
    """The timing of samples taken over several turns; drift between turns makes it unsteady."""
    return _summary(list(taken), STEADY[device])


def peak_mib(function: Callable[[], object], device: str) -> float | None:
    """MiB that a call allocates at its peak, above the previous allocations; None on the CPU."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
