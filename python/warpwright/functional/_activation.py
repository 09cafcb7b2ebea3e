"""Activations."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._common import dynamo, exporting


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(input, 0) elementwise; NaN stays NaN.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16 or an integer type.
        inplace: overwrite ``input`` and return it.
    Returns:
        The shape, dtype and strides of ``input``; a non-dense input gives a dense output.
    Raises:
        RuntimeError: boolean ``input``, or ``inplace`` on a leaf that requires grad.
        NotImplementedError: complex ``input``.
    """
    if inplace:
        return relu_(input)
    if dynamo() or exporting():
        return torch.relu(input)
    try:
        return ops.relu(input)
    except RuntimeError as error:
        raise _arguments.error(error, "relu", {"input": input}, {}) from None


def relu_(input: Tensor) -> Tensor:
    """:func:`relu` in place: overwrites ``input`` and returns it."""
    if dynamo() or exporting():
        return torch.relu_(input)
    try:
        return ops.relu_(input)
    except RuntimeError as error:
        raise _arguments.error(error, "relu_", {"input": input}, {}) from None
