"""The facts of a GPU that choices of kernels use."""

from __future__ import annotations

from typing import Any

import torch

from . import _C


def current_gpu(device: torch.device) -> tuple[_C.DeviceInfo, str]:
    info = _C.DeviceInfo()
    if not torch.cuda.is_available():
        return info, f" (none here: assuming sm_{info.sm_arch} with {info.num_sms} SMs)"
    properties: Any = torch.cuda.get_device_properties(device)
    info.sm_arch = 10 * properties.major + properties.minor
    info.num_sms = properties.multi_processor_count
    info.smem_per_block = properties.shared_memory_per_block_optin
    info.l2_bytes = properties.L2_cache_size
    # Some versions of torch do not have all of these.
    info.clock_khz = getattr(properties, "clock_rate", info.clock_khz)
    info.memory_clock_khz = getattr(properties, "memory_clock_rate", info.memory_clock_khz)
    info.memory_bus_bits = getattr(properties, "memory_bus_width", info.memory_bus_bits)
    return info, f" ({properties.name}, sm_{info.sm_arch})"
