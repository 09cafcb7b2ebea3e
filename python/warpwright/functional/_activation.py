"""Activations, alone and as gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._arch import FLOATING
from .._catalog import NATIVE_OPERATORS
from .._ops import ops
from ._common import dynamo, exporting

native: Any = torch.nn.functional


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


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """``input * Phi(input)``, elementwise: the Gaussian error linear unit of arXiv 1606.08415.

    Float32 and float64 are computed in their own precision, 16-bit types in float32 and rounded
    once.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16.
        approximate: ``"none"``, or ``"tanh"`` for the tanh form of the paper.
    Returns:
        The shape, dtype and strides of ``input``; a non-dense input gives a dense output.
    Raises:
        NotImplementedError: integer or complex ``input``.
        RuntimeError: another ``approximate``.
        TypeError: an argument has another type than in the signature.
    """
    if approximate.__class__ is not str or approximate not in ("none", "tanh"):
        return native.gelu(input, approximate=approximate)  # type: ignore[no-any-return]
    if dynamo() or exporting():
        return native.gelu(input, approximate=approximate)  # type: ignore[no-any-return]
    try:
        return ops.activation(input, "gelu_tanh" if approximate == "tanh" else "gelu")  # type: ignore[no-any-return]
    except RuntimeError as error:
        return _natively(error, "gelu", lambda x: native.gelu(x, approximate=approximate), input)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """``input * sigmoid(input)``, elementwise; precision and errors as :func:`gelu`.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16.
        inplace: overwrite ``input`` and return it. Native computes such a call.
    """
    if dynamo() or exporting():
        return native.silu(input, inplace)  # type: ignore[no-any-return]
    if inplace:
        _arguments.require_storage("silu", "input", input)
        return native.silu(input, inplace)  # type: ignore[no-any-return]
    try:
        return ops.activation(input, "silu")  # type: ignore[no-any-return]
    except RuntimeError as error:
        return _natively(error, "silu", native.silu, input)


def sigmoid(input: Tensor) -> Tensor:
    """``1 / (1 + exp(-input))``, elementwise. The backward reads the output.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16. Native computes other
            types: integers give a floating-point result.
    Returns:
        The shape, dtype and strides of ``input``; a non-dense input gives a dense output.
    Raises:
        TypeError: ``input`` is no tensor.
    """
    if dynamo() or exporting():
        return torch.sigmoid(input)
    try:
        return ops.activation(input, "sigmoid")  # type: ignore[no-any-return]
    except RuntimeError as error:
        return _natively(error, "sigmoid", torch.sigmoid, input)


def tanh(input: Tensor) -> Tensor:
    """The hyperbolic tangent, elementwise. All else is :func:`sigmoid`'s."""
    if dynamo() or exporting():
        return torch.tanh(input)
    try:
        return ops.activation(input, "tanh")  # type: ignore[no-any-return]
    except RuntimeError as error:
        return _natively(error, "tanh", torch.tanh, input)


def _natively(
    error: RuntimeError, name: str, function: Callable[[Tensor], Tensor], input: Any
) -> Tensor:
    """The result of native's ``function`` for a type that it alone takes; else raises ``error``."""
    if isinstance(input, Tensor) and input.dtype not in FLOATING:
        _arguments.require_storage(name, "input", input)
        return function(input)
    raise _arguments.error(error, name, {"input": input}, {}) from None


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """``silu(gate) * up``: the gated product of arXiv 2002.05202, in one pass each way.

    The product is computed in float32 (or float64) and rounded once. The backward computes
    ``silu(gate)`` again, so autograd keeps the two arguments and nothing else.

    Args:
        gate: any shape and strides; float32, float64, bfloat16, float16. Without ``up``: its last
            dimension holds the gate and then ``up``, as a product with stacked weights gives them.
            Both halves are read in place, and the gradient has the same form.
        up: the shape and dtype of ``gate``, any strides. With another shape or dtype the single ops
            run, which broadcast and promote.
    Returns:
        The shape of ``up``, the dtype and dimension order of ``gate``; dense.
    Raises:
        RuntimeError: shapes do not broadcast, devices differ, or the last dimension is odd without
            ``up``.
        NotImplementedError: integer or complex ``gate``.
    """
    return _gated("swiglu", gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up``, as :func:`swiglu`.

    Args:
        approximate: ``"none"`` or ``"tanh"``, as for ``torch.nn.functional.gelu``.

    The other arguments, the result and the errors are :func:`swiglu`'s.

    Raises:
        RuntimeError: also for another ``approximate``.
        TypeError: also for an ``approximate`` that is no string.
    """
    if not isinstance(approximate, str):
        raise TypeError(
            f"geglu(): argument 'approximate' must be str, not {type(approximate).__name__}"
        )
    if approximate not in ("none", "tanh"):
        raise RuntimeError(f"geglu: approximate: expected 'none' or 'tanh', got {approximate!r}")
    return _gated("geglu", gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


def _gated(name: str, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if dynamo() or exporting():
        return NATIVE_OPERATORS["gated_activation"](gate, up, activation)
    if up is not None and _differ(gate, up):
        for argument, tensor in (("gate", gate), ("up", up)):  # native's product reads freed memory
            _arguments.require_storage(name, argument, tensor)
        if not (gate.is_nested or up.is_nested):
            _arguments.broadcasting(name, gate=gate, up=up)
        return NATIVE_OPERATORS["gated_activation"](gate, up, activation)
    try:
        return ops.gated_activation(gate, up, activation)
    except RuntimeError as error:
        words = {"gated_activation:": f"{name}:"}
        raise _arguments.error(error, name, {"gate": gate}, {"up": up}, words) from None


def _differ(gate: Any, up: Any) -> bool:
    """Whether they are two tensors that native would broadcast or promote, or that it alone takes."""
    if not (isinstance(gate, Tensor) and isinstance(up, Tensor)):
        return False
    if gate.is_nested or up.is_nested:  # which have no sizes
        return True
    return gate.shape != up.shape or gate.dtype != up.dtype
