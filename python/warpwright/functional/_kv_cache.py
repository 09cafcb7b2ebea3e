"""Attention over a cache of keys and values, for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops


def attention_with_kv_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale * query key^T) value over cached keys and values, as flash-attn's function.

    Semantics are those of ``flash_attn_with_kvcache``. The lengths stay on the device, so a CUDA graph
    can repeat the call while the cache grows. It is for inference: no argument may require a
    gradient. Equal inputs give equal bits.

    Args:
        query: (batch, L, heads, head size), L new tokens per sequence; float32, float64, bfloat16 or
            float16. The head size is at most 512.
        k_cache: (pages, page size, key heads, head size) with a ``block_table``, else
            (batch, tokens, key heads, head size). The number of key heads divides that of query heads;
            groups of query heads share a key head. The elements of a head are adjacent.
        v_cache: as ``k_cache``.
        k, v: (batch, tokens, key heads, head size), or None: written into the cache in place, after
            ``cache_seqlens`` tokens of each sequence, and then attended to.
        cache_seqlens: (batch,) int32: the tokens per sequence that the cache holds before the call.
            The function does not change it.
        block_table: (batch, pages per sequence) int32: the pages of each sequence in order. Entries
            after its last token are not read.
        is_causal: the last query sees all keys, the query before it all but the last, and so on.
        scale: factor of the scores; 1 / sqrt(head size) if None.
    Returns:
        (batch, L, heads, head size) in the dtype of ``query``, contiguous; 0 for a query that sees
        no key.
    Raises:
        RuntimeError: a shape, dtype or device does not fit, or an argument requires a gradient.
        IndexError: a length or a page in use is out of range. On CUDA the sequence's output is NaN,
            and :func:`warpwright.check_errors` raises.
        NotImplementedError: integer or complex ``query``.
        TypeError: an argument has another type than in the signature.
    """
    function = "attention_with_kv_cache"
    if is_causal.__class__ is not bool:
        is_causal = _arguments.flag(function, "is_causal", is_causal)
    if scale is not None and scale.__class__ is not float:
        scale = _arguments.real(function, "scale", scale)
    required: dict[str, Tensor | None] = {
        "query": query,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "cache_seqlens": cache_seqlens,
    }
    if k is not None or v is not None:
        required |= {"k": k, "v": v}
    try:
        appended = 0
        if isinstance(k, Tensor) and isinstance(v, Tensor):
            _check_query(query, k)
            ops.kv_cache_append_(k_cache, v_cache, k, v, cache_seqlens, block_table)
            appended = k.shape[1]
        elif k is not None or v is not None:
            raise RuntimeError(f"{function}: k and v: expected both or neither")
        return ops.attention_with_kv_cache(
            query, k_cache, v_cache, cache_seqlens, block_table, appended, is_causal, scale
        )
    except RuntimeError as error:
        optional = {"block_table": block_table}
        raise _arguments.error(error, function, required, optional) from None


def _check_query(query: Tensor, k: Tensor) -> None:
    """What the query has to fit, before anything is written into the cache."""
    if not isinstance(query, Tensor):
        raise RuntimeError("attention_with_kv_cache: query: expected a tensor")
    fits = query.dim() == 4 and k.dim() == 4 and k.shape[2] > 0
    if (
        not fits
        or (query.shape[0], query.shape[3]) != (k.shape[0], k.shape[3])
        or query.shape[2] % k.shape[2]
    ):
        raise RuntimeError(
            "attention_with_kv_cache: query: expected (batch, tokens, heads, head size) with batch, "
            f"head size and a multiple of the heads of k, {tuple(k.shape)}, got {tuple(query.shape)}"
        )
    if query.dtype != k.dtype or query.device != k.device:
        raise RuntimeError(
            f"attention_with_kv_cache: query: expected {k.dtype} on {k.device}, as k, got "
            f"{query.dtype} on {query.device}"
        )
    if query.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "The function 'attention_with_kv_cache' is not differentiable with respect to argument "
            "'query'. This input cannot have requires_grad True."
        )
