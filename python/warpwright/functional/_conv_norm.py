"""A convolution and the batch norm after it, as one op in training; the longest chain ends in a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._common import pair, pool_window
from ._conv import conv2d
from ._norm import (
    _norm_options,
    batch_norm,
    batch_norm_add_relu,
    batch_norm_hardswish,
    batch_norm_relu,
    batch_norm_relu_max_pool2d,
    batch_norm_silu,
)

_SHORT = (torch.bfloat16, torch.float16)
# The functions after the convolution, and the operator's name of their activation.
_AFTER: dict[str, tuple[Callable[..., Tensor], str]] = {
    "conv2d_batch_norm": (batch_norm, "none"),
    "conv2d_batch_norm_relu": (batch_norm_relu, "relu"),
    "conv2d_batch_norm_add_relu": (batch_norm_add_relu, "relu"),
    "conv2d_batch_norm_silu": (batch_norm_silu, "silu"),
    "conv2d_batch_norm_hardswish": (batch_norm_hardswish, "hardswish"),
}
# What a batch norm's messages call weight and bias are other arguments here.
_NORM_WORDS = {f"{name} should": f"norm_{name} should" for name in ("weight", "bias")}


def takes_statistics(
    input: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    residual: Tensor | None = None,
) -> bool:
    """Whether a call in training should run as one operator: 16-bit images on a GPU, and several.

    Everywhere else one operator after the other is as fast. So it runs if a residual broadcasts.
    """
    if not (isinstance(input, Tensor) and isinstance(weight, Tensor)):
        return False  # conv2d raises
    if not input.is_cuda or input.dim() != 4 or input.size(0) < 2 or weight.dim() != 4:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
    if dtype not in _SHORT or isinstance(padding, str):
        return False
    if residual is None:
        return True
    if not isinstance(residual, Tensor) or residual.dtype != dtype:
        return False
    windows = [(w, w) if isinstance(w, int) else tuple(w) for w in (stride, padding, dilation)]
    if any(len(window) != 2 or min(window) < 0 for window in windows) or 0 in windows[0]:
        return False  # conv2d raises
    extents = (
        (input.size(2 + i) + 2 * p - d * (weight.size(2 + i) - 1) - 1) // s + 1
        for i, (s, p, d) in enumerate(zip(*windows, strict=True))
    )
    return residual.shape == (input.size(0), weight.size(0), *extents)


# Windows (input channels, rows, columns) with kernels that never write the convolution's output.
FEW_ELEMENTS = ((1, 3, 3), (1, 5, 5), (3, 3, 3))


def writes_maxima_alone(
    input: Tensor,
    weight: Tensor,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    pool: tuple[Any, ...],
) -> bool:
    """Whether a call in training should run as one operator: the first layer of a network.

    Its images are float32, on a GPU and need no gradient, its windows have few elements, and the
    pool is of 2x2. Elsewhere the backward would compute the convolution again.

    Args:
        pool: kernel_size, stride, padding, dilation and ceil_mode of the pool.
    """
    if not all(isinstance(t, Tensor) for t in (input, weight)) or isinstance(padding, str):
        return False
    if not input.is_cuda or input.dim() != 4 or input.dtype != torch.float32:
        return False
    if input.requires_grad or torch.is_autocast_enabled("cuda"):
        return False
    kernel, step, *rest = pool
    return (
        tuple(weight.shape[1:]) in FEW_ELEMENTS
        and weight.size(0) % 4 == 0
        and _is_all(1, stride)
        and _is_all(1, dilation)
        and _is_all(2, kernel)
        and (step is None or _is_all(2, step))
        and _is_all(0, rest[0])
        and _is_all(1, rest[1])
        and not rest[2]
    )


def _is_all(value: int, extents: int | Sequence[int]) -> bool:
    """Whether an argument for both dimensions is ``value`` in each."""
    if isinstance(extents, int):
        return extents == value
    return len(extents) == 2 and all(extent == value for extent in extents)


def conv2d_batch_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``batch_norm(conv2d(input, weight, ...), ...)``.

    In training on 16-bit images, Hopper's convolution takes the batch's statistics while it stores
    its output. Batch norm then reads that output once and not twice. The statistics are those of
    the rounded output, as if the two ops ran one after the other.

    Args:
        input, weight, bias, stride, padding, dilation, groups: :func:`conv2d`'s.
        running_mean, running_var, training, momentum, eps: :func:`batch_norm`'s.
        norm_weight, norm_bias: its ``weight`` and ``bias``.

    Shapes, dtypes and errors are those of the two functions.
    """
    return _run(
        "conv2d_batch_norm",
        (input, weight, bias, stride, padding, dilation, groups),
        (running_mean, running_var, norm_weight, norm_bias, training, momentum, eps),
    )


def conv2d_batch_norm_relu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``relu(batch_norm(conv2d(input, weight, ...), ...))``; see :func:`conv2d_batch_norm`."""
    return _run(
        "conv2d_batch_norm_relu",
        (input, weight, bias, stride, padding, dilation, groups),
        (running_mean, running_var, norm_weight, norm_bias, training, momentum, eps),
    )


def conv2d_batch_norm_silu(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``silu(batch_norm(conv2d(input, weight, ...), ...))``; see :func:`conv2d_batch_norm`."""
    return _run(
        "conv2d_batch_norm_silu",
        (input, weight, bias, stride, padding, dilation, groups),
        (running_mean, running_var, norm_weight, norm_bias, training, momentum, eps),
    )


def conv2d_batch_norm_hardswish(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``hardswish(batch_norm(conv2d(input, weight, ...), ...))``; see :func:`conv2d_batch_norm`."""
    return _run(
        "conv2d_batch_norm_hardswish",
        (input, weight, bias, stride, padding, dilation, groups),
        (running_mean, running_var, norm_weight, norm_bias, training, momentum, eps),
    )


def conv2d_batch_norm_add_relu(
    input: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``relu(batch_norm(conv2d(input, weight, ...), ...) + residual)``; see :func:`conv2d_batch_norm`.

    Args:
        residual: as for :func:`batch_norm_add_relu`.
    """
    return _run(
        "conv2d_batch_norm_add_relu",
        (input, weight, bias, stride, padding, dilation, groups),
        (running_mean, running_var, norm_weight, norm_bias, training, momentum, eps),
        residual,
    )


def conv2d_batch_norm_relu_max_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    pool_kernel_size: int | tuple[int, int],
    pool_stride: int | tuple[int, int] | None = None,
    pool_padding: int | tuple[int, int] = 0,
    pool_dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``max_pool2d(relu(batch_norm(conv2d(input, weight, ...), ...)), pool_kernel_size, ...)``.

    For the first layer of a network, with windows of 3x3 or 5x5 of one channel or 3x3 of three,
    float32 and training on a GPU, the convolution's output is never written. Its statistics follow
    from mean and covariance of the windows of ``input``, because a convolution is linear. The
    gradient of ``bias`` is then zero, its exact value: batch norm subtracts what a bias adds. All
    other calls run :func:`conv2d` and :func:`batch_norm_relu_max_pool2d`.

    Args:
        input, weight, bias, stride, padding, dilation, groups: :func:`conv2d`'s.
        pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode: :func:`max_pool2d`'s.
        running_mean, running_var, training, momentum, eps: :func:`batch_norm`'s.
        norm_weight, norm_bias: its ``weight`` and ``bias``.

    Shapes, dtypes and errors are those of the functions.
    """
    name = "conv2d_batch_norm_relu_max_pool2d"
    conv = (input, weight, bias, stride, padding, dilation, groups)
    pool = (pool_kernel_size, pool_stride, pool_padding, pool_dilation, ceil_mode)
    training, momentum, eps = _norm_options(name, training, momentum, eps)
    if (
        not training
        or eps <= 0
        or (running_mean is None) != (running_var is None)
        or groups != 1
        or not writes_maxima_alone(input, weight, stride, padding, dilation, pool)
    ):
        norm = (running_mean, running_var, norm_weight, norm_bias, training, momentum, eps)
        return batch_norm_relu_max_pool2d(conv2d(*conv), *norm, *pool)
    operands = (input, weight, bias, norm_weight, norm_bias)
    return _call(
        name,
        name,
        (*operands, running_mean, running_var, momentum, eps),
        (*_windows(name, stride, padding, dilation), 1, *pool_window(name, *pool)),
    )


def _run(
    name: str, conv: tuple[Any, ...], norm: tuple[Any, ...], residual: Tensor | None = None
) -> Tensor:
    input, weight, bias, stride, padding, dilation, groups = conv
    running_mean, running_var, norm_weight, norm_bias, training, momentum, eps = norm
    training, momentum, eps = _norm_options(name, training, momentum, eps)
    after, activation = _AFTER[name]
    if (
        not training
        or eps <= 0
        or (running_mean is None) != (running_var is None)
        or not takes_statistics(input, weight, stride, padding, dilation, residual)
    ):
        added = () if residual is None else (residual,)
        output = conv2d(*conv)
        try:
            return after(output, *added, *norm)
        except RuntimeError as error:
            raise _arguments.error(error, name, {}, {}, _NORM_WORDS) from None
    if groups.__class__ is not int:
        groups = _arguments.integer(name, "groups", groups)
    return _call(
        name,
        "conv2d_batch_norm",
        (
            input,
            weight,
            bias,
            residual,
            norm_weight,
            norm_bias,
            running_mean,
            running_var,
            momentum,
            eps,
        ),
        (activation, *_windows(name, stride, padding, dilation), groups),
    )


def _windows(name: str, stride: Any, padding: Any, dilation: Any) -> tuple[Any, ...]:
    return (
        pair(name, "stride", stride),
        pair(name, "padding", padding),
        pair(name, "dilation", dilation),
    )


def _call(name: str, op: str, operands: tuple[Any, ...], options: tuple[Any, ...]) -> Tensor:
    """Calls ``op``, or the operator that also moves the running statistics, for the function ``name``.

    Args:
        operands: those of the convolution and the norm, then the running statistics, momentum, eps.
    """
    *tensors, running_mean, running_var, momentum, eps = operands
    try:
        if running_mean is None:
            return getattr(ops, op)(*tensors, eps, *options)[0]  # type: ignore[no-any-return]
        update = getattr(ops, op + "_update")
        return update(*tensors, running_mean, running_var, momentum, eps, *options)[0]  # type: ignore[no-any-return]
    except RuntimeError as error:
        input, weight, bias, *_, norm_weight, norm_bias = tensors
        optional = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
        optional |= {"running_mean": running_mean, "running_var": running_var}
        required = {"input": input, "weight": weight}
        raise _arguments.error(error, name, required, optional, _NORM_WORDS) from None
