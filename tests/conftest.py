"""Fixtures shared by all tests: the same tests run on the CPU and, if there is one, on a GPU."""

import gc
import os
import re
import warnings

# Some virtual machines advertise AMX but do not grant it: oneDNN then fails on every 16-bit matrix
# product ("could not create a primitive"), native's included. Its AVX512-FP16 convolution, one step
# below, reads outside a strided weight and may kill the process. Read when oneDNN is first used.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import common
import gpu_sharing
import pytest
import torch
from fusion import count_calls
from processes import Worlds

import warpwright
from warpwright import _batching

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NCCL = pytest.param("nccl", marks=[pytest.mark.gpu, pytest.mark.two_gpus])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


# Thousands of samples each.
LONG = re.compile(r"test_(compare_native|noncontiguous_samples)\[max_pool2d")


def pytest_collection_modifyitems(config, items):
    """Without a GPU the `gpu` tests are not part of the run (deselected, not skipped).

    The longest tests are spread evenly: of several processes each gets some, and none is left with
    them when the others are done.
    """
    if not torch.cuda.is_available():
        dropped = [item for item in items if item.get_closest_marker("gpu") is not None]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.get_closest_marker("gpu") is None]
    if torch.cuda.device_count() < 2:
        dropped = [item for item in items if item.get_closest_marker("two_gpus") is not None]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item.get_closest_marker("two_gpus") is None]
    available = gpu_sharing.gpu_gib()
    for item in items:
        why_not = gpu_sharing.why_too_small(gpu_sharing.needed_gib(item), available)
        if why_not is not None:
            item.add_marker(pytest.mark.skip(reason=why_not))
    long = [item for item in items if LONG.search(item.nodeid)]
    rest = [item for item in items if not LONG.search(item.nodeid)]
    if long:
        each = len(rest) // len(long)
        for i, item in enumerate(long):
            rest.insert(i * (each + 1), item)
        items[:] = rest


def pytest_collection_finish():
    """The tests live until the end: no full pass of the garbage collector need walk them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def dtype(request):
    return request.param


def is_long_run(config):
    return "not slow" not in config.getoption("markexpr")


@pytest.fixture(scope="session")
def long_run(request):
    """Whether the slow tests are part of the run."""
    return is_long_run(request.config)


@pytest.fixture
def model(device):
    """A small ResNet, what the tests of swap() work on."""
    return common.small_resnet().to(device)


@pytest.fixture
def images(device):
    return torch.randn(4, 3, 32, 32, device=device)


@pytest.fixture
def calls(monkeypatch):
    """The names of our functionals, in the order in which they are called."""
    return count_calls(monkeypatch)


@pytest.fixture
def quick_ceilings(monkeypatch):
    """The two rates of `bench` and `profile` take seconds to measure; the tests are about the rest."""
    fixed = {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    monkeypatch.setattr("warpwright.bench.records.ceilings", lambda device: dict(fixed))


@pytest.fixture
def process_group(tmp_path, device):
    """torch.distributed with this process alone."""
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=["gloo", NCCL])
def worlds(request):
    """``worlds(n).run(function, ...)``: a file's processes, n ranks. With gloo on the CPU, and again
    with NCCL if there are two GPUs."""
    worlds = Worlds(request.param)
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def gloo_worlds():
    """As `worlds`, for what only gloo shows."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(autouse=True)
def _reproducible(request):
    torch.manual_seed(0)
    common.opchecked.clear()
    # Strict fp32 unless a test asks for TF32: native's defaults differ between matmul and conv.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    warpwright.set_float32_matmul_precision(None)
    yield
    torch._dynamo.reset()


TURNS = gpu_sharing.turns_of_this_run()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Workers of one run share the GPU; a `gpu_memory` test has it alone."""
    if TURNS is None or item.get_closest_marker("gpu") is None:
        return (yield)
    with gpu_sharing.shared_gpu(TURNS, gpu_sharing.needed_gib(item)):
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """For `-n auto`."""
    return gpu_sharing.worker_count(len(os.sched_getaffinity(0)), gpu_sharing.gpu_gib())


def pytest_configure(config):
    common.trace_all = is_long_run(config)
    # Two test workers on two cores: one thread each, or they fight.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    elif getattr(config.option, "numprocesses", None) and torch.cuda.is_available():
        stop = gpu_sharing.start_mps()
        if stop is not None:
            config.add_cleanup(stop)


@pytest.fixture
def no_fallback(capfd):
    """torch.vmap without PyTorch's loop, which warns from C++."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert "batching rule" not in capfd.readouterr().err


@pytest.fixture
def one_call(monkeypatch):
    """No batching rule of fused operators runs once per sample."""

    def fail(op, *_):
        raise AssertionError(f"{op} runs once per sample")

    for name in ("_norm_and_pool", "_attention_forms", "_linear_cross_entropy"):
        monkeypatch.setattr(getattr(_batching, name), "one_by_one", fail)
