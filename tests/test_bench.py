"""`python -m warpwright bench` compares ops, optimizers and steps with their peers, and marks what is wrong."""

from dataclasses import replace

import pytest
import torch
from bench_runs import TINY, TINY_LINEAR, TINY_POOL, by_impl, check_schema, runner
from torch import nn

from warpwright import _ops
from warpwright.bench import cases, guards, optimizers, peers, run, screen, steps
from warpwright.bench.cases import FP32, ROWS, Case
from warpwright.bench.implementation import Missing
from warpwright.bench.peers import PEERS, Peer

pytestmark = pytest.mark.usefixtures("quick_ceilings")

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


@pytest.mark.slow
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
        ("warpwright_fused", "nchw"),
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

    ours = ["warpwright", "warpwright_fused", "warpwright_fused"]
    assert names(("native",), "cpu") == ["warpwright", "native", *ours]
    captured = names(("native", "channels_last", "compile", "cudagraph"))
    assert {"cudagraph", "warpwright_cudagraph", "compile", "compile_cudagraph"} <= {*captured}
    assert {"warpwright_compile", "warpwright_compile_cudagraph"} <= {*captured}
    assert captured.count("warpwright_fused_cudagraph") == 2  # of both layouts


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
