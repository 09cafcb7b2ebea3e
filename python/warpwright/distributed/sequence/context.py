"""``context_parallel``: routes a model's attention through `ring_attention`."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..._recompute import follow
from ...functional import scaled_dot_product_attention
from ...patch import COMPOSITE
from .attention import METHODS, ring_attention
from .layouts import Group, check_layout, group_of, shard

__all__ = ["context_parallel"]

native = torch.nn.functional
OURS = torch.ops.warpwright.scaled_dot_product_attention
ATTENTION = (native.scaled_dot_product_attention, OURS, OURS.default)
SIGNATURE = inspect.signature(scaled_dot_product_attention)
MULTI_HEAD = inspect.signature(native.multi_head_attention_forward)


class _Route(TorchFunctionMode):
    """The mode that is active inside the block."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in ATTENTION:
            return self._attention(*args, **kwargs)
        if func in COMPOSITE:
            _check_weights(func, args, kwargs)
            with self:
                return COMPOSITE[func](*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        where = "scaled_dot_product_attention under context_parallel"
        if a["attn_mask"] is not None:
            raise ValueError(
                f"{where}: attn_mask: expected None, got a mask of {tuple(a['attn_mask'].shape)}; "
                "no rank holds the scores of whole rows. A model of transformers passes none if it gets an "
                "attention_mask of ones"
            )
        if a["dropout_p"]:
            raise ValueError(f"{where}: dropout_p: expected 0, got {a['dropout_p']}")
        q, k, v = a["query"], a["key"], a["value"]
        if k.shape[-3:-2] != q.shape[-3:-2] and not a["enable_gqa"]:
            raise ValueError(
                f"{where}: key: expected the {q.shape[-3]} heads of query without enable_gqa, got "
                f"{k.shape[-3]}"
            )
        # (L, E) is one head; more than one leading dimension before the heads is one batch.
        four = [x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else _with_heads(x) for x in (q, k, v)]
        out = ring_attention(
            *four,
            is_causal=bool(a["is_causal"]),
            scale=a["scale"],
            **self.options,
        )
        return out.reshape(*q.shape[:-1], v.shape[-1])


class context_parallel:
    """``with context_parallel(mesh, buffers=..., buffer_seq_dims=...)``: the ranks share sequences.

    Inside the block attention runs over the tokens of all ranks, by `ring_attention`. That holds for
    ``F.scaled_dot_product_attention``, for ours, and for their callers: Hugging Face's ``sdpa`` and
    ``nn.MultiheadAttention`` without weights. All other layers of a model work on single tokens. The
    arguments are those of
    ``torch.distributed.tensor.experimental.context_parallel``, which has no path for CPUs.
    With ``buffers`` the backward must be in the block too: autograd may have saved a buffer, and
    buffers are whole again after the block. ``torch.utils.checkpoint`` recomputes under the block of its forward.

    The model gets positions from its inputs: pass `positions` as ``position_ids``, or shard the
    buffers that hold positions. Shift labels before they are sharded, and divide the sum of losses by
    the tokens of all ranks. A model of transformers reads gaps in ``position_ids`` as the ends of
    packed sequences, and makes a mask of them. Pass ``attention_mask=torch.ones(B, L)`` to prevent it.

    Args:
        mesh: the ranks that share a sequence: a mesh of 1 dimension or a process group.
        buffers: tensors with whole sequences, the same on every rank: inputs, labels, positions.
            Inside the block each holds this rank's tokens; afterwards it is what it was.
        buffer_seq_dims: the dimension of the tokens, one per buffer.
        no_restore_buffers: of ``buffers``, those that keep this rank's tokens.
        layout, method, heads_at_once: as of `ring_attention`.
    Raises:
        ValueError: dimensions and buffers differ in number, or a buffer cannot be cut evenly. Inside
            the block: attention has a mask or dropout, or returns its weights.
    """

    def __init__(
        self,
        mesh: Group = None,
        *,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
        layout: str = "zigzag",
        method: str = "auto",
        heads_at_once: int | None = None,
    ) -> None:
        check_layout(layout)
        if method not in METHODS:
            raise ValueError(f"method: expected one of {', '.join(METHODS)}; got {method!r}")
        self.buffers, self.dims = list(buffers or ()), list(buffer_seq_dims or ())
        if len(self.buffers) != len(self.dims):
            raise ValueError(
                f"buffer_seq_dims: expected one dimension per buffer ({len(self.buffers)}), got "
                f"{len(self.dims)}"
            )
        kept = {id(buffer) for buffer in no_restore_buffers or ()}
        if not kept <= {id(buffer) for buffer in self.buffers}:
            raise ValueError("no_restore_buffers: expected tensors of buffers, got others")
        self.restored = [id(buffer) not in kept for buffer in self.buffers]
        self.group = group_of(mesh)
        self.layout = layout
        self.route = _Route(
            group=self.group, layout=layout, method=method, heads_at_once=heads_at_once
        )
        self.wholes: list[Tensor] = []
        follow(_Route)

    def __enter__(self) -> context_parallel:
        # All are cut before the first one changes, so that an error leaves them as they were.
        parts = [
            shard(buffer.detach(), dim, self.group, self.layout)
            for buffer, dim in zip(self.buffers, self.dims, strict=True)
        ]
        self.wholes = [buffer.data for buffer in self.buffers]
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.data = part
        self.route.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.route.__exit__(*exception)
        for buffer, whole, back in zip(self.buffers, self.wholes, self.restored, strict=True):
            if back:
                buffer.data = whole
        self.wholes = []


def _with_heads(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def _check_weights(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    bound = MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["need_weights"]:
        raise ValueError(
            f"{func.__name__} under context_parallel: need_weights: expected False, got True; no rank "
            "holds the weights of whole rows"
        )
