"""Attention of bf16 heads of dimension 128, without a mask."""

from __future__ import annotations

import torch
from ladders.task import Problem, Size, Task
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEAD = 128


class Attention(Task):
    op, dtype, names, exact_bits = "attention", "bfloat16", ("heads", "tokens"), False
    sizes = ((16, 4096),)
    checked = ((1, 256), (3, 768), (2, 2048))
    probe = (4, 2048)

    def work(self, size: Size) -> int:
        heads, tokens = size
        return heads * tokens**2

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        heads, tokens = size
        shape = (1, heads, tokens, HEAD)
        q, k, v = (torch.randn(shape, device=device).bfloat16() for _ in range(3))
        out = torch.empty_like(q)
        workspace = torch.empty(4 * heads * tokens**2 + 2**20, device=device, dtype=torch.uint8)

        def native() -> tuple[torch.Tensor]:
            # cuDNN where it is; the second one runs anywhere.
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
                return (F.scaled_dot_product_attention(q, k, v),)

        def exact() -> tuple[torch.Tensor]:
            heads_of = zip(*(x.double().unbind(1) for x in (q, k, v)), strict=True)
            results = []
            for a, b, c in heads_of:  # one at a time: a head's scores are 4096 x 4096 float64
                scores = a @ b.transpose(1, 2) / HEAD**0.5
                results.append(torch.softmax(scores, 2) @ c)
            return (torch.stack(results, 1),)

        return Problem(
            size,
            (q, k, v, workspace),
            (out,),
            native=native,
            exact=exact,
            bytes=4 * q.nbytes,
            flops=4 * heads * tokens**2 * HEAD,
        )


def task_of(rung: str) -> Task:
    """Every rung computes the same."""
    return Attention()
