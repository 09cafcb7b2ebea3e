"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._common import dynamo, exporting

native: Any = torch.nn.functional


def softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``exp(input) / sum(exp(input))`` along ``dim``, stable for every finite input.

    One read and one write, in any dimension: threads hold a row or column and meet once. Sums are
    float32 (float64 for float64). A row of ``-inf`` alone gives NaN, as native's does.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16. With ``dtype`` also
            integers.
        dim: the dimension; None chooses one with a warning, as native does.
        dtype: of the result; ``input`` is converted to it first. 16 bits to float32 happens in the
            kernel.
    Returns:
        The shape of ``input``, contiguous. Under autocast on a GPU: float32, unless ``dtype`` says
        otherwise.
    Raises:
        IndexError: ``dim`` is out of range.
        NotImplementedError: an integer, boolean or complex ``input`` without a floating ``dtype``.
        TypeError: an argument has another type than in the signature.
    """
    return _softmax("softmax", input, dim, _stacklevel, dtype)


def log_softmax(
    input: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``input - log(sum(exp(input)))`` along ``dim``.

    The arguments, the result and the errors are :func:`softmax`'s.
    """
    return _softmax("log_softmax", input, dim, _stacklevel, dtype)


def _softmax(name: str, input: Tensor, dim: Any, stacklevel: Any, dtype: Any) -> Tensor:
    if stacklevel.__class__ is torch.dtype:  # torch.softmax's third argument
        dtype = stacklevel
    elif dim is None:
        if not isinstance(input, Tensor):
            raise _arguments.error(RuntimeError(), name, {"input": input}, {})
        dim = native._get_softmax_dim(name, input.dim(), stacklevel + 1)
    if dim.__class__ is not int:
        if isinstance(dim, str):  # of a tensor with named dimensions
            return getattr(torch, name)(input, dim, dtype=dtype)  # type: ignore[no-any-return]
        dim = _arguments.integer(name, "dim", dim)
    if dtype is not None and dtype.__class__ is not torch.dtype:
        dtype = _arguments.dtype(name, "dtype", dtype)
    if dynamo() or exporting():
        return getattr(torch, name)(input, dim, dtype=dtype)  # type: ignore[no-any-return]
    if dtype is not None:  # the conversion would read freed memory
        _arguments.require_storage(name, "input", input)
    try:
        return getattr(ops, name)(input, dim, dtype)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise _arguments.error(error, name, {"input": input}, {}) from None
