"""How DTensor computes with our operators: a rule for each.

`RULES` has a table of placements per operator (`_table`); `HANDLERS` the operators that communicate
inside, or that refuse DTensors. A composed operator runs as its parts. DTensor is below our
autograd: a backward is an operator like any other.

The rules are registered when a program imports ``torch.distributed.tensor``. They use parts of it
that are not public; docs/distributed.md names the releases that they were tried with.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ... import _arch
from . import (
    _attention,
    _codes,
    _elementwise,
    _embedding,
    _kv_cache,
    _layer_scale,
    _linear_cross_entropy,
    _losses,
    _norms,
    _products,
    _reduction,
    _refused,
    _scan,
    _softmax,
    _squeeze_excitation,
)
from ._table import Rule, register

RULES: dict[str, Rule] = {
    **_products.RULES,
    **_elementwise.RULES,
    **_layer_scale.RULES,
    **_norms.RULES,
    **_attention.RULES,
    **_scan.RULES,
    **_codes.RULES,
    **_softmax.RULES,
    **_embedding.RULES,
    **_squeeze_excitation.RULES,
    **_reduction.RULES,
    **_kv_cache.RULES,
}
HANDLERS: dict[str, Any] = {
    **_losses.HANDLERS,
    **_linear_cross_entropy.HANDLERS,
    **_attention.HANDLERS,
    **_refused.HANDLERS,
    **_elementwise.HANDLERS,
    **_embedding.HANDLERS,
}


def register_all(tensor: ModuleType) -> None:
    """Registers every rule; ``tensor`` is the module ``torch.distributed.tensor``."""
    for name, rule in RULES.items():
        register(name, rule)
    dispatcher = tensor.DTensor._op_dispatcher
    for name, handler in HANDLERS.items():
        op = getattr(torch.ops.warpwright, name).default
        dispatcher._custom_op_handlers[op] = handler
    _arch.accept(tensor.DTensor)
