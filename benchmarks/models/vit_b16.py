"""timm's ViT-B/16 on 224 x 224 images as a training step in bf16 autocast.

    python -m warpwright bench --suite model vit_b16_step
    python -m warpwright profile benchmarks/models/vit_b16.py:training

Needs timm and torchvision (`pip install --no-deps timm torchvision`).
"""

from __future__ import annotations

import timm
import torch
from torch import nn

from warpwright.bench.steps import ROWS, Workload

NAME = "vit_base_patch16_224"


def _optimizer(parameters: object) -> torch.optim.Optimizer:
    # capturable: the step counts are on the GPU, so that a CUDA graph can hold the step.
    return torch.optim.AdamW(
        parameters,  # type: ignore[arg-type]
        lr=3e-4,
        fused=True,
        capturable=torch.cuda.is_available(),
    )


def workloads(device: str) -> list[Workload]:
    batch = 128 if device == "cuda" else 1
    return [
        Workload(
            "vit_b16_step",
            f"b{batch} 224x224",
            lambda: timm.create_model(NAME, num_classes=1000),
            lambda: (torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))),
            optimizer=_optimizer,
            dtype=torch.bfloat16 if device == "cuda" else torch.float32,
            layouts=(ROWS,),
        )
    ]


def training(device: str = "cpu", batch: int | None = None) -> dict[str, object]:
    batch = batch or (128 if device == "cuda" else 2)
    model = timm.create_model(NAME, num_classes=1000).to(device)
    return {
        "model": model,
        "inputs": (torch.randn(batch, 3, 224, 224, device=device),),
        "target": torch.randint(0, 1000, (batch,), device=device),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _optimizer(model.parameters()),
        "autocast": torch.bfloat16 if device == "cuda" else None,
    }
