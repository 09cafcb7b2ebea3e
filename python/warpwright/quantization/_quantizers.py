"""A weight to codes: the scale of the largest value, or the one with the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from .._quantized_weight import pack_pairs

Codes = tuple[Tensor, Tensor, Tensor | None]  # codes, scales, zeros
METHODS = ("absmax", "mse")
CLIPS = 24  # scales that "mse" tries, from the whole range down to half of it


def check_method(function: str, method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"{function}: method: expected one of {METHODS}, got {method!r}")


def check_weight(function: str, weight: Tensor) -> None:
    if not weight.is_floating_point():
        raise TypeError(f"{function}: weight: expected floating point numbers, got {weight.dtype}")


def _nonzero(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype that is stored. A group of zeros has scale 1."""
    scales = scales.to(dtype)
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def group_scales(groups: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point of groups along the last dimension, for 4 bits."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scales = _nonzero(torch.maximum(-low, high) / 7, dtype)
        return scales, torch.full_like(scales, 8, dtype=torch.uint8)
    scales = _nonzero((high - low) / 15, dtype)
    zeros = (-low / scales.to(low.dtype)).round().clamp(0, 15)
    return scales, zeros.to(torch.uint8)


def nearest(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The codes 0 to 15 of groups along the last dimension, as floats."""
    wide = scales.to(values.dtype)[..., None]
    return (values / wide + zeros.to(values.dtype)[..., None]).round().clamp(0, 15)


def _error(groups: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    q = nearest(groups, scales, zeros)
    numbers = (q - zeros.to(q.dtype)[..., None]) * scales.to(q.dtype)[..., None]
    return (numbers - groups).square().sum(-1)


def int4(
    weight: Tensor, group: int = 128, *, symmetric: bool = True, method: str = "absmax"
) -> Codes:
    """4-bit codes of (N, K) in groups along K.

    Args:
        weight: float32, float64, bfloat16 or float16. Scales get its dtype.
        group: an even divisor of K.
        symmetric: the scale covers the largest magnitude, and code 8 is zero. Otherwise it covers
            the range from the least to the greatest value, and each group has its own code of zero.
        method: ``"absmax"``, or ``"mse"``: of 24 ranges down to half of it, the one with the least
            squared error.
    Returns:
        Codes (N, K / 2), scales (N, K / group), and zeros or None.
    """
    check_method("int4", method)
    check_weight("int4", weight)
    if weight.dim() != 2 or group <= 0 or group % 2 or weight.shape[1] % group:
        raise ValueError(
            "int4: group: expected an even divisor of the weight's columns, got a weight of shape "
            f"{tuple(weight.shape)} and group {group}"
        )
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    groups = weight.detach().to(wide).unflatten(1, (-1, group))
    scales, zeros = group_scales(groups, symmetric, weight.dtype)
    if method == "mse":
        best = _error(groups, scales, zeros)
        for i in range(1, CLIPS):
            clip = 1 - 0.5 * i / (CLIPS - 1)
            s, z = group_scales(groups * clip, symmetric, weight.dtype)
            error = _error(groups, s, z)
            better = error < best
            best = torch.where(better, error, best)
            scales, zeros = torch.where(better, s, scales), torch.where(better, z, zeros)
    codes = pack_pairs(nearest(groups, scales, zeros).flatten(1))
    return codes, scales, None if symmetric else zeros


def int8(weight: Tensor, *, method: str = "absmax") -> Codes:
    """8-bit codes of (N, K) with a scale per row; arguments and results as :func:`int4`'s."""
    check_method("int8", method)
    check_weight("int8", weight)
    if weight.dim() != 2:
        raise ValueError(f"int8: weight: expected a matrix, got shape {tuple(weight.shape)}")
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    rows = weight.detach().to(wide)
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(rows.shape[0])

    def coded(scales: Tensor) -> Tensor:
        return (rows / scales.to(wide)[:, None]).round().clamp(-128, 127)

    scales = _nonzero(largest / 127, weight.dtype)
    if method == "mse":
        best = torch.full_like(largest, torch.inf)
        for i in range(CLIPS):
            s = _nonzero(largest * (1 - 0.5 * i / (CLIPS - 1)) / 127, weight.dtype)
            error = (coded(s) * s.to(wide)[:, None] - rows).square().sum(1)
            scales = torch.where(error < best, s, scales)
            best = torch.minimum(error, best)
    return coded(scales).to(torch.int8), scales, None
