"""The rules of layer_scale_add: samples are further ones, unless a sum or a factor differs per sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._ops import ops
from ._fold import Dims, Rule, front, into, one_by_one, out_of, results


def _folds(x: Tensor, dim: int | None, scale: Tensor) -> bool:
    """Whether the first dimension of a sample of ``x`` is not that of the channels."""
    dims = x.dim() - (dim is not None)
    return dims > 0 and (scale.dim() < dims or scale.shape[0] == 1)


def layer_scale_add(
    info: Any,
    dims: Dims,
    input: Tensor,
    residual: Tensor,
    scale: Tensor,
    sample_scale: Tensor | None = None,
) -> tuple[Any, Any]:
    samples, args = info.batch_size, (input, residual, scale, sample_scale)
    if dims[2] is None and sample_scale is None:  # a scale broadcasts to any dimensions before it
        pair = (front(t, d, samples) for t, d in zip(args[:2], dims[:2], strict=True))
        return ops.layer_scale_add(*pair, scale), 0
    if dims[2] is not None or not _folds(input, dims[0], scale):
        return one_by_one(ops.layer_scale_add, samples, dims, args)
    x, r, s = (into(args[i], dims[i], samples, 0) for i in (0, 1, 3))
    return out_of(ops.layer_scale_add(x, r, scale, s), samples, 0)


def layer_scale_add_backward(
    info: Any,
    dims: Dims,
    grad: Tensor,
    input: Tensor,
    scale: Tensor,
    sample_scale: Tensor | None,
    mask: list[bool],
) -> tuple[Any, Any]:
    """The gradient of ``scale`` is a sum over a sample's elements alone."""
    samples, args = info.batch_size, (grad, input, scale, sample_scale, mask)
    if mask[1] or dims[2] is not None or not _folds(input, dims[1], scale):
        return one_by_one(ops.layer_scale_add_backward, samples, dims, args)
    dy, x, s = (into(args[i], dims[i], samples, 0) for i in (0, 1, 3))
    found = ops.layer_scale_add_backward(dy, x, scale, s, mask)[0]
    return results(out_of(found, samples, 0), (None, None))


RULES: dict[str, Rule] = {
    "layer_scale_add": layer_scale_add,
    "layer_scale_add_backward": layer_scale_add_backward,
}
