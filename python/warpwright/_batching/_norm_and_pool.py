"""Rules of relu, batch norm and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, Rule, front, images, into, out_of, per_sample, results


def relu_backward(info: Any, dims: Dims, grad: Tensor, y: Tensor) -> tuple[Tensor, int]:
    samples = info.batch_size
    return ops.relu_backward(front(grad, dims[0], samples), front(y, dims[1], samples)), 0


def batch_norm(info: Any, dims: Dims, x: Tensor, *rest: Any) -> tuple[Any, Any]:
    samples, *channel, training, eps = info.batch_size, *rest
    if not training and all(d is None for d in dims[1:5]):
        y, mean, rstd = ops.batch_norm(into(x, dims[0], samples, 0), *channel, training, eps)
        return results((y.unflatten(0, (samples, -1)), 0), (mean, None), (rstd, None))
    folded = (into(c, d, samples, 0) for c, d in zip(channel, dims[1:5], strict=True))
    y, mean, rstd = ops.batch_norm(into(x, dims[0], samples, 1), *folded, training, eps)
    return results(*(out_of(t, samples, at) for t, at in ((y, 1), (mean, 0), (rstd, 0))))


def batch_norm_backward(
    info: Any, dims: Dims, grad: Tensor, x: Tensor, *rest: Any
) -> tuple[Any, Any]:
    samples, *channel, training, mask = info.batch_size, *rest
    folded = (into(c, d, samples, 0) for c, d in zip(channel, dims[2:5], strict=True))
    grad_input, *others = ops.batch_norm_backward(
        into(grad, dims[0], samples, 1), into(x, dims[1], samples, 1), *folded, training, mask
    )
    return results(out_of(grad_input, samples, 1), *(out_of(g, samples, 0) for g in others))


def pool(op: Any) -> Rule:
    def rule(info: Any, dims: Dims, x: Tensor, *window: Any) -> tuple[Any, Any]:
        results = op(images(x, dims[0], info.batch_size), *window)
        if isinstance(results, Tensor):
            return per_sample(results, x.dim() == 4, info.batch_size), 0
        results = tuple(per_sample(r, x.dim() == 4, info.batch_size) for r in results)
        return results, (0,) * len(results)

    return rule


def _in_layout(x: Tensor, channels_last: bool) -> Tensor:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return x.contiguous(memory_format=layout)


def max_pool2d_backward(
    info: Any, dims: Dims, grad: Tensor, codes: Tensor, size: Sequence[int], *rest: Any
) -> tuple[Tensor, int]:
    samples, single = info.batch_size, len(size) == 3
    folded = [samples, *size] if single else [samples * size[0], *size[1:]]
    batch = (images(t, d, samples) for t, d in ((grad, dims[0]), (codes, dims[1])))
    y = ops.max_pool2d_backward(*(_in_layout(t, rest[-1]) for t in batch), folded, *rest)
    return per_sample(y, single, samples), 0


def max_pool2d_indices(
    info: Any, dims: Dims, codes: Tensor, size: Sequence[int], *rest: Any
) -> tuple[Tensor, int]:
    samples, single = info.batch_size, len(size) == 3
    folded = [samples, *size] if single else [samples * size[0], *size[1:]]
    batch = _in_layout(images(codes, dims[0], samples), rest[-1])
    return per_sample(ops.max_pool2d_indices(batch, folded, *rest), single, samples), 0


def max_pool2d_gather(
    info: Any, dims: Dims, source: Tensor, codes: Tensor, *rest: Any
) -> tuple[Tensor, int]:
    samples, single = info.batch_size, source.dim() - (dims[0] is not None) == 3
    batch = (images(t, d, samples) for t, d in ((source, dims[0]), (codes, dims[1])))
    y = ops.max_pool2d_gather(*(_in_layout(t, rest[-1]) for t in batch), *rest)
    return per_sample(y, single, samples), 0
