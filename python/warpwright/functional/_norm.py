"""Batch norm, alone and with the layers that follow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from ._activation import relu
from ._common import dynamo, exporting, pool_window


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` per channel, which is dimension 1.

    The formula is that of arXiv 1502.03167. In training, mean and variance are the batch's. The
    running statistics, if given, then move towards them by ``momentum`` (with the unbiased
    variance). In evaluation, mean and variance are the running statistics.

    Args:
        input: (N, C) or (N, C, ...), contiguous or channels_last (kept in the output); float32,
            float64, bfloat16, float16.
        running_mean, running_var, weight, bias: (C), each in the dtype of ``input``, or float32 for
            a 16-bit ``input``.
        training: normalise by the batch's statistics.
        momentum: weight of the batch in the running statistics. The modules also take native's
            ``momentum=None``, the plain average.
        eps: added to the variance.
    Returns:
        The shape, dtype and layout of ``input``.
    Raises:
        ValueError: training with one value per channel; an ``eps`` that native refuses; or only one
            of the running statistics.
        RuntimeError: no running statistics in evaluation, or sizes or dtypes do not fit.
        NotImplementedError: integer or complex ``input``.
    """
    if training.__class__ is not bool or not (momentum.__class__ is eps.__class__ is float):
        training, momentum, eps = _norm_options("batch_norm", training, momentum, eps)
    try:
        if _uses_batch_statistics(input, running_mean, running_var, training, eps):
            return ops.batch_norm(input, weight, bias, None, None, True, eps)[0]
        if not training:
            run = NATIVE_OPERATORS["batch_norm"] if dynamo() or exporting() else ops.batch_norm
            return run(input, weight, bias, running_mean, running_var, False, eps)[0]
        return ops.batch_norm_update(input, weight, bias, running_mean, running_var, momentum, eps)[
            0
        ]
    except RuntimeError as error:
        optional = {"running_mean": running_mean, "running_var": running_var}
        optional |= {"weight": weight, "bias": bias}
        raise _arguments.error(error, "batch_norm", {"input": input}, optional) from None


def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``relu(batch_norm(input, ...))`` in one op, without the intermediate tensor.

    The backward recomputes the sign of the output from ``input``, so the forward keeps nothing of
    the output's size. Arguments and errors are :func:`batch_norm`'s.
    """
    return _fused_norm(
        "batch_norm_relu",
        *((input, None, weight, bias), running_mean, running_var, training, momentum, eps),
    )


def batch_norm_add_relu(
    input: Tensor,
    residual: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``relu(batch_norm(input, ...) + residual)`` in one op: the end of a residual block.

    The sum is rounded once. For the backward the forward keeps one byte per 16 bytes of ``input``,
    and nothing of the output's size.

    Args:
        residual: a tensor of the shape and dtype of ``input``, in any layout. With another shape or
            dtype, and for a number, the single ops run, which broadcast and promote.

    The other arguments and the errors are :func:`batch_norm`'s.
    """
    if getattr(residual, "shape", None) != input.shape or residual.dtype != input.dtype:
        if not torch.compiler.is_compiling():  # native's sum would read freed memory
            _arguments.require_storage("batch_norm_add_relu", "residual", residual)
        return relu(
            batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
            + residual
        )
    return _fused_norm(
        "batch_norm_relu",
        *((input, residual, weight, bias), running_mean, running_var, training, momentum, eps),
    )


def batch_norm_silu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``silu(batch_norm(input, ...))`` in one op, without the intermediate tensor.

    The backward recomputes the normalised value from ``input``, so the forward keeps nothing of the
    output's size. A 16-bit value is rounded once, after the activation. Arguments and errors are
    :func:`batch_norm`'s.
    """
    return _fused_norm(
        "batch_norm_activation",
        *((input, weight, bias), running_mean, running_var, training, momentum, eps),
        "silu",
        function="batch_norm_silu",
    )


def batch_norm_hardswish(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``hardswish(batch_norm(input, ...))`` in one op; see :func:`batch_norm_silu`."""
    return _fused_norm(
        "batch_norm_activation",
        *((input, weight, bias), running_mean, running_var, training, momentum, eps),
        "hardswish",
        function="batch_norm_hardswish",
    )


def batch_norm_relu_max_pool2d(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``max_pool2d(relu(batch_norm(input, ...)), ...)`` in one op, which writes the pooled tensor only.

    For the backward the forward keeps, per output, the position of the maximum (one byte) and its
    element of ``input``. Of the input's size it keeps the input alone.

    Args:
        input: (N, C, H, W), contiguous or channels_last (kept in the output); float32, float64,
            bfloat16, float16.

    The other arguments and the errors are :func:`batch_norm`'s and :func:`max_pool2d`'s.

    Raises:
        RuntimeError: also if ``input`` has another number of dimensions, or if all taps of a
            dilated window are in the padding.
    """
    name = "batch_norm_relu_max_pool2d"
    return _fused_norm(
        name,
        *((input, weight, bias), running_mean, running_var, training, momentum, eps),
        *pool_window(name, kernel_size, stride, padding, dilation, ceil_mode),
    )


def _norm_options(
    function: str, training: Any, momentum: Any, eps: Any
) -> tuple[bool, float, float]:
    return (
        _arguments.flag(function, "training", training),
        _arguments.real(function, "momentum", momentum),
        _arguments.real(function, "eps", eps),
    )


def _uses_batch_statistics(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Whether it trains without running statistics. Raises the errors of native's Python."""
    if eps <= 0.0:  # native decides and raises: newer releases take 0 in evaluation
        one = torch.ones(1)
        torch.nn.functional.batch_norm(torch.ones(2, 1), one, one, training=training, eps=eps)
    if not training:
        return False
    if input.numel() == (input.size(1) if input.dim() > 1 else 1) > 0:
        if input.dim() == 0:
            raise IndexError("batch_norm: input: expected at least 2 dimensions, got 0")
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.size()}"
        )
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    return running_mean is None


def _fused_norm(
    name: str,
    operands: tuple[Any, ...],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *options: Any,
    function: str = "",
) -> Tensor:
    """Calls the operator ``name``, or the one that also updates the running statistics.

    Args:
        options: the operator's last arguments.
        function: the user's function, for errors; "": it has the operator's name.
    """
    function = function or name
    training, momentum, eps = _norm_options(function, training, momentum, eps)
    input = operands[0]
    try:
        if _uses_batch_statistics(input, running_mean, running_var, training, eps):
            return getattr(ops, name)(*operands, None, None, True, eps, *options)[0]
        if not training:
            stats = running_mean, running_var
            run = NATIVE_OPERATORS[name] if dynamo() or exporting() else getattr(ops, name)
            return run(*operands, *stats, False, eps, *options)[0]
        update = getattr(ops, name + "_update")
        return update(*operands, running_mean, running_var, momentum, eps, *options)[0]
    except RuntimeError as error:
        optional = {"running_mean": running_mean, "running_var": running_var}
        optional |= {"weight": operands[-2], "bias": operands[-1]}
        raise _arguments.error(error, function, {"input": input}, optional) from None
