"""The rules of embedding: batched indices are more indices, batched weights more columns or rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, shifted


def embedding(
    info: Any, dims: Dims, weight: Tensor, indices: Tensor, padding_idx: int, by_freq: bool
) -> tuple[Tensor, int]:
    """Padding and frequencies concern derivatives, whose operator gets its own batch."""
    of_weight, of_indices = dims[:2]
    if of_weight is None:
        return ops.embedding(weight, indices, padding_idx, by_freq), of_indices  # type: ignore[return-value]
    if of_indices is None:  # samples side by side in columns
        weight = weight.movedim(of_weight, 1)
        rows, samples, columns = weight.shape
        result = ops.embedding(weight.reshape(rows, samples * columns), indices, -1, False)
        return result.unflatten(-1, (samples, columns)), indices.dim()
    weight, indices = weight.movedim(of_weight, 0), indices.movedim(of_indices, 0)
    folded = shifted(indices, weight.shape[1], -1)
    return ops.embedding(weight.flatten(0, 1), folded, -1, False), 0


def embedding_backward(
    info: Any,
    dims: Dims,
    grad: Tensor,
    indices: Tensor,
    rows: int,
    padding_idx: int,
    by_freq: bool,
) -> tuple[Tensor, int]:
    of_grad, of_indices = dims[:2]
    samples = info.batch_size
    if of_indices is None:
        grad = grad.movedim(of_grad, -2)  # type: ignore[arg-type]
        columns = grad.shape[-1]
        result = ops.embedding_backward(grad.flatten(-2), indices, rows, padding_idx, by_freq)
        return result.unflatten(1, (samples, columns)), 1
    grad, indices = front(grad, of_grad, samples), indices.movedim(of_indices, 0)
    folded = shifted(indices, rows, -1)
    skipped = -1
    if padding_idx >= 0:  # every sample has that row: its positions get an index that is no row
        skipped = samples * rows
        folded = torch.where(indices == padding_idx, skipped, folded)
    result = ops.embedding_backward(grad, folded, samples * rows, skipped, by_freq)
    return result.unflatten(0, (samples, rows)), 0
