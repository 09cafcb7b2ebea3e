"""Attention."""

from __future__ import annotations

from torch import Tensor

from .. import _arguments
from .._ops import ops


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + mask) value, without the score matrix in memory.

    The algorithm is FlashAttention's (arXiv 2205.14135).

    Args:
        query: (..., H, L, E); float32, float64, bfloat16 or float16.
        key: (..., H, S, E). value: (..., H, S, E_v). Leading dimensions broadcast.
        attn_mask: broadcasts to (..., H, L, S); bool (False hides) or added to the scores. It may
            require grad. If a row hides every key, its output and its gradients are 0.
        dropout_p: probability of dropping a weight, in [0, 1], rounded to a multiple of 2^-16;
            always applied, as in native.
        is_causal: hide key j from query i if j > i. With ``attn_mask``, both hide.
        scale: factor of the scores; 1 / sqrt(E) if None.
        enable_gqa: the number of key and value heads divides that of the query; groups of query
            heads share a key head.
    Returns:
        (..., H, L, E_v) in the dtype of ``query``.
    Raises:
        RuntimeError: dtypes or devices differ, shapes do not fit, the mask has another dtype, or
            ``dropout_p`` is outside [0, 1].
        NotImplementedError: complex inputs.
    """
    function = "scaled_dot_product_attention"
    if dropout_p.__class__ is not float:
        dropout_p = _arguments.real(function, "dropout_p", dropout_p)
    if is_causal.__class__ is not bool:
        is_causal = _arguments.flag(function, "is_causal", is_causal)
    if scale is not None and scale.__class__ is not float:
        scale = _arguments.real(function, "scale", scale)
    if enable_gqa.__class__ is not bool:
        enable_gqa = _arguments.flag(function, "enable_gqa", enable_gqa)
    try:
        return ops.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except RuntimeError as error:
        operands = {"query": query, "key": key, "value": value}
        raise _arguments.error(error, function, operands, {"attn_mask": attn_mask}) from None
