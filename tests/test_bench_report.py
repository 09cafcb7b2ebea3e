"""`python -m warpwright report`: what the documents say is what the records say."""

import json
import shutil
from pathlib import Path

import pytest

import warpwright_cli
from warpwright.bench import plots, records, sources, tables

ROOT = Path(__file__).resolve().parents[1]
FULL = ROOT / "benchmarks" / "results" / "h200" / "full.json"


def run(root, *options):
    return warpwright_cli.main(["report", "--root", str(root), *options])


def test_documents_are_what_the_command_generates(capsys):
    """After new results or a change of the tables: `python -m warpwright report`."""
    code = run(ROOT, "--check")
    assert code == 0, capsys.readouterr().out


def row(op, impl, ms, which="fwd", **changes):
    fixed = {"case": "8", "dtype": "float32", "layout": "rows", "bytes": 8, "flops": 0}
    fixed |= {"floor_ms": 1.0, "peak_mib": None, "err": 1e-7, "err_native": 2e-7}
    times = {"ms": ms, "ms_lo": ms, "ms_hi": ms}
    return {"op": op, "pass": which, "impl": impl, **fixed, **times, **changes}


@pytest.fixture
def tree(tmp_path):
    """A repository with one small record."""
    for folder in ("csrc/ops/relu", "csrc/device", "python", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "csrc/ops/relu/relu.cu").write_text("int relu;\n")
    (tmp_path / "README.md").write_text("a\n<!-- results:summary -->\nold\n<!-- /results -->\nb\n")
    record = {
        **{k: v for k, v in json.loads(FULL.read_text()).items() if k != "rows"},
        "op_hashes": {"relu": sources.op_hash("relu", tmp_path, "cuda")},
        "rows": [
            row("relu", "warpwright", 2.0),
            row("relu", "native", 4.0, ratio=2.0, ratio_lo=1.9, ratio_hi=2.125),
            row("relu", "compile", 1.0, notes=["differs"]),
        ],
        "missing": {"liger": "runs on CUDA only"},
    }
    path = tmp_path / "benchmarks/results/h200/full.json"
    records.save_records(record, path)
    return tmp_path, path, record


def test_report(tree, capsys):
    root, _, record = tree
    assert run(root, "--check") == 1
    assert run(root) == 0
    assert run(root, "--check") == 0
    readme = (root / "README.md").read_text()
    assert readme.startswith("a\n<!-- results:summary -->\n| native time / ours |")
    assert readme.endswith("<!-- /results -->\nb\n")
    assert "| `relu` | fwd 2.00× | 2.00× (fwd) |" in readme
    for part in (record["gpu"], record["date"], record["torch"]):
        assert part in readme
    page = (root / "docs/results.md").read_text()
    assert "| `relu` | fwd | 1 | **2.00×** | 2.00× | 2.00× | 0.50× | 50% |" in page
    for part in (record["gpu"], record["date"], record["source_hash"]):
        assert part in page
    assert "2.00× [1.90, 2.12]" in page
    assert "compile 1.0000" in page
    assert "compile: differs" in page
    assert "- liger: runs on CUDA only" in page
    for picture in ("bars", "roofline", "bars_dark"):
        assert f"h200_full_{picture}.png" in page
        assert (root / f"docs/results/h200_full_{picture}.png").exists()
    assert "ladder" not in page


def test_stale_rows_are_marked_and_the_check_looks_past_the_mark(tree, capsys):
    root, _, _ = tree
    run(root)
    assert tables.STALE not in (root / "README.md").read_text()
    (root / "csrc/ops/relu/relu.cu").write_text("int changed;\n")
    capsys.readouterr()
    assert run(root, "--check") == 0
    assert "stale: relu" in capsys.readouterr().out
    run(root)
    readme = (root / "README.md").read_text()
    assert "| `relu` | fwd 2.00×† | 2.00× (fwd) |" in readme
    assert tables.STALE_LINE in readme
    assert run(root, "--check") == 0


@pytest.mark.parametrize("steady", [False, True], ids=["drifted", "too short for the clock"])
def test_times_that_say_nothing_are_not_in_the_summary(tree, steady):
    root, path, record = tree
    (ours,) = (r for r in record["rows"] if r["impl"] == "warpwright")
    others = [{**row, "case": "another"} for row in record["rows"]]
    record["rows"] += others
    ours |= {"steady": steady, "ms": 1e-3}
    records.save_records(record, path)
    run(root)
    assert "| `relu` | fwd 2.00× | 2.00× (fwd) |" in (root / "README.md").read_text()
    page = (root / "docs/results.md").read_text()
    assert "| `relu` | fwd | 1 of 2 | **2.00×** | 2.00× | 2.00× |" in page
    assert tables.DRIFTING_LINE in page
    assert "0.0010" in page
    for row in others:
        row["steady"] = False
    records.save_records(record, path)
    run(root)
    assert "| `relu` |  |  |" in (root / "README.md").read_text()
    assert "| `relu` | fwd | 0 of 2 |  |" in (root / "docs/results.md").read_text()


def test_what_was_measured_again_replaces_the_whole_suites_rows(tree):
    root, path, record = tree
    record["rows"] += [{**row, "op": "linear"} for row in record["rows"]]
    records.save_records(record, path)
    rows = [{**row, "op": op} for op in ("relu", "mnist_step") for row in record["rows"][:3]]
    other = {**record, "date": "2020-02-02", "rows": rows, "source_hash": "0" * 16}
    records.save_records(other, path.with_name("later.json"))
    run(root)
    readme = (root / "README.md").read_text()
    assert readme.count("`relu`") == readme.count("`linear`") == 1
    assert (
        f"| `mnist_step`{tables.STALE} 8 | **0.50×** | 4 | 1 (compile) | 2 | 2 (warpwright) |  |"
        in readme
    )
    gpu = record["gpu"].removeprefix("NVIDIA ")
    assert f"| training step on {gpu}, ms | fastest of all peers" in readme
    assert "2020-02-02" in readme


def test_an_op_comes_from_its_newest_record(tree):
    root, path, record = tree
    for name, date, ms in (("a", "2026-01-03", 8.0), ("b", "2026-01-02", 16.0)):
        rows = [{**r, "ms": ms} if r["impl"] == "native" else r for r in record["rows"]]
        records.save_records({**record, "date": date, "rows": rows}, path.with_name(f"{name}.json"))
    run(root)
    assert "| `relu` | fwd 4.00× | 4.00× (fwd) |" in (root / "README.md").read_text()
    page = (root / "docs/results.md").read_text()
    newest = page[: page.index(": a\n")]
    assert "| `relu` | fwd | 1 | **4.00×** |" in newest
    assert "a.json" in newest
    assert "b.json" not in newest


def test_other_numbers_fail_the_check(tree):
    root, path, record = tree
    run(root)
    record["rows"][0]["ms"] = 2.5
    records.save_records(record, path)
    assert run(root, "--check") == 1
    assert run(root) == 0
    assert run(root, "--check") == 0


def test_an_edited_or_missing_picture_fails_the_check(tree, capsys):
    root, _, _ = tree
    run(root)
    capsys.readouterr()
    picture = root / "docs/results/h200_full_bars.png"
    picture.unlink()
    assert run(root, "--check") == 1
    assert capsys.readouterr().out.strip().startswith("docs/results/h200_full_bars.png: not what")
    shutil.copy(root / "docs/results/h200_full_roofline.png", picture)
    assert run(root, "--check") == 0  # the same record's
    picture.write_bytes(b"another")
    assert run(root, "--check") == 1


def test_a_picture_of_no_record_goes(tree, capsys):
    root, path, _ = tree
    run(root)
    path.rename(path.with_name("renamed.json"))
    capsys.readouterr()
    assert run(root, "--check") == 1
    assert "docs/results/h200_full_bars.png: of no record\n" in capsys.readouterr().out
    assert run(root) == 0
    pictures = [picture.name for picture in (root / "docs/results").iterdir()]
    assert len(pictures) == 6
    assert all(name.startswith(("h200_renamed_", "h200_newest_")) for name in pictures)
    assert run(root, "--check") == 0


def test_every_rate_that_a_floor_is_made_of_is_named(tree):
    root, path, record = tree
    records.save_records({**record, "tf32_tflops": 123.4}, path)
    run(root)
    page = (root / "docs/results.md").read_text()
    assert "TF32 matmul 123 TFLOP/s, measured in the same run" in page


@pytest.mark.parametrize(("device", "rate"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_the_rate_has_its_type(tree, device, rate):
    """A CPU's record has torch's CUDA version too: it does not make the rate one of bf16."""
    record = {**tree[2], "device": device, "cuda": "13.0", "matmul_tflops": 1.5}
    assert f"{rate} matmul 1.5 TFLOP/s" in tables.provenance(record)


@pytest.mark.parametrize("field", records.ROW_FIELDS)
def test_rows_without_a_field_are_refused(tree, field):
    root, path, record = tree
    del record["rows"][1][field]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=rf"full\.json: rows\[1\]: field '{field}' is missing"):
        run(root)
    assert "old" in (root / "README.md").read_text()


def test_no_results(tmp_path, capsys):
    assert run(tmp_path) == 2
    assert "no results" in capsys.readouterr().out


def test_source_hash_is_setup_pys(monkeypatch):
    source = (ROOT / "setup.py").read_text()
    start = source.index("def source_hash")
    names = {"ROOT": ROOT}
    exec("import hashlib\n" + source[start : source.index("\n\n\n", start)], names)
    assert names["source_hash"]() == sources.source_hash(ROOT)


def test_two_gpus_stand_side_by_side(tree):
    root, path, record = tree
    run(root)
    assert "## Ratios per GPU" not in (root / "docs/results.md").read_text()
    rows = [
        row("relu", "warpwright", 3.0),
        row("relu", "native", 9.0),
        row("linear", "warpwright", 1.0),  # not measured on the first
        row("linear", "native", 1.0),
        row("linear_relu", "warpwright", 4.0),
        row("linear_relu", "native", 1.0),
    ]
    other = {**record, "gpu": "Another GPU", "rows": rows}
    records.save_records(other, path.parents[1] / "another/full.json")
    again = {**other, "rows": [row("relu", "warpwright", 2.0), row("relu", "native", 3.0)]}
    records.save_records(again, path.parents[1] / "another/again.json")
    run(root)
    page = (root / "docs/results.md").read_text()
    main = record["gpu"].removeprefix("NVIDIA ")
    assert f"| op | pass | workloads | {main} | Another GPU |" in page
    assert "| `relu` | fwd | 1 | 2.00× | 1.50× |" in page
    assert "| `linear` | fwd | 1 |" not in page[: page.index("newest record")]
    # README has the first GPU's ops, and says where the other's are.
    readme = (root / "README.md").read_text()
    assert "| native time / ours | geometric mean | slowest row |" in readme
    assert "| `relu` | fwd 2.00× | 2.00× (fwd) |" in readme
    assert "`linear`" not in readme
    assert "The ops on Another GPU, and every row" in readme
    assert "| `linear_relu`† | fwd | 1 | **0.25×** |" in page
    assert run(root, "--check") == 0


def test_a_family_of_ops_is_a_line(tree):
    root, path, record = tree
    ops = ("linear", "linear_relu", "linear_gelu", "linear_silu")
    record["rows"] = [{**row, "op": op} for op in ops for row in record["rows"]]
    next(r for r in record["rows"] if r["op"] == "linear_silu" and r["impl"] == "native")["ms"] = (
        1.0
    )
    records.save_records(record, path)
    run(root)
    line = "| `linear`, `linear_relu` and 2 more | fwd 1.41×† | 0.50× (`linear_silu` fwd) |"
    assert line in (root / "README.md").read_text()


def test_each_gpu_has_a_line_per_step(tree):
    root, path, record = tree
    steps = [{**row, "op": "mnist_step", "case": case} for row in record["rows"] for case in "12"]
    slower = [{**r, "ms": 4 * r["ms"]} for r in steps]
    record["rows"] += steps
    records.save_records(record, path)
    other = {**record, "gpu": "NVIDIA Other", "rows": slower}
    records.save_records(other, path.parents[1] / "a_gpu/some.json")
    run(root)
    readme = (root / "README.md").read_text()
    main = record["gpu"].removeprefix("NVIDIA ")
    lines = [line.split("|") for line in readme.splitlines() if "mnist_step" in line]
    assert [cells[3:5] for cells in lines] == [[f" {main} ", " 4 "], [" Other ", " 16 "]]


def test_steps_that_both_sides_compile_are_compared(tree):
    root, path, record = tree
    impls = {"warpwright": 9, "native": 12, "compile": 7, "compile_cudagraph": 6}
    impls |= {"warpwright_compile": 4, "warpwright_compile_cudagraph": 5}
    record["rows"] += [row("mnist_step", impl, float(ms)) for impl, ms in impls.items()]
    records.save_records(record, path)
    run(root)
    (found,) = [s for s in (root / "README.md").read_text().splitlines() if "mnist_step" in s]
    assert found.endswith("| 12 | 6 (compile_cudagraph) | 9 | 4 (compile) | 1.50× |")


def test_a_drifting_row_is_in_no_column(tree):
    root, path, record = tree
    other = {**record, "gpu": "Another GPU", "rows": [dict(r) for r in record["rows"]]}
    other["rows"][0]["steady"] = False
    records.save_records(other, path.parents[1] / "another/full.json")
    run(root)
    page = (root / "docs/results.md").read_text()
    assert "| `relu` | fwd | 1 | 2.00× | 2.00× |" not in page
    assert "| `relu` | fwd 2.00× | 2.00× (fwd) |" in (root / "README.md").read_text()


def test_the_readmes_picture_has_each_steps_largest_workload():
    def row(case, impl, ms, layout="nhwc"):
        return {"op": "net_step", "case": case, "impl": impl, "ms": ms, "layout": layout}

    rows = [
        row("b8", "warpwright", 1.0),
        row("b64", "native", 9.0, "nchw"),
        row("b64", "native", 7.0),
        row("b64", "compile", 5.0),
        row("b64", "cudagraph", 6.0),
        row("b64", "warpwright", 4.5),
        row("b64", "warpwright_fused", 4.0),
    ]
    assert plots.largest_steps({"rows": rows}) == {
        "net": {
            "native": ("native", 7.0),
            "peer": ("compile", 5.0),
            "ours": ("warpwright_fused", 4.0),
        }
    }
