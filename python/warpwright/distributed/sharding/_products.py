"""Shardings of the products: linear, linear with an activation, convolutions.

A weight that is cut stays cut. If its rows are cut, so are the output's features (or channels). If its
columns are cut, the output is a partial sum, and each of n ranks adds the n-th part of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import Shard

from ._table import P, R, Row, Rule, S, all_replicated, picked

LINEAR_ADVICE = (
    "Shard the weight with ColwiseParallel or RowwiseParallel, and the input over its rows."
)
ACTIVATION_ADVICE = (
    "An activation needs the whole sum: use ColwiseParallel for a layer fused with its activation, "
    "or swap(fuse=False)."
)
FFT_CONV_ADVICE = (
    "A transform needs all of its dimensions: shard images or, without groups, channels."
)
OVER = "over N or, without groups, over channels; not over H and W."
CONV_ADVICE = f"conv2d is computed {OVER}"


def linear(x: Any, w: Any, b: Any) -> list[Row]:
    last = x.ndim - 1
    rows: list[Row] = [all_replicated(1, 3)]
    rows += [([S(i)], [S(i), R, R]) for i in range(last)]
    rows.append(([S(last)], [R, S(0), S(0)]))
    rows.append(([P], [S(last), S(1), P]))
    return rows


def linear_backward(
    dy: Any, x: Any, w: Any, mask: Sequence[bool], float32_mask: Sequence[bool] = ()
) -> list[Row]:
    last = dy.ndim - 1
    rows: list[Row] = [(picked(mask, R, R, R), [R, R, R])]
    rows += [(picked(mask, S(i), P, P), [S(i), S(i), R]) for i in range(last)]
    rows.append((picked(mask, P, S(0), S(0)), [S(last), R, S(0)]))
    rows.append((picked(mask, S(last), S(1), R), [R, S(last), S(1)]))
    return rows


def linear_activation(x: Any, w: Any, b: Any, activation: str, keep: bool) -> list[Row]:
    last = x.ndim - 1

    def both(p: Any) -> list[Any]:
        return [p, p if keep else R]  # without `keep` the second result is an empty placeholder

    rows: list[Row] = [all_replicated(2, 3)]
    rows += [(both(S(i)), [S(i), R, R]) for i in range(last)]
    rows.append((both(S(last)), [R, S(0), S(0)]))
    return rows


def linear_activation_backward(
    dy: Any, kept: Any, activation: str, bias_gradient: bool, float32_bias: bool = False
) -> list[Row]:
    last, mask = dy.ndim - 1, (True, bias_gradient)
    rows: list[Row] = [(picked(mask, R, R), [R, R])]
    rows += [(picked(mask, S(i), P), [S(i), S(i)]) for i in range(last)]
    rows.append((picked(mask, S(last), S(0)), [S(last), S(last)]))
    return rows


def mlp_hidden_gradient(dy: Any, w: Any, kept: Any, activation: str) -> list[Row]:
    last = dy.ndim - 1
    rows: list[Row] = [all_replicated(1, 3)]
    rows += [([S(i)], [S(i), R, S(i)]) for i in range(last)]
    rows.append(([S(last)], [R, S(1), S(last)]))
    return rows


def _cuts_groups(codes: Any, scales: Any, fragments: bool) -> bool:
    """Whether shards along the input's features are whole groups of plain codes."""
    return not fragments and (scales.ndim == 1 or scales.shape[1] % codes.mesh.size() == 0)


def linear_quantized(
    x: Any, codes: Any, scales: Any, zeros: Any, bias: Any, fragments: bool, ahead: bool
) -> list[Row]:
    last = x.ndim - 1
    rows: list[Row] = [all_replicated(1, 5)]
    rows += [([S(i)], [S(i), R, R, R, R]) for i in range(last)]
    if not fragments:
        rows.append(([S(last)], [R, S(0), S(0), S(0), S(0)]))
    if _cuts_groups(codes, scales, fragments):
        grouped = R if scales.ndim == 1 else S(1)
        rows.append(([P], [S(last), S(1), grouped, grouped, P]))
    return rows


def linear_quantized_backward(
    dy: Any, codes: Any, scales: Any, zeros: Any, fragments: bool
) -> list[Row]:
    last = dy.ndim - 1
    rows: list[Row] = [all_replicated(1, 4)]
    rows += [([S(i)], [S(i), R, R, R]) for i in range(last)]
    if not fragments:
        rows.append(([P], [S(last), S(0), S(0), S(0)]))
    if _cuts_groups(codes, scales, fragments):
        grouped = R if scales.ndim == 1 else S(1)
        rows.append(([S(last)], [R, S(1), grouped, grouped]))
    return rows


def _is_cut(spec: Any, dims: Sequence[int]) -> bool:
    return any(isinstance(p, Shard) and p.dim in dims for p in spec.placements)


def conv2d(x: Any, w: Any, b: Any, *options: Any) -> list[Row]:
    groups, c = options[3], x.ndim - 3
    if _is_cut(x, (c + 1, c + 2)):
        return []
    rows: list[Row] = [all_replicated(1, 3)]
    if c == 1:
        rows.append(([S(0)], [S(0), R, R]))
    if groups == 1:
        rows.append(([S(c)], [R, S(0), S(0)]))
        rows.append(([P], [S(c), S(1), P]))
    return rows


def conv2d_backward(dy: Any, x: Any, w: Any, *options: Any) -> list[Row]:
    groups, mask, c = options[3], options[4], x.ndim - 3
    if _is_cut(x, (c + 1, c + 2)):
        return []
    # The last tensor is the addend, placed as the gradient that it is added to.
    rows: list[Row] = [(picked(mask, R, R, R), [R, R, R, R])]
    if c == 1:
        rows.append((picked(mask, S(0), P, P), [S(0), S(0), R, S(0)]))
    if groups == 1:
        rows.append((picked(mask, P, S(0), S(0)), [S(c), R, S(0), P]))
        rows.append((picked(mask, S(c), S(1), R), [R, S(c), S(1), S(c)]))
    return rows


def conv_transpose2d(x: Any, w: Any, b: Any, *options: Any) -> list[Row]:
    """conv2d's, with a weight whose dimensions of channels are exchanged."""
    groups, c = options[3], x.ndim - 3
    if _is_cut(x, (c + 1, c + 2)):
        return []
    rows: list[Row] = [all_replicated(1, 3)]
    if c == 1:
        rows.append(([S(0)], [S(0), R, R]))
    if groups == 1:
        rows.append(([S(c)], [R, S(1), S(0)]))
        rows.append(([P], [S(c), S(0), P]))
    return rows


def conv_transpose2d_cat(skip: Any, x: Any, w: Any, b: Any, *options: Any) -> list[Row]:
    """Over N: a shard of channels would be one of either operand."""
    rows: list[Row] = [all_replicated(1, 4)]
    if x.ndim == 4 and not _is_cut(x, (2, 3)):
        rows.append(([S(0)], [S(0), S(0), R, R]))
    return rows


def conv_transpose2d_backward(dy: Any, x: Any, w: Any, *options: Any) -> list[Row]:
    groups, mask, c = options[3], options[5], x.ndim - 3
    if _is_cut(x, (c + 1, c + 2)):
        return []
    rows: list[Row] = [(picked(mask, R, R, R), [R, R, R])]
    if c == 1:
        rows.append((picked(mask, S(0), P, P), [S(0), S(0), R]))
    if groups == 1:
        rows.append((picked(mask, P, S(1), S(0)), [S(c), R, S(1)]))
        rows.append((picked(mask, S(c), S(0), R), [R, S(c), S(0)]))
    return rows


def fft_conv(
    x: Any, y: Any, b: Any, padding: Any, groups: int, wanted: str = "output"
) -> list[Row]:
    """Over images; without groups over channels: each result is a sum over one of the dimensions."""
    if _is_cut(x, range(2, x.ndim)):
        return []
    rows: list[Row] = [all_replicated(1, 3)]
    if wanted == "output":
        rows.append(([S(0)], [S(0), R, R]))
    elif wanted == "input":
        rows.append(([S(0)], [S(0), R, None]))
    else:
        rows.append(([P], [S(0), S(0), None]))
    if groups == 1 and wanted == "output":
        rows += [([S(1)], [R, S(0), S(0)]), ([P], [S(1), S(1), P])]
    elif groups == 1 and wanted == "input":
        rows += [([S(1)], [R, S(1), None]), ([P], [S(1), S(0), None])]
    elif groups == 1:
        rows += [([S(0)], [R, S(1), None]), ([S(1)], [S(1), R, None])]
    return rows


RULES = {
    "linear": Rule(linear, kept=("weight",), advice=LINEAR_ADVICE),
    "linear_backward": Rule(linear_backward, kept=("weight",), advice=LINEAR_ADVICE),
    "linear_activation": Rule(linear_activation, kept=("weight",), advice=ACTIVATION_ADVICE),
    "linear_activation_backward": Rule(linear_activation_backward),
    "mlp_hidden_gradient": Rule(mlp_hidden_gradient, kept=("weight",), advice=ACTIVATION_ADVICE),
    "linear_quantized": Rule(linear_quantized, kept=("codes",), advice=LINEAR_ADVICE),
    "linear_quantized_backward": Rule(
        linear_quantized_backward, kept=("codes",), advice=LINEAR_ADVICE
    ),
    "fft_conv": Rule(fft_conv, advice=FFT_CONV_ADVICE),
    "conv2d": Rule(conv2d, kept=("weight",), advice=CONV_ADVICE),
    "conv2d_backward": Rule(conv2d_backward, kept=("weight",), advice=CONV_ADVICE),
    "conv_transpose2d": Rule(
        conv_transpose2d, kept=("weight",), advice=f"conv_transpose2d is computed {OVER}"
    ),
    "conv_transpose2d_cat": Rule(
        conv_transpose2d_cat,
        kept=("weight",),
        advice="conv_transpose2d_cat is computed over N. For other shards, call torch.cat.",
    ),
    "conv_transpose2d_backward": Rule(
        conv_transpose2d_backward, kept=("weight",), advice=f"conv_transpose2d is computed {OVER}"
    ),
}
