"""The squeeze-and-excitation layer of :mod:`warpwright.nn`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from . import functional as F
from ._squeeze_excitation import ACTIVATIONS, SCALE_ACTIVATIONS
from ._tools import Named


class SqueezeExcitation(Named, nn.Module):
    """Scales channels by a function of their means: :func:`warpwright.functional.squeeze_excitation`.

    Parameters and ``state_dict`` are those of torchvision's ``SqueezeExcitation``.

    Args:
        input_channels: C.
        squeeze_channels: between the two layers.
        activation: ``"relu"`` or ``"silu"``.
        scale_activation: ``"sigmoid"`` or ``"hardsigmoid"``.

    Shape: (N, C, H, W) or (C, H, W) to the same. The layers are the 1x1 convolutions ``fc1`` and
    ``fc2``.
    """

    def __init__(
        self,
        input_channels: int,
        squeeze_channels: int,
        activation: str = "relu",
        scale_activation: str = "sigmoid",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("activation", activation, ACTIVATIONS),
            ("scale_activation", scale_activation, SCALE_ACTIVATIONS),
        ):
            if value not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}; got {value!r}")
        where = {"device": device, "dtype": dtype}
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1, **where)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1, **where)
        self.activation, self.scale_activation = activation, scale_activation

    def forward(self, input: Tensor) -> Tensor:
        return F.squeeze_excitation(
            *(input, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias),
            activation=self.activation,
            scale_activation=self.scale_activation,
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, scale_activation={self.scale_activation!r}"
