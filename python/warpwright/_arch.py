"""Which tensors and GPUs have a kernel in this build."""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from . import _C

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Types of tensors that our operators take; DTensor joins them with its sharding rules.
PLAIN: set[type] = {Tensor, torch.nn.Parameter, FakeTensor}


def accept(kind: type) -> None:
    """From now on tensors of the type ``kind`` count as plain ones."""
    PLAIN.add(kind)


@functools.cache
def built_archs() -> tuple[str, ...]:
    """As TORCH_CUDA_ARCH_LIST named them: "8.0", "8.0+PTX", "9.0a"; empty in a CPU-only build."""
    info = _C.build_info()
    return tuple(re.split(r"[;\s]+", info["archs"].strip())) if info["with_cuda"] else ()


def arch_runs(built: str, capability: tuple[int, int]) -> bool:
    """Whether code built for ``built`` runs on a GPU of ``capability``.

    Binary code runs on the same major and no older minor, "a" code on that architecture only, PTX on
    that one and all newer ones. An unknown name ("Hopper") counts as running.
    """
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", built)
    if match is None:
        return True
    major, minor = int(match[1]), int(match[2])
    if match[3] == "a":
        return capability == (major, minor)
    if match[4] and match[3] == "":
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


@functools.cache
def why_no_gpu_kernel(index: int) -> str | None:
    """Why CUDA device ``index`` has no kernel in this build; None if it has."""
    if not built_archs():
        return "this build of warpwright has no CUDA kernels"
    capability = torch.cuda.get_device_capability(index)
    if any(arch_runs(arch, capability) for arch in built_archs()):
        return None
    major, minor = capability
    return (
        f"{torch.cuda.get_device_name(index)} is sm_{major}{minor}, this build has "
        f"{', '.join(built_archs())}"
    )


def why_no_kernel(tensor: Tensor, any_dtype: bool = False) -> str | None:
    """Why no kernel of ours takes ``tensor``; None if one does."""
    if is_lazy(tensor):
        return "not initialised yet"
    if type(tensor) not in PLAIN:
        return f"a {type(tensor).__name__}, expected a plain tensor"
    if not any_dtype and tensor.dtype not in FLOATING:
        return f"no kernel for {str(tensor.dtype).removeprefix('torch.')}"
    if tensor.layout != torch.strided:
        return f"no kernel for the {str(tensor.layout).removeprefix('torch.')} layout"
    if tensor.is_nested:  # its type and layout are a plain tensor's
        return "no kernel for nested tensors"
    if tensor.device.type in ("cpu", "meta"):
        return None
    if tensor.device.type != "cuda":
        return f"no kernel for {tensor.device.type} devices"
    if torch.version.hip is not None:
        return "no kernel for ROCm devices"
    return why_no_gpu_kernel(tensor.device.index or 0)
