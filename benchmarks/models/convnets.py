"""torchvision's EfficientNet-B0, MobileNetV3-L and ConvNeXt-T as training steps in bf16 autocast.

    python -m warpwright bench --suite model efficientnet_b0_step mobilenet_v3_step convnext_t_step
    python -m warpwright profile benchmarks/models/convnets.py:efficientnet_b0

Dropout and stochastic depth are 0: the losses of all implementations are then comparable.

Needs torchvision (`pip install --no-deps torchvision`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import nn

from warpwright.bench.steps import NHWC, Workload

# Name -> the function of torchvision.models, the batch on a GPU, arguments without chance.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "efficientnet_b0": ("efficientnet_b0", 256, {"dropout": 0.0, "stochastic_depth_prob": 0.0}),
    "mobilenet_v3": ("mobilenet_v3_large", 256, {"dropout": 0.0}),
    "convnext_t": ("convnext_tiny", 128, {"stochastic_depth_prob": 0.0}),
}


def _build(name: str) -> Callable[[], nn.Module]:
    function, _, options = MODELS[name]
    return lambda: getattr(torchvision.models, function)(num_classes=1000, **options)


def _optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "convnext_t":
        # capturable: the step counts are on the GPU, so that a CUDA graph can hold the step.
        on_gpu = torch.cuda.is_available()
        return lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True, capturable=on_gpu)
    return lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-5, fused=True)


def workloads(device: str) -> list[Workload]:
    found = []
    for name, (_, batch, _) in MODELS.items():
        batch, side = (batch, 224) if device == "cuda" else (2, 64)

        def images(batch: int = batch, side: int = side) -> tuple[torch.Tensor, ...]:
            return torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))

        found.append(
            Workload(
                f"{name}_step",
                f"b{batch} {side}x{side}",
                _build(name),
                images,
                optimizer=_optimizer(name),
                dtype=torch.bfloat16 if device == "cuda" else torch.float32,
                layouts=(NHWC,),
            )
        )
    return found


def _training(name: str, device: str, batch: int | None, side: int | None) -> dict[str, object]:
    on_gpu = device == "cuda"
    batch = batch or (MODELS[name][1] if on_gpu else 2)
    side = side or (224 if on_gpu else 64)
    model: Any = _build(name)().to(device)
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, side, side, device=device)
    return {
        "model": model,
        "inputs": (images.contiguous(memory_format=torch.channels_last),),
        "target": torch.randint(0, 1000, (batch,), device=device),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": _optimizer(name)(model.parameters()),
        "autocast": torch.bfloat16 if on_gpu else None,
    }


def efficientnet_b0(
    device: str = "cpu", batch: int | None = None, side: int | None = None
) -> dict[str, object]:
    return _training("efficientnet_b0", device, batch, side)


def mobilenet_v3(
    device: str = "cpu", batch: int | None = None, side: int | None = None
) -> dict[str, object]:
    return _training("mobilenet_v3", device, batch, side)


def convnext_t(
    device: str = "cpu", batch: int | None = None, side: int | None = None
) -> dict[str, object]:
    return _training("convnext_t", device, batch, side)
