"""Heads of language models: in a training call with labels, their loss needs no logits.

A hook on the model notes whether a call has labels. If it has, the head returns
:class:`~warpwright.integrations._logits.LazyLogits`. transformers' losses, and the losses in the models'
own code, call ``torch.nn.functional.cross_entropy``. With lazy logits that call computes the head's
product too.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import functional as F
from ... import nn as ours
from ...swap.classes import NATIVE_LAYERS
from .. import Plan
from .._hooks import remove_hooks_of
from .._logits import LazyLogits, versions_of

OP = "linear_cross_entropy"
NOTE = "in training with labels: linear_cross_entropy, logits only if they are read"
CAPPED = "its loss stays native: the model caps the logits before it"


class _Calls(threading.local):
    """A stack per thread: (a model, whether its call has labels, the rest)."""

    def __init__(self) -> None:
        self.top: tuple[nn.Module, bool, Any] | None = None


_calls = _Calls()


class LanguageHead(ours.Linear):
    """``torch.nn.Linear``, whose output is lazy within a training call with labels."""

    extra_repr = nn.Linear.extra_repr

    def forward(self, input: Tensor) -> Any:
        top = _calls.top
        if top is None or not top[1] or not _may_be_lazy(self, input):
            return F.linear(input, self.weight, self.bias)
        kind = input.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        weight, bias = self.weight, self.bias
        # Traced code cannot tell versions: its constants stay.
        versions = None if torch.compiler.is_compiling() else versions_of(weight, bias)
        return LazyLogits(input, weight, bias, None, autocast, versions)


def _may_be_lazy(head: LanguageHead, input: Tensor) -> bool:
    """Whether nothing needs the head's output itself, or the head's own call for its weight."""
    if not torch.is_grad_enabled() or type(head) is not LanguageHead:
        return False
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return False
    if type(head.weight) is not nn.Parameter or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    # Dynamo takes is_exporting() for true even in torch.compile.
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return False
    if torch.is_autocast_enabled(input.device.type):
        return input.dtype != torch.float64
    return input.dtype == head.weight.dtype


# ---- the hooks ----


@functools.cache
def _position_of_labels(kind: Any) -> int | None:
    """Of the argument ``labels`` of the class's forward; None if it has no such argument."""
    names = list(inspect.signature(kind.forward).parameters)
    return names.index("labels") - 1 if "labels" in names else None


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    labels = kwargs.get("labels")
    if labels is None and len(args) > 1:
        position = _position_of_labels(_class_of(module))
        labels = args[position] if position is not None and position < len(args) else None
    _calls.top = (module, labels is not None, _calls.top)


def _leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    top = _calls.top
    # Not this module's, if another pre-hook raised before its own ran.
    if top is not None and top[0] is module:
        _calls.top = top[2]


def remove_hooks(module: nn.Module) -> None:
    remove_hooks_of(module, (_enter, _leave))


class Heads:
    """The change to one model: hooks on each model that has a head and takes labels."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models

    def apply(self) -> None:
        for module in self.models:
            module.register_forward_pre_hook(_enter, with_kwargs=True)
            module.register_forward_hook(_leave, always_call=True)

    def undo(self) -> None:
        for module in self.models:
            remove_hooks(module)


def plan_heads(
    models: list[nn.Module], chosen: Mapping[nn.Module, type[nn.Module]], plan: Plan
) -> None:
    """Adds to ``plan`` the heads to swap, and hooks on the models around them.

    Args:
        chosen: the layers that are swapped anyway, and their classes.
    """
    hooked = []
    for model in models:
        head = _head_of(model)
        if head is None or _position_of_labels(_class_of(model)) is None:
            continue
        is_chosen = chosen.get(head) is ours.Linear
        if is_chosen and _caps(model):
            plan.notes[head] = CAPPED
        elif is_chosen or type(head) is LanguageHead:
            if is_chosen:
                plan.classes[head], plan.notes[head] = LanguageHead, NOTE
            if not any(hook is _leave for hook in model._forward_hooks.values()):
                hooked.append(model)
    if hooked:
        plan.changes.append(Heads(hooked))


def _class_of(module: nn.Module) -> Any:
    """Its type; mypy takes a ``type`` for unhashable."""
    return type(module)


def _head_of(model: nn.Module) -> nn.Module | None:
    if not isinstance(model, PreTrainedModel):
        return None
    try:
        head = model.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    return head if isinstance(head, nn.Linear) else None


def _caps(model: nn.Module) -> bool:
    """Whether the model changes its logits before the loss, as Gemma 2 does."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "final_logit_softcapping", None) is not None


NATIVE_LAYERS[LanguageHead] = nn.Linear
