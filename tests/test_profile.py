"""`warpwright.profile` and its command: the joins, the sums, the page, what is left as it was."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_bench import check_page
from torch import nn
from torch.nn import functional as F

import warpwright
import warpwright_cli
from warpwright.bench import records
from warpwright.profile import command, page, runs, summary, trace
from warpwright.profile.ranges import Amount, Ranges, op_of
from warpwright.profile.trace import Label
from warpwright.swap import OPS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _quick_ceilings(monkeypatch):
    fixed = {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    monkeypatch.setattr(records, "ceilings", lambda device: dict(fixed))


# ---------------------------------------------------------------- the join, on hand-built traces

HOST, ENGINE, GPU = (1, 1), (1, 2), (0, 7)


def span(name, start, dur, category="cpu_op", thread=HOST, **args):
    pid, tid = thread
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start,
        "dur": dur,
        "args": args,
    }


def annotation(name, start, dur):
    return span(name, start, dur, "user_annotation")


def launched(correlation, start, kernel, kernel_start, dur, thread=HOST):
    return [
        span("cudaLaunchKernel", start, 2, "cuda_runtime", thread, correlation=correlation),
        span(kernel, kernel_start, dur, "kernel", GPU, correlation=correlation),
    ]


CONV = trace.op_range("conv2d", "stem.conv")
GPU_TRACE = [
    annotation(trace.STEP, 0, 1000),
    annotation(trace.module_range("stem"), 10, 200),
    annotation(CONV, 20, 100),
    # A copy of a flag for no gradient peeks at the next number; the convolution then takes it.
    span("aten::to", 21, 5, **{"Sequence number": 7}),
    span("warpwright::conv2d", 30, 80, **{"Sequence number": 7}),
    *launched(1, 40, "void warpwright::conv_kernel<64>()", 300, 50),
    *launched(2, 60, "void at::native::bias_kernel()", 350, 10),
    # An addition that no layer claims, inside the module.
    span("aten::add", 130, 20, **{"Sequence number": 8}),
    *launched(3, 135, "void at::native::add_kernel()", 360, 5),
    # The backward runs on a thread of its own.
    span(trace.ENGINE + "AddBackward0", 400, 10, thread=ENGINE, **{"Sequence number": 8}),
    span(
        trace.ENGINE + "WarpwrightConv2dBackward", 420, 90, thread=ENGINE, **{"Sequence number": 7}
    ),
    span("warpwright::conv2d_backward", 425, 80, thread=ENGINE),
    *launched(4, 430, "void warpwright::wgrad()", 500, 100, ENGINE),
    *launched(5, 440, "void warpwright::dgrad()", 560, 80, ENGINE),
    span(trace.ENGINE + "torch::autograd::AccumulateGrad", 600, 10, thread=ENGINE),
    *launched(6, 601, "void at::native::add_kernel()", 700, 4, ENGINE),
    annotation(trace.phase_range("optimizer"), 620, 100),
    span("aten::_fused_sgd_", 630, 50),
    *launched(7, 640, "multi_tensor_apply_kernel", 750, 20),
    # Launched before the step, ran inside of it: not the step's.
    *launched(8, -20, "void earlier()", 5, 500),
    # Launched inside, no range at all.
    *launched(9, 800, "void stray()", 900, 3),
    span("Memset (Device)", 950, 1, "gpu_memset", GPU, correlation=9),
]


def test_join_on_a_hand_built_gpu_trace():
    joined = trace.join(GPU_TRACE)
    assert joined.device == "cuda"
    assert joined.steps == [(0, 1000)]
    found = {}
    for work in joined.work:
        found.setdefault(work.label, []).append(work.us)
    assert found == {
        Label("conv2d", "stem.conv", "fwd"): [50, 10],
        Label("add", "stem", "fwd"): [5],
        Label("conv2d", "stem.conv", "bwd"): [100, 80],
        Label(trace.ACCUMULATE, "", "bwd"): [4],
        Label("optimizer"): [20],
        Label(trace.OUTSIDE): [3, 1],
    }
    assert joined.work_us == 50 + 10 + 5 + 100 + 80 + 4 + 20 + 3 + 1
    # 500..600 and 560..640 overlap.
    assert joined.busy_us == 60 + 5 + 140 + 4 + 20 + 3 + 1
    assert joined.calls[Label("conv2d", "stem.conv", "fwd")] == 1


def test_sums_of_labels_are_the_totals():
    joined = trace.join(GPU_TRACE)
    sums = summary.by_label(joined)
    assert sum(s.us for s in sums.values()) == pytest.approx(joined.work_us)
    assert sum(s.kernels for s in sums.values()) == len(joined.work)
    conv = sums[Label("conv2d", "stem.conv", "fwd")]
    assert (conv.us, conv.own_us, conv.kernels, conv.calls) == (60, 50, 2, 1)
    # Host time of an op is its own, without the ops that it calls and without ranges.
    nested = trace.join([*GPU_TRACE, span("aten::empty", 31, 30)])
    label = Label("conv2d", "stem.conv", "fwd")
    assert nested.host_us[label] == joined.host_us[label]


def test_join_per_step():
    shifted = [
        {
            **event,
            "ts": event["ts"] + 2000,
            "args": {k: v + 100 for k, v in event["args"].items()},
        }
        for event in GPU_TRACE
    ]
    one, two = trace.join(GPU_TRACE), trace.join([*GPU_TRACE, *shifted])
    assert len(two.steps) == 2
    a, b = summary.by_label(one), summary.by_label(two)
    assert a.keys() == b.keys()
    for label in a:
        assert b[label].us == pytest.approx(a[label].us)
        assert b[label].kernels == pytest.approx(a[label].kernels)


def test_join_on_a_hand_built_cpu_trace():
    relu = trace.op_range("relu", "1")
    joined = trace.join(
        [
            annotation(trace.STEP, 0, 100),
            annotation(relu, 10, 30),
            span("warpwright::relu", 12, 20, **{"Sequence number": 1}),
            span("aten::empty_like", 13, 4),
            span(trace.ENGINE + "WarpwrightReluBackward", 50, 20, **{"Sequence number": 1}),
            span("warpwright::relu_backward", 52, 10),
            span("aten::mul", 200, 10),
        ]
    )
    sums = {}
    for work in joined.work:
        sums[work.label] = sums.get(work.label, 0) + work.us
    assert sums == {Label("relu", "1", "fwd"): 20, Label("relu", "1", "bwd"): 20}
    assert joined.busy_us == joined.work_us == 40


def test_memory_goes_to_the_op_that_allocates():
    def memory(time, total, kind=1):
        return {
            "ph": "i",
            "name": "[memory]",
            "pid": 1,
            "tid": 1,
            "ts": time,
            "args": {"Total Allocated": total, "Device Type": kind},
        }

    events = [*GPU_TRACE, memory(45, 1 << 20), memory(47, 99, 0), memory(635, 5 << 20)]
    assert trace.join(events).memory == [
        (45, 1 << 20, Label("conv2d", "stem.conv", "fwd")),
        (635, 5 << 20, Label("optimizer")),
    ]


# ---------------------------------------------------------------- what bounds, what is least


ENVIRONMENT = {"copy_tbs": 1.0, "matmul_tflops": 100.0}


def test_floors_and_bounds():
    assert Amount(2e6, 0).floor_us(ENVIRONMENT) == 2.0
    assert Amount(0, 3e8).floor_us(ENVIRONMENT) == 3.0
    assert Amount(2e6, 1e8).bound(ENVIRONMENT) == "memory"
    assert Amount(2e6, 3e8).bound(ENVIRONMENT) == "compute"


def test_what_bounds_the_step():
    joined = trace.join(GPU_TRACE)
    run = runs.Run("swapped", joined=joined)
    run.timing = type("T", (), {"ms": 1.0})()
    amounts = {
        Label("conv2d", "stem.conv", "bwd"): Amount(1.0, 1e9),
        Label("optimizer"): Amount(1e6, 0.0),
    }
    bound = summary.bound_of(run, summary.by_label(joined), amounts, ENVIRONMENT)
    assert sum(bound.values()) == pytest.approx(1)
    assert bound["launch"] == pytest.approx(1 - 233 / 1000)
    assert "waits" in summary.describe_bound(bound)
    assert bound["compute"] > bound["other"] > bound["memory"] > 0


def test_work_is_counted_from_shapes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    x = torch.randn(2, 3, 4, 4)
    ranges = Ranges({"": model}, count=True)
    with ranges:
        model(x).sum().backward()
    conv = 2 * (2 * 8 * 16) * 27
    assert ranges.amounts[Label("conv2d", "0", "fwd")].flops == conv
    # The images want no gradient: one product in the backward.
    assert ranges.amounts[Label("conv2d", "0", "bwd")].flops == conv
    linear = 2 * 2 * 128 * 5
    assert ranges.amounts[Label("linear", "3", "bwd")].flops == 2 * linear
    assert ranges.amounts[Label("relu", "1", "fwd")].bytes == 2 * 4 * (2 * 8 * 16)
    assert not [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_ranges_close_when_a_layer_raises():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("broken")

    model = nn.Sequential(nn.ReLU(), Broken())
    ranges = Ranges({"": model})
    with pytest.raises(RuntimeError, match="broken"), ranges:
        model(torch.randn(2))
    assert not ranges._open
    assert not [m for m in model.modules() if m._forward_hooks]


def test_op_names():
    assert op_of(nn.Conv2d(1, 1, 1)) == op_of(warpwright.nn.Conv2d(1, 1, 1)) == "conv2d"
    assert op_of(nn.PReLU()) == "PReLU"


# ---------------------------------------------------------------- a whole profile


class Net(nn.Module):
    """Layers, a function without a layer, and a layer that swap leaves alone."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.prelu = nn.PReLU(64)
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 2)
        return self.fc(self.prelu(x.flatten(1)))


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    torch.manual_seed(0)
    fixed = {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    out = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "ceilings", lambda device: dict(fixed))
        report = warpwright.profile(
            model,
            torch.randn(4, 1, 8, 8),
            torch.randint(0, 3, (4,)),
            optimizer=optimizer,
            out=out,
            steps=2,
            seconds=0.05,
        )
    return model, optimizer, before, report, out


@pytest.mark.parametrize("fuse", [False, True])
def test_a_swapped_model_stays_swapped(fuse):
    model, loss = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.CrossEntropyLoss()
    warpwright.swap(model, fuse=fuse)
    warpwright.swap(loss)
    before = [type(m) for m in (*model.modules(), *loss.modules())]
    seen = []
    model[0].register_forward_hook(_fused_or_not(seen))
    report = warpwright.profile(
        model,
        torch.randn(4, 4),
        torch.randint(0, 4, (4,)),
        loss=loss,
        runs=("native", "swapped", "fused"),
        steps=1,
        seconds=0.01,
    )
    assert [type(m) for m in (*model.modules(), *loss.modules())] == before
    assert report.swap["swapped"] == 2
    assert nn.Linear in seen  # the native run was native


def _fused_or_not(seen):
    from warpwright.swap.blocks import fits_fused

    return fits_fused(lambda module, args, output: seen.append(type(module)))


def test_the_model_is_as_before(profiled):
    model, optimizer, (state, optimizer_state), _, _ = profiled
    assert [type(m) for m in model.children()] == [
        nn.Conv2d,
        nn.BatchNorm2d,
        nn.PReLU,
        nn.Linear,
    ]
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert optimizer.state_dict()["state"].keys() == optimizer_state["state"].keys()
    assert all(p.grad is None for p in model.parameters())


def test_ops_add_up_to_the_step(profiled):
    report = profiled[3]
    assert [r["name"] for r in report.runs] == list(runs.default_runs("cpu"))
    for run in report.runs:
        assert run["error"] is None
        name = run["name"]
        for rows in (report.ops, report.modules):
            total = sum(row[name]["ms"] or 0 for row in rows)
            assert total == pytest.approx(run["work_ms"], rel=1e-6)
            assert all((row[name]["ms"] or 0) >= 0 for row in rows)
        (start, changes, end), ours = page.waterfall_steps(report), report.ours
        assert start + sum(c for _, c in changes) == pytest.approx(end) == ours["ms"]


def test_every_op_is_named(profiled):
    report = profiled[3]
    rows = {(r["module"], r["op"]): r for r in report.modules}
    for key in (
        ("conv", "conv2d"),
        ("bn", "batch_norm"),
        ("", "relu"),
        ("", "max_pool2d"),
        ("prelu", "PReLU"),
        ("fc", "linear"),
        ("loss", "cross_entropy"),
    ):
        row = rows[key]
        assert row["native"]["ms"] > 0, key
        assert row["swapped"]["ms"] > 0, key
        assert row["calls"] == 1, key
        if key[1] in OPS:
            assert row["native"]["own_share"] == 0
            assert row["swapped"]["own_share"] > 0, key
    assert rows["conv", "conv2d"]["swap"] == "swapped"
    assert rows["prelu", "PReLU"]["swap"] == "warpwright has no such layer"
    assert 0 < rows["conv", "conv2d"]["error"] < 1e-5
    assert rows["conv", "conv2d"]["native"]["roofline"] > 0
    assert ("", "optimizer") in rows


def test_report_files(profiled, tmp_path):
    _, _, _, report, out = profiled
    names = {p.name for p in out.iterdir()}
    assert {"report.html", "report.json", "ops.csv", "modules.csv", "waterfall.png"} <= names
    assert {"trace_native.json", "trace_swapped.json", "memory.png", "roofline_dark.png"} <= names
    check_page(out / "report.html", tmp_path)
    text = (out / "report.html").read_text()
    assert "warpwright has no such layer" in text
    assert report.environment["source_hash"] in text
    traced = trace.join(trace.load(out / "trace_swapped.json"))
    assert len(traced.steps) == 2
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(page.__file__).parent / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads((out / "report.json").read_text()), schema)
    assert "speed-up" in str(report)


def test_memory_over_time(profiled):
    for points in profiled[3].memory.values():
        assert points[0][0] == 0
        assert max(m for _, m in points) > 0
        assert [t for t, _ in points] == sorted(t for t, _ in points)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got int"):
        warpwright.profile(3, torch.randn(2))
    with pytest.raises(ValueError, match="runs: expected names out of native"):
        warpwright.profile(nn.ReLU(), torch.randn(2), runs=["nope"])


def test_a_run_that_fails_is_reported(monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4))
    workload = runs.Workload(model, torch.randn(2, 4))
    original = runs.prepared

    def prepared(workload, name):
        if name == "swapped":
            raise RuntimeError("no such kernel")
        return original(workload, name)

    monkeypatch.setattr(runs, "prepared", prepared)
    found = runs.time_runs(workload, ("native", "swapped"), 0.01)
    assert found["swapped"].error == "RuntimeError: no such kernel"
    assert found["native"].timing is not None


def test_inference_takes_no_gradients():
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    workload = runs.Workload(model, torch.randn(2, 4))
    assert not workload.trains
    assert not workload.run(model).requires_grad
    assert workload.run(model).shape == (2, 4)


# ---------------------------------------------------------------- the command

SCRIPT = """
import torch
from torch import nn

def model(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU())

def pair():
    return model(), (torch.randn(5, 3),)

def wrong():
    return 3
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script_of_a_user.py"
    path.write_text(SCRIPT)
    return path


def run_command(*arguments):
    return warpwright_cli.main(["profile", *map(str, arguments)])


def test_command(script, tmp_path, capsys):
    arguments = ["--device", "cpu", "--steps", 1, "--seconds", 0.02, "--out", tmp_path / "out"]
    slow = run_command(
        f"{script}:model",
        *("--input", "5x3", "--arg", "width=8", "--runs", "swapped", "--fail-below", 1e9),
        *arguments,
    )
    assert slow == 1
    out = capsys.readouterr().out
    assert "below 1e+09" in out
    assert (tmp_path / "out" / "report.html").exists()
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [r["name"] for r in report["runs"]] == ["native", "swapped"]


@pytest.mark.parametrize(
    ("what", "extra", "says"),
    [
        ("nothing", [], "expected SCRIPT_OR_MODULE:FACTORY"),
        ("missing.py:model", [], "missing.py: no such file"),
        ("{script}:nope", [], "has no 'nope'"),
        ("{script}:model", [], "gives no inputs"),
        ("{script}:wrong", [], "expected a model, (model, inputs[, target]) or a dict, got int"),
        ("{script}:pair", ["--input", "5xa"], "'5xa': expected SHAPE"),
        ("{script}:model", ["--arg", "width"], "--arg: expected NAME=VALUE"),
    ],
)
def test_command_says_what_it_expects(script, what, extra, says, capsys):
    assert run_command(what.format(script=script), "--device", "cpu", *extra) == 2
    assert says in " ".join(capsys.readouterr().out.split())


def test_specs():
    x = command.tensor_of("2x3:bfloat16", "cpu")
    assert (x.shape, x.dtype) == ((2, 3), torch.bfloat16)
    tokens = command.tensor_of("4x100:int64:9", "cpu")
    assert tokens.dtype == torch.int64
    assert tokens.max() < 9
    assert tokens.max() > 2


def test_fail_below(script, tmp_path, monkeypatch, capsys):
    real = command.profile

    def faster(*args, **kwargs):
        report = real(*args, **{**kwargs, "out": None})
        report.speedup = 1.5
        return report

    monkeypatch.setattr(command, "profile", faster)
    arguments = ["--device", "cpu", "--steps", 1, "--seconds", 0.01, "--out", tmp_path]
    assert run_command(f"{script}:pair", "--fail-below", 1.0, *arguments) == 0
    assert run_command(f"{script}:pair", "--fail-below", 2.0, *arguments) == 1
    assert "1.500 as speed-up: below 2" in capsys.readouterr().out


def test_import_does_not_need_what_draws():
    code = "import sys, warpwright; assert not {'matplotlib', 'jsonschema'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert callable(warpwright.profile)
