"""The sum of a matrix; softmax of its rows; cross-entropy of the rows with its gradient. All float32."""

from __future__ import annotations

import torch
from ladders.task import Problem, Size, Task, integers
from torch.nn import functional as F


def workspace(numel: int, device: str) -> torch.Tensor:
    return torch.empty(numel // 32 + 2**20, device=device, dtype=torch.uint8)


class Total(Task):
    """The sum of all elements: one number."""

    op, dtype, names = "sum", "float32", ("rows", "columns")
    sizes = ((16384, 16384),)
    checked = ((1, 4), (64, 1000), (4096, 4096))
    probe = (1024, 4096)

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        x = (
            integers(size, device).float()  # sums of so few stay below 2^24
            if integers_only
            else torch.randn(size, device=device)
        )
        total = torch.empty(1, device=device)
        return Problem(
            size,
            (x, workspace(x.numel(), device)),
            (total,),
            native=lambda: (x.sum().view(1),),
            exact=lambda: (x.double().sum().view(1),),
            bytes=x.nbytes,
            flops=x.numel(),
        )


class Softmax(Task):
    op, dtype, names, exact_bits = "softmax", "float32", ("rows", "columns"), False
    sizes = ((8192, 32000),)
    checked = ((1, 4), (3, 1000), (300, 32000))
    probe = (1024, 32000)

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        x = torch.randn(size, device=device) * 4
        y = torch.empty_like(x)
        return Problem(
            size,
            (x, workspace(x.numel(), device)),
            (y,),
            native=lambda: (torch.softmax(x, 1),),
            exact=lambda: (torch.softmax(x.double(), 1),),
            bytes=2 * x.nbytes,
            flops=5 * x.numel(),
        )


class CrossEntropy(Task):
    """The loss of each row, and the gradient of their sum."""

    op, dtype, names, exact_bits = "cross_entropy", "float32", ("rows", "classes"), False
    direction = "fwd+bwd"
    sizes = ((8192, 32000),)
    # As few rows as the shipped kernel takes for so many classes.
    checked = ((2200, 8000), (600, 32000), (513, 50257))
    probe = (1024, 32000)

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        x = torch.randn(size, device=device) * 4
        labels = torch.randint(size[1], size[:1], device=device)
        gradient, loss = torch.empty_like(x), torch.empty(size[0], device=device)
        ones = torch.ones_like(loss)

        def native(logits: torch.Tensor = x) -> tuple[torch.Tensor, torch.Tensor]:
            leaf = logits.detach().requires_grad_()
            out = F.cross_entropy(leaf, labels, reduction="none")
            (grad,) = torch.autograd.grad(out, leaf, ones.to(out))
            return grad, out.detach()

        return Problem(
            size,
            (x, labels, workspace(x.numel(), device)),
            (gradient, loss),
            native=native,
            exact=lambda: native(x.double()),
            bytes=2 * x.nbytes,
            flops=6 * x.numel(),
        )


def task_of(rung: str) -> Task:
    number = int(rung[:2])
    return Total() if number <= 5 else Softmax() if number <= 8 else CrossEntropy()
