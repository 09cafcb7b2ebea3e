"""The rungs: their files, compiled by nvcc into one shared library each, called through ctypes.

The libraries stand in build/ladder/ under the hash of what they are made of, so that a second run
compiles nothing, and a machine without nvcc can be handed the folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from warpwright.bench import ladder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What a rung calls on the host beside its own file.
HOST = (HERE / "entry.cpp", ROOT / "csrc/host/device_info.cu", ROOT / "csrc/host/tensor_map.cu")
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}", f"-I{HERE}")
# Another library of this process may have symbols of the same name: each keeps to its own.
LOCAL = ("-Xcompiler=-fPIC,-fvisibility=hidden",)
LINK = ("-shared", "-Xlinker=-Bsymbolic,--exclude-libs,ALL")


class BuildError(RuntimeError):
    """nvcc is missing, or what it said."""


@dataclass(frozen=True)
class Source:
    """One file of the ladder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def header(self) -> str:
        """The comment that opens the file."""
        lines = self.text.splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
        return "\n".join(line.removeprefix("//").strip() for line in lines[:end])

    @property
    def needs_sm90(self) -> bool:
        """Whether it uses TMA and wgmma, which sm_90a alone has."""
        return re.search(r'#include ".*sm90.*"', self.text) is not None


def sources() -> list[Source]:
    return [Source(path) for path in sorted(HERE.glob("[0-9][0-9]_*.cu"))]


def arch_of_gpu() -> str:
    major, minor = torch.cuda.get_device_capability()
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def folder_of(arch: str) -> Path:
    return ROOT / "build" / "ladder" / f"sm_{arch}-{ladder.sources_hash(ROOT)}"


def _nvcc(*arguments: str | Path) -> str:
    """What the compiler said."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        raise BuildError(f"nvcc is neither on PATH nor in {home}/bin")
    done = subprocess.run([nvcc, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"nvcc {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def build(wanted: list[Source], arch: str) -> dict[str, Path]:
    """{name: its library}; a .log beside each says what ptxas made of it. MAX_JOBS at a time."""
    folder = folder_of(arch)
    folder.mkdir(parents=True, exist_ok=True)
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    objects = [folder / f"{path.stem}.o" for path in HOST]

    def compile_host(path: Path, target: Path) -> None:
        if not target.exists():
            half = target.with_suffix(f".{os.getpid()}.o")
            _nvcc(*FLAGS, *LOCAL, code, "-c", path, "-o", half)
            os.replace(half, target)

    def compile_rung(source: Source) -> Path:
        target = folder / f"{source.name}.so"
        if not target.exists():
            half = target.with_suffix(f".{os.getpid()}.so")
            arguments = (*FLAGS, *LOCAL, *LINK, code, "-Xptxas=-v", source.path, *objects)
            said = _nvcc(*arguments, "-o", half)
            target.with_suffix(".log").write_text(said)
            os.replace(half, target)
        return target

    missing = [s for s in wanted if not (folder / f"{s.name}.so").exists()]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        if missing:
            list(pool.map(compile_host, HOST, objects))
        return dict(zip((s.name for s in wanted), pool.map(compile_rung, wanted), strict=True))


@dataclass(frozen=True)
class Shape:
    """What a rung says about itself: `Rung` of ladder.cuh."""

    blk_m: int
    blk_n: int
    blk_k: int
    stages: int
    threads: int
    smem_bytes: int


class Rung:
    """A rung's library. `rung(a, b, d)` enqueues d = a b^T on the current stream."""

    def __init__(self, name: str, library: Path) -> None:
        self.name = name
        loaded = ctypes.CDLL(str(library))
        self._run = loaded.ladder_run
        self._run.restype = ctypes.c_char_p
        pointer, extent = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [pointer] * 3 + [extent] * 3 + [pointer]
        values = (ctypes.c_int * 6)()
        loaded.ladder_describe(values)
        self.shape = Shape(*values)

    def __call__(self, a: Tensor, b: Tensor, d: Tensor) -> None:
        (m, k), (n, _) = a.shape, b.shape
        if b.shape != (n, k) or d.shape != (m, n):
            raise ValueError(f"{self.name}: a {a.shape}, b {b.shape}, d {d.shape} do not fit")
        for x in (a, b, d):
            if x.dtype != torch.bfloat16 or not x.is_contiguous() or not x.is_cuda:
                raise ValueError(f"{self.name}: expected dense bfloat16 matrices on the GPU")
        stream = torch.cuda.current_stream().cuda_stream
        error = self._run(a.data_ptr(), b.data_ptr(), d.data_ptr(), m, n, k, stream)
        if error is not None:
            raise ValueError(f"{self.name}: {error.decode()}")
