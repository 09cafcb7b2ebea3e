"""The record format: one JSON file a suite and GPU, every figure in the docs comes from one."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import _C
from .measure import interleaved

SCHEMA = 1
HEADER_FIELDS = (
    "schema",
    "gpu",
    "driver",
    "torch",
    "cuda",
    "cudnn",
    "source_hash",
    "date",
    "copy_tbs",
    "matmul_tflops",
    "rows",
)
ROW_FIELDS = (
    "op",
    "case",
    "dtype",
    "layout",
    "pass",
    "impl",
    "ms",
    "ms_lo",
    "ms_hi",
    "bytes",
    "flops",
    "floor_ms",
    "peak_mib",
    "err",
    "err_native",
)


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


def _matmul_tflops(device: str, dtype: torch.dtype) -> float:
    n = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    ms = interleaved({"matmul": lambda: a @ b}, device, seconds=0.5)["matmul"].ms
    return 2 * n**3 / ms / 1e9


def machine_header(device: str) -> dict[str, Any]:
    """Where and with what the rows were measured, and the two ceilings, measured now."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
    matmul_dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return {
        "schema": SCHEMA,
        "gpu": gpu,
        "driver": _driver() if device == "cuda" else "",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "source_hash": _C.build_info()["source_hash"],
        "date": datetime.date.today().isoformat(),
        "copy_tbs": round(_copy_tbs(device), 3),
        "matmul_tflops": round(_matmul_tflops(device, matmul_dtype), 1),
        "rows": [],
    }


def validate(record: dict[str, Any], name: str = "record") -> None:
    """Raises ValueError naming the missing field."""
    for field in HEADER_FIELDS:
        if field not in record:
            raise ValueError(f"{name}: field {field!r} is missing")
    for i, row in enumerate(record["rows"]):
        for field in ROW_FIELDS:
            if field not in row:
                raise ValueError(f"{name}: rows[{i}]: field {field!r} is missing")


def save_records(record: dict[str, Any], path: Path) -> None:
    validate(record, str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    header = json.dumps({k: v for k, v in record.items() if k != "rows"}, indent=1)[:-2]
    path.write_text(f'{header},\n "rows": [\n{rows}\n]}}\n')


def load_records(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    validate(record, str(path))
    return record
