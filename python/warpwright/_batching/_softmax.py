"""The rules of softmax: the batch is one more dimension that is not reduced."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._prims_common import canonicalize_dim

from .._ops import ops
from ._fold import Dims, Rule, front


def _rule(op: Any, operands: int) -> Rule:
    """Of an operator that takes its operands, the dimension and a dtype."""

    def rule(info: Any, dims: Dims, *args: Any) -> tuple[Tensor, int]:
        tensors = zip(args[:operands], dims[:operands], strict=True)
        samples = [front(t, d, info.batch_size) for t, d in tensors]
        dim, dtype = args[operands:]
        dim = canonicalize_dim(samples[0].dim() - 1, dim)
        if samples[0].dim() == 1:  # a sample is one number
            return op(*(t[:, None] for t in samples), 1, dtype)[:, 0], 0
        return op(*samples, dim + 1, dtype), 0

    return rule


RULES: dict[str, Rule] = {
    "softmax": _rule(ops.softmax, 1),
    "log_softmax": _rule(ops.log_softmax, 1),
    "softmax_backward": _rule(ops.softmax_backward, 2),
    "log_softmax_backward": _rule(ops.log_softmax_backward, 2),
}
