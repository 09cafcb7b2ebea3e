"""Drop-in versions of `torch.nn.functional`: same names, arguments, defaults and errors."""

from __future__ import annotations

from torch import Tensor

from ._ops import ops

__all__ = ["linear", "relu", "relu_"]


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """max(input, 0) elementwise; NaN stays NaN.

    Args:
        input: any shape and strides; float32, float64, bfloat16, float16 or an integer type.
        inplace: overwrite ``input`` and return it.
    Raises:
        RuntimeError: boolean ``input``, or ``inplace`` on a leaf that requires grad.
        NotImplementedError: complex ``input``.
    """
    if inplace:
        return relu_(input)
    return ops.relu(input)


def relu_(input: Tensor) -> Tensor:
    """:func:`relu` in place: overwrites ``input`` and returns it."""
    ops.relu_(input)
    return input


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``.

    float32 on CUDA follows ``torch.backends.cuda.matmul`` (``allow_tf32``, ``fp32_precision``).
    Integer and complex types go to the native op: there is no kernel of ours for them.

    Args:
        input: (*, in_features), any strides.
        weight: (out_features, in_features) or (in_features), any strides.
        bias: (out_features), or any shape that broadcasts to the output.
    Raises:
        RuntimeError: shapes that do not multiply, or operands of several dtypes or devices.
    """
    return ops.linear(input, weight, bias)
