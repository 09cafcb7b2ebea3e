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

    Args:
        query: (..., H, L, E); float32, float64, bfloat16 or float16.
        key: (..., H, S, E). value: (..., H, S, E_v). Leading dimensions broadcast.
        attn_mask: broadcasts to (..., H, L, S); bool (False hides) or added to the scores. It may
            require grad. A row that is hidden entirely gives 0, and so do its gradients.
        dropout_p: probability of dropping a weight, always applied (as in native).
        is_causal: hide key j from query i where j > i; together with ``attn_mask``, both hide.
        scale: default 1 / sqrt(E).
        enable_gqa: the heads of key and value divide those of query and are shared by groups.
    Raises:
        RuntimeError: mixed dtypes or devices, shapes that do not fit, a mask of another dtype,
            ``dropout_p`` outside [0, 1].
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
