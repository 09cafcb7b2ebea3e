"""`bench` measures times with their intervals, compiles ahead, and ends at an interrupt."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from bench_runs import TINY, TINY_LINEAR, runner
from rich.progress import Progress

from warpwright.bench import ahead, code_cases, guards, measure, run

pytestmark = pytest.mark.usefixtures("quick_ceilings")


def timing(samples):
    return measure._summary(list(samples), 0.03)


def test_ratio_and_its_interval():
    generator = torch.Generator().manual_seed(3)
    noise = 1 + 0.05 * torch.randn(2, 100, generator=generator).double()
    ratio, low, high = measure.ratio_interval(timing(3 * noise[0]), timing(2 * noise[1]))
    assert low < 1.5 < high
    assert low < ratio < high
    assert high - low < 0.1
    # More noise: less certain. The same twice: certain.
    rough = timing(3 * (1 + 8 * (noise[0] - 1)))
    _, low2, high2 = measure.ratio_interval(rough, timing(2 * noise[1]))
    assert high2 - low2 > 3 * (high - low)
    constant = timing([2.0] * 20)
    assert measure.ratio_interval(constant, constant) == (1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_are_measured(dtype):
    case = code_cases._quantize(16, 64, torch.bfloat16, dtype, whole=False)
    rows = run.case_rows(case, "cpu", {"copy_tbs": 0.01, "matmul_tflops": 0.1}, 0.001)
    assert [(row["impl"], row["agrees"]) for row in rows] == [
        ("warpwright", True),
        ("native", True),
    ]
    guards.refuse_constant({"codes": torch.randn(4, 4).to(dtype)})
    assert guards.disagreement(torch.tensor([1, 2]), torch.tensor([1, 3]), 0.0) is not None


def test_median_is_robust_and_drift_is_unsteady():
    steady = timing([1.0, 1.01, 0.99, 50.0, 1.0, 1.0, 1.01, 0.99, 1.0])
    assert steady.ms == 1.0
    assert steady.steady
    drifting = timing([1.0 + 0.02 * i for i in range(12)])
    assert not drifting.steady


def test_unsteady_is_measured_again_then_marked(monkeypatch):
    calls = []

    class Clock:
        def run(self, functions, rounds):
            calls.append(rounds)
            return {name: [1.0 + 0.1 * i for i in range(rounds)] for name in functions}

    monkeypatch.setattr(measure, "_Cpu", Clock)
    found = measure.interleaved({"f": lambda: None}, "cpu", 0.02)["f"]
    assert not found.steady
    assert len([n for n in calls if n > 1]) == 2


def test_a_known_time_is_measured_as_such(monkeypatch):
    # A clock that only the workload moves: how busy the machine is does not matter.
    now = 0.0

    def takes(seconds):
        def workload():
            nonlocal now
            now += seconds

        return workload

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    found = measure.interleaved({"a": takes(0.002), "b": takes(0.004)}, "cpu", 0.1)
    assert found["a"].ms == pytest.approx(2)
    assert found["b"].ms == pytest.approx(4)
    assert all(timing.steady for timing in found.values())


COMPILED_AHEAD = """
import functools
from types import SimpleNamespace
from warpwright.bench import ahead, records, run
import torch
from rich.console import Console

ahead.FEWEST, ahead.processes_for = 1, lambda items: 2
records.ceilings = lambda device: {"copy_tbs": 0.01, "matmul_tflops": 0.1}
options = SimpleNamespace(op=["relu"], dtype=None)
again = functools.partial(run._chosen, "quick", "cpu", options)
runner = run.Runner("cpu", ("native", "compile"), Console(quiet=True), 0.001)
record = runner.run(*again(), again)
print({row["impl"] for row in record["rows"]}, dict(torch._dynamo.utils.counters["aot_autograd"]))
"""


@pytest.mark.slow
def test_compiled_ahead(tmp_path):
    """The process that measures finds what another one compiled."""
    found = subprocess.run(
        [sys.executable, "-c", COMPILED_AHEAD],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "'compile'" in found.stdout, found.stderr
    assert "'autograd_cache_hit': 1" in found.stdout


def _deaf_items():
    """In a process that compiles it never returns."""
    while multiprocessing.parent_process() is not None:
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(60)
    return [TINY], []


@pytest.fixture
def hears_ctrl_c():
    """A job in the background of a shell is born deaf to it, and so are its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_does_not_wait_for_compilers(monkeypatch, hears_ctrl_c):
    monkeypatch.setattr(ahead, "FEWEST", 1)
    monkeypatch.setattr(ahead, "processes_for", lambda items: 2)
    progress = Progress(disable=True)
    task = progress.add_task("")
    main = threading.main_thread().ident
    timer = threading.Timer(3, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ahead.compile_ahead(_deaf_items, "cpu", ("native", "compile"), (), progress, task)
    timer.join()


def test_a_swallowed_interrupt_ends_the_run():
    """A compiler may take the exception for one of its own: the signal counts."""
    bench = runner()
    with pytest.raises(KeyboardInterrupt):
        bench.interrupt(signal.SIGINT, None)
    record = bench.run([TINY, TINY_LINEAR])
    assert record["interrupted"]
    assert {row["op"] for row in record["rows"]} == {"relu"}


@pytest.mark.gpu
def test_the_host_is_not_timed(monkeypatch):
    """The device waits before an op for as long as the host launches it, before a step it does not."""
    waits = []
    monkeypatch.setattr(torch.cuda, "_sleep", waits.append)
    x = torch.zeros(64, device="cuda")

    def slow_launch():
        time.sleep(1e-3)
        x.add_(1)

    measure.interleaved({"f": slow_launch}, "cuda", 0.02)
    assert len(waits) >= measure.MIN_ROUNDS
    assert min(waits) > measure.CYCLES_PER_MS
    waits.clear()
    measure.interleaved({"f": slow_launch}, "cuda", 0.02, hide_host=False)
    assert not waits
