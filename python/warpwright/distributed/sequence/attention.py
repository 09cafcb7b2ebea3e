"""``ring_attention``: attention over a sequence that the ranks of a group share."""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from ..._arch import why_no_kernel
from . import transport
from .cost import (
    INFINIBAND,
    NVLINK,
    Hardware,
    Shape,
    choose_heads_at_once,
    choose_method,
    why_no_ulysses,
)
from .layouts import Group, check_layout, group_of
from .ring import Ring, RingAttention
from .ulysses import ulysses

METHODS = ("auto", "ring", "ulysses")
# The calls on which all ranks of a group have agreed.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[Any, ...]]] = (
    weakref.WeakKeyDictionary()
)


@_disable_dynamo  # torch.compiler.disable, but imports torch._dynamo at the first call
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    group: Group = None,
    is_causal: bool = False,
    scale: float | None = None,
    layout: str = "zigzag",
    method: str = "auto",
    heads_at_once: int | None = None,
) -> Tensor:
    """softmax(scale * query key^T) value over a sequence that the ranks of ``group`` share.

    Ring attention (arXiv 2310.01889) with the layouts of arXiv 2407.21783 (zigzag) and 2311.09431
    (striped), or Ulysses (arXiv 2309.14509). Every rank of the group makes the same call with its own
    tokens. Sums of the output, dK and dV are float32 (float64 for float64). Two runs give the same
    bits. There is no second derivative.

    Args:
        query: (B, H, L, E), this rank's L tokens in ``layout``; float32, float64, bfloat16 or float16.
        key: (B, H_kv, L_k, E). value: (B, H_kv, L_k, E_v). H_kv divides H; groups of query heads share
            a key head. With ``is_causal``, L_k is L.
        group: a process group, or a mesh of 1 dimension; None is the default group.
        is_causal: hide the keys of later tokens of the whole sequence.
        scale: factor of the scores; 1 / sqrt(E) if None.
        layout: ``"zigzag"``, ``"striped"`` or ``"contiguous"``: how `shard` cut the sequence. It
            matters only with ``is_causal``.
        method: ``"ring"``, ``"ulysses"`` (the ranks divide H_kv), or ``"auto"``: the one that `explain`
            predicts to be faster.
        heads_at_once: key heads that travel together in the ring, a divisor of H_kv. Fewer take less
            memory; None chooses the fewest that fill a GPU.
    Returns:
        (B, H, L, E_v) in the dtype of ``query``: this rank's tokens.
    Raises:
        ValueError: shapes do not fit or differ between the ranks, or an argument is not one of those
            above.
        TypeError: no kernel takes a tensor (its dtype, its device, a subclass such as DTensor), or
            dtypes differ.
        RuntimeError: a rank failed; the text is that of the backend.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        query, key, value = (x.to(lower) for x in (query, key, value))
    group = group_of(group)
    ranks = dist.get_world_size(group)
    _check_operands(query, key, value, is_causal)
    _check_options(query, key, ranks, is_causal, layout, method, heads_at_once)
    batch, heads, length, head_dim = query.shape
    key_heads = key.shape[1]
    if method == "auto":
        size = query.element_size()
        shape = Shape(batch, heads, key_heads, length * ranks, head_dim, is_causal, size)
        method = choose_method(shape, ranks, _link(group), layout)
    options = (is_causal, scale, layout, method, heads_at_once)
    _agree(group, (tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype), options)
    if method == "ulysses":
        with torch.autocast(kind, enabled=False):
            return ulysses(query, key, value, group, layout, is_causal, scale)
    at_once = heads_at_once or choose_heads_at_once(batch, heads, key_heads, length)
    ring = Ring(group, layout, is_causal, scale, at_once, transport.choose(group, query.device))
    return RingAttention.apply(query, key, value, ring)


def _link(group: dist.ProcessGroup) -> Hardware:
    """By torchrun's number of ranks per host; without it all ranks are on one host."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    hosts = {rank // per_host for rank in dist.get_process_group_ranks(group)}
    return INFINIBAND if len(hosts) > 1 else NVLINK


def _check_operands(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> None:
    for name, x in (("query", q), ("key", k), ("value", v)):
        if type(x) not in (Tensor, torch.nn.Parameter):  # a DTensor's local part is not the call's
            raise TypeError(f"{name}: a {type(x).__name__}, expected a plain tensor")
        reason = why_no_kernel(x)
        if reason is not None:
            raise TypeError(f"{name}: {reason}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of query, {q.dtype}; got {x.dtype}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected (B, H, L, E), got {tuple(x.shape)}")
        if not x.numel():
            raise ValueError(f"{name}: expected at least one element, got {tuple(x.shape)}")
    expected = (q.shape[0], k.shape[1], k.shape[2])
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"key: expected the batch size and head dimension of query {tuple(q.shape)}, and a number "
            f"of heads that divides query's; got {tuple(k.shape)}"
        )
    if tuple(v.shape[:3]) != expected:
        raise ValueError(f"value: expected (*{expected}, E_v), got {tuple(v.shape)}")
    if is_causal and k.shape[2] != q.shape[2]:
        raise ValueError(
            f"key: expected as many tokens as query with is_causal, {q.shape[2]}; got {k.shape[2]}"
        )


def _check_options(
    q: Tensor,
    k: Tensor,
    ranks: int,
    is_causal: bool,
    layout: str,
    method: str,
    heads_at_once: int | None,
) -> None:
    check_layout(layout)
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}; got {method!r}")
    if is_causal and layout == "zigzag" and ranks > 1 and q.shape[2] % 2:
        raise ValueError(
            f"query: expected an even number of tokens in the zigzag layout, got {q.shape[2]}"
        )
    key_heads = k.shape[1]
    reason = why_no_ulysses(q.shape[1], key_heads, ranks)
    if method == "ulysses" and reason is not None:
        raise ValueError(f"method: ulysses exchanges whole key heads, but {reason}")
    if heads_at_once is not None and (heads_at_once < 1 or key_heads % heads_at_once):
        raise ValueError(
            f"heads_at_once: expected a divisor of the {key_heads} key heads, got {heads_at_once}"
        )


def _agree(group: dist.ProcessGroup, operands: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Compares the call with the other ranks', once for each kind of call.

    A message of another size than expected would end in a crash or in wrong values. It is also the
    first collective of the group, which NCCL wants before point-to-point messages.
    """
    call = (*operands, *options)
    known = _agreed.setdefault(group, set())
    if call in known:
        return
    calls: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(calls, (operands, options), group=group)
    for rank, other in enumerate(calls):
        if other != (operands, options):
            raise ValueError(
                "ring_attention: expected the same call on every rank, but rank "
                f"{dist.get_rank(group)} has {_words(operands, options)} and rank {rank} "
                f"{_words(*other)}"
            )
    known.add(call)


def _words(operands: tuple[Any, ...], options: tuple[Any, ...]) -> str:
    names = ("query", "key", "value", "dtype", "is_causal", "scale", "layout", "method")
    return ", ".join(
        f"{name} {value}" for name, value in zip(names, (*operands, *options), strict=False)
    )
