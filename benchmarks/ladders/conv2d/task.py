"""y = conv2d(x, w) + bias: 3 x 3, padding 1, 64 -> 64 channels, bf16 in channels_last."""

from __future__ import annotations

import torch
from ladders.task import Problem, Size, Task, integers
from torch.nn import functional as F

CHANNELS = 64


class Conv2d(Task):
    op, dtype, names = "conv2d", "bfloat16", ("images", "side")
    sizes = ((256, 56),)  # a layer of ResNet-50's first stage
    # Rows that end inside a tile, images that do, and rows longer than one.
    checked = ((2, 16), (32, 14), (128, 7), (2, 56), (8, 12))
    probe = (64, 56)

    def work(self, size: Size) -> int:
        images, side = size
        return images * side**2

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        images, side = size
        shapes = (images, side, side, CHANNELS), (CHANNELS, 3, 3, CHANNELS), (CHANNELS,)
        if integers_only:  # sums stay below 2^8, so that bf16 holds them
            x, w, bias = (integers(shape, device, limit=1).bfloat16() for shape in shapes)
        else:
            x, w, bias = (torch.randn(shape, device=device).bfloat16() for shape in shapes)
        y = torch.empty_like(x)
        windows = torch.empty(x.numel() * 9, device=device, dtype=x.dtype)
        planes, filters = x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)  # channels_last

        def conv(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
            return (F.conv2d(x, w, bias, padding=1).permute(0, 2, 3, 1),)

        def native() -> tuple[torch.Tensor]:
            with torch.backends.cudnn.flags(enabled=True, benchmark=True):
                return conv(planes, filters, bias)

        return Problem(
            size,
            (x, w, bias, windows),
            (y,),
            native=native,
            exact=lambda: conv(planes.double(), filters.double(), bias.double()),
            bytes=2 * x.nbytes + w.nbytes,
            flops=2 * images * side**2 * CHANNELS**2 * 9,
        )


def task_of(rung: str) -> Task:
    """Every rung computes the same."""
    return Conv2d()
