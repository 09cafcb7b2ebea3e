"""Squeeze-and-excitation layers of torchvision and timm: pooling, two convolutions, product, as one op.

The layer's own forward runs if one of its parts is another than the op has, or if someone watches a
part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from .. import nn as ours
from ..functional._common import dynamo, exporting, trains_on_gpu
from ..swap.blocks import all_layers_are_watched, is_hooked
from ..swap.patterns import CONVOLUTIONS
from ..swap.registry import Known, register_code

# Native's layers and the op's names for them.
ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    ours.ReLU: "relu",
    nn.SiLU: "silu",
    ours.SiLU: "silu",
}
SCALE_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Sigmoid: "sigmoid",
    ours.Sigmoid: "sigmoid",
    nn.Hardsigmoid: "hardsigmoid",
}


def _is_product(layer: Any) -> bool:
    """Whether it is a convolution that on one pixel is a matrix product."""
    return (
        type(layer) in CONVOLUTIONS
        and layer.kernel_size == (1, 1)
        and layer.stride == (1, 1)
        and layer.padding == (0, 0)
        and layer.groups == 1
        and "forward" not in vars(layer)
    )


def _is_no_step(layer: Any) -> bool:
    """Whether it does nothing, or is the op's own pooling."""
    if type(layer) in (nn.AdaptiveAvgPool2d, ours.AdaptiveAvgPool2d):
        return layer.output_size in (1, (1, 1)) and "forward" not in vars(layer)
    return type(layer) is nn.Identity


def _has_hooks(layer: Any) -> bool:
    """Whether a hook watches the layer. The dicts first: most are empty."""
    found = (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )
    return bool(found) and is_hooked(layer)


def _forward(
    first: str, activation: str, second: str, scale_activation: str, *nothing: str
) -> Callable[[Any, Tensor], Tensor]:
    """The forward of a layer with its parts at these names; ``nothing``: parts that are no step.

    It runs in every step, so it reads the dicts of the modules: ``nn.Module.__getattr__`` takes
    longer than the rest.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        parts = self._modules
        fc1, fc2 = parts[first], parts[second]
        f, g = parts[activation], parts[scale_activation]
        names: Any = ACTIVATIONS.get(type(f)), SCALE_ACTIVATIONS.get(type(g))
        is_ours = names[0] is not None and names[1] is not None
        is_ours = is_ours and _is_product(fc1) and _is_product(fc2)
        is_ours = is_ours and not any(_has_hooks(layer) for layer in (fc1, f, fc2, g))
        for name in nothing:
            layer = parts[name]
            is_ours = is_ours and _is_no_step(layer) and not _has_hooks(layer)
        if not is_ours or x.dim() != 4 or x.numel() == 0 or not x.is_floating_point():
            return self._native.forward(self, x)  # type: ignore[no-any-return]
        if (dynamo() or exporting()) and not trains_on_gpu(x):
            return self._native.forward(self, x)  # type: ignore[no-any-return]
        if all_layers_are_watched() or vars(self).get("add_maxpool"):
            return self._native.forward(self, x)  # type: ignore[no-any-return]
        of_fc1, of_fc2 = fc1._parameters, fc2._parameters
        return F.squeeze_excitation(
            *(x, of_fc1["weight"], of_fc1["bias"], of_fc2["weight"], of_fc2["bias"]),
            *names,
        )

    return forward


def _example(
    first: str, activation: str, second: str, scale_activation: str, **others: Any
) -> Callable[[], tuple[nn.Module, Tensor]]:
    def example() -> tuple[nn.Module, Tensor]:
        layer = nn.Module()
        for name, part in others.items():
            setattr(layer, name, part)
        setattr(layer, first, nn.Conv2d(16, 4, 1))
        setattr(layer, activation, nn.SiLU())
        setattr(layer, second, nn.Conv2d(4, 16, 1))
        setattr(layer, scale_activation, nn.Sigmoid())
        return layer, torch.randn(3, 16, 5, 4) * 3 + 1

    return example


def register(names: tuple[str, str, str, str], nothing: dict[str, Any], *sources: str) -> None:
    """Adds a class by its code: first layer, activation, second layer, scale activation.

    Args:
        nothing: attributes of the example with values that do nothing; those with layers are parts.
    """
    layers = tuple(name for name, value in nothing.items() if isinstance(value, nn.Module))
    known = Known(
        "squeeze_excitation",
        _forward(*names, *layers),
        _example(*names, **nothing),
        parts=(*names, *layers),
    )
    register_code(known, *sources)
