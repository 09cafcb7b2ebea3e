"""Checks of a measurement: random data, agreeing results, clocks, and kernels that really ran."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ..testing import max_error
from .cases import Inputs

# Two results may differ by the effect of another summation order in the dtype, and by our or native's
# error against float64. The slack is for errors measured on a part of the data. An error counts for
# no more than the cap.
SLACK = 4.0
ORDER = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CAP = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# nvidia-smi's clock event reasons that mean "slower than this GPU can run".
THROTTLE_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal (software)",
    0x0000000000000040: "thermal (hardware)",
    0x0000000000000080: "power brake",
}


class Refused(ValueError):
    """The numbers would be meaningless. The message says why."""


def refuse_constant(inputs: Inputs) -> None:
    """Refuses constant data: zeros need less power, so a GPU runs faster than on real data."""
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 1:
            low, high = torch.aminmax(x.detach().float() if x.itemsize == 1 else x.detach())
            if bool(low == high):
                raise Refused(f"input {name!r} is the constant {float(low):g}")


def refuse_empty_results(values: Iterable[Tensor | None]) -> None:
    """Refuses results that are all zero or not finite: they do not come from such data."""
    for i, x in enumerate(values):
        if x is None or not x.numel():
            continue
        if not bool(torch.isfinite(x).all()):
            raise Refused(f"result {i} is not finite")
        if x.numel() > 1 and not bool(x.any()):
            raise Refused(f"result {i} is all zeros")


def relative(value: Tensor, reference: Tensor, l2: bool = False) -> float:
    """Largest difference over the largest |reference|; or the L2 norm of one over the other's."""
    if l2:
        reference = reference.detach().double()
        norm = float(reference.norm())
        return float((value.detach().double() - reference).norm()) / (norm or 1.0)
    scale = float(reference.detach().abs().max()) if reference.numel() else 0.0
    return max_error(value, reference) / (scale or 1.0)


def corner(value: Tensor, shape: torch.Size) -> Tensor:
    return value[tuple(slice(0, n) for n in shape)]


def disagreement(ours: Tensor, theirs: Tensor, error: float, l2: bool = False) -> str | None:
    """Why the two results cannot both be right; None if they can. `error`: ours or native's."""
    found = relative(ours.double(), theirs, l2)
    dtype = theirs.dtype
    allowed = 0.0  # codes are equal
    if dtype.is_floating_point:
        allowed = SLACK * (min(error, CAP[dtype]) + torch.finfo(dtype).eps) + ORDER[dtype]
    if found <= allowed:
        return None
    return f"differs from warpwright's result by {found:.1e}, expected at most {allowed:.1e}"


class Clocks:
    """Samples of SM clock and throttle reasons while a GPU works; empty without nvidia-smi."""

    FIELDS = "clocks.sm,clocks_event_reasons.active,power.draw,temperature.gpu"

    def __init__(self, device: str, every_ms: int = 200) -> None:
        self.samples: list[tuple[float, float, int, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if device != "cuda":
            return
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [
                    "nvidia-smi",
                    f"--id={_physical_index()}",
                    f"--query-gpu={self.FIELDS}",
                    "--format=csv,noheader,nounits",
                    f"--loop-ms={every_ms}",
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                clock, reasons, power, temperature = (part.strip() for part in line.split(","))
                self.samples.append(
                    (
                        time.monotonic(),
                        float(clock),
                        int(reasons, 16),
                        float(power),
                        float(temperature),
                    )
                )

    def since(self, start: float) -> dict[str, Any]:
        """{"sm_mhz": median, "throttled": [reason …]} over the samples after `start`."""
        found = [s for s in self.samples if s[0] >= start]
        if not found:
            return {"sm_mhz": None, "throttled": []}
        clocks = sorted(s[1] for s in found)
        # A reason in few samples is a transition, not a state.
        reasons = [
            name
            for bit, name in THROTTLE_REASONS.items()
            if sum(bool(s[2] & bit) for s in found) > len(found) / 4
        ]
        return {"sm_mhz": clocks[len(clocks) // 2], "throttled": reasons}

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process = None


def _physical_index() -> str:
    """nvidia-smi counts all GPUs, CUDA those in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = torch.cuda.current_device()
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


@contextlib.contextmanager
def clocks(device: str) -> Iterator[Clocks]:
    sampler = Clocks(device)
    try:
        yield sampler
    finally:
        sampler.stop()


OWN_KERNEL, OWN_OP = "warpwright::", "warpwright::"


@dataclass(frozen=True)
class Ran:
    """The kernels of a call: the share of its time in ours, and the names of the others."""

    own_share: float
    foreign: tuple[str, ...]

    @property
    def path(self) -> str:
        if self.own_share >= 0.995:
            return "warpwright"
        if self.own_share == 0:
            return "native fallback"
        return f"warpwright {self.own_share:.0%}"


def what_ran(call: Callable[[], object], device: str) -> Ran:
    """Profiles one call. On the CPU an op of ours counts as one kernel: the share is 0 or 1."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with quiet_profiler(), profile(activities=activities, acc_events=True) as profiler:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    if device != "cuda":
        return Ran(float(any(e.name.startswith(OWN_OP) for e in profiler.events())), ())
    times: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type.name == "CUDA" and "Memset" not in event.name:
            times[event.name] = times.get(event.name, 0.0) + event.device_time_total
    total = sum(times.values())
    own = sum(t for name, t in times.items() if OWN_KERNEL in name)
    foreign = sorted((n for n in times if OWN_KERNEL not in n), key=lambda n: -times[n])
    return Ran(own / total if total else 0.0, tuple(name[:120] for name in foreign[:3]))


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Without a GPU, hides the profiler's error message that it found none."""
    if not torch.cuda.is_available():
        os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    yield
