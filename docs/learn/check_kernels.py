"""Checks the exercises that are CUDA kernels: g++ compiles them with simt.h, and a CPU runs them.

python docs/learn/check_kernels.py docs/learn/exercises/scan.cu
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ORDERS = (0, 1, 2, 3)  # of a block's threads
GUARD = 64  # elements on both sides of the result that must stay
SENTINEL = np.float32(-77)
SECONDS = 60
WIDTHS = (1, 2, 31, 32, 33, 100, 128, 129, 256)

# Takes x, the result between its guards, and an order of the threads; returns what went wrong.
Run = Callable[[np.ndarray, np.ndarray, int], "str | None"]


def integers(rows: int, columns: int) -> np.ndarray:
    """Their sums are exact in any order."""
    return np.random.default_rng(columns).integers(-9, 10, (rows, columns)).astype(np.float32)


def scores(rows: int, columns: int) -> np.ndarray:
    """Large ones, which overflow without the maximum, and masked ones."""
    x = np.random.default_rng(columns).standard_normal((rows, columns)).astype(np.float32) * 100
    x[:, 1::3] = -np.inf
    return x


def far_from_zero(rows: int, columns: int) -> np.ndarray:
    """Where the mean of squares minus the square of the mean fails in float32."""
    x = np.random.default_rng(columns).standard_normal((rows, columns)) + 1e4
    return x.astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


@dataclass(frozen=True)
class Kernel:
    """What an exercise computes, in float64, and for which shapes."""

    reference: Callable[[np.ndarray], np.ndarray]
    shapes: tuple[tuple[int, int], ...] = tuple((3, width) for width in WIDTHS)
    make: Callable[[int, int], np.ndarray] = integers
    tolerance: float = 0.0  # 0: equal bits


_ROWS = (*((3, width) for width in WIDTHS), (1, 1000))
KERNELS = {
    "row_sum": Kernel(lambda x: x.sum(1), _ROWS),
    "warp_sum": Kernel(lambda x: x.sum(1), _ROWS),
    "transpose": Kernel(lambda x: x.T, tuple((r, c) for r in (1, 31, 32, 33) for c in (1, 32, 70))),
    "gram": Kernel(lambda x: x @ x.T, ((1, 1), (5, 7), (16, 16), (17, 33), (40, 20))),
    "variance": Kernel(lambda x: x.var(1), make=far_from_zero, tolerance=2e-3),
    "scan": Kernel(lambda x: x.cumsum(1)),
    "softmax": Kernel(softmax, make=scores, tolerance=1e-6),
}


def compile_for_cpu(path: Path, folder: Path) -> Path:
    library = folder / f"{path.stem}.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-I", str(Path(__file__).parent), "-x", "c++"]
    compiler = os.environ.get("CXX", "g++").split()
    done = subprocess.run(
        [*compiler, *flags, str(path), "-o", str(library)], capture_output=True, text=True
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise AssertionError("it does not compile: " + (errors or [done.stderr[-300:]])[0])
    return library


def function_of(library: Path) -> Callable[..., bytes | None]:
    """``run(x, y, rows, columns, order)`` of an exercise's library, with addresses for x and y."""
    function = ctypes.CDLL(str(library)).run
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int] * 3
    return function  # type: ignore[no-any-return]


def on_cpu(library: Path) -> Run:
    function = function_of(library)

    def run(x: np.ndarray, whole: np.ndarray, order: int) -> str | None:
        said = function(x.ctypes.data, whole[GUARD:].ctypes.data, *x.shape, order)
        return said.decode() if said is not None else None

    return run


def check(kernel: Kernel, run: Run) -> None:
    """Raises an AssertionError that says what is wrong."""
    for rows, columns in kernel.shapes:
        x = kernel.make(rows, columns)
        exact = kernel.reference(x.astype(np.float64))
        what = f"x of {rows} x {columns}"
        first: np.ndarray | None = None
        for order in ORDERS:
            whole = np.full(exact.size + 2 * GUARD, SENTINEL)
            whole[GUARD:-GUARD] = np.nan
            said = run(x, whole, order)
            assert said is None, said
            outside = np.concatenate([whole[:GUARD], whole[-GUARD:]])
            assert (outside == SENTINEL).all(), f"{what}: it writes outside of y"
            y = whole[GUARD:-GUARD].reshape(exact.shape)
            if first is None:
                compare(y, exact, kernel.tolerance, what)
            else:
                assert np.array_equal(y, first), (
                    f"{what}: another order of the threads gives other results: is a barrier missing?"
                )
            first = y


def compare(y: np.ndarray, exact: np.ndarray, tolerance: float, what: str) -> None:
    wrong = ~(np.abs(y - exact) <= tolerance)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{what}: y{list(at)} is {y[at]}, expected {exact[at]:.7g}")


def result_of(path: Path) -> str:
    """``"right"``, or what is missing or wrong. In a process of its own, which may crash or hang."""
    command = [sys.executable, __file__, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"wrong: it does not end within {SECONDS} s"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"wrong: {name}: it reads or writes far outside of its arrays"
    return done.stdout.strip() or f"wrong: {done.stderr.strip().splitlines()[-1]}"


def main() -> int:
    path = Path(sys.argv[1])
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(KERNELS[path.stem], on_cpu(compile_for_cpu(path, Path(folder))))
    except AssertionError as error:
        said = str(error)
        print(said if said.startswith("to do: ") else f"wrong: {said}")
        return 1
    print("right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
