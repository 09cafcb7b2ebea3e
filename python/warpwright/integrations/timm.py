"""timm's layers: norms, squeeze-and-excitation, and the attention of its vision transformers.

The registry recognises them by their code. Each fingerprint names the first version of timm that
has it, up to 1.0.31.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers.activations import Sigmoid
from torch import Tensor, nn

from .. import functional as F
from .. import nn as ours
from .._ops import ops
from .._running_statistics import RunningStatistics
from ..swap.blocks import is_hooked
from ..swap.functions import mean_along
from ..swap.norms import IMAGE_NORMS
from ..swap.registry import Known, register_code
from ..swap.residual import (
    LAYER_NORM,
    NORMS,
    Block,
    ExampleAttention,
    Step,
    example_mlp,
    example_norm,
    register_block,
)
from ..swap.selection import WhyLeft
from . import Plan
from ._squeeze_excitation import SCALE_ACTIVATIONS, register

__all__ = ["plan", "undo"]


def plan(
    model: nn.Module,
    wanted: frozenset[str],
    why_left: WhyLeft,
    chosen: Mapping[nn.Module, type[nn.Module]],
) -> Plan:
    """Only layers' classes change, by the registry."""
    return Plan()


def undo(model: nn.Module) -> int:
    return 0


# ---- norms ----
# With timm's "fast norm" they compute in autocast's dtype, or by apex: that stays timm's.


def _native(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self._native.forward(self, *args, **kwargs)


def _layer_norm(self: Any, x: Tensor) -> Tensor:
    if self._fast_norm:
        return _native(self, x)
    return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


def _layer_norm_2d(self: Any, x: Tensor) -> Tensor:
    """LayerNorm2d normalises the channels of (N, C, H, W)."""
    if self._fast_norm:
        return _native(self, x)
    x = x.permute(0, 2, 3, 1)
    x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    return x.permute(0, 3, 1, 2)


def _norm_example(*size: int) -> tuple[nn.Module, Tensor]:
    layer: Any = nn.Module()
    layer.weight, layer.bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
    layer.normalized_shape, layer.eps, layer._fast_norm = (16,), 0.1, False
    return layer, torch.randn(*size) * 3


register_code(
    Known("layer_norm", _layer_norm, lambda: _norm_example(3, 4, 16)), "82e21e13d87c7232"
)  # LayerNorm, 0.9
register_code(
    Known("layer_norm", _layer_norm_2d, lambda: _norm_example(2, 16, 3, 4)), "357bd359005770b5"
)  # LayerNorm2d, 0.9
NORMS[_layer_norm] = LAYER_NORM
IMAGE_NORMS.add(_layer_norm_2d)


# Batch norm with the activation after it, in timm's convolutional models.
_AFTER_NORM: dict[type[nn.Module], str] = {
    nn.Identity: "batch_norm",
    nn.ReLU: "batch_norm_relu",
    ours.ReLU: "batch_norm_relu",
    nn.SiLU: "batch_norm_silu",
    ours.SiLU: "batch_norm_silu",
    nn.Hardswish: "batch_norm_hardswish",
}


def _batch_norm_act(self: Any, x: Tensor) -> Tensor:
    functional = _AFTER_NORM.get(type(self.act))
    if functional is None or type(self.drop) is not nn.Identity or self.momentum is None:
        return _native(self, x)
    if is_hooked(self.act) or is_hooked(self.drop):
        return _native(self, x)
    return RunningStatistics._normalize(self, x, functional=functional)


def _batch_norm_act_example() -> tuple[nn.Module, Tensor]:
    layer: Any = nn.BatchNorm2d(16)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    layer.drop, layer.act = nn.Identity(), nn.SiLU()
    return layer, torch.randn(2, 16, 3, 4) * 3


register_code(
    Known("batch_norm", _batch_norm_act, _batch_norm_act_example, parts=("drop", "act")),
    "768cc976a4e23ec6",  # 1.0.31
)


# ---- pooling ----


def _average_pool(self: Any, x: Tensor) -> Tensor:
    return mean_along(x, self.dim, not self.flatten)


def _average_pool_example() -> tuple[nn.Module, Tensor]:
    layer: Any = nn.Module()
    layer.flatten, layer.dim = True, (2, 3)
    return layer, torch.randn(2, 16, 3, 4)


register_code(
    Known("adaptive_avg_pool2d", _average_pool, _average_pool_example), "eb2e9cbb232e9964"
)  # FastAdaptiveAvgPool, 0.9


# ---- squeeze-and-excitation ----

SCALE_ACTIVATIONS[Sigmoid] = "sigmoid"
register(
    ("conv_reduce", "act1", "conv_expand", "gate"), {}, "612bbc605c8ced4b"
)  # SqueezeExcite, 0.9
register(
    ("fc1", "act", "fc2", "gate"), {"bn": nn.Identity(), "add_maxpool": False}, "8fa26859322d2786"
)  # SEModule, 0.9


# ---- attention ----


def _attention(
    self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The heads of q, k and v are views of the product's thirds.

    Attention's backward then writes the product's gradient. That of timm's ``unbind`` is a stack of
    transposed tensors and a copy that transposes it back.
    """
    if not self.fused_attn:
        # Before 1.0.17 the forward took x alone, before 1.0.24 no flag.
        masks = {} if attn_mask is None else {"attn_mask": attn_mask}
        return _native(self, x, **masks, **({"is_causal": True} if is_causal else {}))
    gate = None if getattr(self, "gate", None) is None else self.gate(x).sigmoid()
    thirds = ops.split_qkv(self.qkv(x), self.num_heads)
    q, k, v = (third.transpose(1, 2) for third in thirds)
    dropout_p = self.attn_drop.p if self.training else 0.0
    x = F.scaled_dot_product_attention(
        self.q_norm(q), self.k_norm(k), v, attn_mask, dropout_p, is_causal
    )
    x = x.transpose(1, 2).flatten(2)
    if (norm := getattr(self, "norm", None)) is not None:  # since 1.0.17
        x = norm(x)
    return self.proj_drop(self.proj(x if gate is None else x * gate))


def _attention_example() -> tuple[nn.Module, Tensor]:
    layer: Any = nn.Module()
    layer.num_heads, layer.head_dim, layer.attn_dim, layer.scale = 2, 8, 16, 8**-0.5
    layer.fused_attn, layer.gate = True, None
    layer.qkv, layer.proj = nn.Linear(16, 48), nn.Linear(16, 16)
    layer.q_norm = layer.k_norm = layer.norm = nn.Identity()
    layer.attn_drop = layer.proj_drop = nn.Dropout(0.0)
    return layer, torch.randn(2, 5, 16)


register_code(
    Known("scaled_dot_product_attention", _attention, _attention_example),
    "3b4a9210ed79d82f",  # 0.9
    "46b05fa15e860728",  # 1.0.17
    "f6dbcb7958ae027b",  # 1.0.24
    "897bd67b4b3fcd7c",  # 1.0.26
    "dbb01b52ddea8ef0",  # 1.0.28
)


# ---- blocks ----


def _block(
    self: Any,
    steps: tuple[Step, Step],
    dtype: torch.dtype,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    first, second = steps
    x, y = first.beside(self.norm1, x, dtype)
    y = self.drop_path1(self.ls1(self.attn(y, attn_mask=attn_mask, is_causal=is_causal)))
    x, y = second.added(self.norm2, y, x, dtype)
    return x + self.drop_path2(self.ls2(self.mlp(y)))


def _block_example() -> tuple[Any, ...]:
    layer: Any = nn.Module()
    layer.norm1, layer.norm2 = example_norm(ours.LayerNorm), example_norm(ours.LayerNorm)
    layer.attn = ExampleAttention(returns_weights=False)
    layer.mlp = example_mlp()
    layer.ls1 = layer.ls2 = layer.drop_path1 = layer.drop_path2 = nn.Identity()
    return layer, torch.randn(2, 5, 16)


register_block(
    Block(_block, (("norm1", "attn"), ("norm2", "mlp")), _block_example),
    "42a9cc334429026b",  # 1.0.31
)
