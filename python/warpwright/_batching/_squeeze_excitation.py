"""The rules of squeeze-and-excitation: samples are further images, unless weights differ per sample."""

from __future__ import annotations

from typing import Any

from .._ops import ops
from ._fold import Dims, Rule, into, one_by_one, out_of, results


def squeeze_excitation(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    samples = info.batch_size
    if any(dim is not None for dim in dims[1:5]):
        return one_by_one(ops.squeeze_excitation, samples, dims, args)
    found = ops.squeeze_excitation(into(args[0], dims[0], samples, 0), *args[1:])
    return results(*(out_of(t, samples, 0) for t in found))


def squeeze_excitation_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """The gradients of the weights are sums over the images, which stay apart per sample."""
    samples, mask = info.batch_size, args[-1]
    if any(dim is not None for dim in dims[2:6]) or any(mask[1:]):
        return one_by_one(ops.squeeze_excitation_backward, samples, dims, args)
    images = (into(t, d, samples, 0) for t, d in zip(args[:2], dims[:2], strict=True))
    kept = (into(t, d, samples, 0) for t, d in zip(args[6:9], dims[6:9], strict=True))
    dx, *none = ops.squeeze_excitation_backward(*images, *args[2:6], *kept, *args[9:])
    return results(out_of(dx, samples, 0), *((t, None) for t in none))


RULES: dict[str, Rule] = {
    "squeeze_excitation": squeeze_excitation,
    "squeeze_excitation_backward": squeeze_excitation_backward,
}
