"""Rules of attention over packed sequences and over a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ops import ops
from ._fold import Dims, front, into, one_by_one, out_of, results, shifted


def _ends(ends: Tensor, dim: int | None, samples: int, rows: int, longest: int) -> Tensor:
    """(samples, sequences + 1) among the rows of all samples. An end that is none becomes -1."""
    ends = front(ends, dim, samples)
    lengths = torch.nn.functional.pad(ends.diff(dim=1), (1, 0))
    first = torch.arange(samples, dtype=torch.int32, device=ends.device).mul_(rows).unsqueeze(1)
    return torch.where((ends >= 0) & (ends <= rows) & (lengths <= longest), ends + first, -1)


def _rows(x: Tensor, dim: int | None) -> int:
    return x.shape[0] if dim is None else x.movedim(dim, 0).shape[1]


class _Packed:
    """The sequences of all samples. With common ends the samples are heads, else they are rows.

    Rows of no sequence lie between those of two samples. They become two sequences: one without
    keys, then one without queries. Results are 0 there, as those of rows of no sequence.
    """

    def __init__(self, samples: int, query: Any, key: Any, ends: Any, longest: Any) -> None:
        """Tensors with their dimensions of the batch, and the lengths of the longest sequences."""
        self.samples = samples
        self.heads = all(d is None for _, d in ends)
        if self.heads:
            self.sequences = (ends[0][0], ends[1][0], *longest)
            return
        rows = _rows(*query), _rows(*key)
        of_queries, of_keys = (
            _ends(e[0], e[1], samples, n, most)
            for e, n, most in zip(ends, rows, longest, strict=True)
        )
        self.sequences = (
            torch.cat((of_queries[:, :1], of_queries), 1).flatten()[1:],
            torch.cat((of_keys, of_keys[:, -1:]), 1).flatten()[:-1],
            *(
                most if most < 0 else max(most, 2 * n)
                for n, most in zip(rows, longest, strict=True)
            ),
        )

    def fold(self, x: Any, dim: int | None) -> Any:
        """(rows, heads, head size)"""
        return into(x, dim, self.samples, int(self.heads))

    def unfold(self, x: Any) -> tuple[Any, int | None]:
        return out_of(x, self.samples, int(self.heads))

    def fold_lse(self, x: Any, dim: int | None) -> Any:
        """(heads, rows)"""
        return into(x, dim, self.samples, int(not self.heads))

    def unfold_lse(self, x: Any) -> tuple[Any, int | None]:
        return out_of(x, self.samples, int(not self.heads))


def attention_varlen(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    query, key, value, *ends = zip(args[:5], dims[:5], strict=True)
    packed = _Packed(info.batch_size, query, key, ends, args[5:7])
    operands = (packed.fold(*x) for x in (query, key, value))
    out, lse = ops.attention_varlen(*operands, *packed.sequences, *args[7:])
    return results(packed.unfold(out), packed.unfold_lse(lse))


def attention_varlen_backward(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    grad, query, key, value, *ends, out, lse = zip(args[:8], dims[:8], strict=True)
    packed = _Packed(info.batch_size, query, key, ends, args[8:10])
    of_queries, of_keys, *longest = packed.sequences
    grads = ops.attention_varlen_backward(
        *(packed.fold(*x) for x in (grad, query, key, value)),
        of_queries,
        of_keys,
        packed.fold(*out),
        packed.fold_lse(*lse),
        *longest,
        *args[10:-1],
        packed.fold_lse(args[-1], dims[len(args) - 1]),
    )
    return results(*(packed.unfold(g) for g in grads))


def _of_one_cache(samples: int, query: Tensor, dim: Any, cache: Any, *options: Any) -> Any:
    """More heads of queries for each head of keys."""
    heads = cache[0].shape[2]
    groups = query.movedim(dim, 0).unflatten(3, (heads, -1)).movedim(0, 3)
    out = ops.attention_with_kv_cache(groups.flatten(2, 4), *cache, *options)
    return out.unflatten(2, (heads, samples, -1)).movedim(3, 0).flatten(3, 4), 0


def attention_with_kv_cache(info: Any, dims: Dims, *args: Any) -> tuple[Any, Any]:
    """Further sequences. Pages of several caches are further pages of one."""
    query, k_cache, v_cache, lengths, table, *options = args
    samples, op = info.batch_size, ops.attention_with_kv_cache
    if any(t.dim() - (d is not None) != 4 for t, d in zip(args[:3], dims[:3], strict=True)):
        return one_by_one(op, samples, dims, args)  # raises
    batch, _, heads, _ = query.shape if dims[0] is None else query.movedim(dims[0], 0).shape[1:]
    shared = dims[1] is None and dims[2] is None
    pages, _, kv_heads, _ = (k_cache if dims[1] is None else k_cache.movedim(dims[1], 0)[0]).shape
    if kv_heads == 0 or heads % kv_heads != 0 or (table is None and pages != batch):
        return one_by_one(op, samples, dims, args)  # raises
    if all(d is None for d in dims[1:5]):
        cache = k_cache, v_cache, lengths, table
        return _of_one_cache(samples, query, dims[0], cache, *options)
    of_table = dims[4]
    if table is None and shared:  # sequence b of every sample is page b
        table = torch.arange(pages, dtype=torch.int32, device=query.device).unsqueeze(1)
    if table is not None:
        table = front(table, of_table, samples)
        if not shared:
            table = shifted(table, pages, -1).to(table.dtype)
        table = table.flatten(0, 1)
    if not shared:
        k_cache, v_cache = into(k_cache, dims[1], samples, 0), into(v_cache, dims[2], samples, 0)
    query, lengths = into(query, dims[0], samples, 0), into(lengths, dims[3], samples, 0)
    return out_of(op(query, k_cache, v_cache, lengths, table, *options), samples, 0)
