"""Convolution."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._common import pair
from ._fft_conv import conv2d_by


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    algorithm: str = "direct",
) -> Tensor:
    """2-D convolution (cross-correlation) of a batch of images.

    The output is channels_last if ``input`` or ``weight`` is. float32, float64, bfloat16 and
    float16 run on our kernels. float32 on CUDA follows ``torch.backends.cudnn.allow_tf32``. Native
    computes integer and complex tensors.

    Args:
        input: ``(N, C, H, W)`` or ``(C, H, W)``, any strides.
        weight: ``(K, C / groups, R, S)``, same dtype.
        bias: ``(K,)`` or None.
        stride, dilation: one number, or one per dimension, in pixels.
        padding: one number, or one per dimension, in pixels; or ``"valid"`` (none); or ``"same"``
            (the output is as large as the input; an odd amount adds the extra row and column at
            the end; stride must be 1).
        groups: number of groups that divide C and K; each group is convolved on its own.
        algorithm: ``"direct"``; ``"fft"`` (:func:`fft_conv2d`, stride and dilation 1); or ``"auto"``:
            the transform if its cost model expects less time than any direct kernel needs. Traced
            programs then stay direct.
    Returns:
        ``(N, K, P, Q)``, or ``(K, P, Q)`` for an unbatched input, in the dtype of ``input``.
    Raises:
        ValueError: an unknown ``algorithm``, or ``"fft"`` with a stride or dilation.
        RuntimeError: as native: a wrong rank, dtype, device or channel count; a stride, dilation or
            groups below 1; negative padding; or a kernel larger than the padded input.
    """
    stride = pair("conv2d", "stride", stride)
    dilation = pair("conv2d", "dilation", dilation)
    if groups.__class__ is not int:
        groups = _arguments.integer("conv2d", "groups", groups)
    if algorithm != "direct":
        window = stride, padding, dilation, groups
        transformed = conv2d_by(algorithm, input, weight, bias, *window)
        if transformed is not None:
            return transformed
    try:
        if isinstance(padding, str):
            return ops.conv2d_padding(input, weight, bias, stride, padding, dilation, groups)
        padding = pair("conv2d", "padding", padding)
        if len(padding) > 2:  # the operator takes four: the uneven padding of "same"
            raise RuntimeError(
                "expected padding to be a single integer value or a list of 2 values to match the "
                f"convolution dimensions, but got padding={list(padding)}"
            )
        return ops.conv2d(input, weight, bias, stride, padding, dilation, groups)
    except RuntimeError as error:
        operands = {"input": input, "weight": weight}
        raise _arguments.error(error, "conv2d", operands, {"bias": bias}) from None
