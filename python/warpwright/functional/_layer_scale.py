"""A residual addition with a factor per channel and one per sample."""

from __future__ import annotations

from torch import Tensor

from .. import _arguments
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from ._common import dynamo, exporting


def layer_scale_add(
    input: Tensor, residual: Tensor, scale: Tensor, sample_scale: Tensor | None = None
) -> Tensor:
    """``residual + scale * input * sample_scale``: the end of a residual block, in one pass each way.

    ``scale`` is LayerScale (arXiv 2103.17239), a factor per channel. ``sample_scale`` is stochastic
    depth (arXiv 1603.09382), a factor per sample: 0, or one over the probability that a block stays.
    On a GPU the result is rounded once if channels are innermost in memory. Autograd keeps ``input``
    and the factors. A ``sample_scale`` that requires a gradient makes native's single ops run.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16.
        residual: the shape of ``input``.
        scale: a shape that broadcasts to that of ``input``, with at most one dimension other than 1:
            (C, 1, 1) next to (N, C, H, W), or (C,) next to (N, L, C).
        sample_scale: (N, 1, ..., 1), with as many dimensions as ``input``, or None for factors of 1.
    Returns:
        The shape of ``input``, in the dtype that native's formula gives: float32 for a bfloat16
        ``input`` next to a float32 ``scale`` or ``residual``.
    Raises:
        RuntimeError: a shape or device that does not fit, or a tensor that is not floating point;
            the message names the argument.
        TypeError: an argument is no tensor.
    """
    if dynamo() or exporting():
        return NATIVE_OPERATORS["layer_scale_add"](input, residual, scale, sample_scale)
    try:
        return ops.layer_scale_add(input, residual, scale, sample_scale)
    except RuntimeError as error:
        required = {"input": input, "residual": residual, "scale": scale}
        optional = {"sample_scale": sample_scale}
        raise _arguments.error(error, "layer_scale_add", required, optional) from None
