"""The build's properties, and which of its kernels run on this machine."""

from __future__ import annotations

import json
import os
import platform
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from ._arch import built_archs, why_no_gpu_kernel
from ._text import plain_text
from ._version import __version__

if TYPE_CHECKING:  # imported when the table is printed
    from types import SimpleNamespace

    from rich.console import RenderableType

__all__ = ["Info", "info"]


class Info(dict[str, Any]):
    """A dict that prints as a table."""

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for key, value in self.items():
            if key in ("gpus", "warnings"):
                continue
            table.add_row(key.replace("_", " "), str(value) if value != "" else "-")
        for gpu in self["gpus"]:
            table.add_row(
                f"GPU {gpu['index']}",
                f"{gpu['name']}, sm_{gpu['arch']}, {gpu['sms']} SMs, {gpu['memory_gib']} GiB: "
                f"{gpu['runs']}",
            )
        if not self["gpus"]:
            table.add_row("GPU", "none visible; the CPU kernels run")
        parts: list[RenderableType] = [table]
        parts += [Text(f"warning: {line}", style="yellow") for line in self["warnings"]]
        return Group(*parts)

    def __str__(self) -> str:
        return plain_text(self, width=140)


def info() -> Info:
    """Versions, the build's properties, and the code that each GPU will run."""

    built = _C.build_info()
    warnings: list[str] = []
    gpus = [_gpu(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    for gpu in gpus:
        why = why_no_gpu_kernel(gpu["index"])
        if why is not None:
            warnings.append(f"{why}: native torch runs in place of every op on this GPU")
    if built["fast_compile"]:
        warnings.append("built with FAST_COMPILE=1: the CUDA kernels are not optimised")
    return Info(
        warpwright=__version__,
        source_hash=built["source_hash"],
        python=platform.python_version(),
        torch=torch.__version__,
        built_for_torch=built["torch"],
        cuda=torch.version.cuda or "",
        built_with_cuda=built["cuda"],
        cudnn=torch.backends.cudnn.version() or "",
        archs=" ".join(built_archs()) or "none: a CPU-only build",
        path=os.environ.get("WARPWRIGHT_PATH", ""),
        cpu_threads=torch.get_num_threads(),
        gpus=gpus,
        warnings=warnings,
    )


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "arch": f"{properties.major}{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "runs": "native torch"
        if why_no_gpu_kernel(index) is not None
        else _kernels((properties.major, properties.minor)),
    }


def _kernels(capability: tuple[int, int]) -> str:
    portable = "warpwright's portable kernels"
    hopper = capability == (9, 0) and any(arch.startswith("9.0a") for arch in built_archs())
    if not hopper or os.environ.get("WARPWRIGHT_PATH") == "portable":
        return portable
    return f"{portable}; sm_90a's (TMA, wgmma) for attention, convolutions and linear layers"


def run(arguments: SimpleNamespace) -> int:
    from rich.console import Console

    found = info()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        Console(highlight=False).print(found)
    return 0
