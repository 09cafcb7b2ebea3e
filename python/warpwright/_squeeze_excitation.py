"""Squeeze-and-excitation in native's functions, and its backward in ATen's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

native = torch.nn.functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": native.relu, "silu": native.silu}
SCALE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "hardsigmoid": native.hardsigmoid,
}


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return native.conv2d(x, weight if weight.dim() == 4 else weight[:, :, None, None], bias)


def squeeze_excitation(
    input: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str,
    scale_activation: str,
) -> tuple[Tensor]:
    """The chain that the op replaces."""
    scale = native.adaptive_avg_pool2d(input, 1)
    # float32 parameters next to a 16-bit input, which native has under autocast alone
    mixed = fc1_weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type)
    if mixed:
        scale = scale.to(fc1_weight.dtype)
    scale = ACTIVATIONS[activation](_convolved(scale, fc1_weight, fc1_bias))
    scale = SCALE_ACTIVATIONS[scale_activation](_convolved(scale, fc2_weight, fc2_bias))
    return ((scale.to(input.dtype) if mixed else scale) * input,)


# ---- in ATen's functions ----

_Five = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _sums_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.flatten(1).to(dtype)


def _vector(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def aten_squeeze_excitation(
    input: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    activation: str,
    scale_activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward reads: the mean, the first layer's result, the factors."""
    dtype = _sums_dtype(input)
    mean = input.mean((2, 3), dtype=dtype)
    hidden = native.linear(mean, _matrix(fc1_weight, dtype), _vector(fc1_bias, dtype))
    squeezed = ACTIVATIONS[activation](hidden)
    scale = SCALE_ACTIVATIONS[scale_activation](
        native.linear(squeezed, _matrix(fc2_weight, dtype), _vector(fc2_bias, dtype))
    )
    output = (input * scale[:, :, None, None]).to(input.dtype)
    return output, mean, hidden, scale


def aten_squeeze_excitation_backward(
    grad: Tensor,
    input: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    mean: Tensor,
    hidden: Tensor,
    scale: Tensor,
    activation: str,
    scale_activation: str,
    mask: Sequence[bool],
) -> _Five:
    dtype = _sums_dtype(input)
    of_scale = (grad.to(dtype) * input).sum((2, 3))
    if scale_activation == "sigmoid":
        of_argument = of_scale * ((1 - scale) * scale)
    else:
        inside = (scale > 0) & (scale < 1)
        of_argument = torch.where(inside, of_scale / 6, torch.zeros_like(of_scale))
    of_squeezed = of_argument @ _matrix(fc2_weight, dtype)
    if activation == "relu":
        of_hidden = torch.where(hidden <= 0, torch.zeros_like(of_squeezed), of_squeezed)
    else:
        s = torch.sigmoid(hidden)
        of_hidden = of_squeezed * (s * (1 + hidden * (1 - s)))
    dx = None
    if mask[0]:
        of_mean = of_hidden @ _matrix(fc1_weight, dtype) / (input.shape[2] * input.shape[3])
        dx = (grad * scale[:, :, None, None] + of_mean[:, :, None, None]).to(input.dtype)
    squeezed = ACTIVATIONS[activation](hidden)

    def shaped(gradient: Tensor, parameter: Tensor | None, wanted: bool) -> Tensor | None:
        if parameter is None or not wanted:
            return None
        return gradient.to(parameter.dtype).reshape(parameter.shape)

    return (
        dx,
        shaped(of_hidden.t() @ mean, fc1_weight, mask[1]),
        shaped(of_hidden.sum(0), fc1_bias, mask[2]),
        shaped(of_argument.t() @ squeezed, fc2_weight, mask[3]),
        shaped(of_argument.sum(0), fc2_bias, mask[4]),
    )
