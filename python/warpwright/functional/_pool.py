"""Max pooling, alone and after a relu."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _arguments
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from ._common import dynamo, exporting, pool_window


def max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Maximum over windows. NaN stays NaN. The first of equal maxima gets the gradient.

    Args:
        input: (N, C, H, W) or (C, H, W), contiguous or channels_last (kept in the output); float32,
            float64, bfloat16, float16, on the CPU also the integer types.
        kernel_size: of the window, in pixels: one number or (height, width). The next three
            arguments have the same forms.
        stride: from window to window; ``kernel_size`` if None.
        padding: at most half the kernel, filled with -inf.
        dilation: from tap to tap of a window.
        ceil_mode: include windows that begin inside the image and end outside.
        return_indices: return ``(output, indices)``; an index is the int64 position of the maximum
            in its H x W plane.
    Returns:
        (N, C, P, Q) or (C, P, Q), in the dtype of ``input``.
    Raises:
        RuntimeError: the window breaks these rules, or ``input`` has another number of dimensions.
        NotImplementedError: a dtype without a kernel.
    """
    if return_indices:
        return max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode)
    if (
        not (kernel_size.__class__ is padding.__class__ is dilation.__class__ is int)
        or not (stride is None or stride.__class__ is int)
        or ceil_mode.__class__ is not bool
    ):
        window = pool_window("max_pool2d", kernel_size, stride, padding, dilation, ceil_mode)
    else:  # pairs pass directly: a number would be converted by torch
        steps = () if stride is None else (stride, stride)
        size, pad, gaps = (kernel_size,) * 2, (padding,) * 2, (dilation,) * 2
        window = size, steps, pad, gaps, ceil_mode
    run = torch.max_pool2d if dynamo() or exporting() else ops.max_pool2d
    try:
        return run(input, *window)
    except RuntimeError as error:
        raise _arguments.error(error, "max_pool2d", {"input": input}, {}) from None


def max_pool2d_with_indices(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`max_pool2d` with the positions of the maxima, whatever ``return_indices`` says."""
    del return_indices
    name = "max_pool2d_with_indices"
    window = pool_window(name, kernel_size, stride, padding, dilation, ceil_mode)
    run = NATIVE_OPERATORS[name] if dynamo() or exporting() else ops.max_pool2d_with_indices
    try:
        return run(input, *window)
    except RuntimeError as error:
        raise _arguments.error(error, name, {"input": input}, {}) from None


def relu_max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``max_pool2d(relu(input), ...)`` in one op, without the intermediate tensor.

    The forward keeps one byte per output for the backward: the position of the maximum in its
    window, or that no element was positive. A zero output is always +0. Arguments and errors are
    :func:`max_pool2d`'s.
    """
    window = pool_window("relu_max_pool2d", kernel_size, stride, padding, dilation, ceil_mode)
    run = NATIVE_OPERATORS["relu_max_pool2d"] if dynamo() or exporting() else ops.relu_max_pool2d
    try:
        return run(input, *window)
    except RuntimeError as error:
        raise _arguments.error(error, "relu_max_pool2d", {"input": input}, {}) from None
