"""The models of `bench --suite model`: files of a folder, each with `workloads(device)`."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from .sources import source_root
from .steps import Workload


def models_folder(folder: Path | None) -> Path:
    """The folder asked for, else benchmarks/models of the repository or the current directory."""
    root = source_root()
    tried = [folder] if folder else [p / "benchmarks" / "models" for p in (root, Path()) if p]
    for candidate in tried:
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(
        f"--models: no folder {' or '.join(map(str, tried))}; the models are in the repository's "
        "benchmarks/models"
    )


def load_file(path: Path, device: str) -> list[Workload]:
    """The workloads of one file.

    Raises:
        ModuleNotFoundError: a package that the file needs is not installed.
    """
    name = f"warpwright_models_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return [dataclasses.replace(w, source=path) for w in module.workloads(device)]


def load_workloads(folder: Path | None, device: str) -> list[Workload]:
    """Every workload of every file. A model whose package is not installed is named and left out."""
    from rich.console import Console
    from rich.text import Text

    found: list[Workload] = []
    for path in sorted(models_folder(folder).glob("*.py")):
        if path.name.startswith("_"):
            continue
        try:
            found += load_file(path, device)
        except ModuleNotFoundError as error:
            words = f"{path.stem}: missing: {error.name} is not installed"
            Console().print(Text(words, style="yellow"))
    return found
