"""quantize_rows and the products of 8-bit codes in native's functions: see _native."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize_rows(
    input: Tensor, dtype: torch.dtype, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    x, largest = input.detach().float(), LARGEST[dtype]
    if x.numel() == 0:
        shape = () if per_tensor else (*x.shape[:-1], 1)
        return torch.empty_like(x, dtype=dtype), x.new_full(shape, SMALLEST_SCALE)
    maximum = x.abs().amax() if per_tensor else x.abs().amax(-1, keepdim=True)
    # By a tensor: CUDA multiplies by the reciprocal of a number.
    scale = (maximum / maximum.new_full((), largest)).clamp_min(SMALLEST_SCALE)
    x = (x * scale.reciprocal()).clamp(-largest, largest)
    if dtype == torch.int8:
        x = x.round().nan_to_num(0.0)
    return x.to(dtype).contiguous(), scale


def _times(x: Tensor, scale: Tensor | None, each: tuple[int, int]) -> Tensor:
    if scale is None:
        return x
    return x * (scale.reshape(()) if scale.numel() == 1 else scale.reshape(each))


def scaled_linear(
    input: Tensor,
    input_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Codes as float64, so that sums of int8 are exact and those of floats nearly."""
    rows = (
        input.reshape(-1, input.shape[-1])
        if input.numel()
        else input.new_empty((input.shape[:-1].numel(), input.shape[-1]))
    )
    sums = torch.mm(rows.double(), weight.double().t())
    if out_dtype != torch.int32:
        sums = sums.float()
    y = _times(_times(sums, input_scale, (-1, 1)), weight_scale, (1, -1))
    y = y if bias is None else y + bias
    return y.to(out_dtype).reshape(*input.shape[:-1], weight.shape[0])


def _quantized(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    per_tensor: bool,
) -> Tensor:
    """With the derivative of the unquantised product ("straight-through")."""
    codes, scale = quantize_rows(input, weight.dtype, per_tensor)
    x = input.float()
    x = x + (codes.float() * scale - x).detach()
    y = torch.nn.functional.linear(x, _times(weight.float(), weight_scale, (-1, 1)))
    return (y if bias is None else y + bias).to(input.dtype)


def linear_int8(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    per_tensor: bool = False,
) -> Tensor:
    return _quantized(input, weight, weight_scale, bias, per_tensor)


def linear_fp8(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    per_tensor: bool = False,
    use_fast_accum: bool = False,
) -> Tensor:
    return _quantized(input, weight, weight_scale, bias, per_tensor)
