"""Runs cases with ours and native interleaved, and writes the record."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from .. import functional as ours_functional
from ..testing import max_error, to_double
from .cases import CASES, QUICK_CASES, Case, Inputs
from .measure import interleaved, peak_mib
from .records import machine_header, save_records
from .steps import mnist_rows

Row = dict[str, Any]

IMPLEMENTATIONS = {"warpwright": ours_functional, "native": torch.nn.functional}


def leaves_of(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs.values() if isinstance(x, Tensor) and x.requires_grad]


def _forward_and_grads(
    functional: Any, case: Case, inputs: Inputs, cotangent: Tensor | None
) -> Any:
    output = case.call(functional, inputs)
    if cotangent is None:
        cotangent = torch.randn_like(output)
    grads = torch.autograd.grad(output, leaves_of(inputs), cotangent.to(output.dtype))
    return output, grads, cotangent


def relative_errors(case: Case, inputs: Inputs) -> dict[str, dict[str, float]]:
    """{impl: {"fwd": e, "bwd": e}}: max error against float64 over max |exact|; bwd: worst gradient."""
    sample = case.sample(inputs) if case.sample else inputs
    exact, exact_grads, cotangent = _forward_and_grads(
        torch.nn.functional, case, to_double(sample), None
    )

    def relative(value: Tensor, reference: Tensor) -> float:
        scale = float(reference.abs().max()) or 1.0
        return max_error(value, reference) / scale

    errors = {}
    for name, functional in IMPLEMENTATIONS.items():
        output, grads, _ = _forward_and_grads(functional, case, sample, cotangent)
        backward = [relative(g, e) for g, e in zip(grads, exact_grads, strict=True)]
        errors[name] = {"fwd": relative(output, exact.detach()), "bwd": max(backward)}
    return errors


def case_rows(case: Case, device: str, ceilings: dict[str, float], seconds: float) -> list[Row]:
    inputs = case.make(device)
    leaves = leaves_of(inputs)
    errors = relative_errors(case, inputs)
    outputs = {name: case.call(f, inputs) for name, f in IMPLEMENTATIONS.items()}
    cotangent = torch.randn_like(outputs["native"])

    def forward(functional: Any) -> Any:
        return lambda: case.call(functional, inputs)

    def backward(output: Tensor) -> Any:
        return lambda: torch.autograd.grad(output, leaves, cotangent, retain_graph=True)

    def both(functional: Any) -> Any:
        return lambda: torch.autograd.grad(case.call(functional, inputs), leaves, cotangent)

    rows = []
    for which in case.bytes:
        calls = {
            name: {"fwd": forward(f), "bwd": backward(outputs[name]), "fwd+bwd": both(f)}[which]
            for name, f in IMPLEMENTATIONS.items()
        }
        timings = interleaved(calls, device, seconds)
        flops = case.flops.get(which, 0.0)
        floor_ms = max(
            case.bytes[which] / ceilings["copy_tbs"] / 1e9,
            flops / ceilings["matmul_tflops"] / 1e9,
        )
        for name, timing in timings.items():
            error_pass = "fwd" if which == "fwd" else "bwd"
            rows.append(
                {
                    "op": case.op,
                    "case": case.case,
                    "dtype": case.dtype_name,
                    "layout": case.layout,
                    "pass": which,
                    "impl": name,
                    "ms": round(timing.ms, 5),
                    "ms_lo": round(timing.ms_lo, 5),
                    "ms_hi": round(timing.ms_hi, 5),
                    "bytes": int(case.bytes[which]),
                    "flops": int(flops),
                    "floor_ms": round(floor_ms, 5),
                    "peak_mib": peak_mib(calls[name], device),
                    "err": errors[name][error_pass],
                    "err_native": errors["native"][error_pass],
                }
            )
    return rows


def table_of(rows: Iterable[dict[str, Any]], title: str) -> Table:
    """One line a (case, pass): ours, native, their ratio, and our share of the floor."""
    table = Table(title=title)
    for column in ("op", "case", "dtype", "layout", "pass"):
        table.add_column(column)
    for column in ("ours ms", "native ms", "native/ours", "floor/ours", "err/native's"):
        table.add_column(column, justify="right")
    pairs: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("op", "case", "dtype", "layout", "pass"))
        pairs.setdefault(key, {})[row["impl"]] = row
    for key, impls in pairs.items():
        if not {"warpwright", "native"} <= impls.keys():
            continue
        ours, native = impls["warpwright"], impls["native"]
        ratio = native["ms"] / ours["ms"]
        error = "" if ours["err"] is None else f"{ours['err'] / max(native['err'], 1e-30):.2f}"
        floor = "" if not ours["floor_ms"] else f"{ours['floor_ms'] / ours['ms']:.0%}"
        color = "green" if ratio >= 1 else "red" if ratio < 0.4 else "yellow"
        cells = [
            f"{ours['ms']:.4f}",
            f"{native['ms']:.4f}",
            f"[{color}]{ratio:.2f}[/]",
            floor,
            error,
        ]
        table.add_row(*key, *cells)
    return table


def run(
    cases: list[Case], device: str, seconds: float, console: Console, steps: bool
) -> dict[str, Any]:
    """Measures; Ctrl-C and a failing case keep the rows measured so far."""
    torch.backends.cudnn.benchmark = True
    record = machine_header(device)
    failures: list[Row] = []
    record["failures"] = failures
    columns = (
        TextColumn("{task.description:<58}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) + steps)
        try:
            for case in cases:
                progress.update(task, description=f"{case.op} {case.case}")
                try:
                    record["rows"] += case_rows(case, device, record, seconds)
                except RuntimeError as error:  # one case must not take the others with it
                    failures.append({"op": case.op, "case": case.case, "error": str(error)})
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
                progress.advance(task)
            if steps:
                progress.update(task, description="mnist_step")
                record["rows"] += mnist_rows(device, seconds)
                progress.advance(task)
        except KeyboardInterrupt:
            console.print("interrupted: keeping the rows measured so far")
    return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", nargs="*", help="only these ops (default: all)")
    parser.add_argument("--suite", choices=("quick", "full"), default=None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--seconds", type=float, default=0.25, help="measuring time a row")
    parser.add_argument("--json", type=Path, default=None, help="write the record here")


def main(options: argparse.Namespace) -> int:
    """`python -m warpwright bench`: measures, prints the table, writes the record."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    suite = options.suite or ("full" if device == "cuda" else "quick")
    cases = CASES if suite == "full" else QUICK_CASES
    known = {case.op for case in cases} | {"mnist_step"}
    unknown = set(options.op) - known
    if unknown:
        print(f"op: {', '.join(sorted(unknown))}: expected one of {', '.join(sorted(known))}")
        return 2
    if options.op:
        cases = [case for case in cases if case.op in options.op]

    console = Console()
    steps = not options.op or "mnist_step" in options.op
    record = run(cases, device, options.seconds, console, steps)
    console.print(table_of(record["rows"], f"{record['gpu']}, torch {record['torch']}"))
    for failure in record["failures"]:
        console.print(f"[red]{failure['op']} {failure['case']}: {failure['error']}[/]")
    if options.json:
        save_records(record, options.json)
    return 1 if record["failures"] else 0
