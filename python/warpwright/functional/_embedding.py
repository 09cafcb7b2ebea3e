"""Rows of a table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _arguments
from .._ops import ops
from ._common import dynamo, is_exported

native: Any = torch.nn.functional


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``weight[input]``: the row of each index.

    The gradient of ``weight`` is the sum over the positions of each row, in float32 (float64 for
    float64) and in a fixed order: every run gives the same bits. No sort and no atomic addition.
    On a GPU, an index out of range gives a row of NaN and a note for
    :func:`warpwright.check_errors`; on the CPU it raises.

    Args:
        input: int64 or int32, any shape and strides.
        weight: (rows, columns), any strides; float32, float64, bfloat16, float16. Native computes
            other types.
        padding_idx: a row that gets no gradient; negative values count from the end.
        max_norm: rows of ``weight`` that ``input`` names are first scaled in place, without a
            gradient, so that their norm is at most this.
        norm_type: the p of that norm.
        scale_grad_by_freq: divides the gradient of a row by the number of its positions.
        sparse: the gradient is a sparse tensor. Native computes such a call.
    Returns:
        ``(*input.shape, columns)``, contiguous.
    Raises:
        AssertionError: ``padding_idx`` is no row.
        IndexError: on the CPU, an index out of range.
        RuntimeError: ``weight`` is no matrix, or ``input`` has another type.
        TypeError: an argument has another type than in the signature.
    """
    if padding_idx is not None:
        if padding_idx > 0:
            assert padding_idx < weight.size(0), "Padding_idx must be within num_embeddings"
        elif padding_idx < 0:
            assert padding_idx >= -weight.size(0), "Padding_idx must be within num_embeddings"
            padding_idx = weight.size(0) + padding_idx
        if padding_idx.__class__ is not int and not dynamo():
            padding_idx = _arguments.integer("embedding", "padding_idx", padding_idx)
    if max_norm is not None:
        if not torch.compiler.is_compiling():
            # The copy below, and native's norms, would read freed memory.
            _arguments.require_storage("embedding", "input", input)
            _arguments.require_storage("embedding", "weight", weight)
        input = input.contiguous()
        _renormalise(weight, input, max_norm, norm_type)
    if scale_grad_by_freq.__class__ is not bool:
        scale_grad_by_freq = _arguments.flag("embedding", "scale_grad_by_freq", scale_grad_by_freq)
    padding = -1 if padding_idx is None else padding_idx
    if sparse.__class__ is not bool:
        sparse = _arguments.flag("embedding", "sparse", sparse)
    if sparse:
        return torch.embedding(weight, input, padding, scale_grad_by_freq, True)
    try:
        return ops.embedding(weight, input, padding, scale_grad_by_freq)  # type: ignore[no-any-return]
    except RuntimeError as error:
        tensors = {"weight": weight, "indices": input}
        raise _arguments.error(error, "embedding", tensors, {}) from None


def _are_on_gpu(*tensors: Tensor) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


def _renormalise(weight: Tensor, input: Tensor, max_norm: Any, norm_type: Any) -> None:
    """In place. Native's, unless both are on a GPU and no transform of torch.func watches them.

    Native's CUDA kernel may scale a row twice if its indices are apart (pytorch's ``Embedding.cu`` notes
    the race), so a trace of ``torch.compile`` keeps ours.
    """
    most = _arguments.real("embedding_renorm_", "max_norm", max_norm)
    kind = _arguments.real("embedding_renorm_", "norm_type", norm_type)
    in_transform = not dynamo() and torch._C._functorch.peek_interpreter_stack() is not None
    if is_exported() or in_transform or not _are_on_gpu(weight, input):
        native._no_grad_embedding_renorm_(weight, input, most, kind)
    else:
        ops.embedding_renorm_(weight.detach(), input, most, kind)
