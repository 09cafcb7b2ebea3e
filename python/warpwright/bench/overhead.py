"""Host time of a call, on tensors of a few elements.

On CUDA nothing waits for the GPU: the time is that of Python, the dispatcher, autograd and the
launches. ``fwd`` records no graph; ``fwd+bwd`` records it, walks it and computes every gradient.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown
from torch import Tensor

from .. import _C, functional
from .._catalog import OPS
from .._op import Op
from .measure import peak_mib
from .records import machine_header, require_writable, save_records

Row = dict[str, Any]
Call = Callable[[Any], Tensor]  # takes the module of functions: ours or native's

# Short rounds: few are interrupted. Their launches fit the stream's queue: the host never waits.
CALLS_A_ROUND = 10
PASSES = ("fwd", "fwd+bwd")
IMPLEMENTATIONS = {"warpwright": functional, "native": torch.nn.functional}


def calls(device: str) -> dict[str, tuple[str, Call, list[Tensor]]]:
    """op -> (shape, call, leaves that want a gradient), by the catalog's examples."""

    def prepared(op: Op) -> tuple[str, Call, list[Tensor]]:
        assert op.example is not None
        shape, args, kwargs = op.example(device)
        leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        return shape, lambda f: getattr(f, op.name)(*args, **kwargs), leaves

    return {name: prepared(op) for name, op in OPS.items() if op.example is not None}


def microseconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call, one figure per round. The functions take turns."""
    on_gpu = torch.cuda.is_available()
    samples: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    try:
        for i in range(-2, rounds):  # two to warm up
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(CALLS_A_ROUND):
                    function()
                elapsed = time.perf_counter() - start
                if on_gpu:
                    torch.cuda.synchronize()
                if i >= 0:
                    samples[name].append(elapsed / CALLS_A_ROUND * 1e6)
    finally:
        gc.enable()
    return samples


def overhead_rows(device: str, rounds: int) -> list[Row]:
    rows = []
    for op, (shape, call, leaves) in calls(device).items():
        cotangent = torch.ones_like(call(torch.nn.functional))

        def forward(f: Any, call: Call = call) -> Callable[[], object]:
            def run() -> object:
                with torch.no_grad():
                    return call(f)

            return run

        def both(
            f: Any, call: Call = call, leaves: Any = leaves, dy: Tensor = cotangent
        ) -> Callable[[], object]:
            return lambda: torch.autograd.grad(call(f), leaves, dy)

        for which, make in zip(PASSES, (forward, both), strict=True):
            functions = {name: make(f) for name, f in IMPLEMENTATIONS.items()}
            for name, samples in microseconds(functions, rounds).items():
                lo, median, hi = statistics.quantiles(samples, n=4, method="inclusive")
                rows.append(
                    {
                        "op": op,
                        "case": f"host time of a call on {device.upper()}, {shape}",
                        "dtype": "float32",
                        "layout": "rows" if len(shape.split("x")) < 4 else "nchw",
                        "pass": which,
                        "impl": name,
                        "ms": round(median / 1e3, 6),
                        "ms_lo": round(lo / 1e3, 6),
                        "ms_hi": round(hi / 1e3, 6),
                        "bytes": 0,
                        "flops": 0,
                        "floor_ms": 0.0,
                        "peak_mib": peak_mib(functions[name], device),
                        "err": None,
                        "err_native": None,
                    }
                )
    return rows


def table(record: Row) -> str:
    """One line per op: microseconds, ours and native's, per device and pass."""
    found = {
        (row["op"], "CUDA" if "CUDA" in row["case"] else "CPU", row["pass"], row["impl"]): row["ms"]
        for row in record["rows"]
    }
    devices = [d for d in ("CPU", "CUDA") if any(key[1] == d for key in found)]
    columns = [(d, p) for d in devices for p in PASSES]
    titles = {"fwd": "forward", "fwd+bwd": "forward + backward"}
    lines = [
        "| op | " + " | ".join(f"{d}, {titles[p]}" for d, p in columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for op in dict.fromkeys(key[0] for key in found):
        cells = [
            "{:.1f} ({:.1f})".format(*(1e3 * found[op, d, p, i] for i in IMPLEMENTATIONS))
            for d, p in columns
        ]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    stale = record["source_hash"] != _C.build_info()["source_hash"]
    return "\n".join(
        [
            *lines,
            "",
            "Microseconds of host time a call, native's in parentheses, on tensors of a few elements "
            f"(medians; machine with {record['gpu']}, torch {record['torch']}, {record['date']}, "
            f"source {record['source_hash']}{', **stale**: the code has changed since' if stale else ''}).",
        ]
    )


def main(options: SimpleNamespace) -> int:
    """`warpwright overhead`: both devices, the table, the record."""
    if options.json:
        try:
            require_writable(options.json)
        except ValueError as error:
            print(f"overhead: {error}", file=sys.stderr)
            return 2
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    record = machine_header(devices[-1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thread pool has no work here, but asking it takes time
    try:
        for device in devices:
            record["rows"] += overhead_rows(device, options.rounds)
    finally:
        torch.set_num_threads(threads)
    Console().print(Markdown(table(record)))
    if options.json:
        save_records(record, options.json)
    return 0
