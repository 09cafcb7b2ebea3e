"""``warpwright doctor``: what runs on this machine, a test against native torch, and advice."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.nn import functional as native

from . import functional as ours
from ._arch import built_archs, why_no_gpu_kernel
from .explain import explain
from .info import info
from .testing import compare_with_native

__all__ = ["advice", "calls", "check", "run"]

Call = tuple[list[Tensor], dict[str, Any]]


def calls(device: str) -> dict[str, Call]:
    """A small call of each op that ``native_function`` has: its tensors and its other arguments."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, requires_grad=True)

    running = [torch.zeros(8, device=device), torch.ones(8, device=device)]
    labels = torch.arange(16, device=device) % 10
    tokens = torch.arange(32, device=device).view(2, 16) % 7
    return {
        **{op: ([random(64, 256)], {}) for op in ("relu", "gelu", "silu", "sigmoid", "tanh")},
        "conv2d": ([random(4, 8, 16, 16), random(16, 8, 3, 3), random(16)], {"padding": 1}),
        "conv_transpose2d": (
            [random(4, 8, 16, 16), random(8, 16, 2, 2), random(16)],
            {"stride": 2},
        ),
        "batch_norm": ([random(4, 8, 16, 16), *running, random(8), random(8)], {}),
        "layer_norm": ([random(32, 64)], {"normalized_shape": [64], "weight": random(64)}),
        "rms_norm": ([random(32, 64)], {"normalized_shape": [64], "weight": random(64)}),
        "group_norm": ([random(4, 8, 16, 16)], {"num_groups": 2, "weight": random(8)}),
        "instance_norm": ([random(4, 8, 16, 16)], {}),
        "softmax": ([random(32, 64)], {"dim": 1}),
        "log_softmax": ([random(4, 8, 16, 16)], {"dim": 1}),
        "embedding": ([tokens, random(10, 64)], {"padding_idx": 3}),
        "max_pool2d": ([random(4, 8, 16, 16)], {"kernel_size": 2}),
        "adaptive_avg_pool2d": ([random(4, 8, 16, 16)], {"output_size": 1}),
        "linear": ([random(64, 128), random(96, 128), random(96)], {}),
        "cross_entropy": ([random(16, 10), labels], {}),
        "scaled_dot_product_attention": ([random(2, 4, 32, 16) for _ in range(3)], {}),
        **{op: ([random(32, 64)], {"dim": 1}) for op in REDUCTIONS},
        **{op: ([random(32, 64)], {"dim": 1}) for op in SCANS},
        **{op: ([random(64, 128), random(96, 128), random(96)], {}) for op in LINEAR},
        **{op: ([random(32, 64), random(32, 64)], {}) for op in GATED},
        "layer_scale_add": (
            [random(4, 8, 16, 16), random(4, 8, 16, 16), random(8, 1, 1), random(4, 1, 1, 1)],
            {},
        ),
        "batch_norm_relu": ([random(4, 8, 16, 16), *running, random(8), random(8)], {}),
        "relu_max_pool2d": ([random(4, 8, 16, 16)], {"kernel_size": 2}),
        "linear_cross_entropy": ([random(16, 32), random(10, 32), labels], {}),
    }


# Functions of torch.
REDUCTIONS = ("sum", "mean", "amax", "logsumexp", "var", "std")
SCANS = ("cumsum", "cumprod", "logcumsumexp")
LINEAR = ("linear_relu", "linear_gelu", "linear_silu")
GATED = ("swiglu", "geglu")
# Ops that native computes by several functions.
COMPOSED: dict[str, Callable[..., Tensor]] = {
    "linear_relu": lambda x, weight, bias: native.relu(native.linear(x, weight, bias)),
    "linear_gelu": lambda x, weight, bias: native.gelu(native.linear(x, weight, bias)),
    "linear_silu": lambda x, weight, bias: native.silu(native.linear(x, weight, bias)),
    "swiglu": lambda gate, up: native.silu(gate) * up,
    "geglu": lambda gate, up: native.gelu(gate) * up,
    "layer_scale_add": lambda x, residual, scale, of_samples: residual + scale * x * of_samples,
    "batch_norm_relu": lambda *arguments: native.relu(native.batch_norm(*arguments)),
    "relu_max_pool2d": lambda x, kernel_size: native.max_pool2d(native.relu(x), kernel_size),
    "linear_cross_entropy": lambda x, weight, target: native.cross_entropy(x @ weight.T, target),
}


def native_function(op: str) -> Callable[..., Tensor]:
    """What computes the op without warpwright."""
    if op in COMPOSED:
        return COMPOSED[op]
    return getattr(torch if op in REDUCTIONS or op in SCANS else native, op)


def check(op: str, call: Call) -> str | None:
    """Why the op's result or gradients are worse than native's; None if they are not."""
    try:
        compare_with_native(_of_values(getattr(ours, op)), _of_values(native_function(op)), *call)
    except Exception as error:  # a kernel that cannot run at all is a finding too
        return str(error) or type(error).__name__
    return None


def _of_values(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function with a contiguous result: native's backends differ in their memory order."""
    return lambda *args, **kwargs: function(*args, **kwargs).contiguous()


def advice() -> list[str]:
    """Sentences about what keeps this machine from its fastest kernels."""
    found = list(info()["warnings"])
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        found.append("this machine has an NVIDIA GPU, but the installed torch is a CPU-only build")
    if (
        torch.version.cuda is not None
        and shutil.which("nvidia-smi")
        and not torch.cuda.is_available()
    ):
        found.append("torch finds no GPU though there is a driver: see `nvidia-smi`")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        hopper = any(arch.startswith("9.0a") for arch in built_archs())
        if capability == (9, 0) and not hopper and why_no_gpu_kernel(index) is None:
            found.append("build with TORCH_CUDA_ARCH_LIST=9.0a for the kernels of Hopper")
    if os.environ.get("WARPWRIGHT_PATH"):
        found.append(
            f"WARPWRIGHT_PATH={os.environ['WARPWRIGHT_PATH']} restricts the choice of kernels"
        )
    if torch.get_num_threads() == 1 and (os.cpu_count() or 1) > 1:
        found.append(f"torch uses 1 thread of {os.cpu_count()} cores (OMP_NUM_THREADS)")
    return found


def run(options: SimpleNamespace) -> int:
    """Returns 0 if every op agrees with native, 1 if not, 2 if the device is not there."""
    console = Console(highlight=False)
    if options.device == "cuda" and not torch.cuda.is_available():
        console.print("--device: got cuda, but torch finds no CUDA device")
        return 2
    console.print(info())
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    devices = [options.device] if options.device else devices
    start = time.perf_counter()
    # Ops that take the same path share a line.
    lines: dict[tuple[str, str, str], list[str]] = {}
    for device in devices:
        for op, call in _strictly(functools.partial(calls, device)).items():
            why = _strictly(functools.partial(check, op, call))
            role_and_path = explain(op, *call[0], **call[1]).splitlines()[1]
            path = role_and_path.split("  ")[-1].strip()
            verdict = "agrees" if why is None else f"differs: {why}"
            lines.setdefault((device, verdict, path), []).append(op)
    console.print()
    console.print(_table(lines, len(devices) > 1))
    checks = sum(map(len, lines.values()))
    failures = sum(len(ops) for (_, verdict, _), ops in lines.items() if verdict != "agrees")
    words = f"{failures} of {checks} checks failed" if failures else f"all {checks} checks passed"
    console.print(f"{words} in {time.perf_counter() - start:.1f} s")
    for sentence in advice():
        console.print(Text(f"advice: {sentence}", "yellow"), soft_wrap=True)
    return 1 if failures else 0


def _table(lines: dict[tuple[str, str, str], list[str]], with_device: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("op", *(["device"] if with_device else []), "with native", "what runs"):
        table.add_column(column, overflow="fold")
    for (device, verdict, path), ops in lines.items():
        style = "green" if verdict == "agrees" else "red"
        table.add_row(
            ", ".join(ops), *([device] if with_device else []), Text(verdict, style), Text(path)
        )
    return table


def _strictly(function: Callable[[], Any]) -> Any:
    """Runs it from a fixed seed and without TF32, and restores both."""
    switches = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return function()
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = switches
