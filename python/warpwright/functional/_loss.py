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
