"""The record format: one JSON file per suite and GPU, the source of every figure in the docs.

schema.json defines it. Every read and write of a record checks the required fields.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from .. import _C
from .._version import __version__
from .measure import interleaved, tf32_allowed

SCHEMA: dict[str, Any] = json.loads((resources.files(__package__) / "schema.json").read_text())
HEADER_FIELDS: tuple[str, ...] = tuple(SCHEMA["required"])
_ROW = SCHEMA["properties"]["rows"]["items"]
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # how a spreadsheet's formulas start
ROW_FIELDS: tuple[str, ...] = tuple(_ROW["required"])
ALL_ROW_FIELDS: tuple[str, ...] = tuple(_ROW["properties"])
KEY = ("op", "case", "dtype", "layout", "pass")


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def _copy_tbs(device: str) -> float:
    """Bytes read plus written by a device copy, in TB/s: the ceiling of memory-bound ops."""
    source = torch.randn((1 << 29) if device == "cuda" else (1 << 24), device=device)
    target = torch.empty_like(source)
    ms = interleaved({"copy": lambda: target.copy_(source)}, device)["copy"].ms
    return 2 * source.numel() * source.itemsize / ms / 1e9


# Bytes read plus written: from a part of the first cache to far beyond the last one.
CACHE_SIZES = tuple(2**power for power in range(12, 29, 2))


def _cached_tbs(size: int) -> float:
    """The fastest of a copy, a sum and a fill on the CPU that move `size` bytes, in TB/s.

    The data is as warm as a repeated call leaves it, which is how ops are measured.
    """
    source, target = (torch.zeros(size // 8) for _ in range(2))
    whole = torch.zeros(size // 4)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "sum": whole.sum,
        "fill": lambda: whole.fill_(1.0),
    }
    timings = interleaved(calls, "cpu", seconds=0.05)
    return size / min(timing.ms for timing in timings.values()) / 1e9


def memory_tbs(ceilings: Mapping[str, Any], size: float) -> float:
    """The rate at which this machine can move `size` bytes, in TB/s.

    On a CPU it depends on the caches that hold them: the faster of the two measured sizes around it.
    """
    rates = {int(k): v for k, v in ceilings.get("cached_tbs", {}).items()}
    if not rates:
        return float(ceilings["copy_tbs"])
    below = max((s for s in rates if s <= size), default=min(rates))
    above = min((s for s in rates if s >= size), default=max(rates))
    return float(max(rates[below], rates[above]))


def matmul_tflops(ceilings: Mapping[str, Any], dtype_name: str) -> float:
    """The measured rate of matrix products; a CPU has one of its own for 16-bit numbers."""
    key = "half_tflops" if dtype_name in ("bfloat16", "float16") else "matmul_tflops"
    return float(ceilings.get(key, ceilings["matmul_tflops"]))


def _matmul_tflops(device: str, dtype: torch.dtype) -> float:
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    ms = interleaved({"matmul": lambda: a @ b}, device, seconds=0.5)["matmul"].ms
    return 2 * n**3 / ms / 1e9


def machine_name(device: str) -> str:
    """The GPU's name, or the CPU's with the threads in use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        cpus = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in cpus if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        name = platform.processor() or "CPU"
    return f"{name}, {torch.get_num_threads()} threads"


def environment(device: str) -> dict[str, Any]:
    """The machine and the versions of a measurement."""
    return {
        "schema": 1,
        "device": device,
        "gpu": machine_name(device),
        "driver": _driver() if device == "cuda" else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "python": platform.python_version(),
        "warpwright": __version__,
        "threads": torch.get_num_threads(),
        "source_hash": _C.build_info()["source_hash"],
        "date": datetime.date.today().isoformat(),
    }


def ceilings(device: str) -> dict[str, Any]:
    """The rates that no kernel can beat, measured now.

    A GPU has TF32's too, a CPU those of 16-bit products and of data that its caches hold.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    found: dict[str, Any] = {
        "copy_tbs": round(_copy_tbs(device), 4),
        "matmul_tflops": round(_matmul_tflops(device, dtype), 3),
    }
    if device == "cuda":
        with tf32_allowed():
            found["tf32_tflops"] = round(_matmul_tflops(device, torch.float32), 3)
    else:
        found["half_tflops"] = max(
            found["matmul_tflops"], round(_matmul_tflops(device, torch.bfloat16), 3)
        )
        found["cached_tbs"] = {str(size): round(_cached_tbs(size), 5) for size in CACHE_SIZES}
    return found


def machine_header(device: str) -> dict[str, Any]:
    """The record of a run that has only measured the ceilings."""
    return {**environment(device), **ceilings(device), "rows": []}


def validate(record: dict[str, Any], name: str = "record") -> None:
    """Raises ValueError naming the missing field."""
    for field in HEADER_FIELDS:
        if field not in record:
            raise ValueError(f"{name}: field {field!r} is missing")
    if not isinstance(record["rows"], list):
        raise ValueError(f"{name}: rows: expected a list, got {type(record['rows']).__name__}")
    for i, row in enumerate(record["rows"]):
        for field in ROW_FIELDS:
            if field not in row:
                raise ValueError(f"{name}: rows[{i}]: field {field!r} is missing")


def save_records(record: dict[str, Any], path: Path) -> None:
    """All or nothing: an interrupted write leaves the file as it was."""
    validate(record, str(path))
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    header = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1)[:-2]
    write(path, f'{header},\n "rows": [\n{rows}\n]}}\n')


def load_records(path: Path) -> dict[str, Any]:
    """Raises ValueError if the file holds no record."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor text
        raise ValueError(f"{path}: expected a record of bench --json: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(
            f"{path}: expected a record of bench --json, got a JSON {type(record).__name__}"
        )
    if not {"schema", "rows"} & record.keys():
        raise ValueError(f"{path}: expected a record of bench --json, got another JSON object")
    validate(record, str(path))
    return record


def as_cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row for a CSV file: text that a spreadsheet would run as a formula gets a quote in front."""
    return {
        key: f"'{value}" if isinstance(value, str) and value[:1] in FORMULA else value
        for key, value in row.items()
    }


def save_csv(record: dict[str, Any], path: Path) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, ALL_ROW_FIELDS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in record["rows"]:
        flat = {k: "; ".join(v) if isinstance(v, list) else v for k, v in row.items()}
        writer.writerow(as_cells(flat))
    write(path, text.getvalue())


def require_writable(path: Path) -> None:
    """Raises ValueError if the file can't be written, so that no measurement is made in vain."""
    if path.is_dir():
        raise ValueError(f"{path}: expected a file to write, got a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{path}: can't be written: {error.strerror}") from error


def require_device(device: str) -> None:
    """Raises ValueError if torch cannot use the device, or if this build's times on it say nothing."""
    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ValueError("--device: got cuda, but torch finds no CUDA device")
    if _C.build_info()["fast_compile"]:
        raise ValueError(
            "--device: got cuda, but this build's kernels are not optimised (FAST_COMPILE=1): build "
            "again without it"
        )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".part")
    half.write_text(text)
    os.replace(half, path)


def is_training_step(op: str) -> bool:
    """mnist_step and its like, which are whole; an optimizer's own step is an op like others."""
    return op.endswith("_step")


def grouped(record: dict[str, Any]) -> dict[tuple[str, ...], dict[str, dict[str, Any]]]:
    """{(op, case, dtype, layout, pass): {impl: row}}, in file order."""
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault(tuple(row[k] for k in KEY), {})[row["impl"]] = row
    return groups


def native_ratio(impls: Mapping[str, Mapping[str, Any]], impl: str = "warpwright") -> float | None:
    """Native's time over `impl`'s in the same run; None if either is missing."""
    if impl not in impls or "native" not in impls:
        return None
    return float(impls["native"]["ms"] / impls[impl]["ms"])
