"""Times a kernel exercise on a GPU, next to torch's op and to the floor.

    python docs/learn/time_kernels.py docs/learn/exercises/row_sum.cu

nvcc compiles the file. The kernel must pass the exercise's check on the GPU before it is timed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import check_kernels
import numpy as np
import torch
from torch import Tensor

ROUNDS = 20
# What torch calls, and a shape whose bytes are several times the L2 cache.
Native = Callable[[Tensor], Tensor]
NATIVE: dict[str, tuple[Native, tuple[int, int]]] = {
    "row_sum": (lambda x: x.sum(1), (8192, 16384)),
    "warp_sum": (lambda x: x.sum(1), (8192, 16384)),
    "transpose": (lambda x: x.t().contiguous(), (8192, 16384)),
    "gram": (lambda x: x @ x.t(), (4096, 1024)),
    "variance": (lambda x: x.var(1, correction=0), (8192, 16384)),
    "scan": (lambda x: x.cumsum(1), (524288, 256)),
    "softmax": (lambda x: x.softmax(1), (8192, 16384)),
}


def compile_for_gpu(path: Path, folder: Path) -> Path:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if nvcc is None:
        raise AssertionError(f"nvcc is neither on PATH nor in {home}/bin")
    library = folder / f"{path.stem}.so"
    flags = ["-std=c++20", "-O3", "-arch=native", "-shared", "-Xcompiler=-fPIC"]
    flags += ["-I", str(Path(__file__).parent)]
    command = [nvcc, *flags, str(path), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"it does not compile:\n{done.stdout}{done.stderr}")
    return library


def launch(function: Callable[..., bytes | None], x: Tensor, y: Tensor) -> None:
    """On the default stream, as torch's ops are unless one chooses another."""
    said = function(x.data_ptr(), y.data_ptr(), *x.shape, 0)
    assert said is None, said


def on_gpu(library: Path) -> check_kernels.Run:
    function = check_kernels.function_of(library)

    def run(x: np.ndarray, whole: np.ndarray, order: int) -> str | None:
        there = torch.from_numpy(whole).cuda()
        launch(function, torch.from_numpy(x).cuda(), there[check_kernels.GUARD :])
        whole[:] = there.cpu().numpy()
        return None

    return run


def time_ms(call: Callable[[], object]) -> float:
    """Mean over calls one after the other; a launch hides behind the kernel before it."""
    for _ in range(3):
        call()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(ROUNDS):
        call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / ROUNDS


def times(name: str, library: Path) -> dict[str, float]:
    """Milliseconds of the kernel, of torch's op, and of as many bytes at the rate of a copy."""
    native, shape = NATIVE[name]
    function = check_kernels.function_of(library)
    x = torch.randn(shape, device="cuda")
    expected = native(x)
    y = torch.empty_like(expected)
    source = torch.empty((x.numel() + y.numel()) // 2, device="cuda")
    target = torch.empty_like(source)
    found = {
        "yours": time_ms(lambda: launch(function, x, y)),
        "torch": time_ms(lambda: native(x)),
        "copy": time_ms(lambda: target.copy_(source)),
    }
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-2)
    return found


def main(arguments: list[str] | None = None) -> int:
    (path,) = map(Path, sys.argv[1:] if arguments is None else arguments)
    if not torch.cuda.is_available():
        print("no GPU here: `python docs/learn/check.py` checks kernels on a CPU")
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = compile_for_gpu(path, Path(folder))
            check_kernels.check(check_kernels.KERNELS[path.stem], on_gpu(library))
            found = times(path.stem, library)
    except (AssertionError, RuntimeError) as error:  # such as an illegal address
        print(f"{path.stem}: {error}")
        return 1
    shape = " x ".join(map(str, NATIVE[path.stem][1]))
    print(f"{path.stem}, x of {shape}, on {torch.cuda.get_device_name()}")
    for who, ms in found.items():
        print(f"{who:6} {ms:9.4f} ms, copy / this {found['copy'] / ms:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
