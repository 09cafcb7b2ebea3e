"""torchvision's squeeze-and-excitation, in EfficientNet, MobileNetV3 and RegNetY.

The registry recognises it by its code, which is the same in torchvision 0.24 to 0.26.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

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
