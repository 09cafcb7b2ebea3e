"""Decoder layers of transformers: their norms and the additions before them, under autocast.

The forwards here differ from transformers' in the calls of the norms alone. Each fingerprint names a
class that has it, in transformers 4.57, 5.23 and 5.24.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import nn as ours
from ...swap.residual import (
    NORMS,
    Block,
    ExampleAttention,
    Step,
    example_mlp,
    example_norm,
    register_block,
    rms_norm,
)
from ._layers import (
    _rounded_after_weight,
    _rounded_before_weight,
    _rounded_before_weight_eps,
    _rounded_to_weight,
    _weight_from_one,
)

# With a float32 weight all of them round once.
NORMS.update(
    {
        _rounded_before_weight: rms_norm("variance_epsilon"),
        _rounded_before_weight_eps: rms_norm("eps"),
        _rounded_after_weight: rms_norm("variance_epsilon"),
        _rounded_to_weight: rms_norm("variance_epsilon"),
        _weight_from_one: rms_norm("eps", lambda layer: 1.0 + layer.weight),
    }
)

Steps = tuple[Step, Step]


# ---- LlamaDecoderLayer and its copies: Mistral, Qwen2, Qwen3, Gemma, Olmo, GLM and more ----


def _llama(
    self: Any, steps: Steps, dtype: torch.dtype, hidden_states: Tensor, **others: Any
) -> Tensor:
    first, second = steps
    hidden_states, x = first.beside(self.input_layernorm, hidden_states, dtype)
    x, _ = self.self_attn(hidden_states=x, **others)
    hidden_states, x = second.added(self.post_attention_layernorm, x, hidden_states, dtype)
    output: Tensor = hidden_states + self.mlp(x)
    return output


def _llama_example() -> tuple[Any, ...]:
    layer: Any = nn.Module()
    layer.input_layernorm = example_norm(ours.RMSNorm)
    layer.post_attention_layernorm = example_norm(ours.RMSNorm)
    layer.self_attn = ExampleAttention(returns_weights=True)
    layer.mlp = example_mlp()
    return layer, torch.randn(2, 5, 16)


_LLAMA_NORMS = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))
register_block(
    Block(_llama, _LLAMA_NORMS, _llama_example),
    "1434b557b666948a",  # 4.57
    "98753812cb5d7d7c",  # 5.23
    "ab45088192d33bf3",  # 5.24: `past_key_values` is called `cache`
)


# ---- GPT2Block, without cross-attention ----


_OF_ENCODER = ("encoder_hidden_states", "encoder_attention_mask")


def _gpt2_with_weights(
    self: Any, steps: Steps, dtype: torch.dtype, hidden_states: Tensor, **others: Any
) -> tuple[Tensor, Any]:
    for name in _OF_ENCODER:
        del others[name]
    first, second = steps
    hidden_states, x = first.beside(self.ln_1, hidden_states, dtype)
    x, weights = self.attn(x, **others)
    hidden_states, x = second.added(self.ln_2, x, hidden_states, dtype)
    return hidden_states + self.mlp(x), weights


def _gpt2(*args: Any, **named: Any) -> Tensor:
    return _gpt2_with_weights(*args, **named)[0]


def _gpt2_4(*args: Any, **named: Any) -> tuple[Any, ...]:
    """In transformers 4 the block returns a tuple."""
    outputs = _gpt2_with_weights(*args, **named)
    return outputs if named["output_attentions"] else outputs[:1]


def _without_encoder(named: dict[str, Any]) -> bool:
    return named["encoder_hidden_states"] is None


def _gpt2_example() -> tuple[Any, ...]:
    layer: Any = nn.Module()
    layer.ln_1, layer.ln_2 = example_norm(ours.LayerNorm), example_norm(ours.LayerNorm)
    layer.attn = ExampleAttention(returns_weights=True)
    layer.mlp = example_mlp()
    return layer, torch.randn(2, 5, 16)


_GPT2_NORMS = (("ln_1", "attn"), ("ln_2", "mlp"))
register_block(
    Block(_gpt2, _GPT2_NORMS, _gpt2_example, _without_encoder),
    "2bf2645ec1d7d6a4",  # 5.23
    "eb7f2d954ed988a9",  # 5.24
)
register_block(
    Block(_gpt2_4, _GPT2_NORMS, _gpt2_example, _without_encoder), "f2bf12f75ab525dc"
)  # 4.57
