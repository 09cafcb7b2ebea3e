"""`python -m warpwright bench`: the measuring, the peers, the guards, the record and the page."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

import warpwright_cli
from warpwright import _ops
from warpwright.bench import (
    ahead,
    cases,
    code_cases,
    guards,
    measure,
    optimizers,
    page,
    peers,
    plots,
    records,
    reliability,
    run,
    screen,
    sources,
    steps,
)
from warpwright.bench.cases import FP32, ROWS, Case
from warpwright.bench.implementation import Missing
from warpwright.bench.peers import PEERS, Peer
from warpwright.bench.shapes import CASES

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted(
    path
    for path in (ROOT / "benchmarks" / "results").rglob("*.json")
    if path.name != reliability.RESULT  # tools/campaign.py's; test_campaign.py has it
)
FULL = next(path for path in RESULTS if path.name == "full.json")
STEPS = next(path for path in RESULTS if path.name == "mnist_step.json")

TINY = cases._relu(1 << 10, FP32)
TINY_LINEAR = cases._linear(8, 16, 4, FP32)
TINY_POOL = cases._max_pool2d((2, 4, 8, 8), 2, 2, 0, FP32, cases.NCHW)


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch):
    """The two rates take seconds to measure; these tests are about the rest."""
    fixed = {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    monkeypatch.setattr(records, "ceilings", lambda device: dict(fixed))


def runner(peer_names=("native",), autosave=None):
    return run.Runner("cpu", peer_names, Console(quiet=True), 0.001, None, autosave)


def by_impl(record, **wanted):
    rows = [r for r in record["rows"] if all(r[k] == v for k, v in wanted.items())]
    return {r["impl"]: r for r in rows}


def check_schema(record):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(record, records.SCHEMA)
    jsonschema.Draft202012Validator.check_schema(records.SCHEMA)


# ---------------------------------------------------------------- time


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


# ---------------------------------------------------------------- guards


def test_zeros_are_refused(tmp_path):
    zeros = replace(TINY, make=lambda device: {"x": torch.zeros(64, requires_grad=True)})
    record = runner().run([zeros, TINY_LINEAR])
    assert {r["op"] for r in record["rows"]} == {"linear"}
    (failure,) = record["failures"]
    assert "constant 0" in failure["error"]


@pytest.mark.parametrize("bad", [torch.zeros(8), torch.full((8,), float("nan"))])
def test_empty_results_are_refused(bad):
    with pytest.raises(guards.Refused, match=r"zeros|finite"):
        guards.refuse_empty_results([torch.randn(3), bad])


def wrong_peer(case, inputs, device):
    found = peers.prepare_native(case, inputs, device)
    right = found.results

    def results(cotangent):
        output, grads = right(cotangent)
        return output + 0.1, grads

    return replace(found, results=results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_disagreement(dtype):
    """Another order of the sums is no error; a wrong element is, whatever errors are claimed."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(1000, dtype=torch.float64, generator=generator).to(dtype)
    rounded = right * (1 + 2 * torch.finfo(dtype).eps)
    assert guards.disagreement(right, rounded, 0.0) is None
    wrong = right.clone()
    wrong[7] += right.abs().max() / 4
    assert "differs" in guards.disagreement(right, wrong, 0.0)
    assert "differs" in guards.disagreement(right, wrong, 1e9)
    assert "differs" in guards.disagreement(right, -right, 1e9, l2=True)


def raising_peer(case, inputs, device):
    raise RuntimeError("no plan for this shape")


def test_a_wrong_result_is_marked(monkeypatch):
    monkeypatch.setitem(PEERS, "liger", Peer("liger", "", wrong_peer))
    record = runner(("native", "liger")).run([TINY_LINEAR])
    rows = by_impl(record, **{"pass": "fwd"})
    assert rows["native"]["agrees"]
    assert not rows["liger"]["agrees"]
    assert "differs from warpwright's" in screen.notes_of(rows["liger"])[0]


def test_a_peer_that_raises_is_reported(monkeypatch):
    monkeypatch.setitem(PEERS, "liger", Peer("liger", "", raising_peer))
    record = runner(("native", "liger")).run([TINY])
    (failure,) = record["failures"]
    assert failure["impl"] == "liger"
    assert failure["error"] == "RuntimeError: no plan for this shape"
    assert by_impl(record).keys() == {"warpwright", "native"}
    check_schema(record)


def test_missing_peers_are_named():
    record = runner(("native", "liger", "cudnn-graph")).run([TINY])
    assert record["missing"].keys() == {"liger", "cudnn-graph"}
    absent = replace(PEERS["liger"], needs_cuda=False, module="no_such_module_here")
    assert absent.missing("cpu") == (
        "liger-kernel is not installed (pip install 'warpwright[bench]')"
    )
    with pytest.raises(Missing, match="liger has no relu"):
        peers.prepare(replace(absent, module="torch"), TINY, TINY.make("cpu"), "cpu")


def test_skipped_ops_are_named():
    found = run.skipped(
        [TINY, TINY_LINEAR, TINY_POOL], ("native", "channels_last", "compile"), "cpu"
    )
    assert found == {
        "channels_last": {"relu": "no images", "linear": "no images"},
        "compile": {"linear": "torch.compile runs a lone linear by native's own kernel"},
    }


def test_fallback_is_shown(monkeypatch):
    record = runner().run([TINY])
    assert {r["path"] for r in record["rows"] if r["impl"] == "warpwright"} == {"warpwright"}
    monkeypatch.setattr(_ops.ops, "relu", torch.relu)
    record = runner().run([TINY])
    row = by_impl(record, **{"pass": "fwd"})["warpwright"]
    assert row["path"] == "native fallback"
    assert "ran: native fallback" in screen.notes_of(row)


def test_clocks_are_noted(monkeypatch):
    sampler = guards.Clocks("cpu")
    sampler.samples = [(t, 1500.0 - t, 0x4 if t > 5 else 0, 600.0, 60.0) for t in range(10)]
    assert sampler.since(6) == {"sm_mhz": 1493.0, "throttled": ["power cap"]}
    assert sampler.since(0)["throttled"] == ["power cap"]
    assert sampler.since(100) == {"sm_mhz": None, "throttled": []}
    assert screen.notes_of({"throttled": ["power cap"]}) == ["clocks: power cap"]


# ---------------------------------------------------------------- rows


def test_rows_add_up():
    record = runner(("native", "channels_last")).run([TINY_LINEAR, TINY_POOL])
    check_schema(record)
    assert not record["failures"]
    assert by_impl(record, op="linear").keys() == {"warpwright", "native"}
    for which in ("fwd", "bwd"):
        rows = by_impl(record, op="max_pool2d", **{"pass": which})
        assert rows.keys() == {"warpwright", "native", "channels_last"}
        ours = rows.pop("warpwright")
        for row in rows.values():
            assert row["ratio"] == pytest.approx(row["ms"] / ours["ms"], rel=0.02)
            assert row["ratio_lo"] <= row["ratio"] <= row["ratio_hi"]
            assert row["agrees"]
            assert row["err_native"] == rows["native"]["err"]
    row = by_impl(record, op="linear", **{"pass": "fwd"})["warpwright"]
    assert row["flops"] == 2 * 8 * 16 * 4
    floors = row["bytes"] / 0.01 / 1e9, row["flops"] / 0.1 / 1e9
    assert row["floor_ms"] == pytest.approx(max(floors), abs=1e-5)


def test_errors_are_of_the_sampled_corner():
    """A convolution's error is measured on its first images; all gradients must be theirs."""
    conv = cases._conv2d((6, 3, 8, 8), 5, 3, 1, 1, FP32, cases.NCHW)
    record = runner(("native", "channels_last")).run([conv])
    assert not record["failures"]
    for row in record["rows"]:
        assert row["agrees"], row
        assert 0 < row["err"] < 1e-5


def test_gradients_of_a_convolution_without_bias_are_passes():
    conv = cases._conv2d((6, 3, 8, 8), 5, 3, 1, 1, FP32, cases.NCHW, bias=False)
    record = runner().run([conv])
    assert not record["failures"]
    rows = {r["pass"]: r for r in record["rows"] if r["impl"] == "warpwright"}
    assert list(rows) == ["fwd", "dgrad", "wgrad"]
    assert {r["flops"] for r in rows.values()} == {2 * 6 * 5 * 8 * 8 * 3 * 3 * 3}
    x, y, w = 6 * 3 * 8 * 8, 6 * 5 * 8 * 8, 5 * 3 * 3 * 3
    assert {r["bytes"] for r in rows.values()} == {4 * (x + y + w)}
    assert all(r["agrees"] and r["err"] < 1e-5 for r in rows.values())


@pytest.mark.parametrize("add", [False, True])
def test_fused_batch_norm_is_held_against_the_native_chain(add):
    case = cases._batch_norm_relu((4, 8, 6, 6), FP32, cases.NHWC, add)
    record = runner().run([case])
    assert not record["failures"]
    assert all(r["agrees"] and r["err"] < 1e-5 for r in record["rows"])
    ours = by_impl(record, **{"pass": "bwd"})["warpwright"]
    assert ours["path"] == "warpwright"


def test_linear_cross_entropy_is_held_against_the_native_chain():
    record = runner().run([cases._linear_cross_entropy(12, 8, 33, FP32)])
    assert not record["failures"]
    assert all(r["agrees"] and r["err"] < 1e-5 for r in record["rows"])
    assert by_impl(record, **{"pass": "fwd+bwd"}).keys() >= {"warpwright", "native"}


def test_a_fused_op_is_held_against_the_native_chain():
    fused = Case(
        "relu",
        "chain",
        FP32,
        ROWS,
        lambda device: {"x": torch.randn(64, requires_grad=True)},
        lambda F, i: F.relu(i["x"]),
        {"fwd": 512.0},
        native=lambda F, i: F.relu(F.relu(i["x"])),
    )
    rows = by_impl(runner().run([fused]))
    assert rows["native"]["agrees"]


def test_compile_peer():
    record = runner(("native", "compile")).run([TINY])
    assert not record["failures"]
    assert "compile" in by_impl(record, **{"pass": "bwd"})


# ---------------------------------------------------------------- optimizers


def test_optimizer_sizes():
    for shapes, count, millions in (
        (optimizers.resnet50_shapes(), 161, 25.557),
        (optimizers.gpt2_shapes(), 148, 124.44),
    ):
        assert len(shapes) == count
        assert sum(torch.Size(s).numel() for s in shapes) / 1e6 == pytest.approx(millions, abs=0.01)


def test_optimizer_rows():
    pytest.importorskip("warpwright.optim")
    found = [replace(c, shapes=[(5, 3), (7,)]) for c in optimizers.optimizer_cases("quick")]
    record = runner().run([], found)
    check_schema(record)
    assert not record["failures"]
    assert [(r["op"], r["impl"]) for r in record["rows"]] == [
        (op, impl) for op in ("sgd", "sgd", "adamw") for impl in ("warpwright", "native")
    ]
    assert [r["bytes"] for r in record["rows"]][::2] == [22 * 12, 22 * 20, 22 * 28]
    for row in record["rows"]:
        assert row["agrees"]
        assert row["err"] < 1e-6


# ---------------------------------------------------------------- training steps


def tiny_workload(**changes):
    fixed = {
        "model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)),
        "batch": lambda: (torch.randn(4, 1, 4, 4), torch.randint(0, 3, (4,))),
        "layouts": ("nchw", "nhwc"),
    }
    return steps.Workload("tiny_step", "b4", **{**fixed, **changes})


def test_step_rows():
    record = runner(("native", "channels_last")).run([], [tiny_workload()])
    check_schema(record)
    assert not record["failures"]
    assert [(r["impl"], r["layout"]) for r in record["rows"]] == [
        ("warpwright", "nchw"),
        ("native", "nchw"),
        ("warpwright", "nhwc"),
        ("native", "nhwc"),
        ("warpwright_fused", "nhwc"),
    ]
    assert all(r["throttled"] == [] for r in record["rows"])
    forward = 2 * 4 * (16 * 8 + 8 * 3)
    # No gradient for the images: the first layer has one product less in its backward.
    assert {r["flops"] for r in record["rows"]} == {3 * forward - 2 * 4 * 16 * 8}
    assert all(r["agrees"] for r in record["rows"])


def test_step_variants():
    def names(asked, device="cuda"):
        return [v.impl for v in steps.variants(tiny_workload(), asked, device)]

    assert names(("native",), "cpu") == ["warpwright", "native", "warpwright", "warpwright_fused"]
    captured = names(("native", "channels_last", "compile", "cudagraph"))
    assert {"cudagraph", "warpwright_cudagraph", "compile", "compile_cudagraph"} <= {*captured}


def test_a_step_with_another_loss_is_marked(monkeypatch):
    def wrong(model, criterion):
        with torch.no_grad():
            model[1].weight.mul_(3)

    monkeypatch.setattr(steps, "swap_both", wrong)
    record = runner().run([], [tiny_workload()])
    row = by_impl(record)["warpwright"]
    assert not row["agrees"]
    assert "first loss" in row["notes"][0]


def test_a_step_without_a_loss_is_refused():
    record = runner().run([], [tiny_workload(loss=lambda criterion, out, y: 0 * out.sum().abs())])
    assert not record["rows"]
    assert "the first loss is 0" in record["failures"][0]["error"]


@pytest.mark.parametrize("name", ["mnist_cnn", "gpt2_small"])
def test_models_train_a_step(name):
    from warpwright.bench.models import load_workloads, models_folder

    assert (models_folder(None) / f"{name}.py").exists()
    (workload, *_) = [
        w for w in load_workloads(None, "cpu") if w.op == f"{name.split('_cnn')[0]}_step"
    ]
    torch.manual_seed(0)
    state = workload.model().state_dict()
    losses = {}
    for variant in steps.variants(workload, ("native",), "cpu")[:2]:
        step = steps.build_step(workload, variant, state, "cpu")
        losses[variant.impl] = [float(step()) for _ in range(3)]
    assert losses["native"] == pytest.approx(losses["warpwright"], rel=1e-3)
    assert losses["native"][2] < losses["native"][0]


# ---------------------------------------------------------------- the record


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.stem)
def test_results_in_the_repository_are_valid(path):
    check_schema(records.load_records(path))


def test_interrupted_run_leaves_a_valid_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"

    def interrupt(device):
        raise KeyboardInterrupt

    record = runner(autosave=path).run([TINY, replace(TINY_LINEAR, make=interrupt), TINY_POOL])
    assert record["interrupted"]
    saved = records.load_records(path)
    check_schema(saved)
    assert {r["op"] for r in saved["rows"]} == {"relu"}
    check_schema(record)


def test_ctrl_c_leaves_a_valid_file(tmp_path):
    path = tmp_path / "r.json"
    arguments = ["bench", "--suite", "quick", "--device", "cpu", "--json", str(path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "warpwright", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        # A job in the background of a shell is born deaf to Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for _ in range(1200):
        if path.exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted: keeping the rows measured so far" in out
    saved = records.load_records(path)
    check_schema(saved)
    assert saved["interrupted"]
    assert saved["rows"]


def test_a_time_limit_from_outside_is_an_interrupt(monkeypatch, tmp_path):
    """SIGTERM while a case runs, as `timeout` sends it."""

    def limit(item, *args):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(run, "case_rows", limit)
    before = signal.getsignal(signal.SIGTERM)
    path = tmp_path / "r.json"
    assert command("relu", "--suite", "quick", "--device", "cpu", "--json", path) == 130
    assert records.load_records(path)["interrupted"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_half_written_file_is_never_seen(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    record = runner().run([TINY])
    records.save_records(record, path)
    before = path.read_text()
    monkeypatch.setattr(records.os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        records.save_records({**record, "gpu": "other"}, path)
    assert path.read_text() == before


@pytest.mark.parametrize("field", ["gpu", "source_hash", "copy_tbs"])
def test_a_missing_header_field_is_refused(field):
    record = json.loads(FULL.read_text())
    del record[field]
    with pytest.raises(ValueError, match=f"'{field}' is missing"):
        records.validate(record)


@pytest.mark.parametrize("field", ["ms", "err_native", "layout"])
def test_a_missing_row_field_is_refused(field):
    record = json.loads(FULL.read_text())
    del record["rows"][3][field]
    with pytest.raises(ValueError, match=rf"rows\[3\]: field '{field}' is missing"):
        records.validate(record)


def test_stale_ops(tmp_path):
    """By the code of an op's folders and of what they include, not by comments or other files."""
    csrc = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    ops = ("relu", "batch_norm", "linear", "mnist_step")
    record = {
        "source_hash": "0" * 16,
        "op_hashes": {op: sources.op_hash(op, tmp_path) for op in ops},
        "rows": [{"op": op} for op in ops],
    }

    def append(path, text):
        with (csrc / path).open("a") as file:
            file.write(text)

    assert sources.stale_ops(record, tmp_path) == set()
    append("ops/batch_norm/batch_norm.h", "\n\n// one line\n/* two\n lines */\n")
    append("ops/relu/relu.h", 'constexpr char kNoComment[] = "//";\n')
    assert sources.stale_ops(record, tmp_path) == {"relu", "mnist_step"}
    append("gemm/instances/portable_bf16.cu", "int linear_calls_it;\n")
    assert sources.stale_ops(record, tmp_path) == {"relu", "linear", "mnist_step"}
    (csrc / "device" / "new.cuh").write_text("int nobody_includes_it;\n")
    assert sources.stale_ops(record, tmp_path) == {"relu", "linear", "mnist_step"}
    append("common/dtype.h", "int all_include_it;\n")
    assert sources.stale_ops(record, tmp_path) == {*ops}


def test_every_op_of_the_suite_has_its_folders():
    """An op that is made of others goes stale with them, and with no other."""
    for op in {item.op for item in (*CASES, *optimizers.optimizer_cases("full"))}:
        for folder in sources.folders_of(op):
            assert (ROOT / "csrc" / "ops" / folder).is_dir(), op


def test_csv(tmp_path):
    import csv

    record = runner().run([TINY])
    records.save_csv(record, tmp_path / "r.csv")
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["impl"] for r in rows] == [r["impl"] for r in record["rows"]]
    assert float(rows[0]["ms"]) == record["rows"][0]["ms"]


# ---------------------------------------------------------------- command and page


def command(*arguments):
    return warpwright_cli.main(["bench", *map(str, arguments)])


def test_command_writes_all_three(tmp_path, capsys):
    files = {kind: tmp_path / f"r.{kind}" for kind in ("json", "csv", "html")}
    options = [x for kind, path in files.items() for x in (f"--{kind}", path)]
    assert command("relu", "--suite", "quick", "--device", "cpu", "--seconds", 0.01, *options) == 0
    out = capsys.readouterr().out
    assert "relu" in out
    assert "rows in" in out
    check_schema(json.loads(files["json"].read_text()))
    assert files["csv"].read_text().startswith("op,case,dtype")
    assert "<title>warpwright beside native PyTorch" in files["html"].read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "op: nope: expected one of relu"),
        (["--peer", "nope"], "--peer: expected names out of native"),
        (["--dtype", "int8"], "--dtype: expected names out of bfloat16, float32; got 'int8'"),
        (["--suite", "model", "--models", "nowhere"], "--models: no folder nowhere"),
    ],
)
def test_command_says_what_it_expects(arguments, says, capsys):
    assert command("--suite", "quick", "--device", "cpu", *arguments) == 2
    assert says in " ".join(capsys.readouterr().out.split())


class Page(HTMLParser):
    """Tags that balance, and everything that a browser would fetch."""

    VOID = frozenset({"meta", "link", "img", "source", "br", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.scripts = [], [], 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.fetched += [attrs[k] for k in ("src", "srcset") if k in attrs]
        if tag == "link":
            self.fetched.append(attrs["href"])
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def browser():
    return shutil.which("chromium") or shutil.which("google-chrome")


def open_page(path, tmp_path, width=1200):
    """Loads the page in headless Chromium; the size of the screenshot and what the console said."""
    shot = tmp_path / f"{width}.png"
    result = subprocess.run(
        [
            browser(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},1000",
            f"--screenshot={shot}",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return (shot.stat().st_size if shot.exists() else 0), console


def check_page(path, tmp_path):
    parsed = Page(path.read_text())
    assert parsed.fetched
    assert all(uri.startswith("data:") for uri in parsed.fetched)
    if browser() is None:
        return
    size, console = open_page(path, tmp_path)
    assert size > 20_000
    assert not console


def test_page_of_the_results(tmp_path):
    record = records.load_records(FULL)
    path = tmp_path / "page.html"
    page.write_bench_page(record, path)
    check_page(path, tmp_path)
    text = path.read_text()
    for part in (record["gpu"], record["source_hash"], record["date"], "prefers-color-scheme"):
        assert part in text
    assert text.count('class="ours"') == sum(r["impl"] == "warpwright" for r in record["rows"])


def test_page_escapes_what_it_shows(tmp_path):
    record = records.load_records(FULL)
    record["rows"] = record["rows"][:2]
    record["failures"] = [{"op": "relu", "case": "x", "error": "<script>alert(1)</script>"}]
    text = page.bench_page(record)
    assert text.count("<script") == 1  # the page's own
    assert "alert" not in text.partition("<script")[2]
    assert "&lt;script&gt;alert(1)" in text


def test_pictures_carry_their_origin(tmp_path):
    record, steps = records.load_records(FULL), records.load_records(STEPS)
    for draw, drawn in ((plots.roofline, record), (plots.bars, record), (plots.ladder, steps)):
        text = plots.svg(
            lambda style, draw=draw, drawn=drawn: draw(drawn, style), plots.Style(plots.DARK, True)
        )
        for part in (drawn["gpu"], drawn["torch"], drawn["date"], drawn["source_hash"]):
            assert part in text
    again = plots.svg(lambda style: plots.bars(record, style), plots.Style())
    assert again == plots.svg(lambda style: plots.bars(record, style), plots.Style())


def test_speeds_of_steps_are_relative_to_native():
    """To the faster of its layouts, wherever it stands, and only in layouts in which it ran."""
    times = {("warpwright", "nchw"): 20.0, ("native", "nchw"): 10.0, ("native", "nhwc"): 8.0}
    times["warpwright", "nhwc"] = 4.0
    record = records.load_records(STEPS)
    row = {**record["rows"][0], "op": "x_step", "case": "b1"}
    record["rows"] = [{**row, "impl": i, "layout": at, "ms": ms} for (i, at), ms in times.items()]
    speeds = ("20 ms · 0.40×", "10 ms · 0.80×", "8 ms · 1.00×", "4 ms · 2.00×")
    assert texts(plots.ladder(record, plots.Style())) == [f" {speed}" for speed in speeds]
    del record["rows"][2]
    some = [" 20 ms · 0.50×", " 10 ms · 1.00×", " 4 ms"]
    assert texts(plots.ladder(record, plots.Style())) == some
    del record["rows"][1]
    assert texts(plots.ladder(record, plots.Style())) == [" 20 ms", " 4 ms"]


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_roofline_points_lie_under_the_roof():
    record = json.loads(FULL.read_text())
    for row, (op, impl, x, y) in zip(
        [r for r in record["rows"] if r["bytes"]], plots.roofline_points(record), strict=True
    ):
        assert (op, impl) == (row["op"], row["impl"])
        roof = min(x * record["copy_tbs"], record["matmul_tflops"])
        if not row["flops"]:
            # The share of the roof is the share of the floor, whatever the nominal count.
            assert y / (x * record["copy_tbs"]) == pytest.approx(
                row["floor_ms"] / row["ms"], rel=0.05, abs=0.02
            )
        # Others may move fewer bytes: torch.compile saves relu's mask for the backward.
        assert y < 1.25 * roof or impl not in ("warpwright", "native")


def test_relative_times():
    record = json.loads(FULL.read_text())
    assert all(v["native"] == pytest.approx(1) for v in plots.relative_times(record).values())


def test_pictures_are_optional():
    """What measures does not need what draws."""
    code = "import sys, warpwright.bench.run; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
