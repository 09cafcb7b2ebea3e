"""The running sums of a vector of float32."""

from __future__ import annotations

import torch
from ladders.task import Problem, Size, Task, integers


class Cumsum(Task):
    op, dtype, names = "cumsum", "float32", ("elements",)
    # The first rung would take many seconds for the large one.
    sizes = ((2**20,), (2**28,))
    checked = ((8192,), (2**20,), (3 * 2**20 + 8192,))
    probe = (2**20,)

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        x = (
            integers(size, device).float()  # sums of so few stay below 2^24
            if integers_only
            else torch.randn(size, device=device)
        )
        y = torch.empty_like(x)
        workspace = torch.empty(x.nbytes + 2**20, device=device, dtype=torch.uint8)
        return Problem(
            size,
            (x, workspace),
            (y,),
            native=lambda: (torch.cumsum(x, 0),),
            exact=lambda: (torch.cumsum(x.double(), 0),),
            bytes=2 * x.nbytes,
            flops=x.numel(),
        )


def task_of(rung: str) -> Task:
    """Every rung computes the same."""
    return Cumsum()
