"""Drop-in versions of `torch.nn.functional`: same names, arguments, defaults and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction as _Reduction

from . import _arguments
from ._fallback import ACTIVATIONS, NATIVE
from ._ops import ops

__all__ = [
    "batch_norm",
    "batch_norm_add_relu",
    "batch_norm_relu",
    "batch_norm_relu_max_pool2d",
    "conv2d",
    "cross_entropy",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_relu",
    "linear_silu",
    "max_pool2d",
    "max_pool2d_with_indices",
    "mlp",
    "relu",
    "relu_",
    "relu_max_pool2d",
    "scaled_dot_product_attention",
]


# Together they say what torch.compiler.is_compiling() says, for 40 ns per call instead of 60. While
# compiling, native's op takes the place of ours that only move memory: Inductor fuses those.
_dynamo, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting

# In the functions below a comparison of classes passes the usual arguments on; others go to
# `_arguments`, which knows native's rules, and so does what the operators raise.


def _pair(function: str, name: str, value: int | Sequence[int]) -> Sequence[int]:
    if value.__class__ is int:
        return (value, value)  # type: ignore[return-value]
    if value.__class__ is tuple and len(value) == 2:  # type: ignore[arg-type]
        first, last = value  # type: ignore[misc]
        if first.__class__ is last.__class__ is int:
            return value  # type: ignore[return-value]
    return _arguments.integers(function, name, value)


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """2-D convolution (cross-correlation) of a batch of images.

    The output is channels_last if ``input`` or ``weight`` is. float32, float64, bfloat16 and
    float16 run on our kernels (float32 on CUDA follows ``torch.backends.cudnn.allow_tf32``);
    integer and complex tensors go to native.

    Args:
        input: ``(N, C, H, W)`` or ``(C, H, W)``, any strides.
        weight: ``(K, C / groups, R, S)``, same dtype.
        bias: ``(K,)`` or None.
        stride, dilation: one number, or one for each dimension.
        padding: likewise, or ``"valid"`` (none) or ``"same"`` (output as large as the input; an odd
            amount puts the extra row and column at the end; needs stride 1).
        groups: C and K are cut in so many parts, convolved apart.
    Raises:
        RuntimeError: as native, on a wrong rank, dtype, device or channel count, a non-positive
            stride, dilation or groups, negative padding, or a kernel larger than the padded input.
    """
    stride = _pair("conv2d", "stride", stride)
    dilation = _pair("conv2d", "dilation", dilation)
    if groups.__class__ is not int:
        groups = _arguments.integer("conv2d", "groups", groups)
    try:
        if isinstance(padding, str):
            return ops.conv2d_padding(input, weight, bias, stride, padding, dilation, groups)
        padding = _pair("conv2d", "padding", padding)
        if len(padding) > 2:  # the operator takes four: the uneven padding of "same"
            raise RuntimeError(
                "expected padding to be a single integer value or a list of 2 values to match the "
                f"convolution dimensions, but got padding={list(padding)}"
            )
        return ops.conv2d(input, weight, bias, stride, padding, dilation, groups)
    except RuntimeError as error:
        operands = {"input": input, "weight": weight}
        raise _arguments.error(error, "conv2d", operands, {"bias": bias}) from None


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
    if _dynamo() or _exporting():
        return torch.relu(input)
    try:
        return ops.relu(input)
    except RuntimeError as error:
        raise _arguments.error(error, "relu", {"input": input}, {}) from None


def relu_(input: Tensor) -> Tensor:
    """:func:`relu` in place: overwrites ``input`` and returns it."""
    if _dynamo() or _exporting():
        return torch.relu_(input)
    try:
        return ops.relu_(input)
    except RuntimeError as error:
        raise _arguments.error(error, "relu_", {"input": input}, {}) from None


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
    return_argmax: bool = False,
    inplace_backward: bool = False,
) -> Any:
    """Cross entropy of logits against labels or class probabilities.

    The loss of a row with logits z, target q (smoothed) and class weights w is::

        s = softcap * tanh(z / softcap)     # s = z without a softcap
        lse = log(sum(exp(s)))
        loss = sum(w * q * (lse - s)) + z_loss * lse**2

    and the reduction is native's. Where a gradient will be asked for and the loss is reduced, the
    forward writes it along with the loss (on CUDA from 16 MiB of logits on; not in float16, whose
    gradients need the scale of the loss before they are rounded): the backward multiplies it by the
    gradient of the loss in its place, and only if that is not 1. With ``retain_graph`` or
    ``create_graph`` the backward works it out anew.

    Args:
        input: logits, ``(C)``, ``(N, C)`` or ``(N, C, d1, ..., dk)``; float32, float64, bfloat16 or
            float16; any strides, contiguous and channels_last read in place.
        target: labels ``()``, ``(N)`` or ``(N, d1, ..., dk)``, int64 (uint8 too without ``d1``); or
            probabilities with the shape of ``input``, which may require grad.
        weight: ``(C)``, a factor for each class.
        size_average: deprecated, see ``reduction``.
        ignore_index: a label whose rows count for nothing; it need not be a class.
        reduce: deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` (by the weights of the labels; by rows for probabilities)
            or ``"sum"``.
        label_smoothing: share of the uniform distribution in the target, in [0, 1].
        z_loss: coefficient of ``lse**2``, added to the loss of every row that is not ignored (PaLM,
            arXiv 2204.02311, section 5); a mean divides it by what it divides the loss by.
        softcap: bound of the logits' absolute values (Gemma 2, arXiv 2408.00118, section 2); 0:
            none.
        return_lse: also return ``lse`` of every row, ignored ones too, with the shape of the labels;
            float64 for float64 logits, else float32. It is differentiable.
        return_argmax: also return the class with the largest logit of every row, int64.
        inplace_backward: the backward of labels may write the gradient over the logits, which then
            hold it: no memory for a gradient of their size. Only in a backward that frees the graph,
            and if the logits are dense and no leaf; autograd raises if another op saved them and has
            yet to use them.
    Returns:
        The loss; with ``return_lse`` or ``return_argmax`` a tuple (loss, lse, argmax) of those asked
        for.
    Raises:
        IndexError: a label outside [0, C) on the CPU. On CUDA the row's loss and gradient become
            NaN and :func:`warpwright.check_errors` raises.
        ValueError: sizes that don't match, an unknown ``reduction``, a negative ``z_loss`` or
            ``softcap``.
        RuntimeError: other dtypes of ``target`` or ``weight``, wrong ranks.
    """
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    if ignore_index.__class__ is not int:
        ignore_index = _arguments.integer("cross_entropy", "ignore_index", ignore_index)
    if label_smoothing.__class__ is not float:
        label_smoothing = _arguments.real("cross_entropy", "label_smoothing", label_smoothing)
    native = (input, target, weight, _reduction(reduction), ignore_index, label_smoothing)
    try:
        if not (z_loss or softcap or return_lse or return_argmax or inplace_backward):
            return ops.cross_entropy(*native)
        results = ops.cross_entropy_extras(
            *native, z_loss, softcap, return_lse, return_argmax, inplace_backward
        )
    except RuntimeError as error:
        operands = {"input": input, "target": target}
        raise _arguments.error(error, "cross_entropy", operands, {"weight": weight}) from None
    return _asked_for(results, return_lse, return_argmax)


def _reduction(reduction: str) -> int:
    if not isinstance(reduction, str):  # native prints it, however long it is
        raise ValueError(f"reduction: expected a string, got {type(reduction).__name__}")
    return _Reduction.get_enum(reduction)


def _asked_for(
    results: tuple[Tensor, Tensor, Tensor], return_lse: bool, return_argmax: bool
) -> Any:
    """Of (loss, lse, argmax): the loss alone, or a tuple."""
    loss, lse, argmax = results
    if not (return_lse or return_argmax):
        return loss
    return (loss, *((lse,) if return_lse else ()), *((argmax,) if return_argmax else ()))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``.

    float32 on CUDA follows ``torch.backends.cuda.matmul`` (``allow_tf32``, ``fp32_precision``),
    unless :func:`warpwright.set_float32_matmul_precision` says otherwise: it also has a level
    between the two, sums of two TF32 numbers.
    Integer and complex types go to the native op: there is no kernel of ours for them.

    Args:
        input: (*, in_features), any strides; float32, float64, bfloat16 or float16.
        weight: (out_features, in_features) or (in_features), any strides, same dtype.
        bias: (out_features), or any shape that broadcasts to the output, same dtype.
    Raises:
        RuntimeError: shapes that do not multiply, or operands of several dtypes or devices.
    """
    try:
        return ops.linear(input, weight, bias)
    except RuntimeError as error:
        operands = {"input": input, "weight": weight}
        raise _arguments.error(error, "linear", operands, {"bias": bias}) from None


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
    return_argmax: bool = False,
    chunk_rows: int | None = None,
) -> Any:
    """``cross_entropy(linear(input, weight, bias), target)`` that never holds the logits.

    The rows go through in chunks. Where a gradient will be asked for, it is computed while a chunk's
    logits are there: with d the gradient of the loss by the logits z, ``d = softmax(z) - onehot`` in
    the simplest case, ``dinput = d W`` and ``dweight = sum of d^T input`` over the chunks, so that
    the backward only multiplies them by the gradient of the loss, if that is not 1. Reduction
    ``"none"`` computes the logits once more in its backward, and so does a second derivative, which
    holds them all. Gradients are not divided by their mean before the backward in float16, where
    they would vanish: ``GradScaler`` works as it does with the ops apart.

    Memory beyond the results: one chunk's logits and, with several chunks of 16-bit operands, a
    float32 sum of ``weight``'s gradient where that is the smaller choice
    (``warpwright.explain("linear_cross_entropy", ...)`` tells). With ``softcap`` a chunk's logits
    stand there a few times more, in float32.

    Args:
        input: (*, in_features); float32, float64, bfloat16 or float16.
        weight: (classes, in_features), same dtype.
        target: labels (*), int64 or uint8; or probabilities (*, classes). Probabilities that
            require grad go through the ops apart: their gradient is as large as the logits.
        bias: (classes), same dtype.
        class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap, return_lse,
            return_argmax: as in :func:`cross_entropy`, whose ``weight`` is ``class_weight`` here.
            lse and argmax have the shape of the labels. A gradient that comes by lse computes the
            logits once more.
        chunk_rows: rows of ``input`` at a time; None: chosen by the sizes.
    Returns:
        The loss; with ``return_lse`` or ``return_argmax`` a tuple (loss, lse, argmax) of those asked
        for.
    Raises:
        IndexError: a label outside [0, classes) on the CPU. On CUDA the row's loss and gradient
            become NaN and :func:`warpwright.check_errors` raises.
        ValueError: a target that fits neither form, an unknown ``reduction``, ``chunk_rows`` < 1, a
            negative ``z_loss`` or ``softcap``.
        RuntimeError: shapes that do not multiply, operands of several dtypes or devices.
    """
    if ignore_index.__class__ is not int:
        ignore_index = _arguments.integer("linear_cross_entropy", "ignore_index", ignore_index)
    if label_smoothing.__class__ is not float:
        label_smoothing = _arguments.real(
            "linear_cross_entropy", "label_smoothing", label_smoothing
        )
    plain = (
        *(input, weight, target, bias, class_weight, _reduction(reduction)),
        *(ignore_index, label_smoothing, chunk_rows),
    )
    try:
        if not (z_loss or softcap or return_lse or return_argmax):
            return ops.linear_cross_entropy(*plain)
        results = ops.linear_cross_entropy_extras(
            *plain, z_loss, softcap, return_lse, return_argmax
        )
    except RuntimeError as error:
        operands = {"input": input, "weight": weight, "target": target}
        optional = {"bias": bias, "class_weight": class_weight}
        raise _arguments.error(error, "linear_cross_entropy", operands, optional) from None
    return _asked_for(results, return_lse, return_argmax)


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``relu(linear(input, weight, bias))`` in one op, without the pre-activation in memory.

    The backward reads the signs of the output, which is kept as native's relu keeps it: changing it
    in place before the backward is an error. Arguments and errors are :func:`linear`'s.
    """
    return _linear_activation("linear_relu", input, weight, bias, "relu")


def linear_gelu(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "none"
) -> Tensor:
    """``gelu(linear(input, weight, bias), approximate)`` in one op.

    The pre-activation is written only where a gradient is needed. 16-bit types round once: the
    activation sees the sum as it was accumulated, in float32.

    Args:
        approximate: ``"none"``, ``z * Phi(z)``, or ``"tanh"``; as for ``torch.nn.functional.gelu``.

    The other arguments are :func:`linear`'s.

    Raises:
        RuntimeError: another ``approximate``; else as :func:`linear`.
        NotImplementedError: a type that native's gelu does not take.
    """
    return _linear_activation("linear_gelu", input, weight, bias, _gelu(approximate))


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
    """``linear(activation(linear(input, weight1, bias1)), weight2, bias2)`` in two ops.

    Args:
        input: (*, in_features).
        weight1: (hidden_features, in_features).
        bias1: (hidden_features) or None.
        weight2: (out_features, hidden_features).
        bias2: (out_features) or None.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
    Raises:
        RuntimeError: another activation; else as :func:`linear`.
    """
    hidden = _linear_activation("mlp", input, weight1, bias1, activation)
    return linear(hidden, weight2, bias2)


def _linear_activation(
    function: str, input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    if (_dynamo() or _exporting()) and activation in ACTIVATIONS:
        return ACTIVATIONS[activation](ops.linear(input, weight, bias))
    try:
        return ops.linear_activation(input, weight, bias, activation)[0]
    except RuntimeError as error:
        operands = {"input": input, "weight": weight}
        raise _arguments.error(error, function, operands, {"bias": bias}) from None


def _gelu(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise RuntimeError("approximate argument must be either none or tanh.")
    return "gelu" if approximate == "none" else "gelu_tanh"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query key^T + mask) value, without the score matrix in memory.

    Args:
        query: (..., H, L, E); float32, float64, bfloat16 or float16.
        key: (..., H, S, E). value: (..., H, S, E_v). Leading dimensions broadcast.
        attn_mask: broadcasts to (..., H, L, S); bool (False hides) or added to the scores. It may
            require grad. A row that is hidden entirely gives 0, and so do its gradients.
        dropout_p: probability of dropping a weight, always applied (as in native).
        is_causal: hide key j from query i where j > i; together with ``attn_mask``, both hide.
        scale: default 1 / sqrt(E).
        enable_gqa: the heads of key and value divide those of query and are shared by groups.
    Raises:
        RuntimeError: mixed dtypes or devices, shapes that do not fit, a mask of another dtype,
            ``dropout_p`` outside [0, 1].
        NotImplementedError: complex inputs.
    """
    function = "scaled_dot_product_attention"
    if dropout_p.__class__ is not float:
        dropout_p = _arguments.real(function, "dropout_p", dropout_p)
    if is_causal.__class__ is not bool:
        is_causal = _arguments.flag(function, "is_causal", is_causal)
    if scale is not None and scale.__class__ is not float:
        scale = _arguments.real(function, "scale", scale)
    if enable_gqa.__class__ is not bool:
        enable_gqa = _arguments.flag(function, "enable_gqa", enable_gqa)
    try:
        return ops.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except RuntimeError as error:
        operands = {"query": query, "key": key, "value": value}
        raise _arguments.error(error, function, operands, {"attn_mask": attn_mask}) from None


def max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Maximum over windows; NaN stays NaN, the first of equal maxima gets the gradient.

    Args:
        input: (N, C, H, W) or (C, H, W), contiguous or channels_last (kept in the output); float32,
            float64, bfloat16, float16, on the CPU also the integer types.
        kernel_size: of the window, one number or (height, width), as the three behind it.
        stride: from window to window; ``kernel_size`` when omitted.
        padding: at most half the kernel, filled with -inf.
        dilation: from tap to tap of a window.
        ceil_mode: also windows that begin inside the image and end outside.
        return_indices: return ``(output, indices)``, int64 places in each H x W plane.
    Raises:
        RuntimeError: a window that doesn't fit these rules, or another number of dimensions.
        NotImplementedError: a dtype without a kernel.
    """
    if return_indices:
        return max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode)
    if (
        not (kernel_size.__class__ is padding.__class__ is dilation.__class__ is int)
        or not (stride is None or stride.__class__ is int)
        or ceil_mode.__class__ is not bool
    ):
        kernel_size, stride, padding, dilation, ceil_mode = _window(
            "max_pool2d", kernel_size, stride, padding, dilation, ceil_mode
        )
    run = torch.max_pool2d if _dynamo() or _exporting() else ops.max_pool2d
    try:
        return run(
            input, kernel_size, () if stride is None else stride, padding, dilation, ceil_mode
        )
    except RuntimeError as error:
        raise _arguments.error(error, "max_pool2d", {"input": input}, {}) from None


def _window(
    function: str, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[Any, ...]:
    """The arguments of pooling as the operators take them."""
    return (
        _pair(function, "kernel_size", kernel_size),
        () if stride is None else _pair(function, "stride", stride),
        _pair(function, "padding", padding),
        _pair(function, "dilation", dilation),
        _arguments.flag(function, "ceil_mode", ceil_mode),
    )


def max_pool2d_with_indices(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[Tensor, Tensor]:
    """:func:`max_pool2d` with the places of the maxima, whatever ``return_indices`` says."""
    del return_indices
    name = "max_pool2d_with_indices"
    window = _window(name, kernel_size, stride, padding, dilation, ceil_mode)
    run = NATIVE[name] if _dynamo() or _exporting() else ops.max_pool2d_with_indices
    try:
        return run(input, *window)
    except RuntimeError as error:
        raise _arguments.error(error, name, {"input": input}, {}) from None


def relu_max_pool2d(
    input: Tensor,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``max_pool2d(relu(input), ...)`` in one op, without the tensor in between.

    For the backward one byte an output is kept: the winner's place in its window, or that no
    element was positive. A zero output is always +0. Arguments and errors are :func:`max_pool2d`'s.
    """
    window = _window("relu_max_pool2d", kernel_size, stride, padding, dilation, ceil_mode)
    run = NATIVE["relu_max_pool2d"] if _dynamo() or _exporting() else ops.relu_max_pool2d
    try:
        return run(input, *window)
    except RuntimeError as error:
        raise _arguments.error(error, "relu_max_pool2d", {"input": input}, {}) from None


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``(input - mean) / sqrt(var + eps) * weight + bias`` for each channel (dimension 1).

    In training mean and variance are the batch's, and the running statistics, if given, move
    towards them by ``momentum`` (with the unbiased variance); else they are the running statistics.

    Args:
        input: (N, C) or (N, C, *), contiguous or channels_last (kept in the output); float32,
            float64, bfloat16, float16.
        running_mean, running_var, weight, bias: (C), each in the dtype of ``input``, or float32
            beside a 16-bit one.
        training: take the batch's statistics.
        momentum: share of the batch's in the running statistics; a float (the modules have native's
            ``momentum=None``, the plain average).
        eps: added to the variance.
    Raises:
        ValueError: one value per channel in training, an ``eps`` that native refuses (not positive;
            in newer releases 0 is one for evaluation), or only one of the running statistics.
        RuntimeError: no running statistics in evaluation, or sizes or dtypes that don't fit.
        NotImplementedError: integer or complex ``input``.
    """
    if training.__class__ is not bool or not (momentum.__class__ is eps.__class__ is float):
        training, momentum, eps = _norm_options("batch_norm", training, momentum, eps)
    try:
        if _uses_batch_statistics(input, running_mean, running_var, training, eps):
            return ops.batch_norm(input, weight, bias, None, None, True, eps)[0]
        if not training:
            run = NATIVE["batch_norm"] if _dynamo() or _exporting() else ops.batch_norm
            return run(input, weight, bias, running_mean, running_var, False, eps)[0]
        return ops.batch_norm_update(input, weight, bias, running_mean, running_var, momentum, eps)[
            0
        ]
    except RuntimeError as error:
        optional = {"running_mean": running_mean, "running_var": running_var}
        optional |= {"weight": weight, "bias": bias}
        raise _arguments.error(error, "batch_norm", {"input": input}, optional) from None


def _norm_options(
    function: str, training: Any, momentum: Any, eps: Any
) -> tuple[bool, float, float]:
    return (
        _arguments.flag(function, "training", training),
        _arguments.real(function, "momentum", momentum),
        _arguments.real(function, "eps", eps),
    )


def _uses_batch_statistics(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Training without running statistics; raises what native's Python raises."""
    if eps <= 0.0:  # native's rule, in its words: newer releases take 0 in evaluation
        one = torch.ones(1)
        torch.nn.functional.batch_norm(torch.ones(2, 1), one, one, training=training, eps=eps)
    if not training:
        return False
    if input.numel() == (input.size(1) if input.dim() > 1 else 1) > 0:
        if input.dim() == 0:
            raise IndexError("batch_norm: input: expected at least 2 dimensions, got 0")
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {input.size()}"
        )
    if (running_mean is None) != (running_var is None):
        raise ValueError("running_mean and running_var must either both be None or neither be None")
    return running_mean is None


def batch_norm_relu(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``relu(batch_norm(input, ...))`` in one op, without the normalised tensor in between.

    The backward computes the sign of the output anew from ``input``: nothing of the output's size
    is kept. Arguments and errors are :func:`batch_norm`'s.
    """
    return _fused_norm(
        "batch_norm_relu",
        *((input, None, weight, bias), running_mean, running_var, training, momentum, eps),
    )


def batch_norm_add_relu(
    input: Tensor,
    residual: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``relu(batch_norm(input, ...) + residual)`` in one op: the end of a residual block.

    The sum is rounded once. For the backward one or a few bits an element are kept (a byte for 16
    bytes of ``input``), nothing of the output's size.

    Args:
        residual: a tensor of the shape and dtype of ``input``, in any layout. With another shape
            or dtype the chain of single ops runs, which broadcasts and promotes.

    The other arguments and the errors are :func:`batch_norm`'s.
    """
    if residual.shape != input.shape or residual.dtype != input.dtype:
        return relu(
            batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
            + residual
        )
    return _fused_norm(
        "batch_norm_relu",
        *((input, residual, weight, bias), running_mean, running_var, training, momentum, eps),
    )


def batch_norm_relu_max_pool2d(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] | None = None,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``max_pool2d(relu(batch_norm(input, ...)), ...)`` in one op: only the pooled tensor is written.

    For the backward each output keeps the place of its winner (a byte) and the element of ``input``
    that won; nothing of the input's size but the input.

    Args:
        input: (N, C, H, W), contiguous or channels_last (kept in the output); float32, float64,
            bfloat16, float16.

    The other arguments and the errors are :func:`batch_norm`'s and :func:`max_pool2d`'s.

    Raises:
        RuntimeError: also another number of dimensions, or a window whose taps (with dilation) are
            all in the padding.
    """
    name = "batch_norm_relu_max_pool2d"
    return _fused_norm(
        name,
        *((input, weight, bias), running_mean, running_var, training, momentum, eps),
        *_window(name, kernel_size, stride, padding, dilation, ceil_mode),
    )


def _fused_norm(
    name: str,
    operands: tuple[Any, ...],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *window: Any,
) -> Tensor:
    """The operator `name`, or the one that moves the running statistics."""
    training, momentum, eps = _norm_options(name, training, momentum, eps)
    input = operands[0]
    try:
        if _uses_batch_statistics(input, running_mean, running_var, training, eps):
            return getattr(ops, name)(*operands, None, None, True, eps, *window)[0]
        if not training:
            stats = running_mean, running_var
            run = NATIVE[name] if _dynamo() or _exporting() else getattr(ops, name)
            return run(*operands, *stats, False, eps, *window)[0]
        update = getattr(ops, name + "_update")
        return update(*operands, running_mean, running_var, momentum, eps, *window)[0]
    except RuntimeError as error:
        optional = {"running_mean": running_mean, "running_var": running_var}
        optional |= {"weight": operands[-2], "bias": operands[-1]}
        raise _arguments.error(error, name, {"input": input}, optional) from None
