"""Measures what `simulate.py` predicts, on the GPUs at hand, and native torch on the same work.

    torchrun --nproc_per_node 2 benchmarks/scaling/measure.py --out scaling.json

Rank 0 writes a record with the median of each step on the slowest rank, and the spread. It is written after each row,
and --only adds a part's rows to a record that exists. --quick takes small shapes, on CPUs with gloo too: it shows that
the script runs, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling import attention_cases
from scaling.simulate import MEASURED_SHAPES
from scaling.timing import Case, measure

import warpwright
from warpwright.distributed.sequence.cost import Shape

QUICK = {"quick": Shape(1, 4, 2, 512, 32, True)}


def attention(device: torch.device, quick: bool) -> Iterator[Case]:
    for name, shape in (QUICK if quick else MEASURED_SHAPES).items():
        yield from attention_cases.ours(name, shape, device)
        yield from attention_cases.one_gpu(name, shape, device)


def context_parallel(device: torch.device, quick: bool) -> Iterator[Case]:
    """torch replaces DTensor's rules inside: this part belongs into a process of its own."""
    if device.type != "cuda":
        return
    for name, shape in (QUICK if quick else MEASURED_SHAPES).items():
        for rotate in ("allgather", "alltoall"):
            with attention_cases.torch_context(rotate):
                yield from attention_cases.torch_form(name, shape, device, rotate)


def tensor_parallel(device: torch.device, quick: bool) -> Iterator[Case]:
    from scaling.model_cases import llama_block

    yield from llama_block(device, quick)


def models(device: torch.device, quick: bool) -> Iterator[Case]:
    from scaling import model_cases

    yield from model_cases.models(device, quick)


def optimizers(device: torch.device, quick: bool) -> Iterator[Case]:
    from scaling.model_cases import optimizers as cases

    yield from cases(device, quick)


PARTS = {f.__name__: f for f in (attention, context_parallel, tensor_parallel, models, optimizers)}


class Record:
    """The rows so far, on disk after each one. Rank 0 writes."""

    def __init__(self, path: Path, device: torch.device) -> None:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        versions = {"torch": torch.__version__, "warpwright": warpwright.__version__}
        self.path, self.head, self.rows = path, {"gpu": name, **versions}, []
        if path.exists():
            self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]

    def add(self, row: dict[str, Any]) -> None:
        keys = ("scheme", "impl", "ranks")
        self.rows = [old for old in self.rows if any(old[k] != row[k] for k in keys)] + [row]
        if dist.get_rank() == 0:
            print(
                f"{row['scheme']}, {row['impl']}, {row['ranks']} ranks: {row['ms']:.4g} ms",
                flush=True,
            )
            self.path.write_text(json.dumps({**self.head, "rows": self.rows}, indent=2) + "\n")


def run(part: str, record: Record, device: torch.device, options: argparse.Namespace) -> bool:
    """Measures a part's cases, and goes on after one that fails."""
    whole = True
    cases = PARTS[part](device, options.quick)
    while True:
        try:
            case = next(cases, None)
            if case is None:
                return whole
            record.add(measure(case, device, options.rounds))
        except Exception:
            whole = False
            traceback.print_exc()
        case = None
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with `torchrun --nproc_per_node N benchmarks/scaling/measure.py`")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    record = Record(options.out, device)
    results = [run(part, record, device, options) for part in options.only or PARTS]
    dist.destroy_process_group()
    gc.collect()  # of cycles that still hold the group: its threads must end before Python does
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
