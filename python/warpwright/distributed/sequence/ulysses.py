"""Ulysses (DeepSpeed, arXiv 2309.14509): attention over a shared sequence by two all-to-alls.

Before the attention the ranks exchange a part of the sequence with all heads for the whole sequence with
a part of the heads. Attention then runs as on one GPU. A second exchange turns the output back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...functional import scaled_dot_product_attention
from .layouts import token_order


def _exchange(message: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    return received


def heads_for_tokens(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """(B, H, L, D) of all heads -> (B, H / n, n L, D) of all tokens, by rank. One collective."""
    n = dist.get_world_size(group)
    cut = [x.unflatten(1, (n, -1)).movedim(1, 0) for x in tensors]  # (n, B, H / n, L, D)
    message = torch.cat([x.reshape(n, -1) for x in cut], dim=1)
    sizes = [x[0].numel() for x in cut]
    received = _exchange(message, group).split(sizes, dim=1)
    return [
        r.reshape(x.shape).movedim(0, 2).flatten(2, 3) for r, x in zip(received, cut, strict=True)
    ]


def tokens_for_heads(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """The inverse of `heads_for_tokens`."""
    n = dist.get_world_size(group)
    cut = [x.unflatten(2, (n, -1)).movedim(2, 0) for x in tensors]  # (n, B, H / n, L, D)
    message = torch.cat([x.reshape(n, -1) for x in cut], dim=1)
    sizes = [x[0].numel() for x in cut]
    received = _exchange(message, group).split(sizes, dim=1)
    return [
        r.reshape(x.shape).movedim(0, 1).flatten(1, 2) for r, x in zip(received, cut, strict=True)
    ]


class HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(heads_for_tokens(list(tensors), group))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *tokens_for_heads(list(grads), ctx.group)


class TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return tokens_for_heads([x], group)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, heads_for_tokens([grad], ctx.group)[0]


def ulysses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    layout: str,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """As ring attention, for a number of ranks that divides the key heads."""
    q, k, v = HeadsForTokens.apply(group, q, k, v)
    reordered = is_causal and layout != "contiguous"  # else the order of keys changes nothing
    if reordered:
        order = token_order(q.shape[2], dist.get_world_size(group), layout).flatten().to(q.device)
        back = order.argsort()
        q, k, v = (x.index_select(2, back) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, None, 0.0, is_causal, scale, gqa)
    if reordered:
        out = out.index_select(2, order)
    return TokensForHeads.apply(group, out)
