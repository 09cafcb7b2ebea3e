"""Linear layers whose weight is stored in integers."""

from __future__ import annotations

from torch import Tensor

from .. import _arguments
from .._ops import ops


def linear_quantized(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    fragments: bool = False,
    ahead: bool = False,
) -> Tensor:
    """``input @ W.T + bias`` of a weight in integer codes, ``W = (codes - zeros) * scales``.

    The gradient goes to ``input`` and ``bias``, as training an adapter needs; codes and scales are
    constants. On Hopper, for up to 2048 rows (int8: 1024) of a 16-bit ``input`` or of its gradient,
    the kernels convert codes in fragment order to operands in registers. Other calls first write
    the weight to memory in the dtype of ``input``. :class:`warpwright.nn.QuantizedLinear` keeps
    the order that its device needs.

    Args:
        input: (..., in_features), any strides; float32, float64, bfloat16 or float16.
        codes: (out_features, in_features) int8, or (out_features, in_features / 2) uint8 of two 4-bit
            codes per byte, the low nibble first.
        scales: (out_features) of int8 codes, or (out_features, groups), any floating dtype.
        zeros: (out_features, groups) uint8, the codes of zero, 0 to 15; None: 8. Only of 4-bit codes.
        bias: (out_features), the dtype of ``input``.
        fragments: ``codes`` come from :func:`warpwright.quantization.to_fragments`. The fast path then
            also needs scales and zeros with adjacent features (``scales.t()`` contiguous).
        ahead: no kernel that may still run writes codes, scales or zeros. Their loads may then begin
            before the previous kernel of the stream ends.
    Returns:
        (..., out_features) in the dtype of ``input``.
    Raises:
        RuntimeError: shapes, dtypes or devices do not fit; scales require a gradient.
        NotImplementedError: ``input`` is not real floating-point.
    """
    if fragments.__class__ is not bool:
        fragments = _arguments.flag("linear_quantized", "fragments", fragments)
    if ahead.__class__ is not bool:
        ahead = _arguments.flag("linear_quantized", "ahead", ahead)
    try:
        return ops.linear_quantized(input, codes, scales, zeros, bias, fragments, ahead)
    except RuntimeError as error:
        operands = {"input": input, "codes": codes, "scales": scales}
        optional = {"zeros": zeros, "bias": bias}
        raise _arguments.error(error, "linear_quantized", operands, optional) from None
