"""`bench` with one process per implementation: Hugging Face's models, and how attention is called."""

import functools
import multiprocessing
import signal
import sys
import threading
import time

import pytest
import torch
from rich.console import Console
from torch.nn import functional as native

from warpwright import functional as ours
from warpwright.bench import records, run, separate, steps
from warpwright.bench.attention_calls import attention_calls, masked
from warpwright.bench.models import load_file, load_workloads, models_folder

pytestmark = pytest.mark.usefixtures("quick_ceilings")

TINY = """
import os
import time

import torch
from torch import nn

from warpwright.bench.steps import ROWS, Variant, Workload, swap_both


def wrong(model, criterion):
    with torch.no_grad():
        model[0].weight.mul_(3)


def raises(model, criterion):
    raise ValueError("this one raises")


def dies(model, criterion):
    os._exit(3)


def breaks(model, criterion):
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))


def waits(model, criterion):
    time.sleep(600)


PREPARE = {"warpwright": swap_both, "wrong": wrong, "raises": raises, "dies": dies, "nan": breaks}


def variants(peers, device):
    if "compile" in peers:
        return [Variant("native", ROWS), Variant("waits", ROWS, waits)]
    ours = [Variant(name, ROWS, prepare) for name, prepare in PREPARE.items()]
    return [*ours, Variant("native", ROWS, peer="native")]


def workloads(device):
    return [
        Workload(
            "tiny_step",
            "b4",
            lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)),
            lambda: (torch.randn(4, 8), torch.randint(0, 3, (4,))),
            variants=variants,
            separate=True,
        )
    ]
"""


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


def test_one_process_per_implementation(tiny, device):
    workload = load_file(tiny, device)
    runner = run.Runner(device, ("native",), Console(quiet=True), 0.01, None)
    record = runner.run([], workload)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(record, records.SCHEMA)
    rows = {row["impl"]: row for row in record["rows"]}
    assert [*rows] == ["warpwright", "wrong", "native"]
    counts = {row["rounds"] for row in rows.values()}
    assert len(counts) == 1
    assert counts.pop() >= separate.TURNS * separate.FEWEST
    # The first layer's input needs no gradient: five products.
    assert {row["flops"] for row in rows.values()} == {2 * 4 * (2 * 8 * 16 + 3 * 16 * 3)}
    for name in ("warpwright", "wrong"):
        assert len(rows[name]["losses"]) == separate.FIRST_STEPS
    assert rows["warpwright"]["losses"] == pytest.approx(rows["native"]["losses"], rel=1e-3)
    assert rows["native"]["ratio"] > 0
    assert rows["native"]["losses"][-1] < rows["native"]["losses"][0]
    assert rows["warpwright"]["agrees"]
    assert not rows["wrong"]["agrees"]
    assert "loss 0 is" in rows["wrong"]["notes"][0]
    assert all((row["peak_mib"] is None) == (device == "cpu") for row in rows.values())
    failures = {f["impl"]: f["error"] for f in record["failures"]}
    assert failures.keys() == {"raises", "dies", "nan"}
    assert "this one raises" in failures["raises"]
    assert "exit 3" in failures["dies"]
    assert "a loss of the first steps is nan" in failures["nan"]
    assert not multiprocessing.active_children()


def test_an_interrupt_ends_the_processes(tiny):
    (workload,) = load_file(tiny, "cpu")
    main = threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(8, signal.pthread_kill, (main, signal.SIGINT))
    start = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            separate.workload_rows(
                workload, "cpu", {"matmul_tflops": 1.0}, 0.01, ("native", "compile"), []
            )
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 60
    assert not multiprocessing.active_children()


def test_a_workload_without_a_file_is_refused(tiny):
    from dataclasses import replace

    (workload,) = load_file(tiny, "cpu")
    with pytest.raises(ValueError, match="source: expected the file"):
        separate.workload_rows(replace(workload, source=None), "cpu", {}, 0.01)


# ---------------------------------------------------------------- how attention is called


@pytest.mark.parametrize("function", [native, ours], ids=["native", "ours"])
def test_attention_calls(device, function):
    q = torch.randn(2, 4, 8, 16, device=device, requires_grad=True)
    k = torch.randn(2, 2, 8, 16, device=device, requires_grad=True)
    mask = torch.ones(8, 8, dtype=torch.bool, device=device).tril()

    def step(**options):
        return function.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options)

    (call,) = attention_calls(lambda: step(is_causal=True).sum().backward())
    assert call.startswith("1 x ")
    assert "causal flag, no mask, 4 heads of" in call
    assert "no causal flag" not in call
    assert not masked([call])
    calls = attention_calls(lambda: (step(attn_mask=mask), step(attn_mask=mask)))
    assert calls[0].startswith("2 x ")
    assert "no causal flag, mask " in calls[0]
    assert masked(calls)
    if function is ours:
        assert calls == [
            "2 x warpwright::attention: no causal flag, mask 1x1x8x8, 4 heads of 2"
        ] or calls[0].endswith("8x8, 4 heads of 2")


@pytest.mark.parametrize("heads", [4, 2])
def test_flops_of_attention(device, heads):
    """Heads of key that are shared count as often as they are used."""
    q = torch.randn(2, 4, 8, 16, device=device, requires_grad=True)
    k = torch.randn(2, heads, 8, 16, device=device, requires_grad=True)

    def step():
        y = native.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        y.sum().backward()

    # Two products forward and five backward; fewer backward if native keeps the scores.
    assert steps.count_flops(step) in [n * 2 * 2 * 4 * 8 * 8 * 16 for n in (6, 7)]


# ---------------------------------------------------------------- Hugging Face's classes


@pytest.fixture(scope="module")
def causal_lm():
    pytest.importorskip("transformers")
    return {w.op: w for w in load_file(models_folder(None) / "causal_lm.py", "cpu")}


OPS = ["llama_like_step", "llama_like_labels_step", "gpt2_hf_step", "gpt2_hf_labels_step"]


@pytest.mark.parametrize(
    "op", [OPS[0], *(pytest.param(op, marks=pytest.mark.slow) for op in OPS[1:])]
)
def test_hugging_face_models(causal_lm, op, monkeypatch):
    """Every implementation trains as native does; the peer with the flag gets no mask."""
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    )
    workload = causal_lm[op]
    losses, called = {}, {}
    for variant in steps.variants(workload, ("native", "compile"), "cpu"):
        torch._dynamo.reset()
        step = steps.build_step(workload, variant, None, "cpu")
        losses[variant.impl] = [float(step()) for _ in range(3)]
        called[variant.impl] = attention_calls(step)
        step.release()
        assert not step.optimizer.state
    for impl, found in losses.items():
        assert found == pytest.approx(losses["native"], rel=1e-4), impl
        assert found[2] < found[0]
    assert {"native", "compile", "compile_causal", "warpwright_compile"} <= losses.keys()
    (call,) = called["compile_causal"]
    assert "causal flag, no mask" in call
    assert "no causal flag" not in call
    assert not masked(called["warpwright"])
    for impl in ("warpwright", "warpwright_compile"):
        assert all("warpwright::attention" in call for call in called[impl])


def test_captured_variants_are_asked_for_on_a_gpu(causal_lm):
    names = [v.impl for v in causal_lm[OPS[0]].variants(("native", "compile", "cudagraph"), "cuda")]
    assert names == [
        "warpwright",
        "native",
        "warpwright_fused",
        "cudagraph",
        "warpwright_cudagraph",
        "warpwright_fused_cudagraph",
        "compile",
        "compile_causal",
        "warpwright_compile",
        "compile_causal_cudagraph",
        "warpwright_compile_cudagraph",
    ]


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = {w.op for w in load_workloads(None, "cpu")}
    assert "gpt2_small_step" in found
    assert not found & {*OPS}
    assert "causal_lm: missing: transformers" in capsys.readouterr().out
