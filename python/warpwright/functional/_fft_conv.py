"""Convolution by Fourier transforms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _C, _arguments
from .._gpu import current_gpu
from .._ops import ops
from .._precision import conv_allows_tf32

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def fft_conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """1-D convolution (cross-correlation) by Fourier transforms, for large kernels.

    The time hardly depends on the kernel's length. Long signals are cut into overlapping tiles
    (overlap-save). Everything between the input and the output is float32, or float64 for float64.
    Results are right to rounding: a later element of the input may change earlier outputs of a causal
    convolution in their last bits. NaN and infinities reach the outputs with a window that holds them,
    as in direct convolution. No tap multiplies zeros of the padding.

    Args:
        input: ``(N, C, L)`` or ``(C, L)``, any strides; float32, float64, bfloat16 or float16.
        weight: ``(K, C / groups, S)``, same dtype.
        bias: ``(K,)`` or None.
        stride, dilation: 1. A transform computes every output.
        padding: zeros at both ends; ``"valid"`` (none), ``"same"`` (as many outputs as inputs; an odd
            amount adds the extra zero at the end), ``"full"`` (``S - 1`` at both ends), or
            ``"causal"`` (``S - 1`` before the first: output t sees inputs up to t).
        groups: number of groups that divide C and K.
    Returns:
        ``(N, K, outputs)``, or ``(K, outputs)`` for an unbatched input, contiguous.
    Raises:
        ValueError: ``stride`` or ``dilation`` is not 1, or ``padding`` is an unknown word.
        NotImplementedError: integer or complex ``input``.
        RuntimeError: shapes, dtypes or devices do not fit together.
        TypeError: an argument has another type than in the signature.
    """
    return _convolve("fft_conv1d", 1, input, weight, bias, stride, padding, dilation, groups)


def fft_conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """2-D convolution (cross-correlation) by Fourier transforms, for large kernels.

    :func:`conv2d` takes it with ``algorithm="fft"``. :func:`fft_conv1d` says what holds for both.

    Args:
        input: ``(N, C, H, W)`` or ``(C, H, W)``, any strides; float32, float64, bfloat16 or float16.
        weight: ``(K, C / groups, R, S)``, same dtype.
        bias: ``(K,)`` or None.
        stride, dilation: 1. A transform computes every output.
        padding: one number of zeros at each end, or one per dimension; ``"valid"``, ``"same"`` or
            ``"full"``.
        groups: number of groups that divide C and K.
    Returns:
        ``(N, K, P, Q)``, or ``(K, P, Q)`` for an unbatched input; channels_last if ``input`` or
        ``weight`` is.
    Raises:
        ValueError: ``stride`` or ``dilation`` is not 1, or ``padding`` is an unknown word.
        NotImplementedError: integer or complex ``input``.
        RuntimeError: shapes, dtypes or devices do not fit together.
        TypeError: an argument has another type than in the signature.
    """
    return _convolve("fft_conv2d", 2, input, weight, bias, stride, padding, dilation, groups)


def _numbers(function: str, name: str, value: Any, dims: int) -> list[Any]:
    """One number per dimension."""
    if isinstance(value, (tuple, list)):
        if len(value) not in (1, dims):
            raise RuntimeError(
                f"{function}(): expected {name} to be one number or {dims}, got "
                f"{_arguments.shown(value)}"
            )
        numbers = [_arguments.integer(function, name, v) for v in value]
    else:
        numbers = [_arguments.integer(function, name, value)]
    return numbers * dims if len(numbers) == 1 else numbers


def padding_of(function: str, padding: Any, taps: Sequence[Any]) -> list[Any]:
    """Zeros before each dimension, then after each."""
    if not isinstance(padding, str):
        numbers = _numbers(function, "padding", padding, len(taps))
        return numbers * 2
    if padding == "valid":
        return [0] * (2 * len(taps))
    if padding == "same":
        return [(s - 1) // 2 for s in taps] + [s // 2 for s in taps]
    if padding == "full":
        return [s - 1 for s in taps] * 2
    if padding == "causal" and len(taps) == 1:
        return [taps[0] - 1, 0]
    words = "'valid', 'same', 'full'" + (", 'causal'" if len(taps) == 1 else "")
    raise ValueError(f"{function}(): padding: expected a number or one of {words}, got {padding!r}")


def _convolve(
    function: str, dims: int, input: Tensor, weight: Tensor, bias: Tensor | None, *window: Any
) -> Tensor:
    stride, padding, dilation, groups = window
    for name, value in (("stride", stride), ("dilation", dilation)):
        is_one = value.__class__ is int and value == 1
        if not is_one and any(v != 1 for v in _numbers(function, name, value, dims)):
            raise ValueError(
                f"{function}(): {name}: expected 1, because a transform computes every output, got "
                f"{_arguments.shown(value)}"
            )
    if groups.__class__ is not int:
        groups = _arguments.integer(function, "groups", groups)
    operands = {"input": input, "weight": weight}
    for name, tensor in operands.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{function}(): argument '{name}' must be Tensor, not {type(tensor).__name__}"
            )
    if input.dim() not in (dims + 1, dims + 2) or weight.dim() != dims + 2:
        raise RuntimeError(
            f"{function}(): expected input of {dims + 1} (unbatched) or {dims + 2} dimensions and "
            f"weight of {dims + 2}, got shapes {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    pad = padding_of(function, padding, weight.shape[2:])
    batched = input if input.dim() == dims + 2 else input.unsqueeze(0)
    try:
        output = ops.fft_conv(batched, weight, bias, pad, groups)
    except RuntimeError as error:
        words = {"fft_conv: first": "input", "fft_conv: second": "weight"}
        words = {theirs: f"{function}: {name}" for theirs, name in words.items()}
        words["fft_conv:"] = f"{function}:"
        raise _arguments.error(error, function, operands, {"bias": bias}, words) from None
    return output if input.dim() == dims + 2 else output.squeeze(0)


# ---- conv2d's algorithm ----


def conv2d_by(
    algorithm: str, input: Tensor, weight: Tensor, bias: Tensor | None, *window: Any
) -> Tensor | None:
    """conv2d by a transform; None where the direct kernels are to run."""
    if algorithm == "fft":
        return fft_conv2d(input, weight, bias, *window)
    if algorithm == "auto":
        return fft_conv2d(input, weight, bias, *window) if _pays(input, weight, *window) else None
    raise ValueError(f"conv2d(): algorithm: expected 'direct', 'auto' or 'fft', got {algorithm!r}")


def call_of(input: Tensor, weight: Tensor, padding: Any, groups: int) -> _C.FftConvCall:
    """A call as the cost model takes it."""
    dims = weight.dim() - 2
    x = list(input.shape) if input.dim() == dims + 2 else [1, *input.shape]
    w = list(weight.shape)
    pad = padding_of("explain", padding, weight.shape[2:])
    if dims == 1:
        x.insert(2, 1)
        w.insert(2, 1)
        pad = [0, pad[0], 0, pad[1]]
    return _C.FftConvCall(str(input.dtype).removeprefix("torch."), x, w, pad, groups)


@functools.cache
def _gpu(index: int) -> _C.DeviceInfo:
    return current_gpu(torch.device("cuda", index))[0]


def _pays(
    input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int
) -> bool:
    """Whether the model expects the transform to be faster. Programs that are traced stay direct:
    the decision needs sizes as numbers."""
    if torch.compiler.is_compiling() or not isinstance(input, Tensor):
        return False
    plain = all(_numbers("conv2d", "stride", v, 2) == [1, 1] for v in (stride, dilation))
    if not plain or input.dtype not in _TYPES or input.dim() not in (3, 4) or weight.dim() != 4:
        return False
    if input.device.type not in ("cpu", "cuda") or weight.shape[1] * groups != input.shape[-3]:
        return False
    gpu = _gpu(input.device.index) if input.is_cuda else None
    return _C.fft_conv_pays(call_of(input, weight, padding, groups), conv_allows_tf32(), gpu)
