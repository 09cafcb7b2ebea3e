"""torchvision's ResNets: ResNet-50 as a training step in bf16 autocast, ResNet-18 to profile.

    python -m warpwright bench --suite model resnet50_step
    python -m warpwright profile benchmarks/models/resnet.py:resnet18

Needs torchvision (`pip install --no-deps torchvision`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torchvision
from torch import nn

from warpwright.bench.steps import NCHW, NHWC, Workload


def _optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)  # type: ignore[arg-type]


def workloads(device: str) -> list[Workload]:
    batch, side = (256, 224) if device == "cuda" else (2, 64)
    return [
        Workload(
            f"resnet50{'_prefetch' if prefetch else ''}_step",
            f"b{batch} {side}x{side}",
            torchvision.models.resnet50,
            lambda: (torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))),
            optimizer=_optimizer,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            layouts=(NHWC,) if prefetch else (NCHW, NHWC),
            prefetch=prefetch,
        )
        for prefetch in (False, True)
    ]


def _training(
    build: Callable[[], nn.Module], device: str, batch: int | None, side: int | None
) -> dict[str, object]:
    on_gpu = device == "cuda"
    batch = batch or (256 if on_gpu else 8)
    side = side or (224 if on_gpu else 64)
    model = build().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(batch, 3, side, side, device=device)
    return {
        "model": model,
        "inputs": (images.contiguous(memory_format=torch.channels_last),),
        "target": torch.randint(0, 1000, (batch,), device=device),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _optimizer(model.parameters()),
        "autocast": torch.bfloat16 if on_gpu else None,
    }


def resnet18(
    device: str = "cpu", batch: int | None = None, side: int | None = None
) -> dict[str, object]:
    return _training(torchvision.models.resnet18, device, batch, side)


def resnet50(
    device: str = "cpu", batch: int | None = None, side: int | None = None
) -> dict[str, object]:
    return _training(torchvision.models.resnet50, device, batch, side)
