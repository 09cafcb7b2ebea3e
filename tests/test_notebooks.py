"""Each notebook of examples/ runs from its first cell to its last, and prints what it has stored."""

import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from run_notebook import executed  # noqa: E402

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
# Cells with this tag show times: their outputs have the same kinds, not the same text.
TIMED = "timed"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    return {kind for output in cell.outputs for kind in (output.get("data") or {"text/plain": ""})}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stored = nbformat.read(path, as_version=4)
    nbformat.validate(stored)
    before, after = code_cells(stored), code_cells(executed(path, tmp_path))
    # Stored by one run, from top to bottom.
    assert [cell.execution_count for cell in before] == list(range(1, len(before) + 1))
    for old, new in zip(before, after, strict=True):
        assert not [o for o in old.outputs if o.get("name") == "stderr"], old.source
        if TIMED in old.metadata.get("tags", ()):
            assert kinds(new) == kinds(old), old.source
        else:
            assert new.outputs == old.outputs, old.source
    assert sum(bool(cell.outputs) for cell in before) >= len(before) - 1


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_listed(path):
    assert f"]({path.name})" in (ROOT / "examples" / "README.md").read_text()
