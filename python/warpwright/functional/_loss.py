"""Cross entropy, alone and with the linear layer that makes its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import _reduction as _Reduction

from .. import _arguments
from .._ops import ops


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

    The reduction is native's.

    If the loss is reduced and ``input`` requires grad, the forward also computes the gradient. On CUDA
    it does so for 16 MiB of logits and more. It does not in float16, because gradients need the loss
    scale before they are rounded. The backward then scales that gradient in place, unless the gradient
    of the loss is 1. With ``retain_graph`` or ``create_graph`` the backward computes the gradient again.

    Args:
        input: logits, ``(C)``, ``(N, C)`` or ``(N, C, d1, ..., dk)``; float32, float64, bfloat16 or
            float16; any strides. Contiguous and channels_last tensors are read without a copy.
        target: labels ``()``, ``(N)`` or ``(N, d1, ..., dk)``, int64 (or uint8 without ``d1``); or
            probabilities with the shape of ``input``, which may require grad.
        weight: ``(C)``, one factor per class.
        size_average: deprecated, see ``reduction``.
        ignore_index: rows with this label have no loss and no gradient; it need not be a class.
        reduce: deprecated, see ``reduction``.
        reduction: ``"none"``, ``"mean"`` (labels: divided by the sum of their weights;
            probabilities: divided by the number of rows) or ``"sum"``.
        label_smoothing: share of the uniform distribution in the target, in [0, 1].
        z_loss: coefficient of ``lse**2``, added to the loss of each row that is not ignored (PaLM,
            arXiv 2204.02311, section 5). A mean divides it by the same number as the loss.
        softcap: bound of the logits' absolute values (Gemma 2, arXiv 2408.00118, section 2); 0:
            none.
        return_lse: also return ``lse`` of each row, ignored rows too, with the shape of the labels;
            float64 for float64 logits, else float32. It is differentiable.
        return_argmax: also return the class with the largest logit of each row, int64.
        inplace_backward: allow the backward to overwrite the logits with their gradient, which
            saves one buffer of their size. It does so for labels, if the backward frees the graph
            and the logits are dense and no leaf. Autograd raises if another op saved the logits and
            has not used them yet.
    Returns:
        The loss. With ``return_lse`` or ``return_argmax``: a tuple of the loss and the requested
        ones of lse and argmax, in this order.
    Raises:
        IndexError: a label outside [0, C) on the CPU. On CUDA the row's loss and gradient become
            NaN and :func:`warpwright.check_errors` raises.
        ValueError: sizes do not match, ``reduction`` is unknown, or ``z_loss`` or ``softcap`` is
            negative.
        RuntimeError: other dtypes of ``target`` or ``weight``, wrong ranks.
    """
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    code = _reduction(reduction)  # first, as native
    if ignore_index.__class__ is not int:
        ignore_index = _arguments.integer("cross_entropy", "ignore_index", ignore_index)
    if label_smoothing.__class__ is not float:
        label_smoothing = _arguments.real("cross_entropy", "label_smoothing", label_smoothing)
    native = (input, target, weight, code, ignore_index, label_smoothing)
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
    """``cross_entropy(linear(input, weight, bias), target)`` without all logits in memory.

    The op processes the rows in chunks. If an operand requires grad, it computes the gradients while
    a chunk's logits are in memory. Let d be the gradient of the loss by the logits z, in the
    simplest case ``softmax(z) - onehot``. Then ``dinput = d W``, and ``dweight`` is the sum of
    ``d^T input`` over the chunks. The backward then only scales them, unless the gradient of the loss is 1.

    Two backwards compute the logits again: that of reduction ``"none"``, and a second derivative,
    which holds all of them. In float16 a mean divides the gradients in the backward, not before:
    they would underflow. ``GradScaler`` therefore works as with the two ops.

    Memory beyond the results: the logits of one chunk. Several chunks of 16-bit operands may also
    need a float32 sum of ``weight``'s gradient (``warpwright.explain("linear_cross_entropy", ...)``
    tells). With ``softcap``, several float32 copies of a chunk's logits exist together.

    Args:
        input: (..., in_features); float32, float64, bfloat16 or float16.
        weight: (classes, in_features), same dtype.
        target: labels (...), int64 or uint8; or probabilities (..., classes). If probabilities require
            grad, the two ops run one after the other: the gradient is as large as the logits.
        bias: (classes), same dtype.
        class_weight: ``weight`` of :func:`cross_entropy`.
        ignore_index, reduction, label_smoothing, z_loss, softcap: as in :func:`cross_entropy`.
        return_lse, return_argmax: the same; lse and argmax have the shape of the labels. A gradient
            through lse computes the logits again.
        chunk_rows: rows of ``input`` per chunk; None: chosen by the sizes.
    Returns:
        The loss. With ``return_lse`` or ``return_argmax``: a tuple of the loss and the requested
        ones of lse and argmax, in this order.
    Raises:
        IndexError: a label outside [0, classes) on the CPU. On CUDA the row's loss and gradient
            become NaN and :func:`warpwright.check_errors` raises.
        ValueError: ``target`` has neither form, ``reduction`` is unknown, ``chunk_rows`` < 1, or
            ``z_loss`` or ``softcap`` is negative.
        RuntimeError: the shapes do not multiply, or the operands' dtypes or devices differ.
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


def _reduction(reduction: str) -> int:
    if not isinstance(reduction, str):  # native prints it, however long it is
        raise ValueError(f"reduction: expected a string, got {type(reduction).__name__}")
    return _Reduction.get_enum(reduction)


def _asked_for(
    results: tuple[Tensor, Tensor, Tensor], return_lse: bool, return_argmax: bool
) -> Any:
    """The loss, or a tuple of it and the requested ones of lse and argmax."""
    loss, lse, argmax = results
    if not (return_lse or return_argmax):
        return loss
    return (loss, *((lse,) if return_lse else ()), *((argmax,) if return_argmax else ()))
