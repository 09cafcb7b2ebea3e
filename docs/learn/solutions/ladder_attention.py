"""The arithmetic of the ladder of attention (docs/ladder-attention.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence

State = tuple[float, float, Sequence[float]]


def forward_flops(heads: int, queries: int, keys: int, head_dim: int) -> int:
    """Of both products; a multiply-add is two."""
    return 4 * heads * queries * keys * head_dim


def operand_bytes(heads: int, tokens: int, head_dim: int, itemsize: int) -> int:
    """Of q, k, v and out together."""
    return 4 * heads * tokens * head_dim * itemsize


def score_bytes(heads: int, tokens: int, itemsize: int) -> int:
    """Of all scores."""
    return heads * tokens**2 * itemsize


def tokens_where_scores_are_larger(head_dim: int, itemsize: int, score_itemsize: int) -> int:
    """The fewest tokens with more bytes of scores than of q, k, v and out."""
    # tokens^2 * score_itemsize > 4 * tokens * head_dim * itemsize
    return 4 * head_dim * itemsize // score_itemsize + 1


def merge(a: State, b: State) -> State:
    """(max, sum, out) of two sets of keys as one. out is the weighted mean of the values: divided by sum."""
    largest = max(a[0], b[0])
    if largest == -math.inf:
        return a
    weights = a[1] * math.exp(a[0] - largest), b[1] * math.exp(b[0] - largest)
    total = sum(weights)
    out = [(weights[0] * x + weights[1] * y) / total for x, y in zip(a[2], b[2], strict=True)]
    return largest, total, out


def reads_per_product(rows: int, columns: int) -> float:
    """Floats read from shared memory per multiply-add, for a thread with rows x columns of a product."""
    return (rows + columns) / (rows * columns)


def lane_of(row: int, column: int) -> tuple[int, int]:
    """(lane, index of its four numbers) of an element of mma.sync's 16 x 8 result."""
    return row % 8 * 4 + column // 2, row // 8 * 2 + column % 2


def bytes_per_product(queries: int) -> float:
    """Bytes of shared memory per multiply-add, if a warp reads bf16 keys and values for its queries alone."""
    # Two bytes of a key or value serve one multiply-add of each query.
    return 2 / queries
