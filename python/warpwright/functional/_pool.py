"""Max pooling, alone and after a relu; global average pooling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from ._common import dynamo, exporting, pool_window, trains_on_gpu


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


WHY_NOT_GLOBAL = "only the mean of whole planes, output size 1 or (1, 1), has a kernel"


def is_one(output_size: Any) -> bool:
    """Whether it is the number 1, or two of them."""
    if type(output_size) is int:
        return bool(output_size == 1)
    if type(output_size) not in (tuple, list, torch.Size) or len(output_size) != 2:
        return False
    return all(type(size) is int and size == 1 for size in output_size)


def is_global_pool(input: Any, output_size: Any) -> bool:
    return isinstance(input, Tensor) and input.dim() in (3, 4) and is_one(output_size)


def adaptive_avg_pool2d(
    input: Tensor, output_size: int | tuple[int | None, int | None] | None
) -> Tensor:
    """The mean of each plane, for an output size of 1. Native computes other sizes.

    On a GPU the forward is one pass over ``input``, for any strides. The backward is one kernel, which
    writes the gradient in the memory format of ``input``. Native's divides an expanded tensor, and the
    layer before the pool then copies the quotient into its own format.

    Args:
        input: (N, C, H, W) or (C, H, W), any strides; float32, float64, bfloat16, float16.
        output_size: 1 or (1, 1) for the kernel; otherwise as for native.
    Returns:
        (N, C, 1, 1) or (C, 1, 1), in the dtype of ``input``, channels_last if ``input`` is. NaN if
        planes are empty.
    Raises:
        RuntimeError: an integer ``input``, or as native for other output sizes.
        TypeError: an argument of another type.
    """
    is_ours = is_global_pool(input, output_size)
    if not is_ours or ((dynamo() or exporting()) and not trains_on_gpu(input)):
        if not torch.compiler.is_compiling():  # native would read freed memory
            _arguments.require_storage("adaptive_avg_pool2d", "input", input)
        return torch.nn.functional.adaptive_avg_pool2d(input, output_size)
    try:
        return ops.global_avg_pool2d(input)
    except RuntimeError as error:
        raise _arguments.error(error, "adaptive_avg_pool2d", {"input": input}, {}) from None
