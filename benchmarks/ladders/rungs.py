"""The rungs: their files, compiled by nvcc into one shared library each, called through ctypes.

The libraries stand in build/ladders/ under the hash of what they are made of, so that a second run
compiles nothing, and a machine without nvcc can be handed the folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from warpwright.bench import ladder

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
# What a rung calls on the host beside its own file.
HOST = (HERE / "entry.cu", CSRC / "host/device_info.cu", CSRC / "host/tensor_map.cu")
FLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{CSRC}", f"-I{HERE}")
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


def sources(name: str) -> list[Source]:
    """The rungs of a ladder, from the lowest up."""
    return [Source(path) for path in sorted((HERE / name).glob("[0-9][0-9]_*.cu"))]


def arch_of_gpu() -> str:
    major, minor = torch.cuda.get_device_capability()
    return "90a" if (major, minor) == (9, 0) else f"{major}{minor}"


def folder_of(name: str, arch: str) -> Path:
    digest = ladder.sources_hash(ladder.named(name), ROOT)
    return ROOT / "build" / "ladders" / f"{name}-sm_{arch}-{digest}"


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


def build(name: str, wanted: list[Source], arch: str) -> dict[str, Path]:
    """{rung: its library}; a .log beside each says what ptxas made of it. MAX_JOBS at a time."""
    folder = folder_of(name, arch)
    folder.mkdir(parents=True, exist_ok=True)
    flags = (*FLAGS, f"-I{HERE / name}", *LOCAL)
    code = f"-gencode=arch=compute_{arch},code=sm_{arch}"
    hosts = (*HOST, *(CSRC / path for path in ladder.named(name).links))
    objects = [folder / f"{path.stem}.o" for path in hosts]

    def compile_host(path: Path, target: Path) -> None:
        if not target.exists():
            half = target.with_suffix(f".{os.getpid()}.o")
            _nvcc(*flags, code, "-c", path, "-o", half)
            os.replace(half, target)

    def compile_rung(source: Source) -> Path:
        target = folder / f"{source.name}.so"
        if not target.exists():
            half = target.with_suffix(f".{os.getpid()}.so")
            arguments = (*flags, *LINK, code, "-Xptxas=-v", source.path, *objects)
            said = _nvcc(*arguments, "-o", half)
            target.with_suffix(".log").write_text(said)
            os.replace(half, target)
        return target

    missing = [s for s in wanted if not (folder / f"{s.name}.so").exists()]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:
        if missing:
            list(pool.map(compile_host, hosts, objects))
        return dict(zip((s.name for s in wanted), pool.map(compile_rung, wanted), strict=True))


class Rung:
    """A rung's library. `rung(tensors, extents)` enqueues its kernels on the current stream."""

    def __init__(self, name: str, library: Path) -> None:
        self.name = name
        loaded = ctypes.CDLL(str(library))
        self.run = loaded.ladder_run
        self.run.restype = ctypes.c_char_p
        self.run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        loaded.ladder_describe.restype = ctypes.c_char_p
        said = loaded.ladder_describe().decode().split()
        self.about = {key: int(value) for key, value in (word.split("=") for word in said)}

    def error(self, pointers: Sequence[int], extents: Sequence[int], stream: int) -> str | None:
        """Calls with bare addresses; what is wrong with them."""
        addresses = (ctypes.c_void_p * len(pointers))(*pointers)
        sizes = (ctypes.c_int64 * len(extents))(*extents)
        error = self.run(addresses, sizes, stream)
        return None if error is None else error.decode()

    def __call__(self, tensors: Sequence[Tensor], extents: Sequence[int]) -> None:
        for x in tensors:
            if not x.is_contiguous() or not x.is_cuda:
                raise ValueError(f"{self.name}: expected dense tensors on the GPU")
        stream = torch.cuda.current_stream().cuda_stream
        error = self.error([x.data_ptr() for x in tensors], extents, stream)
        if error is not None:
            raise ValueError(f"{self.name}: {error}")
