"""What would make a swapped model faster, for the report."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


def _on_hopper(weight: Tensor) -> bool:
    return weight.is_cuda and torch.cuda.get_device_capability(weight.device) == (9, 0)


def layout_advice(model: nn.Module, on_hopper: Callable[[Tensor], bool] = _on_hopper) -> list[str]:
    """A sentence if the memory format makes convolutions copy their tensors on Hopper.

    Weights of one tap have the same layout in both formats. Other weights show the model's format.
    """
    found = [
        m
        for m in model.modules()
        if isinstance(m, nn.Conv2d)
        and not is_lazy(m.weight)
        and m.weight.shape[1] % 8 == 0
        and m.kernel_size != (1, 1)
        and not m.weight.is_contiguous(memory_format=torch.channels_last)
        and on_hopper(m.weight)
    ]
    if not found:
        return []
    return [
        f"NCHW weights: {len(found)} of the convolutions. In 16 bits on Hopper each copies its input to "
        "channels_last, once forward and once backward, and the gradient of its output. "
        "model.to(memory_format=torch.channels_last), and the same for the images, saves these passes."
    ]
