"""A user's mistake on the command line gives one sentence and exit code 2, and no traceback."""

import gzip

import pytest
import torch

import warpwright_cli
from warpwright import _C
from warpwright.bench.records import as_cells
from warpwright.demo import data

MODEL = """
import torch
from torch import nn
def build(): return nn.Linear(3, 3)
def raises(): raise KeyError("weights")
def deep(): return nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2))
def more(): return {"model": nn.Linear(3, 3), "inputs": torch.ones(2, 3), "labels": 1}
def none(): return {"inputs": torch.ones(2, 3)}
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "needs.py").write_text("import no_such_package\n")
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(1)\n")
    (tmp_path / "raises.py").write_text("def f():\n    1 / 0\nf()\n")
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
    "profile ends.py:build": "ends.py ends the process when it is imported; put its main part under",
    "profile raises.py:build": "raises.py raises ZeroDivisionError: division by zero (raises.py:2)",
    "profile model.py:raises": "model.py:raises raises KeyError: 'weights' (model.py:5)",
    "profile model.py:none": "the dict's model: expected a torch.nn.Module, got the keys inputs",
    "profile model.py:more": "autocast, step; got labels too",
    "profile model.py:deep --input 2x3": "shapes cannot be multiplied (2x4 and 5x2), in 1 (Linear)",
    "profile model.py:build --input 2x3 --target 2x3:int64:3": "RuntimeError: Expected floating point",
    "profile model.py:build --input 2x3 --runs foo": "runs: expected names out of native, swapped",
    "demo --out file/x": "demo: file/x/demo.json: can't be written",
    "overhead --rounds 2 --json file/x.json": "file/x.json: can't be written",
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


@pytest.mark.parametrize("command", ["profile model.py:build --device cuda", "bench --device cuda"])
def test_a_device_that_is_not_there(folder, monkeypatch, capsys, command):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert warpwright_cli.main(command.split()) == 2
    assert "--device: got cuda, but torch finds no CUDA device" in capsys.readouterr().out


def test_unoptimised_kernels_are_not_measured(monkeypatch, capsys):
    built = {**_C.build_info(), "fast_compile": True}
    monkeypatch.setattr(_C, "build_info", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert warpwright_cli.main(["bench", "relu", "--device", "cuda"]) == 2
    assert "not optimised (FAST_COMPILE=1): build again" in " ".join(
        capsys.readouterr().out.split()
    )


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
