"""Transposed convolution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._common import pair


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """2-D transposed convolution of a batch of images: the input gradient of :func:`conv2d`.

    The output is channels_last if ``input`` or ``weight`` is. float32, float64, bfloat16 and
    float16 run on our kernels. float32 on CUDA follows ``torch.backends.cudnn.allow_tf32``. Native
    computes integer and complex tensors.

    Args:
        input: ``(N, C, H, W)`` or ``(C, H, W)``, any strides.
        weight: ``(C, K / groups, R, S)``, same dtype.
        bias: ``(K,)`` or None.
        stride, dilation: one number, or one per dimension, in pixels of the output.
        padding: one number, or one per dimension: rows and columns cut off at each side of the
            output.
        output_padding: one number, or one per dimension: rows and columns added after the last.
            Below the stride or the dilation.
        groups: number of groups that divide C and K; each group is computed on its own.
    Returns:
        ``(N, K, P, Q)``, or ``(K, P, Q)`` for an unbatched input, in the dtype of ``input``.
        P is ``(H - 1) * stride - 2 * padding + dilation * (R - 1) + output_padding + 1``.
    Raises:
        RuntimeError: as native: a wrong rank, dtype, device or channel count; a stride, dilation or
            groups below 1; negative padding; an output padding that is too large; or an output
            without pixels.
    """
    stride = pair("conv_transpose2d", "stride", stride)
    padding = pair("conv_transpose2d", "padding", padding)
    output_padding = pair("conv_transpose2d", "output_padding", output_padding)
    dilation = pair("conv_transpose2d", "dilation", dilation)
    if groups.__class__ is not int:
        groups = _arguments.integer("conv_transpose2d", "groups", groups)
    try:
        return ops.conv_transpose2d(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    except RuntimeError as error:
        operands = {"input": input, "weight": weight}
        raise _arguments.error(error, "conv_transpose2d", operands, {"bias": bias}) from None


def conv_transpose2d_cat(
    skip: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    groups: int = 1,
    dilation: int | Sequence[int] = 1,
    *,
    skip_first: bool = True,
) -> Tensor:
    """``torch.cat([skip, conv_transpose2d(input, weight, ...)], -3)``: a decoder's concatenation.

    On Hopper, in 16 bits and channels_last, with windows that do not overlap, the transposed
    convolution writes into its slice of the result. Other calls run one op after the other. The
    gradient of ``skip`` is a view of the result's gradient, as native's is.

    Args:
        skip: ``(N, any, P, Q)``, of the sizes of the transposed convolution except for channels.
        input, weight, bias, stride, padding, output_padding, groups, dilation:
            :func:`conv_transpose2d`'s.
        skip_first: the order of the two; False: ``skip`` comes last.
    Returns:
        The concatenation over channels.
    Raises:
        RuntimeError: as :func:`conv_transpose2d`, or ``skip`` has another size.
    """
    name = "conv_transpose2d_cat"
    stride = pair(name, "stride", stride)
    padding = pair(name, "padding", padding)
    output_padding = pair(name, "output_padding", output_padding)
    dilation = pair(name, "dilation", dilation)
    if groups.__class__ is not int:
        groups = _arguments.integer(name, "groups", groups)
    skip_first = _arguments.flag(name, "skip_first", skip_first)
    windows = stride, padding, output_padding, groups, dilation
    try:
        return ops.conv_transpose2d_cat(skip, input, weight, bias, *windows, skip_first)
    except RuntimeError as error:
        operands = {"skip": skip, "input": input, "weight": weight}
        raise _arguments.error(error, name, operands, {"bias": bias}) from None
