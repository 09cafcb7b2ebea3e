"""Loads the library, as the only module. `ops.relu` is the operator overload itself."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

_LIBRARY = Path(__file__).with_name("libwarpwright.so")


def _version_pair(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _built_for() -> str | None:
    """The torch version in the file next to the library; read before the library is loaded."""
    stamp = _LIBRARY.with_name("_built_for.txt")
    return stamp.read_text().strip() if stamp.exists() else None


def _load() -> None:
    if not _LIBRARY.exists():
        raise ImportError(
            f"warpwright: {_LIBRARY} is missing: the package was not built. "
            "Run `pip install --no-build-isolation -e .` in the repository."
        )
    built_for = _built_for()
    if built_for is not None and _version_pair(built_for) != _version_pair(torch.__version__):
        raise ImportError(
            f"warpwright was built for torch {built_for}, but torch {torch.__version__} is "
            "installed. Rebuild it: `pip install --no-build-isolation --force-reinstall "
            "--no-deps warpwright` (or `pip install -e . --no-build-isolation` in the repository)."
        )
    if cpu_without_avx2():
        # Asked before loading: the library's first AVX2 instruction would end the process.
        raise ImportError(
            "warpwright's CPU kernels need a CPU with AVX2; torch finds "
            f"{torch.backends.cpu.get_cpu_capability()} here."
        )
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        raise ImportError(
            f"warpwright was built for torch {built_for}, and its library does not load with the installed "
            f"torch {torch.__version__}: {error}"
        ) from error


def cpu_without_avx2() -> bool:
    """On x86-64 the CPU kernels are built for AVX2, elsewhere for the baseline."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    # ATEN_CPU_CAPABILITY can lower what torch uses; then ask the CPU itself.
    capable = torch.backends.cpu.get_cpu_capability().startswith(("AVX2", "AVX512"))
    return x86 and not (capable or torch.cpu._is_avx2_supported())


_load()


class _Ops:
    """`torch.ops.warpwright.<name>.default` of every operator, 0.1 us cheaper per call.

    The import stores all of them. Dynamo forbids storing one at its first use in a region that must
    have no side effects, such as a checkpoint.
    """

    def __init__(self) -> None:
        for name in torch._C._dispatch_get_all_op_names():
            namespace, _, op = name.partition("::")
            if namespace == "warpwright":
                setattr(self, op, getattr(torch.ops.warpwright, op).default)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


ops = _Ops()
