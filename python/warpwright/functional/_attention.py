"""Attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _arguments
from .._ops import ops

FUNCTION = "scaled_dot_product_attention"


def window_limits(function: str, window_size: Any) -> dict[str, int]:
    """The operator's arguments; a side without a limit has none."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(
            f"{function}(): expected window_size to be a pair (left, right), but got "
            f"{_arguments.shown(window_size)}"
        )
    left, right = (_arguments.integer(function, "window_size", side) for side in window_size)
    if left < -1 or right < -1:
        raise ValueError(
            f"{function}(): expected both numbers of window_size to be at least 0, or -1 for no limit, "
            f"but got {(left, right)}"
        )
    sides = {"window_left": left, "window_right": right}
    return {name: side for name, side in sides.items() if side != -1}


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
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
        window_size: (left, right): query i sees keys i - left to i + right, -1 means no limit.
            Positions count from the first query and the first key, as for ``is_causal``. The rule of
            flash-attn counts from the last of each; both agree if L = S. Blocks of keys outside the
            window cost nothing. With ``is_causal`` or ``attn_mask``, each hides. A row that sees no
            key is 0, as are its gradients.
        softcap: replaces each scaled score x by ``softcap * tanh(x / softcap)``, before the mask.
            None or 0 means none.
        return_lse: return the log-sum-exp of each row of scores, too, after mask and softcap and
            before dropout. It has a gradient, so that calls over parts of the keys can be merged.
    Returns:
        (..., H, L, E_v) in the dtype of ``query``. With ``return_lse`` a pair of it and (..., H, L),
        float32 or for float64 float64; -inf for a row that sees no key.
    Raises:
        RuntimeError: dtypes or devices differ, shapes do not fit, the mask has another dtype, or
            ``dropout_p`` is outside [0, 1], or ``softcap`` is negative or not finite.
        ValueError: ``window_size`` is no pair of numbers of at least -1.
        NotImplementedError: complex inputs.
    """
    function = FUNCTION
    extras: dict[str, Any] = {} if window_size is None else window_limits(function, window_size)
    if softcap is not None and softcap != 0:
        extras["softcap"] = _arguments.real(function, "softcap", softcap)
    if dropout_p.__class__ is not float:
        dropout_p = _arguments.real(function, "dropout_p", dropout_p)
    if is_causal.__class__ is not bool:
        is_causal = _arguments.flag(function, "is_causal", is_causal)
    if scale is not None and scale.__class__ is not float:
        scale = _arguments.real(function, "scale", scale)
    if enable_gqa.__class__ is not bool:
        enable_gqa = _arguments.flag(function, "enable_gqa", enable_gqa)
    if return_lse.__class__ is not bool:
        return_lse = _arguments.flag(function, "return_lse", return_lse)
    try:
        if extras or return_lse:
            op = (
                ops.scaled_dot_product_attention_lse
                if return_lse
                else ops.scaled_dot_product_attention_extras
            )
            return op(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                **extras,
            )
        return ops.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except RuntimeError as error:
        operands = {"query": query, "key": key, "value": value}
        raise _arguments.error(error, function, operands, {"attn_mask": attn_mask}) from None
