"""Batch norm with the statistics of all ranks' batches.

Each direction has one collective. The forward gathers every rank's (mean, variance, count) and merges
them by Chan's formula (Chan, Golub, LeVeque 1979). It does so in the order of ranks, so that all ranks
get the same bits. The backward adds (sum of grad, sum of grad x̂) of all ranks. Counts stay on the device:
nothing waits for the GPU, and a rank may have an empty batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

from .._ops import ops


def sync_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    group: Any,
) -> Tensor:
    """:func:`warpwright.functional.batch_norm` in training, over the batches of all ranks.

    Args:
        input: this rank's part of the batch, (N, C) or (N, C, ...); N may differ between ranks and
            may be 0.
        training: True; in evaluation no rank needs another.
        group: the process group whose ranks share the batch.

    The other arguments are :func:`batch_norm`'s. The gradients of ``weight`` and ``bias`` are this
    rank's part, as DDP and FSDP expect. A second derivative raises, as native's.
    """
    if not training:
        raise ValueError("sync_batch_norm: training: expected True, got False")
    output, mean, var, count = _SyncBatchNorm.apply(input, weight, bias, eps, group)
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp(min=1))
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return output  # type: ignore[no-any-return]


def _moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of this rank's channels, in float32 or float64."""
    if input.is_cuda:
        mean, rstd = torch.batch_norm_stats(input, 0.0)
    else:
        mean, rstd = ops.batch_norm(input, None, None, None, None, True, 0.0)[1:]
    # A variance of 0 has 1/sqrt(0) = inf, or 0 by ATen's kernel.
    return mean, rstd.square().reciprocal().masked_fill(rstd == 0, 0.0)


def merge(mean: Tensor, var: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(mean, variance, count) of all parts, from those of each: (parts, C), (parts, C), (parts, 1).

    The means are merged as differences from the first, so that a large mean costs no digits. A part
    without elements counts for nothing.
    """
    total = count.sum()
    share = count / total
    merged = mean[0] + ((mean - mean[0]) * share).sum(0)
    deviations = var + (mean - merged).square()
    return merged, (deviations * share).sum(0), total


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, ...]:
        channels = input.shape[1]
        count = input.numel() // channels
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        if count:
            mean, var = _moments(input)
        else:
            mean = var = torch.zeros(channels, dtype=dtype, device=input.device)
        own = torch.cat([mean, var, mean.new_full((1,), count)])
        gathered = all_gather_tensor(own.unsqueeze(0), 0, group)
        mean, var, total = merge(*gathered.split([channels, channels, 1], dim=1))
        ctx.save_for_backward(input, weight, mean, (var + eps).rsqrt(), total)
        ctx.group = group
        if count:
            output = ops.batch_norm(input, weight, bias, mean, var, False, eps)[0]
        else:
            output = torch.empty_like(input)
        ctx.mark_non_differentiable(mean, var, total)
        return output, mean, var, total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        input, weight, mean, rstd, total = ctx.saved_tensors
        if input.numel():
            # In evaluation's formula the sums are those of each channel: of grad x̂ and of grad.
            _, by_weight, by_bias = ops.batch_norm_backward(
                grad, input, None, mean, rstd, False, [False, True, True]
            )
        else:
            by_weight = by_bias = torch.zeros_like(mean)
        dx = None
        if ctx.needs_input_grad[0]:
            sums = all_reduce(torch.stack((by_bias, by_weight)), "sum", ctx.group)
            dx = _input_gradient(grad, input, weight, mean, rstd, sums, total)
        dw = by_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        # The bias has the weight's dtype.
        db = by_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def _input_gradient(
    grad: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, sums: Tensor,
    total: Tensor,
) -> Tensor:  # fmt: skip
    """``w rstd (grad - sum(grad) / n - x̂ sum(grad x̂) / n)``, with the sums of all ranks."""
    if not input.numel():
        return torch.zeros_like(input)
    if input.is_cuda:  # one pass
        wide = None if weight is None else weight.to(mean.dtype)
        grad = grad.contiguous(memory_format=torch._prims_common.suggest_memory_format(input))
        return torch.batch_norm_backward_elemt(
            grad, input, mean, rstd, wide, sums[0], sums[1] / rstd, total.to(torch.int32).view(1)
        )
    scale = rstd if weight is None else rstd * weight.to(rstd.dtype)
    by_x = -scale * rstd * sums[1] / total
    constant = -scale * sums[0] / total - by_x * mean
    channels = [-1 if d == 1 else 1 for d in range(input.dim())]
    a, b, c = (part.view(channels) for part in (scale, by_x, constant))
    return (a * grad + b * input + c).to(input.dtype)
