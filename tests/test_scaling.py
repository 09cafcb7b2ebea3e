"""benchmarks/scaling: the arithmetic of collectives, schedules and schemes, and the page they fill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from scaling import schemes, simulate, workloads  # noqa: E402
from scaling.cluster import NVLINK, Cluster, all_reduce, gather  # noqa: E402
from scaling.events import COMPUTE, LINK, Timeline  # noqa: E402
from scaling.workloads import Layer, Workload  # noqa: E402

CLUSTER = Cluster()


def test_collectives():
    """Rings: each of n - 1 steps sends 1 / n; an all-reduce does so twice."""
    assert gather(CLUSTER, 1, 100).sent == all_reduce(CLUSTER, 1, 100).sent == 0
    assert gather(CLUSTER, 4, 100).sent == 75
    assert all_reduce(CLUSTER, 4, 100).sent == 150
    step = gather(CLUSTER, 4, 4e9)
    assert step.seconds == pytest.approx(3 * NVLINK.latency + 3e9 / NVLINK.link)
    assert all_reduce(CLUSTER, 8, 0).seconds == pytest.approx(2 * 3 * NVLINK.latency)
    inside, across = gather(CLUSTER, 8, 1e9), gather(CLUSTER, 16, 1e9)
    assert across.seconds > 8 * inside.seconds


def test_timeline():
    line = Timeline()
    first = line.add(COMPUTE, 5)
    assert line.add(LINK, 3, first) == 8
    assert line.add(COMPUTE, 2) == 7  # does not wait for the link
    assert line.add(COMPUTE, 1, after=8) == 9
    assert line.end() == 9
    assert line.hidden(9) == 2  # of the transfer from 5 to 8; nothing computes from 7 to 8
    assert line.end(slowdown=0.5) == 10


def work(count=4, parameters=50e6, flops=1e12, rate=100e12):
    layers = (Layer(parameters, flops, 2 * flops),) * count
    return Workload("test", layers, rate, "assumed", 2, 4, tokens=1024, width=1024)


@pytest.mark.parametrize(
    "scheme", [schemes.data_parallel, schemes.fully_sharded, schemes.tensor_parallel]
)
def test_one_rank_sends_nothing(scheme):
    step = scheme(work(), CLUSTER, 1)
    assert step.sent == 0
    assert step.seconds == pytest.approx(work().seconds)
    assert step.exposed == pytest.approx(0)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_bytes(ranks):
    """The table of docs/scaling.md."""
    c, w = (ranks - 1) / ranks, work()
    n = w.parameters
    assert schemes.data_parallel(w, CLUSTER, ranks).sent == pytest.approx(2 * c * n * 4)
    # The model gathers each layer for both passes.
    assert schemes.fully_sharded(w, CLUSTER, ranks).sent == pytest.approx(2 * c * n * 2 + c * n * 4)
    blocks = len(w.layers) - 1
    activations = w.tokens * w.width * 2
    tensor = schemes.tensor_parallel(w, CLUSTER, ranks)
    assert tensor.sent == pytest.approx(blocks * 8 * c * activations)
    assert tensor.flops == w.flops / ranks


def test_hybrid_sharding():
    """Inside the host as FSDP; across hosts the all-reduce of a shard."""
    w = work()
    inside = schemes.fully_sharded(w, CLUSTER, 8)
    assert schemes.hybrid_sharded(w, CLUSTER, 8) == inside
    both = schemes.hybrid_sharded(w, CLUSTER, 64)
    assert both.sent - inside.sent == pytest.approx(2 * 7 / 8 * w.parameters * 4 / 8)
    assert both.seconds < schemes.fully_sharded(w, CLUSTER, 64).seconds


def test_data_parallel_by_hand():
    """Two layers of 50 MB: the first bucket travels under the other layer's backward, the second not."""
    w = work(count=2, parameters=12.5e6)
    moved = all_reduce(CLUSTER, 2, 50e6).seconds
    backward = 2e12 / w.rate
    assert moved < backward
    step = schemes.data_parallel(w, CLUSTER, 2)
    assert step.seconds == pytest.approx(w.seconds + moved + schemes.SLOWDOWN * moved)


def test_sharded_by_hand():
    """The first gather and the last scatter are in the open, and nothing else."""
    w = work(count=3)
    gathered = gather(CLUSTER, 8, 100e6).seconds
    scattered = gather(CLUSTER, 8, 200e6).seconds
    assert gathered + scattered < 1e12 / w.rate
    step = schemes.fully_sharded(w, CLUSTER, 8)
    hidden = 5 * gathered + 2 * scattered
    expected = w.seconds + gathered + scattered + schemes.SLOWDOWN * hidden
    assert step.seconds == pytest.approx(expected)


def test_workloads():
    """Parameters as the models have them; rates from the repository's records."""
    assert workloads.resnet50().parameters == 25_557_032
    assert workloads.gpt2_small().parameters == pytest.approx(124e6, rel=0.01)
    llama = workloads.llama3_8b()
    assert llama.parameters == pytest.approx(8.03e9, rel=0.001)
    # 6 N T without the embedding, and 7 l S d T
    products = 6 * (llama.parameters - 4096 * 128256) * 16384
    assert llama.flops == pytest.approx(products + 7 * 32 * 8192 * 4096 * 16384)
    with pytest.raises(ValueError, match="no row of a captured step of nothing"):
        workloads.recorded("nothing")


def test_efficiency_falls_with_ranks():
    for scheme in (schemes.data_parallel, schemes.fully_sharded):
        times = [scheme(workloads.llama3_8b(), CLUSTER, n).seconds for n in (1, 2, 8, 64, 1024)]
        assert times == sorted(times)


def test_page():
    """docs/scaling.md has the simulator's tables. Rows of DP change with the records."""

    def lines(text):
        recorded = ("| DP:", "- ResNet-50", "- GPT-2", "Largest miss")
        return [line for line in text.strip().splitlines() if not line.startswith(recorded)]

    page = (ROOT / "docs" / "scaling.md").read_text()
    found = list(simulate.rows(CLUSTER))
    predicted = f"{simulate.sources()}\n\n{simulate.table(found)}"
    measured = simulate.measured_text(found)
    for (begin, end), expected in (
        ((simulate.BEGIN, simulate.END), predicted),
        (simulate.MEASURED, measured),
    ):
        written = page.partition(begin)[2].partition(end)[0]
        assert lines(written) == lines(expected), (
            "benchmarks/scaling/simulate.py --write docs/scaling.md"
        )


def test_compare(tmp_path):
    found = list(simulate.rows(CLUSTER))
    name, ranks, step, _ = found[0]
    row = {"scheme": name, "impl": "warpwright", "ranks": ranks, "ms": step.seconds * 800}
    other = {"scheme": "none", "impl": "warpwright", "ranks": 2, "ms": 1}
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"rows": [row, other, {**row, "impl": "native"}]}))
    text = simulate.compare(found, record)
    assert f"| {name} | {ranks} |" in text
    assert "Largest miss: +25.0%" in text
    assert "none" not in text
    record.write_text(json.dumps({"rows": [other]}))
    with pytest.raises(ValueError, match="no row with a prediction"):
        simulate.compare(found, record)


def test_script():
    script = ROOT / "benchmarks" / "scaling" / "simulate.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| DP: ResNet-50, 256 images | 2 |" in done.stdout


def test_measuring(tmp_path):
    """Small shapes on two processes of the CPU."""
    script = ROOT / "benchmarks" / "scaling" / "measure.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    out = tmp_path / "record.json"
    command = [*launch, script, "--quick", "--rounds=2", f"--out={out}"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    schemes = {row["scheme"] for row in rows if row["impl"] == "warpwright"}
    assert {"ring: quick", "Ulysses: quick", "TP block, 64 x 64"} < schemes
    for row in rows:
        assert row["ranks"] in (1, 2)
        assert 0 < row["ms_lo"] <= row["ms"] <= row["ms_hi"]
