"""Routes calls of ``torch.nn.functional`` to warpwright inside a block.

For models that call functions: ``F.relu(x)``, ``x.relu()``,
``F.scaled_dot_product_attention(q, k, v)``. A module that is not swapped is routed too, because its
``forward`` calls the same functions. A call that has no kernel of ours stays native.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from . import functional as ours
from ._arch import FLOATING, why_no_kernel
from ._catalog import OPS
from ._recompute import follow
from .swap.classes import check_ops

__all__ = ["patch"]

native = torch.nn.functional


# native function -> (op, name of the first argument, name in warpwright.functional)
ROUTES: dict[Any, tuple[str, str, str]] = {
    route.function: (op.name, route.first, route.ours or op.name)
    for op in OPS.values()
    for route in op.routes
}
ROUTED = tuple(op.name for op in OPS.values() if op.routes)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _has_kernel(op: str, first: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    main = args[0] if args else kwargs.get(first)
    if not isinstance(main, Tensor) or "out" in kwargs:
        return False
    if main.dtype not in FLOATING and not (OPS[op].integers and main.dtype in INTEGERS):
        return False
    if torch.compiler.is_compiling():
        return True
    return all(
        why_no_kernel(value, any_dtype=True) is None
        for value in (*args, *kwargs.values())
        if isinstance(value, Tensor)
    )


def _without_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of ``function``, of torch.nn.functional, that asks no mode whether to override it.

    A mode is off while it handles a call, so it misses the functions that a Python function calls in
    turn. With the mode on again, the function would ask the mode about itself without end. The copy
    can run under the mode.
    """
    assert isinstance(function, types.FunctionType)
    names = {**function.__globals__, "has_torch_function": lambda relevant: False}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Functions written in Python that call some of the above.
COMPOSITE = {
    native.multi_head_attention_forward: _without_overrides(native.multi_head_attention_forward)
}

# What `patch` looks at; __init__ adds an operator that torch registers late.
WATCHED = {*ROUTES, *COMPOSITE, checkpoint, Tensor.unflatten}


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator of torch.nn.attention.varlen.varlen_attn: output, log-sum-exp, a state."""
    window = None if window_size is None else (window_size[0], window_size[1])
    out, lse = ours.attention_varlen(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        is_causal=is_causal,
        scale=scale,
        window_size=window,
        enable_gqa=True,
        return_lse=True,
    )
    return out, lse, torch.zeros(2, dtype=torch.uint64, device=query.device)


def _jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """scaled_dot_product_attention of jagged nested tensors (B, heads, tokens, E); None if it is not."""
    operands = query, key, value
    if not all(
        isinstance(t, Tensor) and t.is_nested and t.layout == torch.jagged and t.dim() == 4
        for t in operands
    ):
        return None
    # (B, tokens, heads, E), packed in a row, without room between the sequences.
    packed: list[Any] = [t.transpose(1, 2) for t in operands]
    if any(getattr(t, "_ragged_idx", 0) != 1 or t.lengths() is not None for t in packed):
        return None
    q, k, v = packed
    same = q.size(1) == k.size(1)  # as many queries as keys: native's causal rule is ours
    if attn_mask is not None or dropout_p != 0.0 or (is_causal and not same):
        return None
    if k.size(1) != v.size(1) or why_no_kernel(q.values()) is not None:
        return None
    out = ours.attention_varlen(
        q.values(),
        k.values(),
        v.values(),
        q.offsets().int(),
        k.offsets().int(),
        q._get_max_seqlen(),
        k._get_max_seqlen(),
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    result: Tensor = torch.nested.nested_tensor_from_jagged(
        out,
        q.offsets(),
        min_seqlen=q._get_min_seqlen(),
        max_seqlen=q._get_max_seqlen(),
    )
    return result.transpose(1, 2)


def _entering(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return run


class patch(TorchFunctionMode):
    """``with patch():`` routes functions that warpwright has to warpwright inside the block.

    Covers functions of ``torch.nn.functional`` that swap has a layer for, such as ``linear`` and
    ``scaled_dot_product_attention``. Their twins in ``torch`` (``torch.relu``, ``torch.conv2d``,
    ``torch.sigmoid``) and the tensor methods are covered, too. ``torch.nn.attention.varlen.varlen_attn``
    runs as ``attention_varlen``, and so does attention of jagged nested tensors.

    A call stays native with ``out=``, or if its tensors have no kernel here (dtype, device, layout,
    subclass). Blocks nest; each holds for the thread that entered it. The backward needs no block: the
    graph has its ops. ``torch.utils.checkpoint`` recomputes under the blocks of its forward, on any
    thread.

    Args:
        ops: only these functionals, e.g. ``{"scaled_dot_product_attention"}``; None means all.
    Raises:
        ValueError: an unknown name in ``ops``.
    """

    def __init__(self, ops: Iterable[str] | None = None) -> None:
        import torch.nn.attention.varlen  # registers its operator: milliseconds, not at import

        WATCHED.add(torch.ops.torch_attn._varlen_attn)
        super().__init__()
        self.ops = check_ops(ops, (*ROUTED, "attention_varlen"))
        if not torch.compiler.is_compiling():  # there a checkpoint is an operator of the graph
            follow(patch)

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Attributes and methods of tensors come here, too: hundreds per forward.
        if func not in WATCHED:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._routed(func, args, kwargs or {})

    def _routed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        route = ROUTES.get(func)
        if route is not None:
            op, first, name = route
            if op in self.ops and _has_kernel(op, first, args, kwargs):
                return getattr(ours, name)(*args, **kwargs)
            if func is native.scaled_dot_product_attention and "attention_varlen" in self.ops:
                packed = _jagged(*args, **kwargs)
                if packed is not None:
                    return packed
        elif func is torch.ops.torch_attn._varlen_attn:  # of varlen_attn, which no mode sees
            if "attention_varlen" in self.ops and _has_kernel(
                "attention_varlen", "query", args, kwargs
            ):
                return _varlen(*args, **kwargs)
        elif func in COMPOSITE:
            with self:
                return COMPOSITE[func](*args, **kwargs)
        elif func is checkpoint:
            # Only torch.compile asks. It traces the function into a graph of its own, which may
            # switch modes only if the graph around it did so first.
            with self:
                pass
            return func(_entering(self, args[0]), *args[1:], **kwargs)
        elif func is Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)  # the method calls super(): not traceable
        return func(*args, **kwargs)
