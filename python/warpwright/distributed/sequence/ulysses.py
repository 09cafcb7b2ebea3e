"""Ulysses (DeepSpeed, arXiv 2309.14509): attention over a shared sequence by two all-to-alls.

Before the attention the ranks exchange a part of the sequence with all heads for the whole sequence with
a part of the heads. Attention then runs as on one GPU. A second exchange turns the output back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...functional import scaled_dot_product_attention
from .layouts import token_order

HEADS, TOKENS = 1, 2  # dimensions of (B, H, L, D)


def exchange(
    tensors: Iterable[Tensor], group: dist.ProcessGroup, cut: int, joined: int
) -> tuple[Tensor, ...]:
    """Cuts the dimension ``cut`` into one part per rank, sends each rank its part of every tensor, and joins
    what the ranks sent along ``joined``, by rank. All tensors travel in one collective.
    """
    n = dist.get_world_size(group)
    parts = [x.unflatten(cut, (n, -1)).movedim(cut, 0) for x in tensors]
    message = torch.cat([x.reshape(n, -1) for x in parts], dim=1)
    received = torch.empty_like(message)
    dist.all_to_all_single(received, message, group=group)
    sizes = [x[0].numel() for x in parts]
    return tuple(
        r.reshape(x.shape).movedim(0, joined).flatten(joined, joined + 1)
        for r, x in zip(received.split(sizes, dim=1), parts, strict=True)
    )


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, cut: int, joined: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.cut, ctx.joined = group, cut, joined
        return exchange(tensors, group, cut, joined)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *exchange(grads, ctx.group, cut=ctx.joined, joined=ctx.cut)


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
    q, k, v = Exchange.apply(group, HEADS, TOKENS, q, k, v)
    reordered = is_causal and layout != "contiguous"  # else the order of keys changes nothing
    if reordered:
        order = token_order(q.shape[2], dist.get_world_size(group), layout).flatten().to(q.device)
        back = order.argsort()
        q, k, v = (x.index_select(2, back) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, None, 0.0, is_causal, scale, gqa)
    if reordered:
        out = out.index_select(2, order)
    (out,) = Exchange.apply(group, TOKENS, HEADS, out)
    return out
