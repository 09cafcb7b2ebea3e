"""What a call does on the GPU, and that it waits for nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def launches(function: Callable[[], object]) -> list[str]:
    """Kernels, copies and fills of a second call, which may not synchronise."""
    function()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return [event.name for event in trace.events() if event.device_type.name == "CUDA"]
