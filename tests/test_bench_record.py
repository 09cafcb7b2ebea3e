"""`bench` writes its record, its table and its page, whole and as its schema says."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from bench_runs import TINY, TINY_LINEAR, TINY_POOL, check_schema, runner
from pages import check_page

import warpwright_cli
from warpwright.bench import (
    live,
    looks,
    optimizers,
    page,
    plots,
    records,
    reliability,
    run,
    sources,
)
from warpwright.bench.shapes import CASES

pytestmark = pytest.mark.usefixtures("quick_ceilings")
ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted(
    path
    for path in (ROOT / "benchmarks" / "results").rglob("*.json")
    if path.name != reliability.RESULT  # tools/campaign.py's; test_campaign.py has it
)
FULL = next(path for path in RESULTS if path.name == "full.json")
STEPS = next(path for path in RESULTS if path.name == "mnist_step.json")


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
        "device": "cuda",
        "op_hashes": {op: sources.op_hash(op, tmp_path, "cuda") for op in ops},
        "rows": [{"op": op} for op in ops],
    }

    def append(path, text):
        with (csrc / path).open("a") as file:
            file.write(text)

    assert sources.stale_ops(record, tmp_path) == set()
    append("ops/batch_norm/batch_norm.h", "\n\n// one line\n/* two\n lines */\n")
    append("ops/relu/relu.h", 'constexpr char kNoComment[] = "//";\n')
    assert sources.stale_ops(record, tmp_path) == {"relu", "mnist_step"}
    append("ops/batch_norm/cpu/batch_norm.cpp", "int no_call_on_a_gpu_runs_it;\n")
    append("ops/dropout/dropout_cpu.cpp", "int nor_this;\n")
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


def test_page_of_the_results(tmp_path):
    record = records.load_records(FULL)
    path = tmp_path / "page.html"
    page.write_bench_page(record, path)
    check_page(path, tmp_path)
    pictures = {p.name for p in tmp_path.glob("*.png")}
    assert {"page_bars.png", "page_bars_dark.png", "page_roofline.png"} <= pictures
    text = path.read_text()
    for part in (record["gpu"], record["source_hash"], record["date"], "prefers-color-scheme"):
        assert part in text
    assert text.count('class="ours"') == sum(r["impl"] == "warpwright" for r in record["rows"])


def test_live_charts():
    """Each bar is a share of native's time, and each row with bytes is a point below the roof."""
    record = records.load_records(FULL)
    charts = live.of_record(record)
    shares = {(v["op"], v["implementation"]): v["share"] for v in charts["bars"].values}
    for (op, which), times in plots.relative_times(record).items():
        for impl, share in times.items():
            assert shares[f"{op} {which}", impl] == pytest.approx(share, abs=1e-4)
    assert len(charts["roofline"].values) == sum(bool(row["bytes"]) for row in record["rows"])
    assert live.of_record({**record, "rows": []}) == {}


def test_roofs_of_a_cpu_are_at_least_what_a_row_reached():
    rates = {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    fixed = {"dtype": "float32", "impl": "native", "ms": 1.0}
    rows = [
        {"op": "relu", "bytes": 10**8, "flops": 0, **fixed},  # 0.1 TB/s, out of a cache
        {"op": "linear", "bytes": 10**6, "flops": 2 * 10**8, **fixed},  # 0.2 TFLOP/s
    ]
    record = {"device": "cuda", **rates, "rows": rows}
    assert plots.roofs(record) == (("copy", 0.01), ("matmul", 0.1))
    copy, matmul = plots.roofs({**record, "device": "cpu"})
    assert copy == ("most reached", pytest.approx(0.1))
    assert matmul == ("most reached", pytest.approx(0.2))


def test_page_escapes_what_it_shows(tmp_path):
    record = records.load_records(FULL)
    record["rows"] = record["rows"][:2]
    record["failures"] = [{"op": "relu", "case": "x", "error": "<script>alert(1)</script>"}]
    text = page.bench_page(record)
    # The page's own, the charts' library, and each chart's data.
    assert text.count("<script") == 2 + len(live.of_record(record))
    assert "alert(1)" not in text.partition("<script")[2]
    assert "&lt;script&gt;alert(1)" in text


def test_pictures_carry_their_origin(tmp_path):
    record, steps = records.load_records(FULL), records.load_records(STEPS)
    for draw, drawn in ((plots.roofline, record), (plots.bars, record), (plots.ladder, steps)):
        text = looks.svg(
            lambda style, draw=draw, drawn=drawn: draw(drawn, style), looks.Style(looks.DARK, True)
        )
        for part in (drawn["gpu"], drawn["torch"], drawn["date"], drawn["source_hash"]):
            assert part in text
    again = looks.svg(lambda style: plots.bars(record, style), looks.Style())
    assert again == looks.svg(lambda style: plots.bars(record, style), looks.Style())


def test_speeds_of_steps_are_relative_to_native():
    """To the faster of its layouts, wherever it stands, and only in layouts in which it ran."""
    times = {("warpwright", "nchw"): 20.0, ("native", "nchw"): 10.0, ("native", "nhwc"): 8.0}
    times["warpwright", "nhwc"] = 4.0
    record = records.load_records(STEPS)
    row = {**record["rows"][0], "op": "x_step", "case": "b1"}
    record["rows"] = [{**row, "impl": i, "layout": at, "ms": ms} for (i, at), ms in times.items()]
    speeds = ("20 ms · 0.40×", "10 ms · 0.80×", "8 ms · 1.00×", "4 ms · 2.00×")
    assert texts(plots.ladder(record, looks.Style())) == [f" {speed}" for speed in speeds]
    del record["rows"][2]
    some = [" 20 ms · 0.50×", " 10 ms · 1.00×", " 4 ms"]
    assert texts(plots.ladder(record, looks.Style())) == some
    del record["rows"][1]
    assert texts(plots.ladder(record, looks.Style())) == [" 20 ms", " 4 ms"]


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
