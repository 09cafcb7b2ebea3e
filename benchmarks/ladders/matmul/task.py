"""D = A B^T in bf16 with fp32 sums: linear's forward without a bias."""

from __future__ import annotations

import torch
from ladders.task import Problem, Size, Task, integers


class Matmul(Task):
    op, dtype, names = "linear", "bfloat16", ("m", "n", "k")
    sizes = ((4096, 4096, 4096),)
    # Several tiles each way, no two extents alike, and one with a single tile of k. linear takes
    # its sm_90a kernel for each of them.
    checked = ((2048, 4096, 64), (768, 512, 320), (512, 1536, 1024))
    probe = (1024, 1024, 1024)

    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        m, n, k = size
        if integers_only:
            assert 9 * k < 2**24  # sums are exact in fp32 in any order
            a, b = (integers((rows, k), device).bfloat16() for rows in (m, n))
        else:
            a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
        d = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        return Problem(
            size,
            (a, b),
            (d,),
            native=lambda: (torch.matmul(a, b.T, out=d),),
            exact=lambda: (a.double() @ b.double().T,),
            bytes=2 * (m * k + n * k + m * n),
            flops=2 * m * n * k,
        )


def task_of(rung: str) -> Task:
    """Every rung computes the same."""
    return Matmul()
