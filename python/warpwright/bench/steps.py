"""Whole training steps: the MNIST CNN with native modules and with ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..swap import swap
from .measure import interleaved, peak_mib


def mnist_cnn() -> nn.Sequential:
    """conv-bn-relu-pool twice, then two linears: 28x28 grey images to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def _step(
    model: nn.Module, loss: nn.Module, device: str, batch: int, layout: str
) -> Callable[[], None]:
    images = torch.randn(batch, 1, 28, 28)
    labels = torch.randint(0, 10, (batch,))
    if device == "cuda":
        images, labels = images.pin_memory(), labels.pin_memory()
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def step() -> None:
        x = images.to(device, memory_format=memory_format, non_blocking=True)
        y = labels.to(device, non_blocking=True)
        optimizer.zero_grad()
        value: Tensor = loss(model(x), y)
        value.backward()
        optimizer.step()

    return step


def mnist_rows(device: str, seconds: float) -> list[dict[str, Any]]:
    """Load + forward + backward + SGD, both memory formats, TF32 allowed for both."""
    rows = []
    previous = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        for batch in (64, 256, 1024, 4096) if device == "cuda" else (64, 256):
            calls = {}
            for layout in ("nchw", "nhwc"):
                memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
                torch.manual_seed(0)
                native = mnist_cnn().to(device, memory_format=memory_format)  # type: ignore[call-overload]
                ours = copy.deepcopy(native)
                loss = nn.CrossEntropyLoss()
                our_loss = nn.CrossEntropyLoss()
                swap(ours)
                swap(our_loss)
                calls["warpwright", layout] = _step(ours, our_loss, device, batch, layout)
                calls["native", layout] = _step(native, loss, device, batch, layout)
            timings = interleaved(
                {f"{impl} {layout}": call for (impl, layout), call in calls.items()},
                device,
                8 * seconds,
            )
            for (impl, layout), call in calls.items():
                timing = timings[f"{impl} {layout}"]
                rows.append(
                    {
                        "op": "mnist_step",
                        "case": f"b{batch}",
                        "dtype": "float32",
                        "layout": layout,
                        "pass": "step",
                        "impl": impl,
                        "ms": round(timing.ms, 5),
                        "ms_lo": round(timing.ms_lo, 5),
                        "ms_hi": round(timing.ms_hi, 5),
                        "bytes": 0,
                        "flops": 0,
                        "floor_ms": 0.0,
                        "peak_mib": peak_mib(call, device),
                        "err": None,
                        "err_native": None,
                    }
                )
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = previous
    return rows
