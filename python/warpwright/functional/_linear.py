"""Linear layers, alone and with an activation in the epilogue."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import _arguments
from .._native import ACTIVATIONS
from .._ops import ops
from ._common import dynamo, exporting, trains_on_gpu


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``.

    float32 on CUDA follows ``torch.backends.cuda.matmul`` (``allow_tf32``, ``fp32_precision``),
    unless :func:`warpwright.set_float32_matmul_precision` says otherwise. That function also has a
    level between the two: sums of two TF32 numbers. Native computes integer and complex tensors.

    Args:
        input: (..., in_features), any strides; float32, float64, bfloat16 or float16.
        weight: (out_features, in_features) or (in_features), any strides, same dtype.
        bias: (out_features), or any shape that broadcasts to the output, same dtype.
    Returns:
        (..., out_features); (...) if ``weight`` has one dimension.
    Raises:
        RuntimeError: the shapes do not multiply, or the operands' dtypes or devices differ.
    """
    try:
        return ops.linear(input, weight, bias)
    except RuntimeError as error:
        operands = {"input": input, "weight": weight}
        raise _arguments.error(error, "linear", operands, {"bias": bias}) from None


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``relu(linear(input, weight, bias))`` in one op, without the pre-activation in memory.

    The backward reads the signs of the saved output, as native's relu does: autograd raises if the
    output is changed in place before the backward. Arguments and errors are :func:`linear`'s.
    """
    return _linear_activation("linear_relu", input, weight, bias, "relu")


HIDDEN = ("relu", "gelu", "gelu_tanh", "silu")  # mlp's activations
GELU = {"none": "gelu", "tanh": "gelu_tanh"}  # by `approximate`


def linear_gelu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "none"
) -> Tensor:
    """``gelu(linear(input, weight, bias), approximate)`` in one op.

    The op writes the pre-activation only if a gradient is needed. 16-bit types are rounded once: the
    activation reads the float32 sum.

    Args:
        approximate: ``"none"``, ``z * Phi(z)``, or ``"tanh"``; as for ``torch.nn.functional.gelu``.

    The other arguments are :func:`linear`'s.

    Raises:
        RuntimeError: another ``approximate``; otherwise as :func:`linear`.
        TypeError: ``approximate`` is no string.
        NotImplementedError: a dtype that native's gelu does not take.
    """
    if not isinstance(approximate, str) or approximate not in GELU:  # native finds the first fault
        linear(input, weight, bias)
        if not isinstance(approximate, str):
            got = type(approximate).__name__
            raise TypeError(f"linear_gelu(): argument 'approximate' must be str, not {got}")
        raise RuntimeError(
            f"linear_gelu: approximate: expected 'none' or 'tanh', got {approximate!r}"
        )
    return _linear_activation("linear_gelu", input, weight, bias, GELU[approximate])


def linear_silu(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``silu(linear(input, weight, bias))`` in one op: see :func:`linear_gelu`."""
    return _linear_activation("linear_silu", input, weight, bias, "silu")


def mlp(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None = None,
    activation: str = "gelu",
) -> Tensor:
    """``linear(activation(linear(input, weight1, bias1)), weight2, bias2)`` as one node.

    Its backward computes the gradient of the hidden layer in the epilogue of one product, without a
    pass over it.

    Args:
        input: (..., in_features).
        weight1: (hidden_features, in_features).
        bias1: (hidden_features) or None.
        weight2: (out_features, hidden_features).
        bias2: (out_features) or None.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
    Raises:
        RuntimeError: another activation; otherwise as :func:`linear`.
    """
    if not (dynamo() or exporting()) or trains_on_gpu(input):
        try:
            return ops.mlp(input, weight1, bias1, weight2, bias2, activation)  # type: ignore[no-any-return]
        except RuntimeError as error:
            tensors = {"input": input, "weight1": weight1, "weight2": weight2}
            optional = {"bias1": bias1, "bias2": bias2}
            raise _fault_of_mlp(error, tensors, optional, activation) from None
    hidden = _linear_activation("mlp", input, weight1, bias1, activation)
    return linear(hidden, weight2, bias2)


def _fault_of_mlp(
    raised: RuntimeError, tensors: dict[str, Any], optional: dict[str, Any], activation: Any
) -> Exception:
    """The error in the words of mlp's arguments, where that of one of its two products is not."""
    fault = _arguments.error(raised, "mlp", tensors, optional, {"linear: input": "mlp: input"})
    if isinstance(fault, TypeError):
        return fault
    if activation not in HIDDEN:
        expected = ", ".join(map(repr, HIDDEN))
        return type(fault)(
            f"mlp: activation: expected one of {expected}, got {_arguments.shown(activation)}"
        )
    weight1, weight2 = tensors["weight1"], tensors["weight2"]
    if weight1.dim() != 2 or weight2.dim() != 2:
        return fault
    hidden, outputs = weight1.shape[0], weight2.shape[0]
    if weight2.shape[1] != hidden:
        return type(fault)(
            f"mlp: weight2: expected {hidden} columns, the rows of weight1, got {weight2.shape[1]}"
        )
    for name, features in (("bias1", hidden), ("bias2", outputs)):
        bias = optional[name]
        if bias is not None and bias.dim() == 1 and bias.shape[0] not in (1, features):
            return type(fault)(f"mlp: {name}: expected shape [{features}], got {list(bias.shape)}")
    return fault


def _linear_activation(
    function: str, input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    is_traced = (dynamo() or exporting()) and not trains_on_gpu(input)
    if is_traced and activation in ACTIVATIONS:
        return ACTIVATIONS[activation](ops.linear(input, weight, bias))
    try:
        return ops.linear_activation(input, weight, bias, activation)[0]
    except RuntimeError as error:
        operands, words = {"input": input, "weight": weight}, {"linear:": f"{function}:"}
        raise _arguments.error(error, function, operands, {"bias": bias}, words) from None
