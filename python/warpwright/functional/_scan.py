"""Scans along a dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _arguments, _native, _native_reductions
from .._ops import ops

# The result types that have kernels. Native alone sums or multiplies into others.
_SUMS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)


def _require_storage(function: str, input: Tensor) -> None:
    """Before a conversion, which would read freed memory."""
    if not torch.compiler.is_compiling():
        _arguments.require_storage(function, "input", input)


def cumsum(
    input: Tensor, dim: int, *, dtype: torch.dtype | None = None, reverse: bool = False
) -> Tensor:
    """``y_t = x_0 + ... + x_t`` along ``dim``, as ``torch.cumsum``; equal bits on every repeat.

    The GPU reads and writes each element once. Each block of a long row reads the sum of the blocks
    before it (decoupled look-back, Merrill and Garland 2016), always in the same order. float32 is
    summed in float32 within a block and in float64 between blocks, 16-bit types in float32.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16 or an integer type. Native
            sums other types.
        dim: the dimension.
        dtype: ``input`` is converted to it first.
        reverse: from the last element to the first: ``y_t = x_t + ... + x_last``. The gradient is the
            scan in the other direction.
    Returns:
        The shape of ``input``, contiguous; int64 for integers without ``dtype``.
    Raises:
        IndexError: ``dim`` is out of range.
        TypeError: an argument has another type than in the signature.
    """
    if dim.__class__ is not int:
        dim = _arguments.integer("cumsum", "dim", dim)
    if reverse.__class__ is not bool:
        reverse = _arguments.flag("cumsum", "reverse", reverse)
    if dtype is not None:
        _require_storage("cumsum", input)
        if dtype not in _SUMS:
            return _native.cumsum(input, dim, reverse, dtype)
        if isinstance(input, Tensor):
            input = input.to(dtype)
    try:
        return ops.cumsum(input, dim, reverse)
    except RuntimeError as error:
        raise _arguments.error(error, "cumsum", {"input": input}, {}) from None


def cumprod(
    input: Tensor, dim: int, *, dtype: torch.dtype | None = None, reverse: bool = False
) -> Tensor:
    """``y_t = x_0 * ... * x_t`` along ``dim``, as ``torch.cumprod``; equal bits on every repeat.

    One pass, as :func:`cumsum`. The gradient is a :func:`linear_scan`: exact where elements are zero,
    without a division and without a synchronisation.

    Args:
        input, dim, dtype: as for :func:`cumsum`.
        reverse: from the last element to the first: ``y_t = x_t * ... * x_last``.
    Returns:
        The shape of ``input``, contiguous; int64 for integers without ``dtype``.
    Raises:
        IndexError, TypeError: as for :func:`cumsum`.
    """
    if dim.__class__ is not int:
        dim = _arguments.integer("cumprod", "dim", dim)
    if reverse.__class__ is not bool:
        reverse = _arguments.flag("cumprod", "reverse", reverse)
    if dtype is not None:
        _require_storage("cumprod", input)
        if dtype not in _SUMS:
            return _native_reductions.cumprod(input, dim, reverse, dtype)
        if isinstance(input, Tensor):
            input = input.to(dtype)
    try:
        return ops.cumprod(input, dim, reverse)
    except RuntimeError as error:
        raise _arguments.error(error, "cumprod", {"input": input}, {}) from None


def logcumsumexp(input: Tensor, dim: int, *, reverse: bool = False) -> Tensor:
    """``y_t = log(exp(x_0) + ... + exp(x_t))`` along ``dim``, as ``torch.logcumsumexp``.

    One pass, as :func:`cumsum`, with equal bits on every repeat. Runs are pairs of a maximum and a sum
    of ``exp(x - maximum)``, so nothing overflows. The gradient is a :func:`linear_scan` whose gates
    are at most 1, and which are never rounded.

    Args:
        input: any shape and strides; float32, float64, bfloat16 or float16. Native computes complex
            numbers.
        dim: the dimension.
        reverse: from the last element to the first.
    Returns:
        The shape of ``input``, contiguous.
    Raises:
        NotImplementedError: integer ``input``.
        IndexError, TypeError: as for :func:`cumsum`.
    """
    if dim.__class__ is not int:
        dim = _arguments.integer("logcumsumexp", "dim", dim)
    if reverse.__class__ is not bool:
        reverse = _arguments.flag("logcumsumexp", "reverse", reverse)
    try:
        return ops.logcumsumexp(input, dim, reverse)
    except RuntimeError as error:
        raise _arguments.error(error, "logcumsumexp", {"input": input}, {}) from None


def linear_scan(
    gate: Tensor,
    input: Tensor,
    initial: Tensor | None = None,
    *,
    dim: int = -1,
    reverse: bool = False,
) -> Tensor:
    """``h_t = gate_t * h_{t-1} + input_t`` along ``dim``: the recurrence of state-space models.

    One pass over the two inputs and the result, as :func:`cumsum`, with equal bits on every repeat.
    Runs of steps are combined as in section 1.4.1 of Blelloch's "Prefix Sums and Their Applications"
    (CMU-CS-90-190). A product of gates must stay finite. That holds for gates up to 1 in size.

    Args:
        gate: the factors; float32, float64, bfloat16 or float16, any strides.
        input: the dtype of ``gate``. The two broadcast.
        initial: ``h`` before the first step, of the broadcast shape without ``dim``; zero if None.
        dim: the dimension of the steps.
        reverse: from the last step to the first: ``h_t = gate_t * h_{t+1} + input_t``.
    Returns:
        ``h`` of all steps, of the broadcast shape, contiguous.
    Raises:
        RuntimeError: shapes, dtypes or devices do not fit together.
        IndexError: ``dim`` is out of range.
        NotImplementedError: integer or complex ``input``.
        TypeError: an argument has another type than in the signature.
    """
    if dim.__class__ is not int:
        dim = _arguments.integer("linear_scan", "dim", dim)
    if reverse.__class__ is not bool:
        reverse = _arguments.flag("linear_scan", "reverse", reverse)
    if isinstance(gate, Tensor) and isinstance(input, Tensor) and gate.shape != input.shape:
        if not torch.compiler.is_compiling():
            _arguments.broadcasting("linear_scan", gate=gate, input=input)
        gate, input = torch.broadcast_tensors(gate, input)
    try:
        return ops.linear_scan(gate, input, initial, dim, reverse)
    except RuntimeError as error:
        required = {"gate": gate, "input": input}
        raise _arguments.error(error, "linear_scan", required, {"initial": initial}) from None
