"""Layer and RMS norm, alone and with the residual addition before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._arch import FLOATING
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from ._common import is_sizes

NARROW = (torch.bfloat16, torch.float16)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` over the last dimensions.

    The formula is that of arXiv 1607.06450, with the biased variance. The backward gives all three
    gradients in one pass over ``input`` and the incoming gradient.

    Args:
        input: ``(..., *normalized_shape)``, any strides; float32, float64, bfloat16, float16.
        normalized_shape: the sizes of the last dimensions, as a list or tuple.
        weight, bias: ``normalized_shape``, both in the dtype of ``input``, or both float32 for a
            16-bit ``input``.
        eps: added to the variance.
        dtype: of the result; None: that of ``input``. A float32 ``input`` also takes bfloat16 and
            float16, so that a matrix product after it needs no cast. The result is rounded once.
    Returns:
        The shape and dtype of ``input``, contiguous. Under autocast on a GPU: float32, unless
        ``dtype`` says otherwise.
    Raises:
        RuntimeError: sizes or dtypes do not fit.
        TypeError: ``normalized_shape`` is no list or tuple of integers.
        NotImplementedError: integer or complex ``input``.
    """
    shape, eps, dtype = _checked("layer_norm", normalized_shape, eps, dtype)
    try:
        return ops.layer_norm(input, shape, weight, bias, eps, dtype)[0]
    except RuntimeError as error:
        optional = {"weight": weight, "bias": bias}
        raise _arguments.error(error, "layer_norm", {"input": input}, optional) from None


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``input / sqrt(mean(input ** 2) + eps) * weight`` over the last dimensions.

    The formula is that of arXiv 1910.07467. The product with ``weight`` is computed in float32 (or
    float64) and rounded once. The backward gives both gradients in one pass.

    Args:
        input: ``(..., *normalized_shape)``, any strides; float32, float64, bfloat16, float16. Native
            computes complex tensors.
        normalized_shape: the sizes of the last dimensions, as a list or tuple.
        weight: ``normalized_shape``, in any real dtype.
        eps: added to the mean; None: the machine epsilon of float32, or of float64 for such an
            ``input``.
        dtype: of the result, as for :func:`layer_norm`.
    Returns:
        The shape and dtype of ``input``; contiguous, or channels_last as ``input``.
    Raises:
        RuntimeError: sizes do not fit.
        ValueError: ``input`` has fewer dimensions than ``normalized_shape``.
        TypeError: ``normalized_shape`` is no list or tuple of integers.
        NotImplementedError: integer ``input``.
    """
    shape, eps, dtype = _checked("rms_norm", normalized_shape, eps, dtype)
    try:
        return ops.rms_norm(input, shape, weight, eps, dtype)[0]
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) and getattr(input, "is_complex", bool)():
            if not torch.compiler.is_compiling():  # native's formula would read freed memory
                _arguments.require_storage("rms_norm", "input", input)
                _arguments.require_storage("rms_norm", "weight", weight)
            return NATIVE_OPERATORS["rms_norm"](input, normalized_shape, weight, eps, dtype)[0]
        optional = {"weight": weight}
        raise _arguments.error(error, "rms_norm", {"input": input}, optional) from None


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``sum = residual + input`` and ``layer_norm(sum, ...)`` in one op.

    The sum is rounded to its dtype before the norm reads it, as by two ops. The backward adds the
    sum's own gradient in the pass that computes the norm's.

    Args:
        input, residual: ``(..., *normalized_shape)``, any strides. One dtype, or float32 next to
            bfloat16 or float16. With other shapes or dtypes the two single ops run, which broadcast
            and promote.

    The other arguments and the errors are :func:`layer_norm`'s.

    Returns:
        The sum, in the promoted dtype, and its norm; both contiguous.
    """
    operands = _operands("add_layer_norm", input, residual)
    if operands is None:
        total = residual + input
        return total, layer_norm(total, normalized_shape, weight, bias, eps, dtype=dtype)
    shape, eps, dtype = _checked("add_layer_norm", normalized_shape, eps, dtype)
    try:
        total, output, *_ = ops.add_layer_norm(*operands, shape, weight, bias, eps, dtype)
        return total, output
    except RuntimeError as error:
        tensors = {"input": input, "residual": residual}
        optional = {"weight": weight, "bias": bias}
        raise _arguments.error(error, "add_layer_norm", tensors, optional) from None


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """``sum = residual + input`` and ``rms_norm(sum, ...)`` in one op.

    ``input``, ``residual`` and the results are :func:`add_layer_norm`'s. The other arguments and the
    errors are :func:`rms_norm`'s.
    """
    operands = _operands("add_rms_norm", input, residual)
    if operands is None:
        total = residual + input
        return total, rms_norm(total, normalized_shape, weight, eps, dtype=dtype)
    shape, eps, dtype = _checked("add_rms_norm", normalized_shape, eps, dtype)
    try:
        total, output, _ = ops.add_rms_norm(*operands, shape, weight, eps, dtype)
        return total, output
    except RuntimeError as error:
        tensors = {"input": input, "residual": residual}
        raise _arguments.error(error, "add_rms_norm", tensors, {"weight": weight}) from None


def _checked(
    function: str, normalized_shape: Any, eps: Any, dtype: Any
) -> tuple[Sequence[int], Any, torch.dtype | None]:
    """The arguments that are no tensors. Only an RMS norm has a default for ``eps`` of None."""
    if not is_sizes(normalized_shape):
        normalized_shape = _arguments.sizes(function, "normalized_shape", normalized_shape)
    if eps.__class__ is not float and (eps is not None or function.endswith("layer_norm")):
        eps = _arguments.real(function, "eps", eps)
    if dtype is not None and dtype.__class__ is not torch.dtype:
        dtype = _arguments.dtype(function, "dtype", dtype)
    return normalized_shape, eps, dtype


def _operands(function: str, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
    """The operator's first two arguments, the wider dtype last; None: the sum is an op of its own."""
    both = isinstance(input, Tensor) and isinstance(residual, Tensor)
    nested = both and (input.is_nested or residual.is_nested)  # these have no sizes
    if both and not nested and input.shape == residual.shape:
        first, second = input.dtype, residual.dtype
        if first == second and first in FLOATING:
            return input, residual
        if second == torch.float32 and first in NARROW:
            return input, residual
        if first == torch.float32 and second in NARROW:
            return residual, input
    if not torch.compiler.is_compiling():  # native's sum would read freed memory
        for name, tensor in (("input", input), ("residual", residual)):
            if isinstance(tensor, Tensor):
                _arguments.require_storage(function, name, tensor)
        if both and not nested:
            _arguments.broadcasting(function, input=input, residual=residual)
    return None
