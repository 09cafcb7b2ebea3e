"""transformers' models: attention on warpwright's kernel, and causal attention as a flag.

transformers looks up an attention function by ``config._attn_implementation``, and a mask function
by the same name. :func:`register` adds ours, as "warpwright". A swapped attention layer gets a view
of its config that answers "warpwright" if the config answers "sdpa" (``_views.py``). Other
models may share the config itself, and it is saved, so it keeps what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from torch import nn

from ..._arch import PLAIN, why_no_kernel
from ...swap.classes import type_name
from ...swap.report import IS_OURS, REPLACED, SwapEntry
from ...swap.selection import WhyLeft
from .. import Plan

try:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
except ImportError as error:
    raise ImportError(
        f"warpwright: transformers 4.53 or newer is needed; {transformers.__version__} is installed"
    ) from error
from . import _blocks as _blocks  # registers its layers, as the next do
from . import _gated as _gated
from . import _heads, _rotary
from . import _layers as _layers
from ._attention import attention
from ._masks import add_hooks, has_hooks, mask, remove_hooks
from ._sources import (
    OP,
    asks_for_sdpa,
    attends,
    attends_itself,
    class_of,
    counts_positions,
    makes_masks,
)
from ._views import NAME, NATIVE, View, view_of

__all__ = ["NAME", "OP", "plan", "register", "undo"]


def register() -> None:
    """Adds our attention and mask functions to transformers' registries."""
    type(ALL_ATTENTION_FUNCTIONS).register(NAME, attention)
    type(ALL_MASK_ATTENTION_FUNCTIONS).register(NAME, mask)


class _Attention:
    """The change to one model: views in ``configured``, hooks on ``makers`` of masks."""

    def __init__(self) -> None:
        self.configured: dict[nn.Module, Any] = {}  # -> the view
        self.makers: list[nn.Module] = []

    def apply(self) -> None:
        for module, view in self.configured.items():
            vars(module)["config"] = view
        for module in self.makers:
            add_hooks(module)

    def undo(self) -> None:
        for module in self.configured:
            _restore_config(module)
        for module in self.makers:
            remove_hooks(module)


def _config(module: nn.Module) -> Any:
    """The config that ``module`` was made with, or None."""
    config = vars(module).get("config")
    return config._warpwright_native if isinstance(config, View) else config


def _restore_config(module: nn.Module) -> bool:
    if not isinstance(vars(module).get("config"), View):
        return False
    vars(module)["config"] = _config(module)
    return True


def undo(model: nn.Module) -> int:
    """Undoes every change in ``model``; returns how many attention layers it gave back."""
    found = 0
    for module in model.modules():
        remove_hooks(module)
        _heads.remove_hooks(module)
        found += _rotary.restore(module)
        found += _restore_config(module) and attends(type(module))
    return found


def _modules_of_models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that belongs to a model of transformers in ``model``, and its name there."""
    seen: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in seen:
            for inner, child in module.named_modules(prefix=name):
                if child not in seen:
                    seen.add(child)
                    yield inner, child


def plan(
    model: nn.Module,
    wanted: frozenset[str],
    why_left: WhyLeft,
    chosen: Mapping[nn.Module, type[nn.Module]],
) -> Plan:
    """Entries for attention layers and their rotations, and the changes that swap them and the heads."""
    modules = list(_modules_of_models(model))
    found = _plan_attention(modules, wanted, why_left)
    _rotary.plan_rotary(modules, wanted, why_left, found)
    if _heads.OP in wanted:
        _heads.plan_heads([module for _, module in modules], chosen, found)
    return found


def _plan_attention(
    modules: list[tuple[str, nn.Module]], wanted: frozenset[str], why_left: WhyLeft
) -> Plan:
    layers = [
        (name, module, _why_not(module, name, wanted, why_left))
        for name, module in modules
        if attends(type(module)) or attends_itself(type(module))
    ]
    change = _Attention()
    views: dict[int, Any] = {}  # by the id of the config
    for _, module, why in layers:
        if why is None:
            config = _config(module)
            if id(config) not in views:
                views[id(config)] = view_of(config)
            change.configured[module] = views[id(config)]
    flags: dict[int, bool] = {}  # by the id of the config: whether a causal mask stays a flag
    for _, module in modules:
        config = _config(module)
        if not (id(config) in views or _asks_for_ours(config)) or not makes_masks(class_of(module)):
            continue
        flags[id(config)] = flags.get(id(config), False) or counts_positions(module)
        if not has_hooks(module):
            change.makers.append(module)
        if id(config) in views and not isinstance(vars(module)["config"], View):
            change.configured[module] = views[id(config)]
    entries = [
        SwapEntry(
            name,
            type_name(module),
            OP,
            why is None,
            why or "",
            note=NOTES[flags.get(id(_config(module)))] if why is None else "",
        )
        for name, module, why in layers
    ]
    return Plan(entries, [change] if change.configured or change.makers else [])


# By whether the masks of a layer's model may stay a flag; None: masks of the model's own code.
NOTES = {
    None: "masks as its model builds them",
    False: "no mask for a causal call with an empty cache, else transformers' masks",
    True: "no mask for a plain causal call, else transformers' masks",
}


def _asks_for_ours(config: Any) -> bool:
    return getattr(config, "_attn_implementation", None) == NAME


def _why_not(module: nn.Module, name: str, wanted: frozenset[str], why_left: WhyLeft) -> str | None:
    """The first reason to leave the attention layer native; None if it is to be swapped."""
    if not attends(type(module)):
        return "computes attention in its own code, not by transformers' registry"
    config = vars(module).get("config")
    chosen = getattr(config, "_attn_implementation", None)
    if chosen == NAME:
        return IS_OURS
    if "forward" in vars(module):
        return REPLACED
    if OP not in wanted:
        return f"{OP} is not in ops"
    if not isinstance(getattr(type(config), "_attn_implementation", None), property):
        return "has no config of its own that names an attention function"
    if chosen == "eager":
        return "its attention is 'eager', by the user's choice or for want of an sdpa form"
    if chosen != NATIVE:
        return f"its attention is {chosen!r}, expected 'sdpa'"
    if getattr(module, "attn_logit_softcapping", None) is not None:
        return "it caps its scores, which warpwright's attention cannot"
    if asks_for_sdpa(class_of(module)):
        return "its code asks for 'sdpa' by name"
    for key, parameter in module.named_parameters():
        why = why_no_kernel(parameter, any_dtype=True) if type(parameter) in PLAIN else None
        if why is not None:
            return f"{key}: {why}"
    return why_left(module, name)


register()
