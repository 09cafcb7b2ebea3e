"""What a part of the campaign is asked and what it answers."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = len(os.sched_getaffinity(0))  # that compile or test at once


@dataclass(frozen=True)
class Options:
    """What the command line says to every part."""

    device: str = "cpu"
    seed: int = 0
    cases: int = 5000  # calls per kind, and random cases per op
    compared: int | None = None  # public calls that native makes, too; None: all
    minutes: float = 60.0  # of a part that stops by time
    mutants: int = 200
    per_file: int = 12  # faults in each file of a build
    only: str = ""  # a regular expression of the files that get faults
    pytorch: Path | None = None  # a checkout of PyTorch


@dataclass
class Row:
    """One thing that was tried: how often, and what failed."""

    part: str
    what: str
    cases: int = 0
    unit: str = "cases"
    failures: list[str] = field(default_factory=list)
    seed: int | None = None
    detail: str = ""
    not_run: str = ""  # why nothing was tried
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
