"""Measures what `simulate.py` predicts, on the GPUs at hand: DP of two models, ring attention, Ulysses.

    torchrun --nproc_per_node 2 benchmarks/scaling/measure.py --out scaling.json

Rank 0 writes a record with the median of each step on the slowest rank, and the spread. --quick takes small shapes, on
CPUs with gloo too: it shows that the script runs, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scaling.simulate import SHAPES
from scaling.workloads import resnet50

import warpwright
from warpwright.distributed import ring_attention
from warpwright.distributed.sequence.cost import Shape

Step = Callable[[], object]


def attention_steps(shapes: dict[str, Shape], device: torch.device) -> Iterator[tuple[str, Step]]:
    """Forward and backward of one call; each rank draws its own tokens."""
    ranks = dist.get_world_size()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name, shape in shapes.items():
        length = shape.tokens // ranks
        leaves = [
            torch.randn(
                shape.batch, h, length, shape.head_dim, device=device, dtype=dtype
            ).requires_grad_()
            for h in (shape.heads, shape.key_heads, shape.key_heads)
        ]
        grad_out = torch.randn_like(leaves[0])
        for form, method in (("ring", "ring"), ("Ulysses", "ulysses")):
            if method == "ulysses" and shape.key_heads % ranks:
                continue

            def step(leaves=leaves, grad_out=grad_out, method=method, shape=shape) -> object:
                out = ring_attention(*leaves, is_causal=shape.is_causal, method=method)
                return torch.autograd.grad(out, leaves, grad_out)

            yield f"{form}: {name}", step


def resnet_step(device: torch.device, batch: int, size: int) -> tuple[str, Step]:
    """As the recorded step of one GPU: channels_last, bfloat16 autocast, fused layers."""
    import torchvision

    model: nn.Module = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
    warpwright.swap(model, fuse=True)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = warpwright.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = warpwright.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return f"DP: {resnet50().name}", step


def measure(step: Step, device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds: the median over rounds, each that of the slowest rank."""
    times = []
    for i in range(rounds + 3):
        dist.barrier()
        wait(device)
        begin = time.perf_counter()
        step()
        wait(device)
        slowest = torch.tensor((time.perf_counter() - begin) * 1e3, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if i >= 3:  # warm
            times.append(slowest.item())
    return {"ms": median(times), "ms_lo": min(times), "ms_hi": max(times), "rounds": rounds}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)
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
    shapes = {"quick": Shape(1, 4, 2, 512, 32, True)} if options.quick else SHAPES
    steps = list(attention_steps(shapes, device))
    if not options.quick:
        steps.append(resnet_step(device, 256, 224))
    rows = []
    for name, step in steps:
        row = {"scheme": name, "ranks": dist.get_world_size()}
        rows.append({**row, **measure(step, device, options.rounds)})
        if dist.get_rank() == 0:
            print(f"{name}: {rows[-1]['ms']:.3g} ms")
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        versions = {"torch": torch.__version__, "warpwright": warpwright.__version__}
        text = json.dumps({"gpu": name, **versions, "rows": rows}, indent=2)
        options.out.write_text(text + "\n")
    dist.destroy_process_group()
    gc.collect()  # of cycles that still hold the group: its threads must end before Python does


if __name__ == "__main__":
    main()
