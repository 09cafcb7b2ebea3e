"""Soak: training steps with changing shapes. The process's memory stays where it is."""

from __future__ import annotations

import gc
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .result import Options, Row

FLAT = 0.01  # the share by which memory may grow
WARM_UP = 0.25  # the share of the run in which allocators and caches fill
IMAGES = [(2, 16), (3, 24), (4, 32), (1, 40), (5, 20)]  # batch, side
WORDS = [(2, 17), (1, 64), (3, 33), (4, 48), (2, 65)]  # batch, length


class Words(nn.Module):
    """A transformer's layers; the loss is linear_cross_entropy's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.RMSNorm(64), nn.Linear(64, 200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(self.embedding(tokens)))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, groups=2),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Training:
    """Two models, swapped and fused, and one step of each."""

    def __init__(self, device: str, seed: int):
        import warpwright

        torch.manual_seed(seed)
        self.device = device
        self.cnn, self.words = cnn().to(device), Words().to(device)
        for model in (self.cnn, self.words):
            warpwright.swap(model, fuse=True)
        self.optimizers = [
            warpwright.optim.SGD(self.cnn.parameters(), lr=0.01, momentum=0.9),
            warpwright.optim.AdamW(self.words.parameters(), lr=1e-3),
        ]

    def step(self, number: int) -> float:
        from warpwright import functional as F

        batch, side = IMAGES[number % len(IMAGES)]
        images = torch.randn(batch, 3, side, side, device=self.device)
        if number % 2:
            images = images.contiguous(memory_format=torch.channels_last)
        labels = torch.randint(10, (batch,), device=self.device)
        loss = F.cross_entropy(self.cnn(images), labels)
        tokens = torch.randint(200, WORDS[number % len(WORDS)], device=self.device)
        hidden, head = self.words(tokens).flatten(0, 1), self.words.head
        loss = loss + F.linear_cross_entropy(hidden, head.weight, tokens.flatten(), head.bias)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return float(loss.detach())


def memory(device: str) -> int:
    """Bytes that the process holds; on a GPU those of tensors."""
    if device == "cuda":
        return torch.cuda.memory_allocated()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def growth(samples: list[int]) -> float:
    """The last quarter's median over that of the quarter after the warm-up, less one."""
    kept = samples[int(len(samples) * WARM_UP) :]
    third = max(1, len(kept) // 3)
    return statistics.median(kept[-third:]) / statistics.median(kept[:third]) - 1


def run(options: Options) -> list[Row]:
    torch.set_num_threads(2)
    training = Training(options.device, options.seed)
    samples: list[int] = []
    row: dict[str, Any] = {"part": "soak", "unit": "training steps", "seed": options.seed}
    failures, steps, begin = [], 0, time.monotonic()
    while time.monotonic() - begin < options.minutes * 60:
        for _ in range(len(IMAGES) * 2):
            loss = training.step(steps)
            steps += 1
            if loss != loss:
                failures.append(f"step {steps}: the loss is NaN")
        gc.collect()
        samples.append(memory(options.device))
    grown = growth(samples)
    if grown > FLAT:
        failures.append(f"memory grew by {grown:.1%}")
    minutes = (time.monotonic() - begin) / 60
    detail = f"{minutes:.0f} minutes, memory {grown:+.2%}"
    what = "training steps with changing shapes: memory is flat within 1 %"
    return [Row(what=what, cases=steps, failures=failures[:20], detail=detail, **row)]
