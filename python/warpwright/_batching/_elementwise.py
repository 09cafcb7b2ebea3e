"""Rules of the gated activations: every element by itself, so one call serves all samples."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, results


def gated_activation(
    info: Any, dims: Dims, gate: Tensor, up: Tensor | None, activation: str
) -> tuple[Tensor, int]:
    halves = (front(t, d, info.batch_size) for t, d in zip((gate, up), dims[:2], strict=True))
    return ops.gated_activation(*halves, activation), 0


def gated_activation_backward(
    info: Any,
    dims: Dims,
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    mask: list[bool],
) -> tuple[Any, Any]:
    tensors = zip((grad, gate, up), dims[:3], strict=True)
    operands = (front(t, d, info.batch_size) for t, d in tensors)
    found = ops.gated_activation_backward(*operands, activation, mask)
    return results(*((t, None if t is None else 0) for t in found))
