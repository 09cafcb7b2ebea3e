"""The MNIST CNN: two blocks of conv, batch norm, ReLU and max pool, then two linears.

python -m warpwright bench --suite model mnist_step mnist_prefetch_step
python -m warpwright profile benchmarks/models/mnist_cnn.py:training
"""

from __future__ import annotations

import torch
from torch import nn

from warpwright.bench.steps import Workload, mnist_cnn, mnist_workloads


def workloads(device: str) -> list[Workload]:
    return [*mnist_workloads(device), *mnist_workloads(device, prefetch=True)]


def training(device: str = "cpu", batch: int = 256) -> dict[str, object]:
    """What `warpwright profile` takes: model, inputs, target, loss and optimizer."""
    model = mnist_cnn().to(device)
    return {
        "model": model,
        "inputs": (torch.randn(batch, 1, 28, 28, device=device),),
        "target": torch.randint(0, 10, (batch,), device=device),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01, fused=True),
    }
