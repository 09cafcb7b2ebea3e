"""warpwright.profile on several ranks: equal steps on each, and communication on the time axis."""

import json

import pytest
import torch
from pages import check_page
from torch import nn

import warpwright
from warpwright.bench import records
from warpwright.profile import timeline, trace


def test_union_and_overlap():
    assert timeline.union([(4, 5), (0, 2), (1, 3)]) == [(0, 3), (4, 5)]
    assert timeline.union([(0, 1), (1.5, 2)], gap=0.5) == [(0, 2)]
    a, b = [(0, 3), (5, 9)], [(2, 6), (8, 20)]
    assert timeline.overlap(a, b) == timeline.overlap(b, a) == 1 + 1 + 1
    assert timeline.overlap(a, []) == 0


def kernel(name, start, us, correlation):
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
    args = {"correlation": correlation}
    work = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7}
    return [
        {**launch, "ts": 1 + correlation, "dur": 0.5, "args": args},
        {**work, "ts": start, "dur": us, "args": args},
    ]


def test_kernels_of_nccl():
    """They take GPU time, and are apart from compute."""
    step = {"ph": "X", "cat": "user_annotation", "name": trace.STEP, "pid": 1, "tid": 1}
    events = [
        {**step, "ts": 0.0, "dur": 100.0},
        *kernel("gemm", 10, 30, 1),
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 40, 2),
        *kernel("relu", 55, 10, 3),
    ]
    joined = trace.join(events)
    assert joined.work_us == 80
    assert timeline.lanes(joined) == {"compute": [(10, 40), (55, 65)], "communication": [(20, 60)]}
    assert timeline.amounts(joined) == {"communication_ms": 0.04, "hidden_ms": 0.025}
    assert [row["lane"] for row in timeline.of_last_step("native", joined)] == [
        *("compute", "compute", "communication")
    ]


def test_one_process_has_none():
    joined = trace.join([])
    assert timeline.amounts(joined) == {}
    assert timeline.of_last_step("native", joined) == []


def profiled(rank, out):
    """A model in DistributedDataParallel; the ranks' clocks ask for different numbers of rounds."""
    records.ceilings = lambda device: {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = nn.parallel.DistributedDataParallel(model)
    before = [p.detach().clone() for p in model.parameters()]
    report = warpwright.profile(
        model,
        torch.randn(8, 64),
        torch.randint(10, (8,)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        out=out,
        steps=2,
        seconds=0.02 * (rank + 1),
    )
    assert all(map(torch.equal, before, model.parameters()))
    return [run["error"] for run in report.runs], report.files, report.timeline, str(report)


def test_ranks(gloo_worlds, tmp_path):
    pytest.importorskip("vl_convert")
    (first, second) = gloo_worlds(2).run(profiled, tmp_path)
    assert first[0] == second[0] == [None] * 3
    assert "timeline.png" in first[1]
    assert second[1] == []
    assert {row["lane"] for row in first[2]} == {"compute", "communication"}
    assert "of communication" in first[3]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["environment"]["ranks"] == 2
    assert report["timeline"] == first[2]
    check_page(tmp_path / "report.html", tmp_path)
    assert "on one time axis" in (tmp_path / "report.html").read_text()
