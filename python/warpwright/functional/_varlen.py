"""Attention of packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._attention import window_limits

FUNCTION = "attention_varlen"


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Any:
    """softmax(scale * query key^T) value within each of the sequences that are packed in a row.

    Semantics are those of flash-attn's ``flash_attn_varlen_func``, and of
    ``torch.nn.attention.varlen.varlen_attn``. Sequence n has the queries from ``cu_seqlens_q[n]`` to
    ``cu_seqlens_q[n + 1] - 1`` and the keys from ``cu_seqlens_k[n]`` to ``cu_seqlens_k[n + 1] - 1``. The
    numbers stay on the device, so a CUDA graph can repeat the call with other lengths. Equal inputs
    give equal bits, in the gradients too.

    Args:
        query: (tokens, heads, E); float32, float64, bfloat16 or float16.
        key: (key tokens, key heads, E). value: (key tokens, key heads, E_v).
        cu_seqlens_q: (sequences + 1,) int32, ascending from 0 to the number of tokens. Sequences may be
            empty. Tokens before the first number and after the last belong to no sequence: their output
            and gradients are 0.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q, max_seqlen_k: no sequence has more queries, or keys. They bound the work that the
            host plans; larger numbers cost little.
        is_causal: the last query of a sequence sees all of its keys, the query before it all but the
            last, and so on.
        window_size: (left, right): a query at position p sees keys p - left to p + right, -1 means no
            limit. Positions count from the end of the sequence, as for ``is_causal``. (-1, 0) is
            ``is_causal``.
        softcap: replaces each scaled score x by ``softcap * tanh(x / softcap)``. None or 0 means none.
        scale: factor of the scores; 1 / sqrt(E) if None.
        enable_gqa: the number of key heads divides that of query heads; groups of query heads share a
            key head.
        return_lse: return the log-sum-exp of each row of scores, too. It has a gradient.
    Returns:
        (tokens, heads, E_v) in the dtype of ``query``, contiguous; 0 for a query that sees no key. With
        ``return_lse`` a pair of it and (heads, tokens), float32 or for float64 float64; -inf for a
        query that sees no key.
    Raises:
        RuntimeError: a shape, dtype or device does not fit, or ``softcap`` is negative or not finite.
        IndexError: the numbers of a ``cu_seqlens`` do not ascend within the tokens, or a sequence is
            longer than its maximum. On CUDA all results are NaN, and
            :func:`warpwright.check_errors` raises.
        ValueError: ``window_size`` is no pair of numbers of at least -1.
        NotImplementedError: integer or complex ``query``.
        TypeError: an argument has another type than in the signature.
    """
    limits: dict[str, int] = {} if window_size is None else window_limits(FUNCTION, window_size)
    cap = 0.0 if softcap is None else _arguments.real(FUNCTION, "softcap", softcap)
    if is_causal.__class__ is not bool:
        is_causal = _arguments.flag(FUNCTION, "is_causal", is_causal)
    if enable_gqa.__class__ is not bool:
        enable_gqa = _arguments.flag(FUNCTION, "enable_gqa", enable_gqa)
    if return_lse.__class__ is not bool:
        return_lse = _arguments.flag(FUNCTION, "return_lse", return_lse)
    if scale is not None and scale.__class__ is not float:
        scale = _arguments.real(FUNCTION, "scale", scale)
    max_seqlen_q = _length("max_seqlen_q", max_seqlen_q)
    max_seqlen_k = _length("max_seqlen_k", max_seqlen_k)
    try:
        if not enable_gqa and isinstance(query, Tensor) and isinstance(key, Tensor):
            _check_heads(query, key)
        out, lse = ops.attention_varlen(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            is_causal,
            scale,
            limits.get("window_left"),
            limits.get("window_right"),
            cap,
        )
    except RuntimeError as error:
        operands: dict[str, Tensor | None] = {
            "query": query,
            "key": key,
            "value": value,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
        }
        raise _arguments.error(error, FUNCTION, operands, {}) from None
    if not return_lse:
        return out
    return out, lse if lse.dtype == out.dtype else lse.float()


def _length(name: str, value: Any) -> Any:
    if torch.compiler.is_compiling() or isinstance(value, torch.SymInt):
        return value  # it may be a symbol
    return _arguments.integer(FUNCTION, name, value)


def _check_heads(query: Tensor, key: Tensor) -> None:
    if query.dim() == 3 and key.dim() == 3 and query.shape[1] != key.shape[1]:
        raise RuntimeError(
            f"{FUNCTION}: key: expected {query.shape[1]} heads as query, or enable_gqa=True, got "
            f"{key.shape[1]}"
        )
