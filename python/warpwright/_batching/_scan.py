"""The rules of scans: the batch is one more dimension that is not scanned."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._prims_common import canonicalize_dim

from .._ops import ops
from ._fold import Dims, Rule, front


def plain_scan(op: Any) -> Rule:
    def rule(info: Any, dims: Dims, input: Tensor, dim: int, reverse: bool) -> tuple[Tensor, int]:
        x = front(input, dims[0], info.batch_size)
        dim = canonicalize_dim(x.dim() - 1, dim)
        if x.dim() == 1:  # a sample is one number
            return op(x[:, None], 1, reverse)[:, 0], 0
        return op(x, dim + 1, reverse), 0

    return rule


def linear_scan(
    info: Any,
    dims: Dims,
    gate: Tensor,
    input: Tensor,
    initial: Tensor | None,
    dim: int,
    reverse: bool,
    shifted: bool,
    levels: bool,
) -> tuple[Tensor, int]:
    tensors = zip((gate, input, initial), dims[:3], strict=True)
    a, b, state = (front(t, d, info.batch_size) for t, d in tensors)
    dim = canonicalize_dim(b.dim() - 1, dim)
    return ops.linear_scan(a, b, state, dim + 1, reverse, shifted, levels), 0
