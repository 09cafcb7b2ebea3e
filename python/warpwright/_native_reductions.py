"""The operators of reductions and scans in native's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Dims = Any  # an integer, several, or None


def total(
    input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.ops.aten.sum.dim_IntList(input, _listed(dim), keepdim, dtype=dtype)


def mean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    return torch.ops.aten.mean.dim(input, _listed(dim), keepdim, dtype=dtype)


def _listed(dim: Dims) -> Any:
    return [dim] if isinstance(dim, int) else dim


def logsumexp(
    input: Tensor,
    dim: Dims,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return torch.logsumexp(input if dtype is None else input.to(dtype), dim, keepdim)


def var(
    input: Tensor, dim: Dims = None, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return torch.var(
        input, dim, correction=1 if correction is None else correction, keepdim=keepdim
    )


def std(
    input: Tensor, dim: Dims = None, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return torch.std(
        input, dim, correction=1 if correction is None else correction, keepdim=keepdim
    )


def cumprod(
    input: Tensor, dim: int, reverse: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    if not reverse:
        return torch.cumprod(input, dim, dtype=dtype)
    return torch.cumprod(input.flip(dim), dim, dtype=dtype).flip(dim)


def logcumsumexp(input: Tensor, dim: int, reverse: bool = False) -> Tensor:
    if not reverse:
        return torch.logcumsumexp(input, dim)
    return torch.logcumsumexp(input.flip(dim), dim).flip(dim)


def global_avg_pool2d(input: Tensor) -> Tensor:
    return torch.nn.functional.adaptive_avg_pool2d(input, 1)
