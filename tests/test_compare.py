"""`python -m warpwright compare`: what differs between two records."""

import json

import pytest

import warpwright_cli
from warpwright.bench import records


def record(**milliseconds):
    """One row an op; every implementation's time is given as op_impl=ms."""
    header = dict.fromkeys(records.HEADER_FIELDS, "x")
    rows = []
    for name, ms in milliseconds.items():
        op, impl = name.split("_")
        row = dict.fromkeys(records.ROW_FIELDS, "x")
        row |= {"op": op, "impl": impl, "ms": ms, "pass": "fwd", "steady": ms < 5}
        rows.append({**row, "throttled": [], "sm_mhz": None})
    return {**header, "rows": rows}


@pytest.fixture
def compare(tmp_path, capsys):
    def run(before, after, *options):
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path, content in zip(paths, (before, after), strict=True):
            path.write_text(json.dumps(content))
        code = warpwright_cli.main(["compare", *map(str, paths), *options])
        return code, capsys.readouterr().out

    return run


def test_rows_that_differ(compare):
    before = record(relu_warpwright=1.0, relu_native=1.0, linear_warpwright=9.0, pool_native=0.01)
    after = record(relu_warpwright=1.02, relu_native=0.9, linear_warpwright=9.9, pool_native=0.02)
    code, text = compare(before, after)
    assert code == 1
    assert "+10.0%" in text
    assert "-10.0%" in text
    assert "unsteady before and after" in text
    assert "+2.0%" not in text
    assert "1 of 3 rows of at least 0.05 ms are within 3%, 1 of the 2 that were steady" in text
    assert "pool" not in text
    code, text = compare(before, after, "--tolerance", "0.2")
    assert code == 0
    assert "3 of 3 rows" in text
    code, text = compare(before, after, "--impl", "warpwright", "--above", "2")
    assert "0 of 1 rows" in text


def test_the_clocks_are_named(compare):
    before, after = record(linear_native=1.0), record(linear_native=1.1)
    before["rows"][0] |= {"sm_mhz": 1980.0}
    after["rows"][0] |= {"sm_mhz": 1740.0, "throttled": ["power cap"]}
    code, text = compare(before, after)
    assert code == 1
    assert "power cap, 1980 -> 1740 MHz" in text
    assert "0 of the 0 that were steady and not throttled" in text


def test_conditions_are_compared_too(compare):
    before = record(relu_native=1.0)
    code, text = compare({**before, "driver": "1.2"}, {**before, "driver": "1.3"})
    assert code == 0
    assert "driver: 1.2 before, 1.3 after" in text


def test_nothing_to_compare(compare, tmp_path, capsys):
    code, text = compare(record(relu_native=1.0), record(pool_native=1.0))
    assert code == 2
    assert "no row of at least 0.05 ms is in both" in text
    code, text = compare({"rows": []}, record(relu_native=1.0))
    assert code == 2
    assert "is missing" in text
    assert (
        warpwright_cli.main(["compare", str(tmp_path / "none.json"), str(tmp_path / "after.json")])
        == 2
    )
    assert "none.json" in capsys.readouterr().out.replace("\n", "")


def test_two_gpus_are_compared_by_their_ratios_to_native(compare):
    before = record(relu_warpwright=1.0, relu_native=2.0, linear_warpwright=1.0, linear_native=1.1)
    after = record(relu_warpwright=2.0, relu_native=4.0, linear_warpwright=2.0, linear_native=1.76)
    code, text = compare({**before, "gpu": "A"}, {**after, "gpu": "B"})
    assert code == 1
    assert "native's time over the implementation's is compared" in text
    assert "1.10" in text
    assert "0.88" in text
    assert "+25.0%" in text
    assert "1 of 2 rows" in text  # native's own rows are no ratio
    code, text = compare({**before, "gpu": "A"}, {**before, "gpu": "B"})
    assert code == 0
    assert "2 of 2 rows" in text
    code, _ = compare(
        {**record(relu_native=1.0), "gpu": "A"}, {**record(relu_native=1.0), "gpu": "B"}
    )
    assert code == 2
