"""The tool that measures what a call costs, and its table in docs/architecture.md."""

import json

import pytest
import torch

import warpwright_cli
from warpwright.bench import overhead, records


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("overhead") / "overhead.json"
    assert warpwright_cli.main(["overhead", "--rounds", "2", "--json", str(path)]) == 0
    return records.load_records(path)


def test_rows(record):
    devices = 2 if torch.cuda.is_available() else 1
    assert len(record["rows"]) == devices * len(overhead.calls("cpu")) * len(overhead.PASSES) * 2
    for row in record["rows"]:
        assert 0 < row["ms_lo"] <= row["ms"] <= row["ms_hi"]


def test_same_results(device):
    """What is compared is the same call."""
    for op, (_, call, leaves) in overhead.calls(device).items():
        ours, native = (call(f) for f in overhead.IMPLEMENTATIONS.values())
        torch.testing.assert_close(ours, native, msg=lambda m, op=op: f"{op}: {m}")
        dy = torch.ones_like(native)
        grads = [torch.autograd.grad(y, leaves, dy) for y in (ours, native)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_table_in_its_document(record, tmp_path, capsys):
    results = tmp_path / "benchmarks" / "results" / "gpu"
    for name in ("README.md", "docs/architecture.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "README.md").write_text("a\n")
    document = tmp_path / "docs/architecture.md"
    document.write_text("a\n<!-- results:overhead -->\nold\n<!-- /results -->\nb\n")
    results.mkdir(parents=True)
    report = ["report", "--root", str(tmp_path)]
    (results / "full.json").write_text(json.dumps({**record, "rows": []}))
    warpwright_cli.main(report)
    assert "old" in document.read_text()
    (results / "overhead.json").write_text(json.dumps(record))
    assert warpwright_cli.main([*report, "--check"]) == 1
    assert warpwright_cli.main(report) == 0
    assert warpwright_cli.main([*report, "--check"]) == 0
    text = document.read_text()
    assert text.startswith("a\n<!-- results:overhead -->\n| op | CPU, forward")
    assert text.count("\n| `") == len(overhead.calls("cpu"))
    assert "old" not in text
