"""Group norm, and instance norm through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._arch import PLAIN
from .._ops import ops
from ._common import dynamo, exporting
from ._norm import batch_norm

native: Any = torch.nn.functional


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` with the statistics of each group.

    The formula is that of arXiv 1803.08494: a group is ``C / num_groups`` neighbouring channels of one
    sample, with the biased variance. On Hopper a block or a cluster of blocks holds a contiguous
    group on chip, so memory is read once.

    Args:
        input: (N, C, ...), contiguous or channels_last (kept in the output); float32, float64,
            bfloat16, float16.
        num_groups: a divisor of C.
        weight, bias: (C), in the dtype of ``input``, or float32 for a 16-bit ``input``.
        eps: added to the variance.
    Returns:
        The shape, dtype and layout of ``input``. Under autocast on a GPU: float32.
    Raises:
        RuntimeError: sizes or dtypes do not fit.
        ValueError: a group has one value.
        NotImplementedError: integer or complex ``input``.
        TypeError: an argument has another type than in the signature.
    """
    if num_groups.__class__ is not int:
        num_groups = _arguments.integer("group_norm", "num_groups", num_groups)
    if eps.__class__ is not float:
        eps = _arguments.real("group_norm", "eps", eps)
    if dynamo() or exporting():
        return native.group_norm(input, num_groups, weight, bias, eps)  # type: ignore[no-any-return]
    if isinstance(input, Tensor) and input.dim() >= 2:
        sizes = input.shape
        native._verify_batch_size([sizes[0] * sizes[1] // num_groups, num_groups, *sizes[2:]])
    try:
        return ops.group_norm(input, num_groups, weight, bias, eps)[0]  # type: ignore[no-any-return]
    except RuntimeError as error:
        optional = {"weight": weight, "bias": bias}
        raise _arguments.error(error, "group_norm", {"input": input}, optional) from None


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` per channel of each sample.

    The formula is that of arXiv 1607.08022. It is :func:`group_norm` with one channel per group, or
    with ``use_input_stats=False`` :func:`batch_norm` in evaluation.

    Args:
        input: (N, C, ...), contiguous or channels_last (kept in the output); float32, float64,
            bfloat16, float16.
        running_mean, running_var: (C). With ``use_input_stats`` they move by ``momentum`` towards the
            means of the samples' statistics (with the unbiased variance).
        weight, bias: as for :func:`group_norm`.
        use_input_stats: normalise by the statistics of ``input``.
        momentum: weight of the input in the running statistics.
        eps: added to the variance.
    Returns:
        The shape, dtype and layout of ``input``.
    Raises:
        ValueError: ``use_input_stats`` with one value per channel and sample.
        RuntimeError: no running statistics without ``use_input_stats``, or sizes or dtypes do not fit.
        NotImplementedError: integer or complex ``input``.
        TypeError: an argument has another type than in the signature.
    """
    use_input_stats = _arguments.flag("instance_norm", "use_input_stats", use_input_stats)
    momentum = _arguments.real("instance_norm", "momentum", momentum)
    eps = _arguments.real("instance_norm", "eps", eps)
    # The statistics of tensors of other kinds stay native's.
    is_plain = type(input) in PLAIN and not input.is_nested
    if dynamo() or exporting() or not is_plain or input.dim() < 2:
        args = (running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        return native.instance_norm(input, *args)  # type: ignore[no-any-return]
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise RuntimeError(
                "Expected running_mean and running_var to be defined when use_input_stats is false"
            )
        return batch_norm(input, running_mean, running_var, weight, bias, False, 0.0, eps)
    native._verify_spatial_size(input.shape)
    if input.shape[1] == 0:
        return native.instance_norm(  # type: ignore[no-any-return]
            input, None, None, weight, bias, True, momentum, eps
        )
    _check_running(input, running_mean, running_var)
    optional = {"weight": weight, "bias": bias}
    try:
        output, mean, rstd = ops.group_norm(input, input.shape[1], weight, bias, eps)
    except RuntimeError as error:
        raise _arguments.error(error, "instance_norm", {"input": input}, optional) from None
    if (running_mean is not None or running_var is not None) and input.numel() > 0:
        _update_running(input, mean, rstd, running_mean, running_var, momentum, eps)
    return output  # type: ignore[no-any-return]


def _check_running(input: Tensor, *running: Any) -> None:
    for name, vector in zip(("running_mean", "running_var"), running, strict=True):
        if vector is None:
            continue
        if not isinstance(vector, Tensor):
            raise TypeError(
                f"instance_norm(): argument '{name}' must be Tensor, not {type(vector).__name__}"
            )
        if vector.numel() != input.shape[1]:
            raise RuntimeError(
                f"{name} should contain {input.shape[1]} elements not {vector.numel()}"
            )
        if vector.dim() > 1:
            raise RuntimeError(f"{name}: expected one dimension, got shape {tuple(vector.shape)}")
        if vector.device != input.device:
            raise RuntimeError(f"{name}: expected device {input.device}, got {vector.device}")
        # The update would write to freed memory.
        _arguments.require_storage("instance_norm", name, vector)


@torch.no_grad()
def _update_running(
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> None:
    """From the statistics that the kernel has written: the variance is ``rstd ** -2 - eps``."""
    if running_mean is not None:
        found = mean.detach().mean(0).to(running_mean.dtype)
        running_mean.mul_(1 - momentum).add_(found, alpha=momentum)
    if running_var is not None:
        count = input[0, 0].numel()
        variance = (rstd.detach().pow(-2) - eps).clamp_(min=0).mean(0) * (count / (count - 1))
        running_var.mul_(1 - momentum).add_(variance.to(running_var.dtype), alpha=momentum)
