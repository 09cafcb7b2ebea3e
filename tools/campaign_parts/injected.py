"""Faults from outside: no memory, signals, forks, threads. Every one ends in an exception, and the
next call gives the bits that it gave before."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .result import ROOT, Options, Row

WHAT = {
    "allocations": (
        "each allocation of a call fails in turn (tensors and `operator new`)",
        "checks",
    ),
    "memory_limit": ("outputs larger than the memory limit", "checks"),
    "signals": ("SIGINT in the middle of a call", "signals"),
    "fork": ("calls in a forked child, and in its parent afterwards", "checks"),
    "spawn": ("calls in spawned workers", "calls"),
    "threads": ("different calls in eight threads at once", "calls"),
}
SECONDS = 1800


def failing_allocator(folder: Path) -> Path:
    library = folder / "failing_allocator.so"
    source = Path(__file__).with_name("failing_allocator.cpp")
    command = ["g++", "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


def run_child(kind: str, seed: int, environment: dict[str, str]) -> Row:
    what, unit = WHAT[kind]
    row = Row(part="injected", what=what, unit=unit, seed=seed)
    command = [sys.executable, str(Path(__file__).with_name("injected_child.py")), kind, str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        row.failures = [f"{kind}: the process hangs"]
        return row
    if done.returncode != 0:
        row.failures = [f"{kind}: exit code {done.returncode}: {done.stderr.strip()[-600:]}"]
        return row
    found = json.loads(done.stdout.splitlines()[-1])
    row.cases, row.failures = found["cases"], found["failures"]
    return row


def run(options: Options) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, (what, unit) in WHAT.items():
            if not re.search(options.only, kind):
                why = "left out by --only"
                rows.append(Row(part="injected", what=what, unit=unit, not_run=why))
                continue
            preload = {}
            if kind == "allocations":
                preload = {"LD_PRELOAD": str(failing_allocator(Path(folder)))}
            rows.append(run_child(kind, options.seed, preload))
            print(f"injected: {kind}: {rows[-1].cases} {unit}", flush=True)
    return rows
