"""Trains the same network on warpwright and on native torch, step by step in turn.

Both start from the same weights and see the same batches, so their losses can be compared point by
point. A step of one follows a step of the other, so that whatever else the machine does falls on
both.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from types import ModuleType

import torch
from torch import Tensor, nn

import warpwright.nn

from .data import Digits

PHASES = ("load", "forward", "backward", "update")
LIBRARIES: dict[str, ModuleType] = {"warpwright": warpwright.nn, "native": torch.nn}


def build(model: str, lib: ModuleType) -> nn.Sequential:
    """The network of ``lib``'s layers: ``torch.nn`` or ``warpwright.nn``."""
    if model == "mlp":
        layers = OrderedDict(
            flatten=nn.Flatten(),
            linear1=lib.Linear(784, 1024),
            relu=lib.ReLU(),
            linear2=lib.Linear(1024, 10),
        )
    else:
        layers = OrderedDict(
            conv1=lib.Conv2d(1, 32, 3, padding=1),
            norm1=lib.BatchNorm2d(32),
            relu1=lib.ReLU(),
            pool1=lib.MaxPool2d(2),
            conv2=lib.Conv2d(32, 64, 3, padding=1),
            norm2=lib.BatchNorm2d(64),
            relu2=lib.ReLU(),
            pool2=lib.MaxPool2d(2),
            flatten=nn.Flatten(),
            linear1=lib.Linear(3136, 128),
            relu3=lib.ReLU(),
            linear2=lib.Linear(128, 10),
        )
    return nn.Sequential(layers)


class Clock:
    """Marks the ends of a step's phases: by events in the stream on a GPU, else by the CPU's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Milliseconds of each phase between two marks. Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        marks, self.marks = self.marks, []
        return [
            a.elapsed_time(b)
            if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event)
            else (b - a) * 1e3  # type: ignore[operator]
            for a, b in pairwise(marks)
        ]


@dataclass
class Training:
    """One library's network, its optimizer and its measurements."""

    library: str
    device: torch.device
    memory_format: torch.memory_format
    model: nn.Sequential
    criterion: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)  # ms of each phase, one row per step
    accuracy: float = float("nan")
    test_loss: float = float("nan")
    predictions: Tensor | None = None

    @classmethod
    def start(
        cls,
        library: str,
        model: str,
        lr: float,
        seed: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> Training:
        torch.manual_seed(seed)
        lib = LIBRARIES[library]
        network = build(model, lib).to(device)
        for parameter in network.parameters():
            if parameter.dim() == 4:
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
        optimizer = torch.optim.SGD(network.parameters(), lr=lr)
        return cls(library, device, memory_format, network, lib.CrossEntropyLoss(), optimizer)

    def batch(self, images: Tensor, labels: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        x = images[rows].to(self.device).contiguous(memory_format=self.memory_format)
        return x, labels[rows].to(self.device)

    def step(self, images: Tensor, labels: Tensor, rows: Tensor) -> float:
        clock = Clock(self.device)
        clock.mark()
        x, y = self.batch(images, labels, rows)
        clock.mark()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.criterion(self.model(x), y)
        clock.mark()
        loss.backward()
        clock.mark()
        self.optimizer.step()
        clock.mark()
        self.times.append(clock.milliseconds())
        self.losses.append(float(loss.detach()))
        return self.losses[-1]

    @torch.no_grad()
    def evaluate(self, images: Tensor, labels: Tensor) -> None:
        self.model.eval()
        logits = torch.cat(
            [
                self.model(self.batch(images, labels, rows)[0]).float().cpu()
                for rows in torch.arange(len(images)).split(1000)
            ]
        )
        self.model.train()
        self.predictions = logits.argmax(1)
        self.accuracy = float((self.predictions == labels).float().mean())
        self.test_loss = float(nn.functional.cross_entropy(logits, labels))

    def phase_ms(self) -> dict[str, float]:
        """Median of each phase over the steps; the step's is the median of the steps' sums."""
        steps = self.times[len(self.times) // 20 :]  # without the first 5 %: warming up
        result = {p: median(row[i] for row in steps) for i, p in enumerate(PHASES)}
        result["step"] = median(sum(row) for row in steps)
        return result


def batches(count: int, size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Rows of each batch, in another order per epoch, without the last incomplete batch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % size].split(size)


def train_side_by_side(
    trainings: list[Training],
    digits: Digits,
    batch: int,
    epochs: int,
    seed: int,
    progress: Callable[[Training, int, float], None],
) -> None:
    """``progress(training, steps done, loss)`` is called after each step of each."""
    images, labels = digits.train_images, digits.train_labels
    for i, rows in enumerate(batches(len(images), batch, epochs, seed)):
        # The first to run has colder caches, so the libraries alternate.
        for training in trainings if i % 2 == 0 else reversed(trainings):
            progress(training, i + 1, training.step(images, labels, rows))
    for training in trainings:
        training.evaluate(digits.test_images, digits.test_labels)


def native_step_ms(
    model: str, digits: Digits, batch: int, device: torch.device, memory_format: torch.memory_format
) -> float:
    """Native's median step in this memory format, for the choice of the faster one."""
    trial = Training.start("native", model, 0.01, 0, device, memory_format)
    for i, rows in enumerate(batches(len(digits.train_images), batch, 8, 0)):
        if i == 12:
            break
        trial.step(digits.train_images, digits.train_labels, rows)
    return trial.phase_ms()["step"] if trial.times else float("inf")
