"""Rules of quantisation and of the products of codes: the batch is folded into the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, one_by_one, results


def quantize_rows(
    info: Any, dims: Dims, input: Tensor, dtype: torch.dtype, per_tensor: bool
) -> tuple[Any, Any]:
    if per_tensor or input.dim() < 2:
        return one_by_one(ops.quantize_rows, info.batch_size, dims, (input, dtype, per_tensor))
    codes, scale = ops.quantize_rows(front(input, dims[0], info.batch_size), dtype, per_tensor)
    return results((codes, 0), (scale, 0))


def scaled_linear(
    info: Any, dims: Dims, input: Tensor, input_scale: Tensor | None, *rest: Any
) -> tuple[Any, Any]:
    samples = info.batch_size
    if dims[0] is None or any(dim is not None for dim in dims[2:]):
        return one_by_one(ops.scaled_linear, samples, dims, (input, input_scale, *rest))
    x = front(input, dims[0], samples)
    scale = input_scale
    if scale is not None and (dims[1] is not None or scale.numel() > 1):
        rows = x.shape[1:-1].numel()
        scale = front(scale, dims[1], samples).reshape(samples, -1).expand(samples, rows)
    return ops.scaled_linear(x, scale, *rest), 0


def _quantized(op: Any) -> Any:
    def rule(
        info: Any, dims: Dims, input: Tensor, weight: Tensor, weight_scale: Tensor, bias: Any,
        per_tensor: bool, *rest: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        args = (input, weight, weight_scale, bias, per_tensor, *rest)
        if per_tensor or dims[0] is None or any(dim is not None for dim in dims[1:]):
            return one_by_one(op, info.batch_size, dims, args)
        return op(front(input, dims[0], info.batch_size), *args[1:]), 0

    return rule


linear_int8 = _quantized(ops.linear_int8)
linear_fp8 = _quantized(ops.linear_fp8)
