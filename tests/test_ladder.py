"""The teaching ladders: their files, what nvcc makes of them, and the tables that their records become.

Without a GPU the measuring code runs on the CPU with rungs made of Python.
"""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from common import NVCC

import warpwright_cli
from warpwright.bench import ladder, records, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from ladders import run, rungs  # noqa: E402
from ladders.matmul.task import Matmul  # noqa: E402
from ladders.task import case_of  # noqa: E402

MAX_LINES = 125
SMEM = 227 * 1024  # a block's, on sm_90
SOURCES = {found.name: rungs.sources(found.name) for found in ladder.LADDERS}
EVERY = [(name, source) for name, found in SOURCES.items() for source in found]
each_rung = pytest.mark.parametrize(
    ("name", "source"), EVERY, ids=[f"{name}-{source.name}" for name, source in EVERY]
)
each_ladder = pytest.mark.parametrize("found", ladder.LADDERS, ids=lambda found: found.name)
# What the last rung includes, and the rungs that only Hopper runs.
SHIPPED = {
    "matmul": "gemm/kernel_sm90.cuh",
    "reduction": "ops/cross_entropy/cuda/fused_ring_sm90.cu",
    "scan": "ops/scan/cuda/launch.cuh",
    "batch_norm": "ops/batch_norm/cuda/rows.cuh",
    "attention": "ops/attention/cuda/sm90/forward.cuh",
    "conv2d": "ops/conv2d/cuda/sm90/launch.cuh",
}
NEEDS_SM90 = {
    "matmul": [7, 8, 9, 10],
    "reduction": [9],
    "scan": [],
    "batch_norm": [],
    "attention": [6],
    "conv2d": [5, 6, 7, 8],
}


# ---- files ----


@each_ladder
def test_rungs_are_numbered_without_a_gap(found):
    names = [source.name for source in SOURCES[found.name]]
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1))
    assert 5 <= len(names) <= 10


def test_every_folder_is_a_ladder():
    folders = {path.parent.name for path in (ROOT / ladder.FOLDER).glob("*/*.cu")}
    assert folders == set(SOURCES) == set(SHIPPED) == set(NEEDS_SM90)


@each_rung
def test_a_rung_is_short_and_says_what_why_and_what_holds_it_up(name, source):
    assert source.text.count("\n") <= MAX_LINES
    what, why, bound = re.split(r"\n(?=Why:|Bound:)", source.header)
    assert re.match(r"[A-Z][\w, -]+: ", what)
    assert why.startswith("Why: ")
    assert bound.startswith("Bound: ")


@each_rung
def test_the_text_explains_the_rung(name, source):
    text = (ROOT / "docs" / ladder.named(name).page).read_text()
    number = int(source.name[:2])
    section = re.search(rf"^## {number}\. .*?(?=^## )", text, re.M | re.S)
    assert section
    assert f"(../benchmarks/ladders/{name}/{source.path.name})" in section[0]
    assert "*Predicted:*" in section[0]


@each_ladder
def test_links_of_the_text_lead_somewhere(found):
    page = ROOT / "docs" / found.page
    for target in re.findall(r"\]\((?!https:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@each_ladder
def test_the_last_rung_includes_the_shipped_kernel(found):
    last = SOURCES[found.name][-1]
    assert f'#include "{SHIPPED[found.name]}"' in last.text
    assert "__global__" not in last.text


@each_ladder
def test_which_rungs_need_hopper(found):
    needing = [int(s.name[:2]) for s in SOURCES[found.name] if s.needs_sm90]
    assert needing == NEEDS_SM90[found.name]


@each_ladder
def test_every_rung_has_a_task(found):
    ops = [run.task_of(found.name, source.name).op for source in SOURCES[found.name]]
    assert list(dict.fromkeys(ops)) == [work.op for work in found.works]


def test_list_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "matmul", "--list", "--rung", "3"])
    assert run.main() == 0
    assert capsys.readouterr().out.startswith("03_shared_tile\nShared tile: ")
    monkeypatch.setattr(sys, "argv", ["run.py", "matmul", "--list", "--rung", "3,11"])
    with pytest.raises(SystemExit, match="11"):
        run.main()


def test_sizes():
    assert Matmul().parse("16x32x64") == (16, 32, 64)
    with pytest.raises(ValueError, match="'16x32': expected mxnxk"):
        Matmul().parse("16x32")


# ---- compiled ----

GOOD = torch.empty(64).data_ptr() & ~15


@pytest.mark.skipif(NVCC is None, reason="nvcc is not here")
@pytest.mark.parametrize(
    "found",
    [
        pytest.param(found, marks=() if found.name == "batch_norm" else pytest.mark.slow)
        for found in ladder.LADDERS
    ],
    ids=lambda found: found.name,
)
def test_every_rung_compiles_and_fits_an_sm(found):
    """One test per ladder, so that two test workers do not compile the same rung."""
    libraries = rungs.build(found.name, SOURCES[found.name], "90a")
    for source in SOURCES[found.name]:
        name = source.name
        rung = rungs.Rung(name, libraries[name])
        said = libraries[name].with_suffix(".log").read_text()
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert spills, name
        assert set(spills) == {("0", "0")}, name
        assert "C75" not in said, name  # ptxas: wgmma is serialised
        assert "warning" not in said, said

        assert rung.about["smem_bytes"] <= SMEM
        assert rung.about["threads"] <= 1024
        static = max(map(int, re.findall(r"(\d+) bytes smem", said)), default=0)
        assert static <= rung.about["smem_bytes"], name
        if found.name == "matmul":
            check_matmul(rung, source, static)
        task = run.task_of(found.name, name)
        problem = task.draw(task.checked[0], "cpu")
        with pytest.raises(ValueError, match="expected dense tensors on the GPU"):
            rung([*problem.inputs, *problem.results], problem.extents)
        count = len(problem.inputs) + len(problem.results)
        # Nothing is launched where the arguments are wrong.
        error = rung.error([0] * count, problem.extents, 0)
        assert re.search(r": expected (an address that 16 divides|a positive multiple)", error)


def check_matmul(rung, source, static):
    """What only the product's rungs have: a ring of tiles, and extents in whole tiles."""
    about, name = rung.about, source.name
    if about["stages"]:
        element = 4 if "float sA" in source.text or "float[kBlkK]" in source.text else 2
        rows, blk_k = about["blk_m"] + about["blk_n"], about["blk_k"]
        if name == "09_cluster":
            rows -= about["blk_n"] // 2  # a block of the two has its own B
        if name == "10_shipped":
            rows, blk_k = 128 + 128, 64  # of the large tile; the rung speaks of what it takes
        ring = about["stages"] * rows * blk_k * element
        # Padding of a row, the mbarriers, alignment, and the shipped kernel's store buffers.
        room = {"06_tensor_cores": about["stages"] * rows * 16}
        allowed = room.get(name, 2 * 16384 + 1024 + 16 * about["stages"])
        assert 0 <= about["smem_bytes"] - ring <= allowed, name
    else:
        assert about["smem_bytes"] == 0
    if static:  # no rung has both kinds
        assert about["smem_bytes"] == static, name
    blocks = [about["blk_m"], about["blk_n"], about["blk_k"]]
    for at, value in (
        (0, blocks[0] + 1),
        (1, blocks[1] + 1),
        (2, blocks[2] + 1),
        (0, 0),
        (0, -blocks[0]),
        (2, 2**40),
    ):
        extents = list(blocks)
        extents[at] = value
        if value > 0 and value % blocks[at] == 0 and value < 2**30:
            continue  # a rung that takes any extent here would go on to launch
        wanted = f"{'mnk'[at]} = {value}: expected a positive multiple of {blocks[at]} below 2^30"
        assert rung.error([GOOD] * 3, extents, 0) == wanted
    assert rung.error([GOOD, GOOD + 2, GOOD], blocks, 0) == (
        "b: expected an address that 16 divides"
    )


def test_without_nvcc_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(rungs, "folder_of", lambda name, arch: tmp_path / name / arch)
    with pytest.raises(rungs.BuildError, match=r"nvcc is neither on PATH nor in .*/bin"):
        rungs.build("matmul", SOURCES["matmul"][:1], "90a")


@pytest.mark.gpu
@each_rung
def test_rungs_are_right(name, source):
    if source.needs_sm90 and rungs.arch_of_gpu() != "90a":
        pytest.skip("needs sm_90a")
    libraries = rungs.build(name, [source], rungs.arch_of_gpu())
    rung, task = rungs.Rung(source.name, libraries[source.name]), run.task_of(name, source.name)
    for size in task.checked:
        assert run.wrong(rung, task, size) is None


# ---- measured: the real code, on the CPU, with rungs of Python ----


@pytest.fixture
def cpu(monkeypatch):
    """run.py on the CPU; its clock gives each call the milliseconds that it claims."""
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    claims = {}
    monkeypatch.setattr(run, "time_once", lambda call: claims.get(str(call()), 1.0))
    return claims


def fake(name, spoil=lambda d: None):
    def rung(tensors, extents):
        a, b, d = tensors
        torch.matmul(a, b.T, out=d)
        spoil(d)
        return name

    rung.name = name
    return rung


class SmallMatmul(Matmul):
    checked, probe = ((24, 40, 16),), (16, 16, 16)


class InexactMatmul(SmallMatmul):
    exact_bits = False


def test_the_check_finds_what_is_wrong(cpu):
    task, size = SmallMatmul(), (24, 40, 16)
    assert run.wrong(fake("right"), task, size) is None

    def one_element(d):
        d[23, 5] += 1

    def not_written(d):
        d[0, 0] = float("nan")

    def outside(d):
        d._base[-run.GUARD] = 0

    assert run.wrong(fake("x", one_element), task, size).startswith(
        "1 of 960 elements differ, the first"
    )
    assert "(23, 5)" in run.wrong(fake("x", one_element), task, size)
    assert "at (0, 0): nan" in run.wrong(fake("x", not_written), task, size)
    assert run.wrong(fake("x", outside), task, size) == "wrote outside of its result"
    task = InexactMatmul()
    assert run.wrong(fake("right"), task, size) is None
    assert run.wrong(fake("x", one_element), task, size).startswith("error ")
    assert run.wrong(fake("x", not_written), task, size).startswith("error nan")


def test_measured_rows_are_a_record(cpu, tmp_path):
    task = SmallMatmul()
    cpu["01_naive"] = 90.0
    cpu["02_coalesced"] = 9.0
    cpu["03_shared_tile"] = 2.0
    record = records.environment("cpu") | {"copy_tbs": 1.0, "matmul_tflops": 1.0, "rows": []}
    record |= {"suite": ladder.SUITE, "peak_tflops": 100.0, "skipped": {}}
    record |= {"op_hashes": {"linear": "0" * 16}}
    found = [fake(source.name) for source in SOURCES["matmul"][:3]]

    def picky(tensors, extents):
        if extents[0] != 16:
            raise ValueError("m = 32: expected a positive multiple of 128")

    picky.name = "04_register_tile"
    found.append(picky)
    # 32 x 48 x 64 has 24 times the FLOPs of the probe.
    run.measure(task, (32, 48, 64), found, record, limit_ms=24 * 50, seconds=0.01)
    assert record["skipped"] == {
        "01_naive": {"linear": "about 2160 ms a call at 32x48x64, over --limit-ms 1200"},
        "04_register_tile": {"linear": "32x48x64: m = 32: expected a positive multiple of 128"},
    }
    rows = record["rows"]
    assert [row["impl"] for row in rows] == ["02_coalesced", "03_shared_tile", "native"]
    for row in rows:
        assert row["flops"] == 2 * 32 * 48 * 64
        assert row["bytes"] == 2 * (32 * 64 + 48 * 64 + 32 * 48)
        assert row["native_ms"] > 0
        assert row["err"] <= 2 * row["err_native"]
    # Native takes 1 ms. The second rung is slow and the third fast, so they are timed apart.
    assert rows[1]["native_ms"] == rows[2]["ms"]
    assert rows[2]["native_ms"] == rows[2]["ms"]
    path = tmp_path / "ladder.json"
    records.save_records(record, path)
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(records.load_records(path), records.SCHEMA)


@each_ladder
def test_tasks_on_the_cpu(found):
    """Native against the exact result, on the integers of the check or on random numbers."""
    for op in found.works:
        rung = next(
            s.name for s in SOURCES[found.name] if run.task_of(found.name, s.name).op == op.op
        )
        task = run.task_of(found.name, rung)
        size = min(task.checked, key=task.work)
        assert len(size) == len(task.names)
        assert task.parse(case_of(size)) == size
        problem = task.draw(size, "cpu", integers_only=task.exact_bits)
        pairs = zip(problem.native(), problem.exact(), problem.results, strict=True)
        for native, exact, result in pairs:
            assert native.shape == exact.shape == result.shape
            assert exact.dtype == torch.float64
            if task.exact_bits:
                assert torch.equal(native, exact.to(native.dtype))
            else:
                # Beyond the rounding to its own dtype, which for bfloat16 is up to 2^-8.
                rounding = (exact.to(native.dtype).double() - exact).abs()
                error = (native.double() - exact).abs()
                assert torch.all(error <= rounding + 1e-3 + 1e-3 * exact.abs())


# ---- the table ----


def row(impl, ms, case="1000x1000x1000", native_ms=2.0):
    return {
        "op": "linear",
        "case": case,
        "dtype": "bfloat16",
        "layout": "rows",
        "pass": "fwd",
        "impl": impl,
        "ms": ms,
        "ms_lo": ms,
        "ms_hi": ms,
        "native_ms": native_ms,
        "bytes": 6_000_000,
        "flops": 2_000_000_000,
        "floor_ms": 1.0,
        "peak_mib": None,
        "err": 1e-3,
        "err_native": 1e-3,
    }


@pytest.fixture
def tree(tmp_path):
    """A repository with one small ladder, and one other record, which the command wants."""
    for folder in (
        "csrc/gemm",
        "csrc/ops/linear/cuda",
        "csrc/device",
        "benchmarks/ladders/matmul",
        "python",
        "docs",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n")
    ladders = tmp_path / "benchmarks/ladders"
    for path in ("csrc/ops/linear/cuda/launch.h", "csrc/ops/linear/cuda/launch.cu"):
        (tmp_path / path).write_text("int linear;\n")
    for name in ("entry.cu", "checks.h", "matmul/01_naive.cu"):
        (ladders / name).write_text("int rung;\n")
    (ladders / "matmul/10_shipped.cu").write_text('#include "ops/linear/cuda/launch.h"\n')
    (tmp_path / "docs/ladder.md").write_text("a\n<!-- results:ladder -->\n<!-- /results -->\nb\n")
    full = json.loads((ROOT / "benchmarks/results/h200/full.json").read_text())
    other = row("warpwright", 1.0)
    full["rows"] = [other, other | {"impl": "native"}]
    records.save_records(full, tmp_path / "benchmarks/results/h200/full.json")
    return tmp_path


def save(root, rows, **changes):
    record = json.loads((root / "benchmarks/results/h200/full.json").read_text())
    record |= {"suite": "ladder", "peak_tflops": 1000.0, "rows": rows, **changes}
    record["op_hashes"] = {"linear": ladder.sources_hash(ladder.named("matmul"), root)}
    records.save_records(record, root / "benchmarks/results/h200/ladder.json")


def command(root, *options):
    return warpwright_cli.main(["report", "--root", str(root), *options])


def test_not_yet_measured(tree):
    assert command(tree) == 0
    text = (tree / "docs/ladder.md").read_text()
    assert text == (
        "a\n<!-- results:ladder -->\n"
        "Not yet measured: there is no `benchmarks/results/*/ladder.json`.\n"
        "<!-- /results -->\nb\n"
    )
    assert command(tree, "--check") == 0


def test_table_and_picture(tree):
    # In any order; cuBLAS took 2 ms when timed with the fast rungs, and 2.5 ms with the slow one.
    rows = [row("native", 2.0), row("10_shipped", 1.6), row("02_coalesced", 25.0, native_ms=2.5)]
    rows.append(row("10_shipped", 4.0, case="500x2000x1000"))
    save(tree, rows)
    assert command(tree, "--check") == 1
    assert command(tree) == 0
    text = (tree / "docs/ladder.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[0].split(" | ")[1:] == [
        "ms",
        "TFLOP/s",
        "% of cuBLAS",
        "% of peak",
        "faster than the rung before |",
    ]
    link = "../benchmarks/ladders/matmul/"
    assert lines[2] == f"| [2 coalesced]({link}02_coalesced.cu) | 25 | 0.08 | 10.0% | 0.01% |  |"
    assert (
        lines[3] == f"| [10 shipped]({link}10_shipped.cu) | 1.6 | 1.25 | 125.0% | 0.12% | 15.62× |"
    )
    assert lines[4] == "| cuBLAS | 2 | 1 |  | 0.10% |  |"
    assert "m × n × k = 1000 × 1000 × 1000" in text
    assert "m × n × k = 500 × 2000 × 1000" in text
    assert "results/h200_ladder_rungs_dark.png" in text
    for suffix in ("", "_dark"):
        assert (tree / f"docs/results/h200_ladder_rungs{suffix}.png").is_file()
    assert "ladder" not in (tree / "docs/results.md").read_text()
    assert command(tree, "--check") == 0


def test_other_numbers_fail_the_check(tree):
    save(tree, [row("01_naive", 3.0), row("native", 2.0)])
    assert command(tree) == 0
    save(tree, [row("01_naive", 2.9), row("native", 2.0)])
    assert command(tree, "--check") == 1


@pytest.mark.parametrize(
    "changed",
    [
        "csrc/ops/linear/cuda/launch.cu",
        "benchmarks/ladders/matmul/01_naive.cu",
        "benchmarks/ladders/entry.cu",
    ],
)
def test_a_changed_rung_is_stale(tree, changed, capsys):
    save(tree, [row("01_naive", 3.0), row("native", 2.0)])
    assert command(tree) == 0
    assert report.STALE not in (tree / "docs/ladder.md").read_text()
    (tree / changed).write_text("int changed;\n")
    capsys.readouterr()
    assert command(tree, "--check") == 0
    assert "ladder.json: stale" in capsys.readouterr().out
    assert command(tree) == 0
    assert report.STALE_LINE in (tree / "docs/ladder.md").read_text()


def test_an_unknown_gpu_has_no_peak(tree):
    save(tree, [row("01_naive", 3.0), row("native", 2.0)], peak_tflops=None)
    assert command(tree) == 0
    assert "| 3 | 0.667 | 66.7% |  |  |" in (tree / "docs/ladder.md").read_text()


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak(gpu, peak):
    assert ladder.peak_tflops(gpu) == peak
