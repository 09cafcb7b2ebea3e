"""`warpwright.profile` and its command report every op of a model, and leave the model as it was."""

import copy
import json
import re
import subprocess
import sys
from collections import UserDict
from pathlib import Path

import pytest
import torch
from pages import check_page
from torch import nn
from torch.nn import functional as F

import warpwright
import warpwright_cli
from warpwright.bench import records
from warpwright.bench.measure import Timing
from warpwright.profile import command, page, runs, trace
from warpwright.swap import OPS

pytestmark = pytest.mark.usefixtures("quick_ceilings")

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


class OfImages(nn.Module):
    def __init__(self, flat):
        super().__init__()
        self.conv, self.flat = nn.Conv2d(3, 8, 3, padding=1), flat

    def forward(self, x):
        y = self.conv(x).relu()
        return y.view(y.shape[0], -1) if self.flat else y.mean((2, 3))


@pytest.mark.parametrize("flat", [False, True])
def test_channels_last_is_measured(flat, monkeypatch):
    """If the model runs in it; and weights, images and their storages are as before."""

    def timed(step, device, seconds):
        """1 ms, or 2 in channels_last."""
        step()
        ms = 1.0 + model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        return Timing(ms, ms, ms, 6, [ms] * 6)

    monkeypatch.setattr(runs, "_timed", timed)
    model, images = OfImages(flat), torch.randn(2, 3, 8, 8)
    weight, before = model.conv.weight, model.conv.weight.detach().clone()
    place = weight.data_ptr()
    workload = runs.Workload(model, images)
    found = runs.time_layouts(workload, "swapped", 0.2)
    assert found == (None if flat else (1.0, 2.0))  # view() of channels_last raises
    with runs._channels_last(workload) as changed:
        assert changed.inputs.is_contiguous(memory_format=torch.channels_last)
        assert weight.is_contiguous(memory_format=torch.channels_last)
    assert images.is_contiguous()
    assert model.conv.weight is weight
    assert weight.is_contiguous()
    assert weight.data_ptr() == place
    assert torch.equal(weight, before)
    assert type(model.conv) is nn.Conv2d
    assert weight.grad is None


def test_channels_last_of_other_models_is_not_measured():
    assert (
        runs.time_layouts(runs.Workload(nn.Linear(4, 4), torch.ones(2, 4)), "native", 0.1) is None
    )
    images = torch.randn(2, 3, 8, 8)
    ready = OfImages(False).to(memory_format=torch.channels_last)
    assert runs.time_layouts(runs.Workload(ready, images), "native", 0.1) is None
    own = runs.Workload(OfImages(False), images, step=lambda model: model(images))
    assert runs.time_layouts(own, "native", 0.1) is None


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
    assert re.search(r"slowest modules, fused: \w+ \(\w+\) [\d.]+ ms, native [\d.]+; ", str(report))


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


def test_any_mapping_of_keyword_arguments():
    """As a tokenizer returns it."""
    model = nn.Sequential(nn.Linear(4, 4))
    inputs = UserDict(input=torch.randn(6, 4))
    report = warpwright.profile(model, inputs, runs=["swapped"], steps=1, seconds=0.01)
    assert report.run("swapped")["error"] is None
    assert warpwright.swap(model, check=inputs).check["unreached"] == []


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"out: expected a folder, got the file .*file"):
        warpwright.profile(nn.ReLU(), torch.randn(2), out=tmp_path / "file")


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
