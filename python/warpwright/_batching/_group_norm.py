"""The rules of group norm: samples are further images, or with weights of their own further groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._ops import ops
from ._fold import Dims, Rule, into, out_of, results


def group_norm(
    info: Any, dims: Dims, x: Tensor, groups: int, weight: Any, bias: Any, eps: float
) -> tuple[Any, Any]:
    samples = info.batch_size
    if dims[2] is None and dims[3] is None:
        found = ops.group_norm(into(x, dims[0], samples, 0), groups, weight, bias, eps)
        return results(*(out_of(t, samples, 0) for t in found))
    vectors = (into(v, d, samples, 0) for v, d in zip((weight, bias), dims[2:4], strict=True))
    found = ops.group_norm(into(x, dims[0], samples, 1), samples * groups, *vectors, eps)
    return results(*(out_of(t, samples, 1) for t in found))


def group_norm_backward(
    info: Any,
    dims: Dims,
    grad: Tensor,
    x: Tensor,
    groups: int,
    weight: Any,
    mean: Tensor,
    rstd: Tensor,
    mask: Sequence[bool],
) -> tuple[Any, Any]:
    """Groups per sample, so that each sample's gradients of weight and bias stay apart."""
    samples = info.batch_size
    dx, *vectors = ops.group_norm_backward(
        *(into(t, d, samples, 1) for t, d in zip((grad, x), dims[:2], strict=True)),
        samples * groups,
        into(weight, dims[3], samples, 0),
        *(into(t, d, samples, 1) for t, d in zip((mean, rstd), dims[4:6], strict=True)),
        mask,
    )
    return results(out_of(dx, samples, 1), *(out_of(v, samples, 0) for v in vectors))


RULES: dict[str, Rule] = {"group_norm": group_norm, "group_norm_backward": group_norm_backward}
