"""Rotary position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _arguments
from .._catalog import NATIVE_OPERATORS
from .._ops import ops


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotates pairs of columns of query and key by angles of their tokens, in one launch.

    The formula of arXiv 2104.09864 as transformers' models compute it:
    ``x * cos + turned(x) * sin``, where ``turned`` takes a pair (x, y) to (-y, x). The sum is
    computed in float32 (or float64) and rounded once. The backward is the transposed rotation.

    Args:
        query: (batch, heads, tokens, columns) in any strides, such as the transposed view of a
            projection; float32, float64, bfloat16, float16.
        key: as ``query``, with any number of heads.
        cos, sin: a value per rotated column, as a model's rotary layer returns them: (batch,
            tokens, rotated), (1, tokens, rotated) or (tokens, rotated). ``rotated`` is even; later
            columns are copied. The dtype of ``query``, or float32 for a 16-bit one.
        interleaved: pairs are columns (2 i, 2 i + 1), as in GPT-J; else (i, i + rotated / 2), as in
            Llama.
    Returns:
        The rotated query and key, in the dtype and dimension order of the inputs. With float32
        tables, single ops would promote a 16-bit query; this function keeps its dtype.
    Raises:
        RuntimeError: a table has a forward-mode tangent; or a shape, dtype or device that does not fit; the message names the argument.
        NotImplementedError: integer or complex ``query``.
    """
    if isinstance(cos, Tensor) and isinstance(sin, Tensor):
        if cos.dim() == 2:
            cos = cos.unsqueeze(0)
        if sin.dim() == 2:
            sin = sin.unsqueeze(0)
        if cos.requires_grad or sin.requires_grad:  # the operator has no gradient of the tables
            if not torch.compiler.is_compiling():  # single ops would read freed memory
                operands = {"query": query, "key": key, "cos": cos, "sin": sin}
                for name, tensor in operands.items():
                    _arguments.require_storage("rotary_embedding", name, tensor)
            return _single_ops(query, key, cos, sin, interleaved)
    _arguments.flag("rotary_embedding", "interleaved", interleaved)
    try:
        return ops.rotary_embedding(query, key, cos, sin, interleaved)
    except RuntimeError as error:
        tensors = {"query": query, "key": key, "cos": cos, "sin": sin}
        raise _arguments.error(error, "rotary_embedding", tensors, {}) from None


def _single_ops(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = NATIVE_OPERATORS["rotary_embedding"](
        query, key, cos, sin, interleaved
    )
    return rotated
