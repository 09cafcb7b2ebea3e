"""Reductions along dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops

Dims = int | Sequence[int] | None


def _dims(function: str, dim: Any) -> Any:
    """What the operators take: None, or integers."""
    if dim is None or dim.__class__ is int:
        return dim
    if not isinstance(dim, (tuple, list)):
        try:
            return _arguments.integer(function, "dim", dim)
        except TypeError:
            _arguments.sizes(function, "dim", dim)  # raises native's error
    return _arguments.sizes(function, "dim", dim)


def _run(function: str, op: Any, input: Tensor, *args: Any) -> Tensor:
    try:
        return op(input, *args)
    except RuntimeError as error:
        raise _arguments.error(error, function, {"input": input}, {}) from None


def _checked(function: str, dim: Any, keepdim: Any, dtype: Any = None) -> Any:
    if keepdim.__class__ is not bool:
        _arguments.flag(function, "keepdim", keepdim)
    if dtype is not None:
        _arguments.dtype(function, "dtype", dtype)
    return _dims(function, dim)


def sum(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum along ``dim``, as ``torch.sum``; equal bits on every repeat.

    The GPU reads each element once, for any strides. It sorts the dimensions by stride and merges
    neighbours (docs/kernels/reduction.md). 16-bit types are summed in float32.

    Args:
        input: any shape and strides. Floating types have kernels; native sums the others.
        dim: a dimension, several, or None for all.
        keepdim: reduced dimensions stay, with size 1.
        dtype: of the result. float32 of 16-bit input costs nothing; other types are converted first.
    Returns:
        Contiguous; int64 for integers without ``dtype``.
    Raises:
        IndexError: a dimension is out of range.
        RuntimeError: a dimension is named twice.
        TypeError: an argument has another type than in the signature.
    """
    dim = _checked("sum", dim, keepdim, dtype)
    return _run("sum", ops.sum, input, dim, keepdim, dtype)


def mean(
    input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The mean along ``dim``, as ``torch.mean``: :func:`sum` over the number of elements.

    Args:
        input, dim, keepdim, dtype: as for :func:`sum`.
    Returns:
        Contiguous; NaN where no elements are.
    Raises:
        RuntimeError: integer ``input`` without a floating ``dtype``, or as for :func:`sum`.
        IndexError, TypeError: as for :func:`sum`.
    """
    dim = _checked("mean", dim, keepdim, dtype)
    return _run("mean", ops.mean, input, dim, keepdim, dtype)


def amax(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The maximum along ``dim``, as ``torch.amax``: NaN if there is one.

    Args:
        input: as for :func:`sum`.
        dim: a dimension, or several; none means all.
        keepdim: reduced dimensions stay, with size 1.
    Returns:
        The type of ``input``, contiguous. Equal maxima share the gradient.
    Raises:
        IndexError: a dimension is out of range, or has no elements.
        RuntimeError, TypeError: as for :func:`sum`.
    """
    dim = _checked("amax", dim, keepdim)
    return _run("amax", ops.amax, input, () if dim is None else dim, keepdim)


def logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """``log(sum(exp(input)))`` along ``dim``, as ``torch.logsumexp``, in one pass.

    Each thread keeps a maximum and a sum of ``exp(x - maximum)`` (Milakov and Gimelshein,
    arXiv:1805.02867), so nothing overflows.

    Args:
        input: as for :func:`sum`. Native computes integers.
        dim: a dimension, or several.
        keepdim: reduced dimensions stay, with size 1.
    Returns:
        Contiguous; ``-inf`` where no elements are.
    Raises:
        IndexError, RuntimeError, TypeError: as for :func:`sum`.
    """
    if dim is None:  # for native a name, and its error is of this type
        raise RuntimeError("logsumexp(): dim: expected one integer or several, got None")
    dim = _checked("logsumexp", dim, keepdim)
    return _run("logsumexp", ops.logsumexp, input, dim, keepdim)


def _of_squares(
    function: str, op: Any, input: Any, dim: Any, unbiased: Any, keepdim: Any, correction: Any
) -> Tensor:
    if dim is True or dim is False:  # native's form (input, unbiased)
        if unbiased is not None:
            raise TypeError(f"{function}(): argument 'dim' must be tuple of ints, not bool")
        unbiased, dim = dim, None
    if unbiased is not None:
        _arguments.flag(function, "unbiased", unbiased)
        if correction is not None:
            raise TypeError(f"{function}(): expected unbiased or correction, got both")
        correction = 1 if unbiased else 0
    elif correction is not None and correction.__class__ is not int:
        correction = _arguments.real(function, "correction", correction)
    dim = _checked(function, dim, keepdim)
    return _run(function, op, input, dim, correction, keepdim)


def var(
    input: Tensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The variance along ``dim``, as ``torch.var``, in one pass.

    Each thread computes means and squared deviations of a few elements. It merges them by the formula
    of Chan, Golub and LeVeque (1979), so a large mean costs no digits.

    Args:
        input: as for :func:`sum`. Native computes complex numbers.
        dim: a dimension, several, or None for all.
        unbiased: native's older form of ``correction``: 1 for True, 0 for False.
        keepdim: reduced dimensions stay, with size 1.
        correction: the squares are divided by the number of elements less this; 1 if None.
    Returns:
        The type of ``input``, contiguous.
    Raises:
        IndexError, RuntimeError, TypeError: as for :func:`sum`.
    """
    return _of_squares("var", ops.var, input, dim, unbiased, keepdim, correction)


def std(
    input: Tensor,
    dim: Dims = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """The root of :func:`var`, as ``torch.std``.

    Args:
        input, dim, unbiased, keepdim, correction: as for :func:`var`.
    Returns:
        The type of ``input``, contiguous. The gradient is 0 where the result is.
    Raises:
        IndexError, RuntimeError, TypeError: as for :func:`sum`.
    """
    return _of_squares("std", ops.std, input, dim, unbiased, keepdim, correction)
