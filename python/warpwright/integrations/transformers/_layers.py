"""Layers that transformers defines itself and our ops compute.

The registry recognises them by their code: many models have a copy of the same norm. Each
fingerprint names a class that has it, in transformers 4.57 and 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

from ... import functional as F
from ...swap.registry import Known, register_code

# ---- norms ----
# All compute in float32. They differ in where they round a 16-bit result.


def _rounded_before_weight(self: Any, hidden_states: Tensor) -> Tensor:
    """LlamaRMSNorm rounds x̂ to the input's type, then its product with the weight.

    With a weight of that type, ours rounds the product once. With a weight of another type the
    result has the promoted type, and ours rounds as LlamaRMSNorm does.
    """
    weight = self.weight
    if weight.dtype == hidden_states.dtype:
        return F.rms_norm(hidden_states, (weight.shape[0],), weight, self.variance_epsilon)
    normalized = F.rms_norm(hidden_states, (weight.shape[0],), None, self.variance_epsilon)
    return weight * normalized


def _rounded_before_weight_eps(self: Any, x: Tensor) -> Tensor:
    """Llama4TextRMSNorm: as LlamaRMSNorm, with other names."""
    weight = self.weight
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (weight.shape[0],), weight, self.eps)
    return F.rms_norm(x, (weight.shape[0],), None, self.eps) * weight


def _rounded_after_weight(self: Any, hidden_states: Tensor) -> Tensor:
    """Olmo2RMSNorm rounds the product once, to the input's type, as ours does."""
    weight = self.weight
    return F.rms_norm(hidden_states, (weight.shape[0],), weight, self.variance_epsilon)


def _rounded_to_weight(self: Any, hidden_states: Tensor) -> Tensor:
    """T5LayerNorm rounds to the weight's type, if that has 16 bits."""
    weight = self.weight
    if weight.dtype == hidden_states.dtype:
        return F.rms_norm(hidden_states, (weight.shape[0],), weight, self.variance_epsilon)
    if hidden_states.dtype != torch.float64:
        hidden_states = hidden_states.float()
    normalized = F.rms_norm(hidden_states, (weight.shape[0],), None, self.variance_epsilon)
    if weight.dtype in (torch.float16, torch.bfloat16):
        normalized = normalized.to(weight.dtype)
    return weight * normalized


def _weight_from_one(self: Any, x: Tensor) -> Tensor:
    """GemmaRMSNorm stores the weight less 1; it rounds the product once, as ours does."""
    weight = 1.0 + self.weight.float()
    return F.rms_norm(x, (weight.shape[0],), weight, self.eps)


def _norm_example(eps: str) -> tuple[nn.Module, Tensor]:
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.randn(16))
    setattr(layer, eps, 0.1)  # large, so that it counts
    return layer, torch.randn(3, 4, 16) * 3


def _register_norm(forward: Callable[..., Tensor], eps: str, source: str) -> None:
    register_code(Known("rms_norm", forward, lambda: _norm_example(eps)), source)


_register_norm(_rounded_before_weight, "variance_epsilon", "aa070ec5d9f13628")  # LlamaRMSNorm
_register_norm(_rounded_before_weight_eps, "eps", "dc362562cb727bd8")  # Llama4TextRMSNorm
_register_norm(_rounded_after_weight, "variance_epsilon", "208975b0ead64280")  # Olmo2RMSNorm
_register_norm(_rounded_to_weight, "variance_epsilon", "aaf094013322e308")  # T5LayerNorm
_register_norm(_weight_from_one, "eps", "cd0d28daeaab0d68")  # GemmaRMSNorm


# ---- Conv1D ----


def _conv1d_on(self: Any, function: Callable[..., Tensor], input: Tensor, **options: Any) -> Tensor:
    # The kernels read any strides, so the transposed weight is not copied.
    return function(input, self.weight.t(), self.bias, **options)


def _conv1d(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight.t(), self.bias)


def _conv1d_example() -> tuple[nn.Module, Tensor]:
    layer = Conv1D(24, 16)
    nn.init.normal_(layer.bias)
    return layer, torch.randn(2, 3, 16)


register_code(Known("linear", _conv1d, _conv1d_example, _conv1d_on), "abf8253adcea340b")


# ---- activations: as a part of a chain with the product before them ----


def _register_activation(name: str, op: str, source: str, **constants: str) -> None:
    def example() -> tuple[nn.Module, Tensor]:
        found = ACT2CLS[name]
        kind, options = found if isinstance(found, tuple) else (found, {})
        return kind(**options), torch.randn(64) * 3

    register_code(Known(op, None, example, constants=constants), source)


# GELUActivation, GELUTanh and others have one forward; their constructors tell them apart.
_register_activation("gelu", "gelu", "bc41930e870cb417", approximate="none")
_register_activation("gelu_pytorch_tanh", "gelu", "53aebabbfa984774", approximate="tanh")
_register_activation("gelu_new", "gelu", "c1f4aa03479d542b", approximate="tanh")
_register_activation("silu", "silu", "c5c3bae5638d53b4")
