"""The attention function that transformers' models look up as "warpwright"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import sdpa_attention

from ... import functional
from ..._arch import FLOATING, why_no_kernel
from ..._ops import ops
from ._masks import window_mask, window_of

native_attention = sdpa_attention.sdpa_attention_forward

# Arguments that our op does not have. If one is given, transformers' own function runs: it raises,
# warns or ignores the argument.
NOT_OURS = ("s_aux", "cache", "output_attentions")


def _runs_here(query: Tensor, kwargs: dict[str, Any]) -> bool:
    for name in NOT_OURS:
        value = kwargs.get(name)
        if value is not None and value is not False:
            return False
    if torch.compiler.is_compiling():
        return query.dtype in FLOATING and query.device.type in ("cpu", "cuda")
    return why_no_kernel(query) is None and not torch.jit.is_tracing()  # type: ignore[attr-defined]


def _split_again(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thirds of one projection (GPT-2's), split by our operator instead of torch's.

    Attention's backward then writes the projection's gradient. Torch's split concatenates three.
    """
    whole = query._base
    if whole is None or key._base is not whole or value._base is not whole:
        return query, key, value
    batch, heads, tokens, _ = query.shape
    if not whole.is_contiguous() or whole.numel() != 3 * query.numel():
        return query, key, value
    thirds = ops.split_qkv(whole.view(batch, tokens, -1), heads)
    q, k, v = (third.transpose(1, 2) for third in thirds)
    for ours, theirs in ((q, query), (k, key), (v, value)):
        if ours.storage_offset() != theirs.storage_offset() or ours.stride() != theirs.stride():
            return query, key, value
    return q, k, v


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers' function for "sdpa", but K and V are never repeated for all heads.

    Args:
        module: the attention layer. Its ``num_key_value_groups`` is read, and its ``is_causal`` if
            the argument is None.
        query: (batch, heads, queries, head size); key and value may have fewer heads.
        attention_mask: boolean, or added to the scores. If it is None, ``is_causal`` decides.
        position_bias: added to the scores too (T5 in transformers 5).
        softcap: caps the scores by tanh (Gemma 2), as transformers' "eager" does. Its "sdpa" refuses it.
    Returns:
        (batch, queries, heads, head size), and None for the weights.
    """
    window = window_of(attention_mask)
    runs_here = _runs_here(query, kwargs)
    if window is not None and (not runs_here or position_bias is not None):
        attention_mask, window = window_mask(window, query, key), None
    if not runs_here:
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        if softcap is not None:
            kwargs["softcap"] = softcap
        output: tuple[Tensor, None] = native_attention(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output
    if query.requires_grad and not torch.compiler.is_compiling() and query.shape == key.shape:
        query, key, value = _split_again(query, key, value)
    queries = query.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if window is not None:
        attention_mask, is_causal = None, True
    # The shape first: with dynamic shapes this is symbolic, and the op wants a bool.
    is_causal = queries > 1 and attention_mask is None and is_causal
    if is_causal and key.shape[2] > queries:
        # The first step of a static cache: its other slots are still empty.
        key, value = key[:, :, :queries], value[:, :, :queries]
        if position_bias is not None:
            position_bias = position_bias[:, :, :, :queries]
    if attention_mask is not None and attention_mask.ndim == 4:
        attention_mask = attention_mask[:, :, :, : key.shape[2]]
    if position_bias is not None:
        attention_mask = sdpa_attention.create_position_bias_mask(
            position_bias, attention_mask, is_causal, query, key
        )
        is_causal = False
    result = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        is_causal,
        scale=scaling,
        enable_gqa=getattr(module, "num_key_value_groups", 1) > 1,
        window_size=None if window is None else (window - 1, 0),
        softcap=softcap,
    )
    return result.transpose(1, 2).contiguous(), None
