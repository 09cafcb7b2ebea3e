"""Cases of 8-bit codes: the quantisation of rows, and products of codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _native_8bit
from .cases import BF16, ROWS, Case, Inputs, _randn

E4M3 = torch.float8_e4m3fn


def _codes(rows: int, cols: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, cols, device=device)
    return _native_8bit.quantize_rows(x, dtype)


def _product(i: Inputs, x: Tensor, x_scale: Tensor, fast: bool) -> Tensor:
    """What torch has for codes; in float64 the exact product."""
    weight, scale = i["weight"], i["weight_scale"]
    if scale.dtype == torch.float64:
        return x.double() @ weight.double().t() * x_scale * scale.t()
    if weight.dtype == torch.int8:
        return (torch._int_mm(x, weight.t()) * x_scale * scale.t()).to(BF16)
    return torch._scaled_mm(x, weight.t(), x_scale, scale.t(), out_dtype=BF16, use_fast_accum=fast)


def _linear_codes(
    op: str, rows: int, features: int, outputs: int, fast: bool = False, quantizes: bool = False
) -> Case:
    """linear_int8 or linear_fp8 of codes, or of bfloat16 rows that it quantises, to bfloat16."""
    dtype = torch.int8 if op == "linear_int8" else E4M3
    options = {"accumulate": "fast"} if fast else {}

    def make(device: str) -> Inputs:
        weight, weight_scale = _codes(outputs, features, dtype, device)
        if quantizes:
            x = {"x": _randn((rows, features), BF16, device).detach()}
        else:
            x = dict(zip(("x", "x_scale"), _codes(rows, features, dtype, device), strict=True))
        return {**x, "weight": weight, "weight_scale": weight_scale}

    def call(F: Any, i: Inputs) -> Tensor:
        if quantizes:
            of_x: dict[str, Any] = {}
        else:
            of_x = {"input_scale": i["x_scale"], "out_dtype": BF16}
        result: Tensor = getattr(F, op)(i["x"], i["weight"], i["weight_scale"], **of_x, **options)
        return result

    def native(F: Any, i: Inputs) -> Tensor:
        if quantizes:
            return _product(i, *_native_8bit.quantize_rows(i["x"].to(BF16), dtype), fast)
        return _product(i, i["x"], i["x_scale"], fast)

    moved = rows * features * (3 if quantizes else 1) + outputs * features + 2 * rows * outputs
    return Case(
        op,
        f"{rows}x{features}->{outputs}"
        + (" fast" if fast else "")
        + (" of bf16" if quantizes else ""),
        BF16,
        ROWS,
        make,
        call,
        {"fwd": float(moved)},
        {"fwd": 2.0 * rows * features * outputs},
        sample=lambda i: {name: x[:64] for name, x in i.items()},
        native=native,
    )


def _quantize(rows: int, cols: int, dtype: torch.dtype, codes: torch.dtype, whole: bool) -> Case:
    """The codes, as bytes."""

    def run(quantize: Any, x: Tensor) -> Tensor:
        result: Tensor = quantize(x, codes, per_tensor=whole)[0].view(torch.uint8)
        return result

    return Case(
        "quantize_rows",
        f"{rows}x{cols} to {'int8' if codes == torch.int8 else 'e4m3'}"
        + (" one scale" if whole else ""),
        dtype,
        ROWS,
        lambda device: {"x": _randn((rows, cols), dtype, device).detach()},
        lambda F, i: run(F.quantize_rows, i["x"]),
        # One scale for all needs the maximum before the first code.
        {"fwd": float(rows * cols * (dtype.itemsize * (2 if whole else 1) + 1))},
        native=lambda F, i: run(_native_8bit.quantize_rows, i["x"].to(dtype)),
    )
