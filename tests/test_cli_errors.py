"""A user's mistake on the command line gives one sentence and exit code 2, and no traceback."""

import gzip

import pytest

import warpwright_cli
from warpwright.bench.records import as_cells
from warpwright.demo import data

MODEL = "import torch\ndef build(): return torch.nn.Linear(3, 3)\nnumber = 3\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "no.json").write_text("x")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    (tmp_path / "[red]odd[bold].json").write_text("x")
    (tmp_path / "file").write_text("")
    return tmp_path


MISTAKES = {
    "profile nomodule:build": "nomodule: no such module, neither here nor installed",
    "profile none.py:build": "none.py: no such file",
    "profile broken.py:build": "broken.py:1: invalid syntax",
    "profile needs.py:build": "needs.py imports no_such_package, which is not installed",
    "profile model.py:other": "model.py has no 'other'",
    "profile model.py:number": "model.py:number: expected a function, got int",
    "profile model.py:build --arg a=3": "model.py:build: got an unexpected keyword argument 'a'",
    "profile model.py:build --input 2x3 --out file/x": "file/x/report.html: can't be written",
    "compare none.json list.json": "none.json: no such file",
    "compare list.json list.json": "list.json: expected a record of bench --json, got a JSON list",
    "compare no.json no.json": "no.json: expected a record of bench --json: Expecting value",
    "compare binary.json no.json": "binary.json: expected a record of bench --json: 'utf-8' codec",
    # The name is shown as it is, though it looks like markup.
    "compare [red]odd[bold].json no.json": "[red]odd[bold].json: expected a record",
    "bench relu --json file/x.json": "file/x.json: can't be written",
    "bench relu --csv .": ".: expected a file to write, got a folder",
    "bench nothing": "op: nothing: expected one of relu",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes(folder, capsys, command):
    assert warpwright_cli.main(command.split()) == 2
    printed = capsys.readouterr()
    assert MISTAKES[command] in (printed.out + printed.err).replace("\n", " ")
    assert "Traceback" not in printed.err


def test_a_gzip_file_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_BYTES", 2**20)
    bomb = tmp_path / "train-images-idx3-ubyte.gz"
    bomb.write_bytes(gzip.compress(bytes(2**24)))
    with pytest.raises(data.DataError, match=r"expected at most 1,048,576 bytes, found more"):
        data.read_idx(bomb, data.IMAGES_MAGIC)


def test_cells_are_no_formulas():
    row = {"module": "=HYPERLINK(0)", "op": "relu", "ms": -1.5, "none": None, "why": "@x", "": ""}
    expected = {**row, "module": "'=HYPERLINK(0)", "why": "'@x"}
    assert as_cells(row) == expected
