"""Native ops instead of ours on a GPU that this build has no kernel for.

The GPUs are checked when CUDA starts, not at import: the import makes no CUDA call, so a process may
still fork afterwards. If every GPU has kernels, calls stay direct.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._arch import why_no_gpu_kernel
from ._catalog import NATIVE_OPERATORS


def watch_gpus() -> None:
    """Checks the GPUs as soon as this process uses CUDA."""
    torch.cuda._lazy_call(check_gpus)


def check_gpus() -> None:
    """Routes calls on GPUs without a kernel to native, and warns once."""
    reasons = {i: why_no_gpu_kernel(i) for i in range(torch.cuda.device_count())}
    without = frozenset(i for i, reason in reasons.items() if reason is not None)
    if not without:
        return
    for name in NATIVE_OPERATORS:
        setattr(_ops.ops, name, _routed(name, without))
    why = "; ".join(dict.fromkeys(r for r in reasons.values() if r is not None))
    warnings.warn(
        f"warpwright: {why}. Native torch ops run there instead. To build for this GPU: "
        "`TORCH_CUDA_ARCH_LIST=<its arch> pip install --no-build-isolation -e .`",
        stacklevel=2,
    )


def _routed(name: str, without: frozenset[int]) -> Callable[..., Any]:
    ours, theirs = getattr(_ops.ops, name), NATIVE_OPERATORS[name]

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.is_cuda and input.device.index in without:
            return theirs(input, *args, **kwargs)
        return ours(input, *args, **kwargs)

    return call
