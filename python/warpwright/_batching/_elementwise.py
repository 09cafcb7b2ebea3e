"""Rules of elementwise ops and rotary embeddings: one call serves all samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, check_randomness, front, into, one_by_one, out_of, results


def activation(info: Any, dims: Dims, input: Tensor, activation: str) -> tuple[Tensor, int | None]:
    return ops.activation(input, activation), dims[0]


def activation_backward(
    info: Any, dims: Dims, grad: Tensor, kept: Tensor, activation: str
) -> tuple[Tensor, int]:
    operands = (front(t, d, info.batch_size) for t, d in zip((grad, kept), dims[:2], strict=True))
    return ops.activation_backward(*operands, activation), 0


def dropout(
    info: Any, dims: Dims, input: Tensor, p: float, place: Sequence[int] = ()
) -> tuple[Any, Any]:
    """A state of the generator per sample, or one for all, which the backward tells apart."""
    check_randomness(info.randomness)
    if info.randomness == "different":
        return one_by_one(ops.dropout, info.batch_size, dims, (input, p, place))
    x = input.movedim(dims[0], 0)  # type: ignore[arg-type]
    _, state = ops.dropout(x[0], p, place)
    return results((_same_dropout(x, state, p, place), 0), (state, None))


def dropout_backward(
    info: Any, dims: Dims, grad: Tensor, philox_state: Tensor, p: float, place: Sequence[int] = ()
) -> tuple[Tensor, int]:
    if dims[1] is not None:
        arguments = (grad, philox_state, p, place)
        return one_by_one(ops.dropout_backward, info.batch_size, dims, arguments)  # type: ignore[return-value]
    return _same_dropout(grad.movedim(dims[0], 0), philox_state, p, place), 0  # type: ignore[arg-type]


def _same_dropout(x: Tensor, state: Tensor, p: float, place: Sequence[int]) -> Tensor:
    factors = ops.dropout_backward(torch.ones_like(x[0]), state, p, place)
    return x * factors


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


def rotary_embedding(
    info: Any,
    dims: Dims,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Any, Any]:
    """Samples fold into the batch; a table without samples and batch stays one."""
    samples = info.batch_size
    batch = query.shape[0] if dims[0] is None else query.movedim(dims[0], 0).shape[1]

    def table(x: Tensor, dim: int | None) -> Tensor:
        if dim is None and x.shape[0] == 1:
            return x
        return front(x, dim, samples).expand(-1, batch, -1, -1).flatten(0, 1)

    rotated = ops.rotary_embedding(
        *(into(x, d, samples, 0) for x, d in zip((query, key), dims[:2], strict=True)),
        *(table(x, d) for x, d in zip((cos, sin), dims[2:4], strict=True)),
        interleaved,
        inverse,
    )
    return results(*(out_of(x, samples, 0) for x in rotated))
