"""Our operators of attention in terms of native's functions."""

from __future__ import annotations

import torch
from torch import Tensor

native = torch.nn.functional


def _paged(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """(batch, key heads, tokens, head size): a copy of the pages in the order of the tokens."""
    if block_table is not None:
        last = max(cache.shape[0] - 1, 0)  # entries that no token needs may be anything
        cache = cache[block_table.long().clamp(0, last)].flatten(1, 2)
    return cache.transpose(1, 2)


def attention_with_kv_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    appended: int = 0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """The pages gathered, and the tokens that a query does not see masked."""
    if query.numel() == 0:  # for which native's fused CUDA kernels return None
        return torch.empty_like(query, memory_format=torch.contiguous_format)
    key, value = _paged(k_cache, block_table), _paged(v_cache, block_table)
    seen = (cache_seqlens + appended).view(-1, 1, 1, 1)
    if is_causal:
        tokens = query.shape[1]
        seen = seen - torch.arange(tokens - 1, -1, -1, device=query.device).view(-1, 1)
    mask = torch.arange(key.shape[2], device=query.device) < seen
    # A copy: native has CUDA kernels that fault on a query that begins off 16 bytes.
    query = query.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    output = native.scaled_dot_product_attention(
        query, key, value, mask, scale=scale, enable_gqa=True
    )
    # Native's kernels disagree about a row that sees no key.
    output = output.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return output.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def kv_cache_append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
) -> None:
    token = cache_seqlens.long().view(-1, 1) + torch.arange(k.shape[1], device=k.device)
    if block_table is None:
        page = torch.arange(k.shape[0], device=k.device).view(-1, 1)
    else:
        size = k_cache.shape[1]
        page, token = block_table.long().gather(1, token // size), token % size
    k_cache.index_put_((page, token), k)
    v_cache.index_put_((page, token), v)


def _token_places(ends: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token: its sequence, its distance from the sequence's end, and whether it is in one."""
    token = torch.arange(tokens, device=ends.device)
    last = ends[1:].long()
    sequence = torch.bucketize(token, last, right=True)
    inside = (sequence < last.shape[0]) & (token >= ends[0])
    end = last[sequence.clamp(max=max(last.shape[0] - 1, 0))] if last.shape[0] else token
    return sequence, token - end, inside


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """One dense call that hides the pairs of different sequences."""
    of_q, q_place, q_inside = _token_places(cu_seqlens_q, query.shape[0])
    of_k, k_place, k_inside = _token_places(cu_seqlens_k, key.shape[0])
    mask = (of_q[:, None] == of_k) & q_inside[:, None] & k_inside
    ahead = k_place - q_place[:, None]
    if is_causal:
        mask &= ahead <= 0
    if window_right is not None:
        mask &= ahead <= window_right
    if window_left is not None:
        mask &= ahead >= -window_left
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    out, lse = scaled_dot_product_attention_lse(
        q, k, v, mask, scale=scale, enable_gqa=True, softcap=softcap
    )
    wide = query.dtype in (torch.float32, torch.float64)
    return (
        out.transpose(0, 1).clone(memory_format=torch.contiguous_format),
        lse.to(torch.float64 if wide else torch.float32),
    )


def _inside_window(
    query: Tensor, key: Tensor, is_causal: bool, left: int | None, right: int | None
) -> Tensor:
    """(L, S): whether a query sees a key."""
    rows = torch.arange(query.shape[-2], device=query.device)[:, None]
    ahead = torch.arange(key.shape[-2], device=query.device) - rows
    inside = torch.ones_like(ahead, dtype=torch.bool)
    if right is not None:
        inside &= ahead <= right
    if is_causal:
        inside &= ahead <= 0
    if left is not None:
        inside &= ahead >= -left
    return inside


def scaled_dot_product_attention_extras(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    inside = _inside_window(query, key, is_causal, window_left, window_right)
    if attn_mask is None:
        mask = inside
    elif attn_mask.dtype == torch.bool:
        mask = attn_mask & inside
    else:
        mask = attn_mask.masked_fill(~inside, float("-inf"))
    if softcap == 0.0:
        return native.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    accum = torch.promote_types(query.dtype, torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * (query.to(accum) @ key.to(accum).mT)
    scores = softcap * torch.tanh(scores / softcap)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    else:
        scores = scores + mask.to(accum)
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    return (native.dropout(weights, dropout_p) @ value.to(accum)).to(query.dtype)


def scaled_dot_product_attention_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_left: int | None = None,
    window_right: int | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Also the log-sum-exp of the scores. Native's public functions do not return it."""
    inside = _inside_window(query, key, is_causal, window_left, window_right)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    accum = torch.promote_types(query.dtype, torch.float32)
    factor = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = factor * (query.to(accum) @ key.to(accum).mT)
    if softcap != 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        inside = inside & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(accum)
    scores = scores.masked_fill(~inside, float("-inf"))
    hidden = (scores == float("-inf")).all(-1, keepdim=True)
    safe = scores.masked_fill(hidden, 0.0)
    weights = safe.softmax(-1).masked_fill(hidden, 0.0)
    out = native.dropout(weights, dropout_p) @ value.to(accum)
    lse = safe.logsumexp(-1).masked_fill(hidden.squeeze(-1), float("-inf"))
    return out.to(query.dtype), lse
