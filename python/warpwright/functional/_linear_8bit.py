"""Products of 8-bit codes, and the quantisation of what they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
ACCUMULATE = ("exact", "fast")


def quantize_rows(
    input: Tensor, dtype: torch.dtype, *, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes of 8 bits and the scales that give ``input`` back: ``input ≈ codes * scale``.

    A scale is the largest magnitude of its row divided by the largest code (127, 448 or 57344). It
    multiplies, as the scales of ``torch._scaled_mm`` and torchao do. The GPU reads a row once. A row
    of zeros has codes 0. A row with a NaN or an infinity has a scale that is not finite, so all of its
    results are NaN. Codes and scales have no gradient.

    Args:
        input: (..., columns), any strides; float32, bfloat16 or float16.
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        per_tensor: one scale for all rows.
    Returns:
        The codes, contiguous, of the shape of ``input``, and the scales in float32, (..., 1) or ().
    Raises:
        RuntimeError: another ``dtype``; ``input`` has no dimension.
        NotImplementedError: another dtype of ``input``.
        TypeError: an argument has another type than in the signature.
    """
    if not isinstance(dtype, torch.dtype):
        dtype = _arguments.dtype("quantize_rows", "dtype", dtype)
    if per_tensor.__class__ is not bool:
        per_tensor = _arguments.flag("quantize_rows", "per_tensor", per_tensor)
    try:
        return ops.quantize_rows(input, dtype, per_tensor)
    except RuntimeError as error:
        raise _arguments.error(error, "quantize_rows", {"input": input}, {}) from None


def linear_int8(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    per_tensor: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``linear`` of int8 codes: ``(input_scale * weight_scale) * (codes @ weight.T) + bias``.

    The sums are int32: exact up to 133,000 features. ``input`` is quantised as it comes
    (:func:`quantize_rows`), or it has codes already.

    The derivative passes through the quantisation of ``input`` as through the identity. Its gradient is
    a product with the dequantised weight in the dtype of ``input``. Codes and scales have none.

    Args:
        input: (..., in_features); float32, bfloat16 or float16. Or int8 codes.
        weight: (out_features, in_features), int8 codes.
        weight_scale: float32, one number per row of ``weight`` or one for all. Codes may go without.
        bias: (out_features), of the result's dtype or float32.
        input_scale: of codes: float32, one number per row or one for all.
        per_tensor: ``input`` is quantised with one scale for all rows.
        out_dtype: of codes: bfloat16 if None, float16, float32, or int32 for the sums themselves,
            as ``torch._int_mm`` returns them.
    Returns:
        (..., out_features) in the dtype of ``input``; of codes in ``out_dtype``.
    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together; a given argument has no meaning.
        NotImplementedError: another dtype of ``input``.
        TypeError: an argument has another type than in the signature.
    """
    if per_tensor.__class__ is not bool:
        per_tensor = _arguments.flag("linear_int8", "per_tensor", per_tensor)
    scales = (input_scale, weight_scale)
    if isinstance(input, Tensor) and input.dtype in CODES:
        return _of_codes("linear_int8", input, weight, scales, bias, per_tensor, out_dtype, False)
    _refuse_of_codes("linear_int8", input_scale, out_dtype)
    try:
        return ops.linear_int8(input, weight, weight_scale, bias, per_tensor)
    except RuntimeError as error:
        required = {"input": input, "weight": weight, "weight_scale": weight_scale}
        raise _arguments.error(error, "linear_int8", required, {"bias": bias}) from None


def linear_fp8(
    input: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    per_tensor: bool = False,
    accumulate: str = "exact",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``linear`` of 8-bit floats: ``(input_scale * weight_scale) * (codes @ weight.T) + bias``.

    As :func:`linear_int8`, with e4m3 codes. Hopper's tensor cores keep about 13 bits of a sum of 8-bit
    floats and cut the rest, so long sums of one sign are too small.

    Args:
        input: (..., in_features); float32, bfloat16 or float16. Or codes, e4m3 or e5m2.
        weight: (out_features, in_features); e4m3 codes, or e5m2 ones next to codes in ``input``.
        weight_scale: float32, one number per row of ``weight`` or one for all. Codes may go without.
        bias: (out_features), of the result's dtype or float32.
        input_scale: of codes: float32, one number per row or one for all.
        per_tensor: ``input`` is quantised with one scale for all rows.
        accumulate: ``"exact"`` moves the sums to float32 every 128 features, as ``torch._scaled_mm``
            does with ``use_fast_accum=False``. ``"fast"`` does not.
        out_dtype: of codes: bfloat16 if None, float16 or float32.
    Returns:
        (..., out_features) in the dtype of ``input``; of codes in ``out_dtype``.
    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together; a given argument has no meaning.
        NotImplementedError: another dtype of ``input``.
        ValueError: another ``accumulate``.
        TypeError: an argument has another type than in the signature.
    """
    if per_tensor.__class__ is not bool:
        per_tensor = _arguments.flag("linear_fp8", "per_tensor", per_tensor)
    if accumulate not in ACCUMULATE:
        raise ValueError(
            f"linear_fp8: accumulate: expected 'exact' or 'fast', got {_arguments.shown(accumulate)}"
        )
    fast = accumulate == "fast"
    scales = (input_scale, weight_scale)
    if isinstance(input, Tensor) and input.dtype in CODES:
        return _of_codes("linear_fp8", input, weight, scales, bias, per_tensor, out_dtype, fast)
    _refuse_of_codes("linear_fp8", input_scale, out_dtype)
    try:
        return ops.linear_fp8(input, weight, weight_scale, bias, per_tensor, fast)
    except RuntimeError as error:
        required = {"input": input, "weight": weight, "weight_scale": weight_scale}
        raise _arguments.error(error, "linear_fp8", required, {"bias": bias}) from None


def _refuse_of_codes(function: str, input_scale: Any, out_dtype: Any) -> None:
    """Arguments that a floating-point ``input`` has no use for."""
    for name, value in (("input_scale", input_scale), ("out_dtype", out_dtype)):
        if value is not None:
            raise RuntimeError(
                f"{function}: {name}: expected None, because input is no tensor of codes, got "
                f"{value if name == 'out_dtype' else type(value).__name__}"
            )


def _of_codes(
    function: str,
    input: Tensor,
    weight: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    per_tensor: bool,
    out_dtype: torch.dtype | None,
    fast: bool,
) -> Tensor:
    is_int8 = function == "linear_int8"
    if is_int8 != (input.dtype == torch.int8):
        expected = "int8 or" if is_int8 else "e4m3, e5m2 or"
        raise RuntimeError(
            f"{function}: input: expected {expected} floating-point numbers of 16 or 32 bits, got "
            f"{input.dtype}"
        )
    if per_tensor:
        raise RuntimeError(
            f"{function}: per_tensor: expected False, because input has codes already, got True"
        )
    if out_dtype is None:
        out_dtype = torch.bfloat16
    elif not isinstance(out_dtype, torch.dtype):
        out_dtype = _arguments.dtype(function, "out_dtype", out_dtype)
    try:
        return ops.scaled_linear(input, scales[0], weight, scales[1], bias, out_dtype, fast)
    except RuntimeError as error:
        optional = {"input_scale": scales[0], "weight_scale": scales[1], "bias": bias}
        required = {"input": input, "weight": weight}
        raise _arguments.error(error, function, required, optional) from None
