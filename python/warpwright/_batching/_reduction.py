"""The rules of reductions: the batch is one more dimension that is kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._prims_common import canonicalize_dim

from ._fold import Dims, Rule, front


def reduction(op: Any) -> Rule:
    def rule(info: Any, dims: Dims, input: Tensor, dim: Any, *rest: Any) -> tuple[Tensor, int]:
        x = front(input, dims[0], info.batch_size)
        rank = x.dim() - 1
        wanted = [dim] if isinstance(dim, int) else (dim or ())
        places = [canonicalize_dim(rank, d) + 1 for d in wanted]
        if rank == 0:  # a sample is one number, which keeps its shape
            return op(x[:, None], [1], *rest).reshape(x.shape), 0
        return op(x, places or list(range(1, rank + 1)), *rest), 0

    return rule
