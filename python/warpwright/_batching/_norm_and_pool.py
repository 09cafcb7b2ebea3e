"""Rules of relu, batch norm, its fused forms and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, Rule, front, images, into, one_by_one, out_of, per_sample, results
from ._products import conv2d


def relu_backward(info: Any, dims: Dims, grad: Tensor, y: Tensor) -> tuple[Tensor, int]:
    samples = info.batch_size
    return ops.relu_backward(front(grad, dims[0], samples), front(y, dims[1], samples)), 0


def batch_norm(op: Any) -> Rule:
    """Of an op (x, weight, bias, running_mean, running_var, training, ...) -> (y, mean, rstd, ...).

    Results of more than one dimension have the channels of y.
    """

    def rule(info: Any, dims: Dims, x: Tensor, *rest: Any) -> tuple[Any, Any]:
        samples, (*channel, training), options = info.batch_size, rest[:5], rest[5:]
        if not training and all(d is None for d in dims[1:5]):
            y, mean, rstd, *kept = op(into(x, dims[0], samples, 0), *channel, training, *options)
            at = 0
            vectors: list[tuple[Tensor | None, int | None]] = [(mean, None), (rstd, None)]
        else:
            folded = (into(c, d, samples, 0) for c, d in zip(channel, dims[1:5], strict=True))
            y, mean, rstd, *kept = op(into(x, dims[0], samples, 1), *folded, training, *options)
            at, vectors = 1, [out_of(mean, samples, 0), out_of(rstd, samples, 0)]
        others = (out_of(t, samples, at) if t.dim() > 1 else (t, None) for t in kept)
        return results(out_of(y, samples, at), *vectors, *others)

    return rule


def batch_norm_backward(op: Any, images: int, vectors: int) -> Rule:
    """Of an op whose first arguments are so many images, and then values per channel."""

    def rule(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
        samples, of_all = info.batch_size, images + vectors
        pairs = list(zip(args, dims, strict=True))
        grad_input, *others = op(
            *(into(t, d, samples, 1) for t, d in pairs[:images]),
            *(into(t, d, samples, 0) for t, d in pairs[images:of_all]),
            *args[of_all:],
        )
        return results(out_of(grad_input, samples, 1), *(out_of(g, samples, 0) for g in others))

    return rule


def _planes(x: Tensor, dim: int | None, samples: int) -> Tensor:
    """The samples as channels, in the layout that a mask of all samples has."""
    return into(x, dim, samples, 1).contiguous()


def _batch_norm_relu_alone(x: Tensor, *rest: Any) -> Any:
    return ops.batch_norm_relu(x, None, *rest)


def batch_norm_relu(
    info: Any, dims: Dims, x: Tensor, residual: Tensor | None, *rest: Any
) -> tuple[Any, Any]:
    """A residual's mask belongs to the folded call: each sample gets all of it, (1, bytes)."""
    samples = info.batch_size
    if residual is None:
        rule = batch_norm(_batch_norm_relu_alone)
        return rule(info, (dims[0], *dims[2:]), x, *rest)
    channel, options = rest[:4], rest[4:]
    folded = (into(c, d, samples, 0) for c, d in zip(channel, dims[2:6], strict=True))
    y, mean, rstd, mask = ops.batch_norm_relu(
        _planes(x, dims[0], samples), _planes(residual, dims[1], samples), *folded, *options
    )
    vectors = out_of(mean, samples, 0), out_of(rstd, samples, 0)
    return results(out_of(y, samples, 1), *vectors, (front(mask.unsqueeze(0), None, samples), 0))


def batch_norm_relu_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """One call per sample if the mask is not that of a folded call."""
    grad, x, *channel, mask, training, wanted = args
    samples, of_mask = info.batch_size, dims[6]
    if of_mask is not None:
        mask = mask.select(of_mask, 0)
    of_all = of_mask is not None and mask.dim() > 1
    if mask.numel() > 0 and not of_all:
        return one_by_one(ops.batch_norm_relu_backward, samples, dims, args)
    folded = (into(c, d, samples, 0) for c, d in zip(channel, dims[2:6], strict=True))
    grad_input, grad_weight, grad_bias, gated = ops.batch_norm_relu_backward(
        _planes(grad, dims[0], samples),
        _planes(x, dims[1], samples),
        *folded,
        mask[0] if of_all else mask,
        training,
        wanted,
    )
    vectors = out_of(grad_weight, samples, 0), out_of(grad_bias, samples, 0)
    return results(out_of(grad_input, samples, 1), *vectors, out_of(gated, samples, 1))


def conv2d_batch_norm(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """The convolution's rule, then batch norm's in training."""
    x, weight, bias, residual, norm_weight, norm_bias, eps, activation, *windows = args
    is_relu = activation == "relu"
    if x.dim() - (dims[0] is not None) != 4 or (residual is not None and not is_relu):
        return one_by_one(ops.conv2d_batch_norm, info.batch_size, dims, args)  # raises
    convolved, at = conv2d(info, dims[:3], x, weight, bias, *windows)
    norm = norm_weight, norm_bias, None, None, True, eps
    of_norm = *dims[4:6], None, None, None, None
    if is_relu:
        (y, mean, rstd, mask), (*of_y, of_mask) = batch_norm_relu(
            info, (at, dims[3], *of_norm), convolved, residual, *norm
        )
    else:
        plain = activation == "none"
        op = ops.batch_norm if plain else ops.batch_norm_activation
        named = () if plain else (activation,)
        rule = batch_norm(op)
        (y, mean, rstd), of_y = rule(info, (at, *of_norm), convolved, *norm, *named)
        mask, of_mask = x.new_empty(0, dtype=torch.uint8), None
    return (y, convolved, mean, rstd, mask), (of_y[0], at, *of_y[1:], of_mask)


def conv2d_batch_norm_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """One call per sample: only the trace of a compilation has this operator."""
    return one_by_one(ops.conv2d_batch_norm_backward, info.batch_size, dims, args)


def conv2d_batch_norm_relu_max_pool2d(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """The convolution's rule, then that of batch norm and pool in training."""
    x, weight, bias, norm_weight, norm_bias, eps, *windows = args
    if x.dim() - (dims[0] is not None) != 4:
        op = ops.conv2d_batch_norm_relu_max_pool2d
        return one_by_one(op, info.batch_size, dims, args)  # raises
    convolved, at = conv2d(info, dims[:3], x, weight, bias, *windows[:4])
    norm = norm_weight, norm_bias, None, None, True, eps
    rule = batch_norm(ops.batch_norm_relu_max_pool2d)
    of_norm = *dims[3:5], None, None, None, None, *[None] * len(windows[4:])
    found, places = rule(info, (at, *of_norm), convolved, *norm, *windows[4:])
    no_moments = x.new_empty(0, dtype=torch.float64)  # the backward computes them
    return (*found[:4], no_moments), (*places[:4], None)


def conv2d_batch_norm_relu_max_pool2d_backward(
    info: Any, dims: Dims, *args: Any
) -> tuple[Any, Any]:
    op = ops.conv2d_batch_norm_relu_max_pool2d_backward
    return one_by_one(op, info.batch_size, dims, args)


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


def global_avg_pool2d_backward(
    info: Any, dims: Dims, grad: Tensor, *planes: Any
) -> tuple[Tensor, int]:
    samples, single = info.batch_size, grad.dim() - (dims[0] is not None) == 3
    y = ops.global_avg_pool2d_backward(images(grad, dims[0], samples), *planes)
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


BATCH_NORM_RULES: dict[str, Rule] = {
    **{
        name: batch_norm(getattr(ops, name))
        for name in ("batch_norm", "batch_norm_activation", "batch_norm_relu_max_pool2d")
    },
    **{
        f"{name}_backward": batch_norm_backward(getattr(ops, f"{name}_backward"), images, vectors)
        for name, images, vectors in (
            ("batch_norm", 2, 3),
            ("batch_norm_activation", 2, 4),
            ("batch_norm_relu_max_pool2d", 4, 4),
        )
    },
    "batch_norm_relu": batch_norm_relu,
    "batch_norm_relu_backward": batch_norm_relu_backward,
    "conv2d_batch_norm": conv2d_batch_norm,
    "conv2d_batch_norm_backward": conv2d_batch_norm_backward,
    "conv2d_batch_norm_relu_max_pool2d": conv2d_batch_norm_relu_max_pool2d,
    "conv2d_batch_norm_relu_max_pool2d_backward": conv2d_batch_norm_relu_max_pool2d_backward,
}
