"""The arithmetic of the ladder of attention (docs/ladder-attention.md)."""

from __future__ import annotations

from collections.abc import Sequence

State = tuple[float, float, Sequence[float]]


def forward_flops(heads: int, queries: int, keys: int, head_dim: int) -> int:
    """Of both products; a multiply-add is two."""
    raise NotImplementedError


def operand_bytes(heads: int, tokens: int, head_dim: int, itemsize: int) -> int:
    """Of q, k, v and out together."""
    raise NotImplementedError


def score_bytes(heads: int, tokens: int, itemsize: int) -> int:
    """Of all scores."""
    raise NotImplementedError


def tokens_where_scores_are_larger(head_dim: int, itemsize: int, score_itemsize: int) -> int:
    """The fewest tokens with more bytes of scores than of q, k, v and out."""
    raise NotImplementedError


def merge(a: State, b: State) -> State:
    """(max, sum, out) of two sets of keys as one. out is the weighted mean of the values: divided by sum."""
    raise NotImplementedError


def reads_per_product(rows: int, columns: int) -> float:
    """Floats read from shared memory per multiply-add, for a thread with rows x columns of a product."""
    raise NotImplementedError


def lane_of(row: int, column: int) -> tuple[int, int]:
    """(lane, index of its four numbers) of an element of mma.sync's 16 x 8 result."""
    raise NotImplementedError


def bytes_per_product(queries: int) -> float:
    """Bytes of shared memory per multiply-add, if a warp reads bf16 keys and values for its queries alone."""
    raise NotImplementedError
