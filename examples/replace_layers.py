"""The course's two networks: replaces one kind of native layer after another, and shows what each step gives.

    python examples/replace_layers.py                              # both networks
    python examples/replace_layers.py --model cnn --batch 256
    python examples/replace_layers.py --model cnn --layer relu1=my_relu.py:MyReLU

Every stage starts from the same weights and sees the same batches. The stages take turns, step by step, so that
whatever else the machine does falls on all of them. --layer adds a stage with a layer of your own, which must first
pass the rule that warpwright's ops pass. docs/learn/project.md is the guide.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

import warpwright
import warpwright.functional as F
from warpwright.testing import compare_with_native

try:
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{error}: pip install scikit-learn")

SIDE = 28  # the course's images; scikit-learn's digits are enlarged to it
WARM_UP = 3  # steps that are trained but not timed
# Of (loss + 1). The stages sum in different orders, and a ReLU or a maximum may flip by one rounding.
TOLERANCE = 0.01


def mlp() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            linear1=nn.Linear(SIDE * SIDE, 1024),
            relu1=nn.ReLU(),
            linear2=nn.Linear(1024, 10),
        )
    )


def cnn() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 32, 3, padding=1),
            norm1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            norm2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            linear1=nn.Linear(64 * (SIDE // 4) ** 2, 128),
            relu3=nn.ReLU(),
            linear2=nn.Linear(128, 10),
        )
    )


NETWORKS = {"mlp": mlp, "cnn": cnn}
# The order of the path: from a map over elements to the products.
REPLACED = {
    "mlp": ("relu", "linear"),
    "cnn": ("relu", "max_pool2d", "batch_norm", "linear", "conv2d"),
}


@dataclass
class Stage:
    """A network, its loss and its optimizer, and what was measured of them."""

    name: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def step(self, x: Tensor, target: Tensor) -> None:
        start = now(x.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model(x), target)
        loss.backward()
        self.optimizer.step()
        self.ms.append((now(x.device) - start) * 1e3)
        self.losses.append(float(loss.detach()))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def stages_of(network: str, model: nn.Module, lr: float) -> Iterator[Stage]:
    """From all native to all ours: each stage changes one thing of the stage before."""
    sgd = (torch.optim.SGD, warpwright.optim.SGD)

    def stage(name: str, ops: list[str], ours: tuple[bool, bool], fuse: bool = False) -> Stage:
        swapped = copy.deepcopy(model)
        if ops:
            warpwright.swap(swapped, ops=ops, fuse=fuse)
        loss = F.cross_entropy if ours[0] else nn.functional.cross_entropy
        return Stage(name, swapped, loss, sgd[ours[1]](swapped.parameters(), lr=lr))

    ops: list[str] = []
    yield stage("native", ops, (False, False))
    for op in REPLACED[network]:
        ops = [*ops, op]
        yield stage(f"+ {op}", ops, (False, False))
    yield stage("+ cross_entropy", ops, (True, False))
    yield stage("+ SGD", ops, (True, True))
    yield stage("+ fusion", ops, (True, True), fuse=True)


def own_stage(option: str, last: Stage, native: nn.Module, images: Tensor, lr: float) -> Stage:
    """The last stage's loss and a network with one layer of the learner's: NAME=FILE.py:CLASS."""
    name, _, source = option.partition("=")
    path, _, class_name = source.rpartition(":")
    layers = dict(native.named_children())
    if name not in layers or not path:
        raise SystemExit(
            f"--layer: expected NAME=FILE.py:CLASS with a NAME of {', '.join(layers)}, got {option}"
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise SystemExit(f"--layer: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    own = getattr(module, class_name)().to(images.device)
    own.load_state_dict(layers[name].state_dict())

    x = images
    for before, layer in native.named_children():  # its input inside of the network
        if before == name:
            break
        x = layer(x)
    try:
        compare_with_native(own, copy.deepcopy(layers[name]), [x.detach().requires_grad_()])
    except AssertionError as error:
        raise SystemExit(f"{name}: {class_name} fails warpwright.testing's rule: {error}") from None
    print(f"{name}: {class_name} passes warpwright.testing's rule")

    model = copy.deepcopy(native)
    setattr(model, name, own)
    warpwright.swap(model, filter_fn=lambda _, layer: layer != name)
    optimizer = warpwright.optim.SGD(model.parameters(), lr=lr)
    return Stage(f"{name} = {class_name}", model, last.loss, optimizer)


def digits(device: torch.device) -> tuple[Tensor, Tensor]:
    """1,797 images (N, 1, 28, 28) of zero mean and unit variance, and their labels."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None]
    images = nn.functional.interpolate(images, size=(SIDE, SIDE), mode="bilinear")
    images = (images - images.mean()) / images.std()
    return images.to(device), torch.from_numpy(data.target).long().to(device)


def train(stages: list[Stage], images: Tensor, labels: Tensor, batch: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for i in range(steps + WARM_UP):
        rows = torch.randint(len(labels), (batch,), generator=generator).to(labels.device)
        x, target = images[rows], labels[rows]
        for stage in stages if i % 2 == 0 else reversed(stages):  # the first has colder caches
            stage.step(x, target)


def report(network: str, stages: list[Stage], batch: int) -> bool:
    """Prints the table; whether every stage learnt what native learnt."""
    native = stages[0]
    timed = f"{len(native.losses)} steps, the last {len(native.losses) - WARM_UP} timed"
    print(f"\n{network}, batch {batch}, {timed}, on {platform()}")
    print(f"{'stage':22} {'ms/step':>8} {'native/this':>12} {'last loss':>10} {'off native':>11}")
    agrees = True
    for stage in stages:
        ms, native_ms = median(stage.ms[WARM_UP:]), median(native.ms[WARM_UP:])
        pairs = zip(stage.losses, native.losses, strict=True)
        off = max(abs(a - b) / (b + 1) for a, b in pairs)
        agrees &= off <= TOLERANCE
        name, last = stage.name, stage.losses[-1]
        print(f"{name:22} {ms:8.3g} {native_ms / ms:11.2f}x {last:10.4f} {off:11.1e}")
    return agrees


def platform() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=[*NETWORKS, "both"], default="both")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--layer", metavar="NAME=FILE.py:CLASS", help="a layer of your own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    device = torch.device(options.device)
    images, labels = digits(device)
    agree = True
    for network in NETWORKS if options.model == "both" else [options.model]:
        torch.manual_seed(0)
        model = NETWORKS[network]().to(device)
        stages = list(stages_of(network, model, options.lr))
        if options.layer:
            start = copy.deepcopy(model)
            stages.append(own_stage(options.layer, stages[-1], start, images[:8], options.lr))
        train(stages, images, labels, options.batch, options.steps)
        agree &= report(network, stages, options.batch)
    if not agree:
        print(f"\nA stage's losses are more than {TOLERANCE:.0%} off native's", file=sys.stderr)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
