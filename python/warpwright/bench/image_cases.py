"""Cases of squeeze-and-excitation: the layers of EfficientNet-B0 and MobileNetV3-L."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _squeeze_excitation, _work
from .cases import BF16, FP32, NCHW, NHWC, Case, Inputs, _randn

Forms = tuple[str, str]
EFFICIENTNET: Forms = ("silu", "sigmoid")
MOBILENET: Forms = ("relu", "hardsigmoid")


def _squeezed(
    shape: tuple[int, int, int, int],
    squeezed: int,
    dtype: torch.dtype,
    layout: str,
    forms: Forms = EFFICIENTNET,
) -> Case:
    """Weights in the input's type. The fewest bytes: an image on chip between mean and product."""
    e = torch.Size(shape).numel() * dtype.itemsize
    channels = shape[1]

    def make(device: str) -> Inputs:
        return {
            "x": _randn(shape, dtype, device, layout),
            "w1": _randn((squeezed, channels, 1, 1), dtype, device) / channels**0.5,
            "b1": _randn((squeezed,), dtype, device),
            "w2": _randn((channels, squeezed, 1, 1), dtype, device) / squeezed**0.5,
            "b2": _randn((channels,), dtype, device),
        }

    def native(F: Any, i: Inputs) -> Tensor:
        scale = F.adaptive_avg_pool2d(i["x"], 1)
        scale = getattr(F, forms[0])(F.conv2d(scale, i["w1"], i["b1"]))
        scale = F.conv2d(scale, i["w2"], i["b2"])
        result: Tensor = _squeeze_excitation.SCALE_ACTIVATIONS[forms[1]](scale) * i["x"]
        return result

    return Case(
        "squeeze_excitation",
        f"{'x'.join(map(str, shape))}, {squeezed} squeezed",
        dtype,
        layout,
        make,
        lambda F, i: F.squeeze_excitation(*i.values(), *forms),
        _work.traffic(e, 2, 3).of("bytes"),
        native=native,
    )


# (channels, squeezed, side)
_OF_EFFICIENTNET = (
    *((32, 8, 112), (96, 4, 56), (144, 6, 56), (144, 6, 28), (240, 10, 28)),
    *((480, 20, 14), (672, 28, 14), (1152, 48, 7)),
)
_OF_MOBILENET = ((72, 24, 28), (120, 32, 28), (480, 120, 14), (672, 168, 14), (960, 240, 7))
SQUEEZE_EXCITATIONS = [
    *(_squeezed((256, c, n, n), s, BF16, NHWC) for c, s, n in _OF_EFFICIENTNET),
    *(_squeezed((256, c, n, n), s, BF16, NHWC, MOBILENET) for c, s, n in _OF_MOBILENET),
    _squeezed((256, 144, 56, 56), 6, BF16, NCHW),
    _squeezed((256, 144, 56, 56), 6, FP32, NHWC),
]
SMALL_SQUEEZE_EXCITATIONS = [
    _squeezed((8, 96, 28, 28), 4, FP32, NCHW),
    _squeezed((8, 96, 28, 28), 4, FP32, NHWC, MOBILENET),
]
