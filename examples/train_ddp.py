"""Trains a swapped CNN on several processes: DistributedDataParallel around warpwright's layers.

    torchrun --nproc_per_node 2 examples/train_ddp.py --compare
    torchrun --nproc_per_node 8 examples/train_ddp.py --model resnet50 --batch 256 --bf16

Each process has a GPU, or a share of the CPU's cores. The digits are scikit-learn's; ResNet-50 gets random images.
--compare trains native's layers first, from the same weights and on the same batches. --graph replays the whole step as
one CUDA graph, collectives included. --profile writes a page with communication and compute of a step on one time axis.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import warpwright
from warpwright.demo.data import load_sklearn
from warpwright.demo.train import build
from warpwright.distributed import side_stream


def start(name: str) -> torch.device:
    """Joins the processes that torchrun started."""
    kind = name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
    return device


class Images:
    """Batches of this rank: all ranks draw the same order, and each takes its part of a batch."""

    def __init__(self, model: str, batch: int, device: torch.device) -> None:
        if model == "mnist":
            digits = load_sklearn()
            self.images, self.labels = digits.train_images, digits.train_labels
        else:
            self.images = torch.randn(2 * batch, 3, 224, 224)
            self.labels = torch.randint(1000, (2 * batch,))
        self.images = self.images.to(device, memory_format=torch.channels_last)
        self.labels = self.labels.to(device)
        self.per_rank = batch // dist.get_world_size()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        order = torch.randperm(len(self.images), generator=generator)
        rows = order[dist.get_rank() * self.per_rank :][: self.per_rank].to(self.images.device)
        return self.images[rows], self.labels[rows]


def make(model: str) -> nn.Module:
    if model == "mnist":
        return build("cnn", nn)
    import torchvision

    return torchvision.models.resnet50()


def train(library: str, options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """The mean loss of the last tenth of the steps, and images per second; of all ranks."""
    torch.manual_seed(0)  # equal weights; DistributedDataParallel would send rank 0's in any case
    model = make(options.model).to(device, memory_format=torch.channels_last)
    if library == "warpwright":
        warpwright.swap(
            model, fuse=True
        )  # before DistributedDataParallel, which wraps what is there
    with side_stream(device):  # for --graph, which cannot hold work of the default stream
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    if library == "warpwright":
        optimizer = warpwright.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    cross_entropy = nn.functional.cross_entropy
    if library == "warpwright":
        cross_entropy = warpwright.functional.cross_entropy
    data = Images(options.model, options.batch, device)
    lower = torch.bfloat16 if options.bf16 else None
    run = eager_step(model, cross_entropy, optimizer, lower)
    if options.graph:
        run = warpwright.graph_step(model, cross_entropy, optimizer, data.batch(0), autocast=lower)

    first = dist.get_rank() == 0
    tenth, begin = max(1, options.steps // 10), 0.0
    mean = torch.zeros((), device=device)
    with Progress(disable=not first) as progress:
        task = progress.add_task(f"{library:<10}", total=options.steps)
        for step in range(options.steps):
            if step == tenth:  # warm from here on
                begin = now(device)
            loss = run(*data.batch(step))
            if step >= options.steps - tenth:
                mean += loss / (tenth * dist.get_world_size())
            progress.update(task, advance=1)
            if first and (step + 1) % options.report == 0:
                progress.print(f"{library:<10} step {step + 1}: loss {loss.item():.4f} on rank 0")
    seconds = now(device) - begin
    dist.all_reduce(mean)
    images_per_second = data.per_rank * dist.get_world_size() * (options.steps - tenth) / seconds
    return {"loss": mean.item(), "images_per_second": images_per_second}


def eager_step(
    model: nn.Module,
    cross_entropy: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    lower: torch.dtype | None,
) -> Callable[[Tensor, Tensor], Tensor]:
    def step(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(images.device.type, lower, enabled=lower is not None):
            loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def profile(options: argparse.Namespace, device: torch.device) -> None:
    """A page about one step; every rank takes part, and rank 0 writes."""
    model = make(options.model).to(device, memory_format=torch.channels_last)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    warpwright.profile(
        model,
        *Images(options.model, options.batch, device).batch(0),
        optimizer=torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9),
        autocast=torch.bfloat16 if options.bf16 else None,
        out=options.profile,
    )


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["mnist", "resnet50"], default="mnist")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64, help="images of all ranks together")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--native", action="store_true", help="torch.nn's layers alone")
    parser.add_argument("--graph", action="store_true", help="each step as one CUDA graph")
    parser.add_argument("--compare", action="store_true", help="native's layers, then ours")
    parser.add_argument("--report", type=int, default=20, help="steps between printed losses")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--profile", type=Path, help="a folder for the page about one step")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with `torchrun --nproc_per_node N examples/train_ddp.py`")
    ranks = int(os.environ["WORLD_SIZE"])
    if options.steps < 2 or options.batch % ranks:
        parser.error(f"expected at least 2 --steps, and a --batch that {ranks} ranks divide")

    needs = {"mnist": ("sklearn", "scikit-learn"), "resnet50": ("torchvision", "torchvision")}
    module, package = needs[options.model]
    if find_spec(module) is None:
        sys.exit(f"--model {options.model} needs {package}: pip install {package}")

    device = start(options.device)
    libraries = ["native", "warpwright"] if options.compare else ["warpwright"]
    if options.native:
        libraries = ["native"]
    results = {library: train(library, options, device) for library in libraries}
    if dist.get_rank() == 0:
        print(
            f"after {options.steps} steps of {options.batch} images on {ranks} ranks ({device.type}):"
        )
        for library, result in results.items():
            speed = result["images_per_second"]
            print(f"  {library:<10} loss {result['loss']:.4f}, {speed:.0f} images/s")
        if options.json is not None:
            options.json.write_text(json.dumps({"ranks": ranks, **results}, indent=2) + "\n")
    if options.profile is not None:
        profile(options, device)
    dist.destroy_process_group()
    gc.collect()  # of cycles that still hold the group: its threads must end before Python does


if __name__ == "__main__":
    main()
