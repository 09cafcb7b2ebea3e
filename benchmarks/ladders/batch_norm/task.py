"""Batch norm in training over rows of 64 channels in bf16: the forward pass."""

from __future__ import annotations

import torch
from ladders.task import Problem, Size, Task
from torch.nn import functional as F

CHANNELS = 64
PIXELS = 256  # native sees images of 16 x 16, channels innermost


class BatchNorm(Task):
    op, dtype, names, exact_bits = "batch_norm", "bfloat16", ("rows",), False
    # The first rung takes seconds for the large one, which is 256 x 112 x 112.
    sizes = ((12544,), (3211264,))
    checked = ((256,), (12544,), (100352,))
    probe = (12544,)

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        (rows,) = size
        x = (torch.randn(rows, CHANNELS, device=device) * 2 + 3).bfloat16()
        weight, bias = (torch.rand(CHANNELS, device=device) + 0.5 for _ in range(2))
        y = torch.empty_like(x)
        workspace = torch.empty(2**20, device=device, dtype=torch.uint8)

        def native(x: torch.Tensor = x) -> tuple[torch.Tensor]:
            images = x.view(rows // PIXELS, 16, 16, CHANNELS).permute(0, 3, 1, 2)
            out = F.batch_norm(images, None, None, weight.to(_wide(x)), bias.to(_wide(x)), True)
            return (out.permute(0, 2, 3, 1).reshape(rows, CHANNELS),)

        return Problem(
            size,
            (x, weight, bias, workspace),
            (y,),
            native=native,
            exact=lambda: native(x.double()),
            bytes=2 * x.nbytes,
            flops=8 * x.numel(),
        )


def _wide(x: torch.Tensor) -> torch.dtype:
    """The type of weight and bias: float32 for 16-bit images."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def task_of(rung: str) -> Task:
    """Every rung computes the same."""
    return BatchNorm()
