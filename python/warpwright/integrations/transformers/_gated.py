"""Gated MLPs of transformers: the activation of the gate and its product run as one op.

The products stay the layers that they are. A gate that ``swiglu`` and ``geglu`` do not have, or one
that someone watches, runs as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ... import functional as F
from ...functional._common import dynamo, exporting
from ...swap import patterns
from ...swap.blocks import all_layers_are_watched, is_hooked
from ...swap.registry import Known, find, register_code

Gated = Callable[..., Tensor]


def _gated_function(activation: nn.Module) -> tuple[Gated, dict[str, Any]] | None:
    """The functional, and its options, that computes ``activation(gate) * up``."""
    if dynamo() or exporting():  # the form that Inductor fuses
        return None
    if "forward" in vars(activation) or is_hooked(activation) or all_layers_are_watched():
        return None
    kind = type(activation)
    find(kind)  # a class of transformers is known from its first use on
    known = patterns.KINDS.get(kind)
    if known is None:
        return None
    if known.op == "silu":
        return F.swiglu, {}
    if known.op == "gelu":
        return F.geglu, {name: getattr(activation, name) for name in known.names} | dict(
            known.constants
        )
    return None


def _mlp(name: str) -> Callable[[Any, Tensor], Tensor]:
    """``down(act(gate(x)) * up(x))``, for a layer with its activation at ``name``."""

    def forward(self: Any, x: Tensor) -> Tensor:
        activation = getattr(self, name)
        found = _gated_function(activation)
        if found is None:
            hidden = activation(self.gate_proj(x)) * self.up_proj(x)
        else:
            function, options = found
            hidden = function(self.gate_proj(x), self.up_proj(x), **options)
        result: Tensor = self.down_proj(hidden)
        return result

    return forward


def _packed_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """One product for the gate and the other factor."""
    found = _gated_function(self.activation_fn)
    packed = self.gate_up_proj(hidden_states)
    if found is None:
        gate, up = packed.chunk(2, dim=-1)
        hidden = up * self.activation_fn(gate)
    else:
        function, options = found
        hidden = function(packed, **options)
    result: Tensor = self.down_proj(hidden)
    return result


def _example(activation: str, **products: nn.Linear) -> tuple[nn.Module, Tensor]:
    layer = nn.Module()
    for name, product in products.items():
        layer.add_module(name, product)
    layer.add_module(activation, ACT2FN["silu"])  # an instance of its own
    return layer, torch.randn(3, 4, 16) * 3


def _register(name: str, source: str) -> None:
    def example() -> tuple[nn.Module, Tensor]:
        products = {"gate_proj": nn.Linear(16, 24), "up_proj": nn.Linear(16, 24)}
        return _example(name, **products, down_proj=nn.Linear(24, 8))

    register_code(Known("swiglu", _mlp(name), example, parts=(name,)), source)


def _packed_example() -> tuple[nn.Module, Tensor]:
    return _example("activation_fn", gate_up_proj=nn.Linear(16, 48), down_proj=nn.Linear(24, 8))


_register("act_fn", "1d60ee83da88b1c9")  # LlamaMLP
_register("activation_fn", "698afde272a7f50f")  # Llama4TextMLP
register_code(
    Known("swiglu", _packed_mlp, _packed_example, parts=("activation_fn",)), "6662611fe2dfc6e1"
)  # Phi3MLP
