"""A profile's page: the flame, the advice, the comparison, and nothing from the network."""

import json
import re

import pytest

import warpwright_cli
from warpwright.bench import records
from warpwright.profile import advice, charts, compare, page, summary
from warpwright.profile.ranges import Amount
from warpwright.profile.trace import Label

RUNS = ("native", "swapped", "fused")
# module, op, ms of each run
TIMES = [
    ("stem", "conv2d", (2.0, 1.0, 1.0)),
    ("block.<b>", "linear", (4.0, 6.0, 6.0)),
    ("block.norm", "batch_norm", (3.0, 1.0, 2.0)),
    ("block.act", "relu", (1.0, 1.0, None)),
    ("", "add", (0.5, 0.5, 0.5)),
]


def cells(ms):
    empty = {"kernels": 1, "host_ms": ms, "roofline": None, "rate": None, "peak_mib": None}
    return {"ms": ms, **empty}


def entry(name, reason=""):
    kind = {"name": name, "type": "nn.Linear", "op": "linear", "swapped": not reason}
    return {**kind, "reason": reason, "fused": "", "note": ""}


def run(name, ms, steady=True):
    times = {"ms": ms, "ms_lo": ms, "ms_hi": ms, "rounds": 9, "steady": steady}
    found = {"name": name, "error": None, **times, "work_ms": ms, "sum_of_ops_ms": ms}
    return {**found, "kernels": 9, "peak_mib": 5.0, "speedup": None, "trace": None}


def row(keys, ms):
    amounts = {"calls": 1.0, "bytes": 0, "flops": 0, "floor_ms": 0.0, "speedup": None}
    return {**keys, **amounts, "error": None, "native_error": None} | {
        name: cells(value) for name, value in zip(RUNS, ms, strict=True)
    }


@pytest.fixture
def report():
    modules = [
        row({"module": m, "op": op}, ms) | {"swap": "swapped" if m else None} for m, op, ms in TIMES
    ]
    versions = {"torch": "2.11.0", "source_hash": "0" * 16, "date": "2026-01-01"}
    rates = {"copy_tbs": 0.01, "matmul_tflops": 0.1}
    entries = [entry(name) for name in ("stem", "block.<b>", "block.norm", "block.act")]
    return summary.ProfileReport(
        title="Net</script>",
        environment={"device": "cuda", "gpu": "some GPU", **versions, **rates},
        runs=[run("native", 11.0), run("swapped", 10.0), run("fused", 12.0)],
        ops=[row({"op": op}, ms) for _, op, ms in TIMES],
        modules=modules,
        kernels=[],
        swap={
            "swapped": 4,
            "left": 0,
            "entries": entries,
            "fusions": [],
            "check": None,
            "dry_run": False,
            "advice": ["use channels_last"],
        },
        check_failures=[],
        bound={"launch": 0.5, "memory": 0.2, "compute": 0.2, "other": 0.1},
        memory={"native": [(0.0, 1.0), (2.0, 3.0)]},
        speedup=0.9,
        speedup_lo=0.8,
        speedup_hi=1.1,
    )


def test_flame(report):
    """Children lie inside of their parent, and the whole is the sum."""
    values = charts.flame_values(report, [*RUNS])
    for name in RUNS:
        bars = {v["name"]: v for v in values if v["run"] == name and v["label"] != "add"}
        root = next(
            v for v in values if v["run"] == name and v["start"] == 0 and name in v["label"]
        )
        of_run = [ms[RUNS.index(name)] or 0 for *_, ms in TIMES]
        assert root["end"] == pytest.approx(sum(of_run))
        block = bars["block"]
        for child in ("block.<b>", "block.norm"):
            assert block["start"] <= bars[child]["start"] <= bars[child]["end"] <= block["end"]
            assert bars[child]["top"] == block["top"] + 1
        # The model's order, not the times'.
        assert bars["block.<b>"]["end"] <= bars["block.norm"]["start"]
    assert not [v for v in values if v["run"] == "fused" and v["name"].startswith("block.act")]


def test_flame_compares_each_run_with_native(report):
    """A run's bars have its own result, and native's, which is the measure, none."""
    kinds = {}
    for value in charts.flame_values(report, [*RUNS]):
        native, mine = float(value["native ms"]), float(value[f"{value['run']} ms"])
        kinds.setdefault(value["run"], set()).add(value["kind"])
        if value["kind"] == "faster than native":
            assert mine < native
        elif value["kind"] == "slower than native":
            assert mine > native
        else:
            assert value["run"] == "native" or not native or mine == pytest.approx(native, rel=0.02)
    assert kinds["native"] == {"native, or no difference"}
    assert kinds["swapped"] == kinds["fused"] == {*charts.KINDS}


def options_of(code):
    """What the advised code hands to swap()."""
    scope = {"model": None, "warpwright": type("W", (), {"swap": staticmethod(lambda *a, **k: k)})}
    exec(code.replace("warpwright.swap", "given = warpwright.swap"), scope)
    return scope["given"]


def test_advice(report):
    found = {a.why.split(" ")[0]: a for a in advice.advice(report)}
    assert found["Leave"].ms == pytest.approx(-2.0)
    # The code runs, names the module exactly, and does not fuse: the swapped run is the faster one.
    assert options_of(found["Leave"].code) == {"exclude": ["block.<b>"]}
    assert found["Here"].code == "warpwright.swap(model)"
    assert found["Here"].ms == pytest.approx(-2.0)
    assert 'mode="reduce-overhead"' in found["The"].code
    assert found["use"].code.startswith("model.to(memory_format=torch.channels_last)\n")
    report.runs[2] = run("fused", 9.0)
    (leave,) = (a for a in advice.advice(report) if a.why.startswith("Leave"))
    assert options_of(leave.code) == {"exclude": ["block.<b>"], "fuse": True}


def test_advice_on_the_memory_format(report):
    """Once channels_last was measured, the measurement takes the place of swap's advice."""
    report.layouts = (12.0, 9.0)
    (found,) = (a for a in advice.advice(report) if "channels_last" in a.code)
    assert found.ms == pytest.approx(-3.0)
    assert found.why == "Bring the model and its images to channels_last."
    assert '<b class="good">-3 ms</b> per step' in page.render(report)
    report.layouts = (12.0, 11.9)
    assert not [a for a in advice.advice(report) if "channels_last" in a.code]


def test_advice_to_leave_a_module_with_swapped_layers_inside(report):
    """exclude= would leave those native too."""
    inner = {**report.swap["entries"][0], "name": "block.<b>.inner", "swapped": True}
    report.swap["entries"].append(inner)
    (code,) = (a.code for a in advice.advice(report) if a.why.startswith("Leave"))
    scope = {"model": None, "warpwright": type("W", (), {"swap": staticmethod(lambda *a, **k: k)})}
    exec(code.replace("warpwright.swap", "given = warpwright.swap"), scope)
    assert scope["given"]["filter_fn"](None, "block.<b>") is False
    assert scope["given"]["filter_fn"](None, "block.<b>.inner") is True


def test_a_fused_block_is_compared_as_a_whole(report):
    """One of its layers has the time of the op that replaces several."""
    chain = {"block": "block", "chain": "norm → add → act", "into": "BatchNormAddReLU2d"}
    report.swap["fusions"] = [chain | {"reason": ""}]
    report.modules.append(row({"module": "block", "op": "add"}, (1.0, 1.0, None)))
    inside = [r for r in report.modules if r["module"].startswith("block")]
    native = sum(r["native"]["ms"] or 0.0 for r in inside)
    (norm,) = (r for r in inside if r["module"] == "block.norm")
    others = sum(r["fused"]["ms"] or 0.0 for r in inside if r is not norm)
    norm["fused"] = cells(native - others)  # more than native's norm alone
    assert set(advice.losses(report, report.ours)).isdisjoint({"block", "block.norm", "block.<b>"})
    norm["fused"] = cells(native - others + 1.5)
    assert advice.losses(report, report.ours)["block"] == pytest.approx(1.5)
    report.runs[2] = run("fused", 9.0)
    assert not any(a.why.startswith("Leave") for a in advice.advice(report))  # within the noise
    report.speedup_lo = report.speedup_hi = report.speedup
    (leave,) = (a for a in advice.advice(report) if a.why.startswith("Leave"))
    assert options_of(leave.code) == {"exclude": ["block"], "fuse": True}
    # Of the whole model the steps' times speak.
    report.swap["fusions"][0]["block"] = ""
    assert advice.losses(report, report.ours) == {}


def test_layers_that_ran_natives_kernels_are_not_advised(report):
    assert advice.losses(report, report.ours)
    for each in report.modules:
        each["fused"]["own_share"] = 0.0
    assert advice.losses(report, report.ours) == {}


def test_no_advice_from_unsteady_runs(report):
    for each in report.runs:
        each["steady"] = False
    assert [a.why for a in advice.advice(report) if a.ms is not None] == []


def test_page(report):
    text = page.render(report)
    assert "<h1>Net&lt;/script&gt;: warpwright beside native" in text
    assert "and native do not differ clearly" in text  # the interval holds 1
    # Data inside of <script> cannot end it.
    data = re.search(r'<script type="application/json" id="flame">(.*?)</script>', text, re.S)[1]
    assert "<" not in data
    assert json.loads(data)["values"][0]["name"] == "Net</script>"
    own = re.sub(r'<script type="module">.*</script>', "", text, flags=re.S)
    assert not re.search(r"""(src|href)=["']?https?:""", own)
    assert own.count('<table class="stack sortable">') >= 2


@pytest.mark.parametrize(("lo", "hi", "says"), [(1.2, 1.4, "is faster"), (0.5, 0.9, "is slower")])
def test_headline(report, monkeypatch, lo, hi, says):
    monkeypatch.setattr(page, "pictures", lambda report: {})
    monkeypatch.setattr(page, "live_charts", lambda report: {})
    report.speedup_lo, report.speedup_hi = lo, hi
    assert f"fused {says} than native" in page.render(report)


def test_waterfall_keeps_the_sign_of_each_change(report):
    """The profiler slows native's ops alone beyond the step: ours are scaled like them."""
    for each in report.ops:
        each["native"]["ms"] = (each["native"]["ms"] or 0.0) * 4
    _, steps, _ = page.waterfall_steps(report)
    differences = {
        each["op"]: (each["fused"]["ms"] or 0.0) - each["native"]["ms"] for each in report.ops
    }
    compared = [(change, differences[op]) for op, change in steps if op in differences]
    assert compared
    assert all(change * difference >= 0 for change, difference in compared)


def test_waterfall_stays_inside_of_the_step(report):
    """Op times of a profiler that slows the CPU are scaled to the step."""
    for each in report.ops:
        for name in RUNS:
            each[name]["ms"] = (each[name]["ms"] or 0.0) * 10
    start, steps, end = page.waterfall_steps(report)
    assert start + sum(change for _, change in steps) == pytest.approx(end)
    at = start
    for _, change in steps:
        at += change
        assert -1e-6 <= at <= max(start, end) + 1e-6


def write(report, path, scale=1.0):
    found = report.to_dict()
    for each in found["modules"]:
        for name in RUNS:
            if each["op"] == "conv2d":
                each[name] = cells(each[name]["ms"] * scale)
    path.write_text(json.dumps(found))
    return str(path)


def test_compare(report, tmp_path, capsys):
    paths = [write(report, tmp_path / "a.json"), write(report, tmp_path / "b.json", 1.5)]
    html = tmp_path / "c.html"
    assert warpwright_cli.main(["compare", *paths, "--html", str(html)]) == 1
    printed = capsys.readouterr().out
    assert "+50.0%" in printed
    assert "3 of 4 modules" in printed
    assert "block.&lt;b&gt;" in html.read_text()
    assert warpwright_cli.main(["compare", paths[0], paths[0]]) == 0
    assert warpwright_cli.main(["compare", paths[0], paths[0], "--above", "99"]) == 2


def test_modules_that_are_missing(report):
    before, after = report.to_dict(), json.loads(json.dumps(report.to_dict()))
    after["modules"] = after["modules"][1:]
    rows = compare.changes(before, after, 0.05)
    (gone,) = (r for r in rows if r["module"] == "stem")
    assert (gone["before"], gone["after"]) == (1.0, 0.0)
    (new,) = (r for r in compare.changes(after, before, 0.05) if r["module"] == "stem")
    assert compare.relative(new) == "new"


def test_a_record_and_a_profile(report, tmp_path, capsys):
    path = write(report, tmp_path / "a.json")
    other = tmp_path / "record.json"
    other.write_text("[]")
    assert warpwright_cli.main(["compare", path, str(other)]) == 2
    assert "record.json: expected the report.json of a profile" in capsys.readouterr().out


def test_compare_of_folders_and_of_other_runs(report, tmp_path, capsys):
    for name in ("before", "after"):
        (tmp_path / name).mkdir()
        write(report, tmp_path / name / "report.json")
    folders = [str(tmp_path / name) for name in ("before", "after")]
    assert warpwright_cli.main(["compare", *folders]) == 0
    assert "modules: of the run fused" in capsys.readouterr().out
    alone = report.to_dict()
    alone["runs"] = alone["runs"][:2]  # native and swapped, which the other profile has, too
    (tmp_path / "after" / "report.json").write_text(json.dumps(alone))
    warpwright_cli.main(["compare", *folders])
    assert "modules: of the run swapped\n" in capsys.readouterr().out
    alone["runs"] = alone["runs"][1:]
    (tmp_path / "before" / "report.json").write_text(
        json.dumps(report.to_dict() | {"runs": report.runs[2:]})
    )
    (tmp_path / "after" / "report.json").write_text(json.dumps(alone))
    warpwright_cli.main(["compare", *folders])
    assert "modules: of the run fused before and swapped after" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--html", "FOLDER"], "expected a file to write, got a folder"),
        (["--impl", "native"], "--impl: expected records of bench, got two report.json"),
    ],
)
def test_what_compare_refuses(report, tmp_path, capsys, options, says):
    path = write(report, tmp_path / "a.json")
    options = [str(tmp_path) if option == "FOLDER" else option for option in options]
    assert warpwright_cli.main(["compare", path, path, *options]) == 2
    assert says in " ".join(capsys.readouterr().out.split())


def test_compare_of_other_json(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"a": 1}')
    assert warpwright_cli.main(["compare", *[str(tmp_path / "a.json")] * 2]) == 2
    assert "expected a record of bench --json, got another JSON object" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_cpu_row_is_not_above_its_floor():
    """The rate is that of data in the same caches, and no measured time is below the floor."""
    rates = {"4096": 0.2, "65536": 0.5, "1048576": 0.1}
    ceilings = {"copy_tbs": 0.01, "matmul_tflops": 0.1, "cached_tbs": rates}
    assert records.memory_tbs(ceilings, 100_000) == 0.5
    assert records.memory_tbs(ceilings, 500) == 0.2
    assert records.memory_tbs(ceilings, 1e9) == 0.1
    assert records.memory_tbs({"copy_tbs": 0.01}, 1e9) == 0.01
    calls = Amount()
    for _ in range(3):
        calls.add(2e5, 0)
    assert calls.floor_us(ceilings) == pytest.approx(6e5 / 0.5e6)
    label = Label("relu", "act", "forward")
    sums = {name: {label: summary.Sum(us=us)} for name, us in (("native", 0.9), ("swapped", 0.6))}
    environment = {**ceilings, "device": "cpu"}
    peaks = {"native": {}, "swapped": {}}
    (found,) = summary._rows(summary.op_key, ("op",), sums, {label: calls}, environment, peaks)
    assert found["swapped"]["roofline"] == 1.0
    assert found["native"]["roofline"] == pytest.approx(0.6 / 0.9)


def test_measured_ceilings():
    tbs = records._cached_tbs(2**14)
    assert 0 < tbs < 50
