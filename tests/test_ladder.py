"""The teaching ladder: its files, what nvcc makes of them, and the table that its record becomes.

Without a GPU the measuring code runs on the CPU with rungs made of Python.
"""

import importlib.util
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
FOLDER = ROOT / "benchmarks" / "ladder"
MAX_LINES = 125
SMEM = 227 * 1024  # a block's, on sm_90


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


rungs = load("rungs")
run = load("run")
SOURCES = rungs.sources()
NAMES = [source.name for source in SOURCES]
each_rung = pytest.mark.parametrize("source", SOURCES, ids=NAMES)


# ---- files ----


def test_rungs_are_numbered_without_a_gap():
    assert [int(name[:2]) for name in NAMES] == list(range(1, len(NAMES) + 1))
    assert 8 <= len(NAMES) <= 10


@each_rung
def test_a_rung_is_short_and_says_what_why_and_what_holds_it_up(source):
    assert source.text.count("\n") <= MAX_LINES
    what, why, bound = re.split(r"\n(?=Why:|Bound:)", source.header)
    assert re.match(r"[A-Z][\w, -]+: ", what)
    assert why.startswith("Why: ")
    assert bound.startswith("Bound: ")


@each_rung
def test_the_text_explains_the_rung(source):
    text = (ROOT / "docs" / "ladder.md").read_text()
    number = int(source.name[:2])
    section = re.search(rf"^## {number}\. .*?(?=^## )", text, re.M | re.S)
    assert section
    assert f"(../benchmarks/ladder/{source.path.name})" in section[0]
    assert "*Predicted:*" in section[0]


def test_links_of_the_text_lead_somewhere():
    page = ROOT / "docs" / "ladder.md"
    for target in re.findall(r"\]\((?!https:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_last_rung_includes_the_shipped_kernel():
    assert '#include "gemm/kernel_sm90.cuh"' in SOURCES[-1].text
    assert "__global__" not in SOURCES[-1].text


def test_which_rungs_need_hopper():
    assert [source.needs_sm90 for source in SOURCES] == [False] * 6 + [True] * 4


def test_list_needs_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--list", "--rung", "3"])
    assert run.main() == 0
    assert capsys.readouterr().out.startswith("03_shared_tile\nShared tile: ")
    monkeypatch.setattr(sys, "argv", ["run.py", "--list", "--rung", "3,11"])
    with pytest.raises(SystemExit, match="11"):
        run.main()


# ---- compiled ----


@pytest.mark.skipif(NVCC is None, reason="nvcc is not here")
def test_every_rung_compiles_and_fits_an_sm():
    """One test, so that two test workers do not compile the same rung."""
    libraries = rungs.build(SOURCES, "90a")
    assert list(libraries) == NAMES
    for source in SOURCES:
        name = source.name
        rung = rungs.Rung(name, libraries[name])
        shape = rung.shape
        said = libraries[name].with_suffix(".log").read_text()
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
        assert spills, name
        assert set(spills) == {("0", "0")}, name
        assert "C75" not in said, name  # ptxas: wgmma is serialised
        assert "warning" not in said, said

        assert shape.smem_bytes <= SMEM
        assert shape.threads <= 1024
        static = re.search(r"(\d+) bytes smem", said)
        if static:  # no rung has both kinds
            assert shape.smem_bytes == int(static[1]), name
        if shape.stages:
            element = 4 if "float sA" in source.text or "float[kBlkK]" in source.text else 2
            rows = shape.blk_m + shape.blk_n
            if name == "09_cluster":
                rows -= shape.blk_n // 2  # a block of the two has its own B
            if name == NAMES[-1]:
                rows, blk_k = 128 + 128, 64  # of the large tile; Rung speaks of what it takes
            else:
                blk_k = shape.blk_k
            ring = shape.stages * rows * blk_k * element
            extra = shape.smem_bytes - ring
            # Padding of a row, the mbarriers, alignment, and the shipped kernel's store buffers.
            assert (
                0
                <= extra
                <= {"06_tensor_cores": shape.stages * rows * 16}.get(
                    name, 2 * 16384 + 1024 + 16 * shape.stages
                )
            ), name
        else:
            assert shape.smem_bytes == 0

        # Nothing is launched where the arguments are wrong.
        m, n, k = shape.blk_m, shape.blk_n, shape.blk_k
        good = torch.empty(64).data_ptr() & ~15
        for at, value in ((0, m + 1), (1, n + 1), (2, k + 1), (0, 0), (0, -m), (2, 2**40)):
            extents = [m, n, k]
            extents[at] = value
            block = (m, n, k)[at]
            error = rung._run(good, good, good, *extents, None)
            if value > 0 and value % block == 0 and value < 2**30:
                continue  # a rung that takes any extent here would go on to launch
            assert error is not None, (name, extents)
            wanted = f"{'mnk'[at]} = {value}: expected a positive multiple of {block} below 2^30"
            assert error.decode() == wanted
        error = rung._run(good, good + 2, good, m, n, k, None)
        assert error.decode() == "b: expected an address that 16 divides"
        error = rung._run(None, good, good, m, n, k, None)
        assert error.decode() == "a: expected an address that 16 divides"
        with pytest.raises(ValueError, match="expected dense bfloat16 matrices on the GPU"):
            rung(*(torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(3)))
        with pytest.raises(ValueError, match="do not fit"):
            rung(torch.zeros(16, 16), torch.zeros(16, 8), torch.zeros(16, 16))


def test_without_nvcc_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(rungs, "folder_of", lambda arch: tmp_path / arch)
    with pytest.raises(rungs.BuildError, match=r"nvcc is neither on PATH nor in .*/bin"):
        rungs.build(SOURCES[:1], "90a")


@pytest.mark.gpu
@each_rung
def test_rungs_are_right_on_integers(source):
    if source.needs_sm90 and rungs.arch_of_gpu() != "90a":
        pytest.skip("needs sm_90a")
    rung = rungs.Rung(source.name, rungs.build([source], rungs.arch_of_gpu())[source.name])
    for shape in run.CHECKED:
        assert run.wrong(rung, shape) is None


# ---- measured: the real code, on the CPU, with rungs of Python ----


@pytest.fixture
def cpu(monkeypatch):
    """run.py on the CPU; its clock gives each call the milliseconds that it claims."""
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    claims = {}
    monkeypatch.setattr(run, "time_once", lambda call: claims.get(call(), 1.0))
    return claims


def fake(name, spoil=lambda d, whole: None):
    def rung(a, b, d):
        torch.matmul(a, b.T, out=d)
        spoil(d, d._base)
        return name

    rung.name = name
    return rung


def test_the_check_finds_what_is_wrong(cpu):
    shape = (24, 40, 16)
    assert run.wrong(fake("right"), shape) is None

    def one_element(d, whole):
        d[23, 5] += 1

    def not_written(d, whole):
        d[0, 0] = float("nan")

    def outside(d, whole):
        whole[-run.GUARD_ROWS, 3] = 0

    assert run.wrong(fake("x", one_element), shape).startswith(
        "1 of 960 elements differ, the first"
    )
    assert "(23, 5)" in run.wrong(fake("x", one_element), shape)
    assert "at (0, 0): nan" in run.wrong(fake("x", not_written), shape)
    assert run.wrong(fake("x", outside), shape) == "wrote outside of D"


def test_measured_rows_are_a_record(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "PROBE", (16, 16, 16))
    cpu["01_naive"] = 90.0
    cpu["02_coalesced"] = 9.0
    cpu["03_shared_tile"] = 2.0
    record = records.environment("cpu") | {"copy_tbs": 1.0, "matmul_tflops": 1.0, "rows": []}
    record |= {"suite": ladder.SUITE, "peak_tflops": 100.0, "skipped": {}}
    record |= {"op_hashes": {"linear": "0" * 16}}
    found = [fake(name) for name in NAMES[:3]]

    def picky(a, b, d):
        if len(a) != 16:
            raise ValueError("m = 32: expected a positive multiple of 128")

    picky.name = "04_register_tile"
    found.append(picky)
    # 32 x 48 x 64 has 24 times the FLOPs of the probe.
    run.measure((32, 48, 64), found, record, limit_ms=24 * 50, seconds=0.01)
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
        "benchmarks/ladder",
        "python",
        "docs",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("a\n")
    (tmp_path / "csrc/ops/linear/cuda/launch.cu").write_text("// linear\n")
    (tmp_path / "benchmarks/ladder/01_naive.cu").write_text("// naive\n")
    (tmp_path / "docs/ladder.md").write_text("a\n<!-- results:ladder -->\n<!-- /results -->\nb\n")
    full = json.loads((ROOT / "benchmarks/results/h200/full.json").read_text())
    other = row("warpwright", 1.0)
    full["rows"] = [other, other | {"impl": "native"}]
    records.save_records(full, tmp_path / "benchmarks/results/h200/full.json")
    return tmp_path


def save(root, rows, **changes):
    record = json.loads((root / "benchmarks/results/h200/full.json").read_text())
    record |= {"suite": "ladder", "peak_tflops": 1000.0, "rows": rows, **changes}
    record["op_hashes"] = {"linear": ladder.sources_hash(root)}
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
    link = "../benchmarks/ladder/"
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
    "changed", ["csrc/ops/linear/cuda/launch.cu", "benchmarks/ladder/01_naive.cu"]
)
def test_a_changed_rung_is_stale(tree, changed, capsys):
    save(tree, [row("01_naive", 3.0), row("native", 2.0)])
    assert command(tree) == 0
    assert report.STALE not in (tree / "docs/ladder.md").read_text()
    (tree / changed).write_text("// changed\n")
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
