"""Runs the notebooks of examples/ and stores their outputs.

    python tools/run_notebook.py                # every notebook
    python tools/run_notebook.py examples/profile_a_model.ipynb

A notebook runs in a folder of its own, so that what it writes does not stay. Needs nbclient and ipykernel
(`pip install 'warpwright[test]'`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`. Raises CellExecutionError with the cell's traceback."""
    notebook = nbformat.read(path, as_version=4)
    # torch's notices on stderr are not the notebook's.
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = str(ROOT / "python")
    environment["COLUMNS"] = "120"  # tables as wide as without a terminal
    client = NotebookClient(
        notebook,
        timeout=300,
        record_timing=False,
        coalesce_streams=True,  # one print may arrive in two messages
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=environment)
    notebook.metadata.pop("language_info", None)  # Python's patch version
    return notebook


def main() -> int:
    paths = [Path(name) for name in sys.argv[1:]] or sorted((ROOT / "examples").glob("*.ipynb"))
    for path in paths:
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        nbformat.write(notebook, path)
        print(f"{path}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
