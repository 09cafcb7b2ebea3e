"""torchvision's squeeze-and-excitation (EfficientNet, MobileNetV3, RegNetY) and ConvNeXt's norm.

The registry recognises them by their code, which is the same in torchvision 0.24 to 0.26.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..swap.norms import IMAGE_NORMS
from ..swap.registry import Known, register_code
from ..swap.residual import example_norm
from ..swap.selection import WhyLeft
from . import Plan
from ._squeeze_excitation import register

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


register(
    ("fc1", "activation", "fc2", "scale_activation"),
    {"avgpool": nn.AdaptiveAvgPool2d(1)},
    "d5b3ab979c898f72",
)  # SqueezeExcitation


def _layer_norm_2d(self: Any, x: Tensor) -> Tensor:
    """The norm of the channels of (N, C, H, W)."""
    x = x.permute(0, 2, 3, 1)
    x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    return x.permute(0, 3, 1, 2)


def _layer_norm_2d_example() -> tuple[nn.Module, Tensor]:
    return example_norm(nn.LayerNorm), torch.randn(2, 16, 3, 4) * 3


register_code(
    Known("layer_norm", _layer_norm_2d, _layer_norm_2d_example), "50dee03c1326be7c"
)  # LayerNorm2d
IMAGE_NORMS.add(_layer_norm_2d)
