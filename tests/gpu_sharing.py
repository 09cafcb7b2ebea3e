"""Test workers that share one GPU: how many, and which tests have its memory to themselves.

A test marked `gpu_memory(GIB)` allocates that much. It runs while no other worker runs a GPU test, and is
skipped, by name of what there is, on a smaller GPU.

Where CUDA's multi-process service (MPS) is installed, workers use it: their kernels run side by side. Else
each worker waits for its turn of the whole GPU, and small kernels wait most. A fault of one client ends
all, so a child process that may cause one gets `without_mps()` as its environment.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

# A worker's CUDA context with cuBLAS, cuDNN and the kernels, and what an unmarked test may allocate.
GIB_PER_WORKER = 5
MOST_WORKERS = 16
KEPT_GIB = 1  # of cached blocks, from one test to the next


MPS = "nvidia-cuda-mps-control"
MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def start_mps():
    """Starts MPS for processes that inherit this one's environment; returns a function that ends it.

    None if it is not installed, does not work here, or the caller has chosen one already.
    """
    control = shutil.which(MPS) or shutil.which(MPS, path="/usr/local/nvidia/bin")
    if control is None or MPS_FOLDERS[0] in os.environ:
        return None
    folder = tempfile.mkdtemp(prefix="warpwright-mps-")
    os.environ.update(dict.fromkeys(MPS_FOLDERS, folder))

    def stop():
        subprocess.run([control], input="quit\n", text=True, capture_output=True)
        for name in MPS_FOLDERS:
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)

    client = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda').item()"]
    for command in ([control, "-d"], client):
        if subprocess.run(command, capture_output=True).returncode != 0:
            stop()
            return None
    return stop


def without_mps():
    """This process's environment for a child whose faults must not reach others."""
    return {name: value for name, value in os.environ.items() if name not in MPS_FOLDERS}


def worker_count(cores, gpu_gib):
    """Workers for `-n auto`: as many as the cores and the GPU's memory (None: no GPU) allow."""
    by_memory = MOST_WORKERS if gpu_gib is None else int(gpu_gib // GIB_PER_WORKER)
    return max(1, min(cores, by_memory, MOST_WORKERS))


def gpu_gib():
    """The GPU's memory, free or not; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory / 2**30


def needed_gib(item):
    """What the test's marker asks for; 0 without one."""
    marker = item.get_closest_marker("gpu_memory")
    return 0 if marker is None else marker.args[0]


def why_too_small(gib, available):
    """Why a GPU of `available` GiB cannot run a test that needs `gib`; None if it can."""
    if available is None or gib <= available:
        return None
    return f"needs {gib} GiB of GPU memory, and this GPU has {available:.0f}"


class GpuTurns:
    """Who may use the GPU, across processes: many tests at a time, or one that has it alone.

    The gate keeps a stream of small tests from making a large one wait for ever: once it waits, no further
    test starts.
    """

    def __init__(self, folder):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def turn(self, alone):
        with open(self._folder / "gate", "w") as gate, open(self._folder / "turn", "w") as turn:
            fcntl.flock(gate, fcntl.LOCK_EX)
            fcntl.flock(turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield  # closing the files gives the turn back


def turns_of_this_run():
    """Of all workers of one pytest run; None if there is one process alone."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    return None if run is None else GpuTurns(Path(tempfile.gettempdir()) / f"warpwright-{run}")


@contextlib.contextmanager
def shared_gpu(turns, gib):
    """Around a test on the GPU. Its memory goes back to the other workers afterwards."""
    with turns.turn(alone=gib > 0):
        yield
        if gib > 0 or torch.cuda.memory_reserved() > KEPT_GIB * 2**30:
            torch.cuda.empty_cache()
