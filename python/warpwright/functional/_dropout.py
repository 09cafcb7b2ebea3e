"""Dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._arch import FLOATING
from .._ops import ops
from ._common import dynamo, exporting

native: Any = torch.nn.functional


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeroes each element with probability ``p`` and scales the others by ``1 / (1 - p)``.

    The random numbers are Philox4x32-7 of the generator's state and the element's position. The
    backward computes them again, so no mask is in memory: autograd keeps 16 bytes.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16. Native computes other
            types.
        p: in [0, 1], rounded to a multiple of 2^-16, but to 0 or 1 only if it is.
        training: without it, or with ``p`` of 0, the result is ``input`` itself.
        inplace: write the result to ``input`` and return it.
    Returns:
        The shape, dtype and strides of ``input``; a non-dense input gives a dense output. For a
        given seed the zeros are others than native's.
    Raises:
        ValueError: ``p`` is outside [0, 1].
        TypeError: an argument has another type than in the signature.
        RuntimeError: ``inplace`` on a leaf that requires a gradient.
    """
    if not isinstance(p, (int, float, Tensor)):
        p = _arguments.real("dropout", "p", p)
    if dynamo() or exporting() or not training:
        return native.dropout(input, p, training, inplace)  # type: ignore[no-any-return]
    if not _is_random(input, p):
        _arguments.require_storage("dropout", "input", input)
        return native.dropout(input, p, training, inplace)  # type: ignore[no-any-return]
    if training.__class__ is not bool:
        training = _arguments.flag("dropout", "training", training)
    try:
        output: Tensor = ops.dropout(input, p)[0]
    except RuntimeError as error:
        raise _arguments.error(error, "dropout", {"input": input}, {}) from None
    return input.copy_(output) if inplace else output


def _is_random(input: Any, p: Any) -> bool:
    """Whether an element may be zeroed and another kept, and a kernel of ours takes the call."""
    if not isinstance(p, float) or not 0.0 < p < 1.0 or not isinstance(input, Tensor):
        return False
    return input.dtype in FLOATING and input.numel() > 0
