"""Rules of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, check_randomness, front, into, one_by_one, out_of, results


def _mask_of_all(mask: Any, dim: int | None, samples: int, batch: int) -> Any:
    """The mask of all samples, with a dimension of their batches if it differs among them."""
    if mask is None or (dim is None and mask.shape[0] == 1):
        return mask
    mask = front(mask, dim, samples)
    return mask.expand(-1, batch, -1, -1, -1).flatten(0, 1)


def attention(
    info: Any, dims: Dims, q: Tensor, k: Tensor, v: Tensor, mask: Any, *rest: Any
) -> tuple[Any, Any]:
    samples, dropout_p = info.batch_size, rest[0]
    if dropout_p > 0:
        check_randomness(info.randomness)
    if dropout_p > 0 and info.randomness == "same":
        return _same_dropout(samples, dims, (q, k, v, mask, *rest))
    batch = q.shape[0] if dims[0] is None else q.movedim(dims[0], 0).shape[1]
    folded = (into(t, d, samples, 0) for t, d in zip((q, k, v), dims[:3], strict=True))
    out, lse, state = ops.attention(*folded, _mask_of_all(mask, dims[3], samples, batch), *rest)
    # One state draws the dropout of all samples.
    return results(out_of(out, samples, 0), out_of(lse, samples, 0), (state, None))


def _same_dropout(samples: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """Each sample draws from the same state of the generator."""
    device = args[0].device
    random: Any = torch.cuda if device.type == "cuda" else torch
    before = random.get_rng_state(device) if device.type == "cuda" else random.get_rng_state()

    def call(*sample: Any) -> Any:
        if device.type == "cuda":
            random.set_rng_state(before, device)
        else:
            random.set_rng_state(before)
        return ops.attention(*sample)

    return one_by_one(call, samples, dims, args)


def attention_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    grad, q, k, v, mask, out, lse, state, *rest, grad_lse = args
    wanted = rest[3]
    samples = info.batch_size
    # Dropout of a state per sample, or of a forward without samples: each draws from its first row.
    if dims[7] is not None or (rest[0] > 0 and dims[5] is None):
        return one_by_one(ops.attention_backward, samples, dims, args)
    batch = q.shape[0] if dims[1] is None else q.movedim(dims[1], 0).shape[1]
    whole, shared = mask, False  # the mask's gradient per sample, summed over its batch if shared
    if mask is not None and wanted[3] and mask.is_floating_point():
        per_sample = front(mask, dims[4], samples)
        shared = per_sample.shape[1] == 1 and batch != 1
        whole = per_sample.expand(-1, batch, -1, -1, -1).flatten(0, 1)
    else:
        whole = _mask_of_all(mask, dims[4], samples, batch)
    tensors = ((grad, 0), (q, 1), (k, 2), (v, 3))
    *grads, dmask = ops.attention_backward(
        *(into(t, dims[i], samples, 0) for t, i in tensors),
        whole,
        into(out, dims[5], samples, 0),
        into(lse, dims[6], samples, 0),
        state,
        *rest,
        None if grad_lse is None else into(grad_lse, dims[len(args) - 1], samples, 0),
    )
    dmask, at = out_of(dmask, samples, 0)
    if shared and dmask is not None:
        dmask = dmask.sum(1, keepdim=True)
    return results(*(out_of(g, samples, 0) for g in grads), (dmask, at))
