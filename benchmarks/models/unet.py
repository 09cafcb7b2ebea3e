"""A U-Net of plain nn modules (convolution, batch norm, ReLU; four scales), as a training step.

python -m warpwright bench --suite model unet_step
python -m warpwright profile benchmarks/models/unet.py:training
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from warpwright.bench.steps import NHWC, Workload

CLASSES = 21


def two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(4)]
        pairs = [*itertools.pairwise(widths)]
        self.first = two_convolutions(3, width)
        self.down = nn.ModuleList(two_convolutions(a, b) for a, b in pairs)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(two_convolutions(2 * a, a) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(self.pool(kept[-1])))
        x = kept.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


def _size(device: str) -> tuple[int, int, int]:
    """Width of the first scale, batch and side."""
    return (64, 16, 256) if device == "cuda" else (8, 2, 32)


def _images(batch: int, side: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, side, side), torch.randint(0, CLASSES, (batch, side, side))


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def workloads(device: str) -> list[Workload]:
    width, batch, side = _size(device)
    return [
        Workload(
            "unet_step",
            f"b{batch} {side}x{side}",
            lambda: UNet(width),
            lambda: _images(batch, side),
            optimizer=_optimizer,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            layouts=(NHWC,),
        )
    ]


def training(
    device: str = "cpu", batch: int | None = None, side: int | None = None
) -> dict[str, object]:
    width, default_batch, default_side = _size(device)
    model: Any = UNet(width).to(device)
    model = model.to(memory_format=torch.channels_last)
    x, y = _images(batch or default_batch, side or default_side)
    return {
        "model": model,
        "inputs": (x.to(device).contiguous(memory_format=torch.channels_last),),
        "target": y.to(device),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _optimizer(model.parameters()),
        "autocast": torch.bfloat16 if device == "cuda" else None,
    }
