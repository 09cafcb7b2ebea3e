"""Squeeze-and-excitation as one op."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .. import _arguments
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from .._squeeze_excitation import ACTIVATIONS, SCALE_ACTIVATIONS
from ._common import dynamo, exporting, trains_on_gpu


def squeeze_excitation(
    input: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str = "relu",
    scale_activation: str = "sigmoid",
) -> Tensor:
    """``input * g(W2 f(W1 mean(input) + b1) + b2)``: channels scaled by a function of their means.

    The block of arXiv 1709.01507, as in MobileNetV3 and EfficientNet. Native runs it as a chain of an
    average pooling, two 1x1 convolutions, their activations and a product. Means, layers and
    factors are computed in float32 (or float64) and the output is rounded once.

    Args:
        input: (N, C, H, W) or (C, H, W), contiguous or channels_last (kept in the output); float32,
            float64, bfloat16, float16.
        fc1_weight: W1, (S, C) or (S, C, 1, 1), in the dtype of ``input``, or float32 for a 16-bit
            ``input``.
        fc1_bias: b1, (S), or None.
        fc2_weight: W2, (C, S) or (C, S, 1, 1).
        fc2_bias: b2, (C), or None.
        activation: f, ``"relu"`` or ``"silu"``.
        scale_activation: g, ``"sigmoid"`` or ``"hardsigmoid"``.
    Returns:
        The shape, dtype and layout of ``input``. Under autocast: the dtype of the chain's product,
        float32 if ``input`` is a 16-bit type other than autocast's.
    Raises:
        RuntimeError: sizes or dtypes do not fit, a dimension other than N is empty, or an unknown
            activation.
        NotImplementedError: integer or complex ``input``.
        TypeError: an argument has another type than in the signature.
    """
    if activation.__class__ is not str or activation not in ACTIVATIONS:
        _refuse("activation", activation, ACTIVATIONS)
    if scale_activation.__class__ is not str or scale_activation not in SCALE_ACTIVATIONS:
        _refuse("scale_activation", scale_activation, SCALE_ACTIVATIONS)
    if isinstance(input, Tensor) and input.dim() == 3:
        input = input.unsqueeze(0)
        rest = (fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, scale_activation)
        return squeeze_excitation(input, *rest).squeeze(0)
    args = (input, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, scale_activation)
    if (dynamo() or exporting()) and not trains_on_gpu(input):
        return NATIVE_OPERATORS["squeeze_excitation"](*args)[0]  # type: ignore[no-any-return]
    try:
        return ops.squeeze_excitation(*args)[0]  # type: ignore[no-any-return]
    except RuntimeError as error:
        required = {"input": input, "fc1_weight": fc1_weight, "fc2_weight": fc2_weight}
        optional = {"fc1_bias": fc1_bias, "fc2_bias": fc2_bias}
        raise _arguments.error(error, "squeeze_excitation", required, optional) from None


def _refuse(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises unless the value is a string of the right name, of a class derived from str."""
    if not isinstance(value, str):
        raise TypeError(
            f"squeeze_excitation(): argument '{name}' must be str, not {type(value).__name__}"
        )
    if value not in known:
        raise RuntimeError(
            f"squeeze_excitation: {name}: expected {' or '.join(known)}, got {value}"
        )
