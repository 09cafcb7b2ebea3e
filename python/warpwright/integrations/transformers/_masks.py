"""The mask function named "warpwright", and the hooks that prove that a call is causal.

transformers' mask functions return None if ``is_causal`` alone can tell attention the mask. While a
graph is traced or captured they cannot read values. They then build a dense mask,
(batch, 1, queries, keys), and K and V are repeated for all heads. For our mask function,
:func:`_needs_no_mask` decides by the arguments alone.

One case needs a proof from outside. Position ids may pack several sequences into one row. Without a
cache the mask function therefore gets an overlay that separates them, even if the model counted
the positions itself. The hooks note whether the caller of the module that makes the masks gave
position ids. In all other cases transformers builds the mask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from .._hooks import remove_hooks_of
from ._sources import counts_positions

native_mask = masking_utils.sdpa_mask


class _Proofs(threading.local):
    """A stack per thread: (a module that makes masks, whether its call is proven, the rest)."""

    def __init__(self) -> None:
        self.top: tuple[nn.Module, bool, Any] | None = None


_proofs = _Proofs()

# The arguments of a forward that can make a causal mask more than causal.
TELLING = ("attention_mask", "position_ids", "past_key_values", "past_key_value", "cache_position")


def _given_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a forward gets only its input, which is its first argument if it is positional."""
    for value in args[1:]:
        if value is not None:
            return False
    return all(kwargs.get(name) is None for name in TELLING)


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For modules that count positions from 0 if they are given none."""
    _proofs.top = (module, _given_nothing(args, kwargs), _proofs.top)


def _enter_unproven(module: nn.Module, args: tuple[Any, ...]) -> None:
    """For all others: hides the proof of a module around them."""
    _proofs.top = (module, False, _proofs.top)


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    top = _proofs.top
    # Not this module's, if another pre-hook raised before its own ran.
    if top is not None and top[0] is module:
        _proofs.top = top[2]


def add_hooks(module: nn.Module) -> None:
    """The hooks are functions of this file, so that copies and pickles of the module keep them."""
    if counts_positions(module):
        module.register_forward_pre_hook(_enter, with_kwargs=True)
    else:
        module.register_forward_pre_hook(_enter_unproven)
    module.register_forward_hook(_leave, always_call=True)


def has_hooks(module: nn.Module) -> bool:
    return any(hook is _leave for hook in module._forward_hooks.values())


def remove_hooks(module: nn.Module) -> None:
    remove_hooks_of(module, (_enter, _enter_unproven, _leave))


_OVERLAID = masking_utils.and_masks(masking_utils.causal_mask_function).__code__


def _needs_no_mask(
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> bool:
    """Whether ``is_causal``, or no mask at all, says the same as the mask.

    The arguments are those of transformers' mask functions. ``allow_is_causal_skip`` says that
    ``mask_function`` is causal within ``local_size`` keys and nothing more.
    """
    if attention_mask is not None or isinstance(q_offset, Tensor) or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if allow_is_bidirectional_skip:
        return local_size is None or kv_length < local_size
    if q_length is None:  # transformers 4 gives the positions, 5 their number
        if cache_position is None:
            return False
        q_length = cache_position.shape[0]
    from_start = kv_length == q_length and kv_offset == 0 and q_offset == 0
    if local_size is not None:
        # All keys must be within one window or chunk. A window's last key may push out its first.
        if kv_length > local_size or kv_offset != 0:
            return False
        if kv_length == local_size and not from_start:
            return False
    if allow_is_causal_skip:
        return from_start or q_length == 1
    # Refused because of an overlay. If the innermost module that makes masks can have no other
    # (counts_positions), it is the overlay for packed sequences, and the proof says: none are packed.
    top = _proofs.top
    return from_start and top is not None and top[1] and mask_function.__code__ is _OVERLAID


_WINDOW = masking_utils.sliding_window_overlay(1).__code__


def _is_window(
    kv_length: int,
    kv_offset: int = 0,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> bool:
    """Whether the mask is that of a sliding window over a whole text, and the caller is known.

    A compiled program keeps its mask: Dynamo does not read what a mask function is made of.
    """
    if torch.compiler.is_compiling():
        return False
    if attention_mask is not None or local_size is None or not allow_is_causal_skip:
        return False
    if isinstance(q_offset, Tensor) or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if kv_length != q_length or kv_offset != 0 or q_offset != 0 or _proofs.top is None:
        return False
    # A chunk of local_size keys has another function.
    if mask_function.__code__ is not _OVERLAID or mask_function.__closure__ is None:
        return False
    parts = mask_function.__closure__[0].cell_contents
    return len(parts) == 2 and parts[0].__code__ is _WINDOW and parts[1] is _CAUSAL


_CAUSAL = masking_utils.causal_mask_function


def window_of(mask: Tensor | None) -> int | None:
    """How many keys a query sees, if `mask` stands for a sliding window.

    Such a mask has no elements. Its third size is the window, which no layer changes on the way.
    """
    if mask is None or mask.ndim != 4 or mask.shape[0] != 0:
        return None
    return mask.shape[2]


def window_mask(window: int, query: Tensor, key: Tensor) -> Tensor:
    """The elements of a window's mask, for attention functions that need them."""
    rows = torch.arange(query.shape[2], device=query.device)[:, None]
    behind = rows - torch.arange(key.shape[2], device=query.device)
    return ((behind >= 0) & (behind < window))[None, None]


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """As transformers' mask for "sdpa": boolean, or None if attention's flag is enough.

    A sliding window over a whole text is a mask without elements (`window_of`).
    """
    if not args and _needs_no_mask(**kwargs):
        return None
    if not args and _is_window(**kwargs):
        shape = (0, 1, kwargs["local_size"], 1)
        return torch.empty(shape, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    made: Tensor | None = native_mask(*args, **kwargs)
    return made
