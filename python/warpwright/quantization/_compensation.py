"""Codes that make up for each other's errors (GPTQ, arXiv 2210.17323)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._quantized_weight import pack_pairs
from ._quantizers import Codes, group_scales, nearest


def gptq(
    weight: Tensor,
    inputs: Tensor,
    group: int = 128,
    *,
    symmetric: bool = True,
    damping: float = 0.01,
) -> Codes:
    """4-bit codes of (N, K) for inputs such as ``inputs``: the error of a column is added to the later
    columns that correlate with it.

    Args:
        weight: (N, K), as for :func:`int4`.
        inputs: (..., K): activations that the layer sees.
        group, symmetric: as for :func:`int4`. A group's scale is chosen when its first column comes.
        damping: of the mean of the Hessian's diagonal, added to the diagonal.
    Returns:
        As :func:`int4`.
    """
    columns = weight.shape[1]
    if group <= 0 or group % 2 or columns % group or inputs.shape[-1] != columns:
        raise ValueError(
            f"gptq: expected groups that divide the columns and inputs of as many, got a weight of "
            f"shape {tuple(weight.shape)}, group {group} and inputs of shape {tuple(inputs.shape)}"
        )
    w = weight.detach().to(torch.float32).clone()
    x = inputs.detach().reshape(-1, columns).to(torch.float32)
    hessian = x.t() @ x
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1
    w[:, unused] = 0
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    codes = torch.empty_like(w)
    scales, zeros = [], []
    for begin in range(0, columns, group):
        end = begin + group
        scale, zero = group_scales(w[:, begin:end], symmetric, weight.dtype)
        errors = torch.empty_like(w[:, begin:end])
        for k in range(begin, end):
            codes[:, k] = nearest(w[:, k, None], scale, zero)[:, 0]
            number = (codes[:, k] - zero) * scale.to(w.dtype)
            errors[:, k - begin] = (w[:, k] - number) / factor[k, k]
            w[:, k:end] -= errors[:, k - begin, None] * factor[k, k:end]
        w[:, end:] -= errors @ factor[begin:end, end:]
        scales.append(scale)
        zeros.append(zero)
    packed = pack_pairs(codes)
    return packed, torch.stack(scales, 1), None if symmetric else torch.stack(zeros, 1)
