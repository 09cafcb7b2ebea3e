"""Shardings of layer norm and RMS norm (rows), group norm (images) and batch norm (channels)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ._table import P, R, Row, Rule, S, picked

ROWS_ADVICE = "A norm is computed over whole rows, with whole weights."
GROUPS_ADVICE = "A group norm is computed over whole images, with whole weights."
BATCH_ADVICE = (
    "Batch norm is computed over channels. For statistics of a batch that the ranks share, use "
    "torch.nn.SyncBatchNorm on plain tensors; swap() runs it on warpwright."
)


# ---- rows ----


def _row_dims(x: Any, normalized_shape: Sequence[int]) -> range:
    return range(x.ndim - len(normalized_shape))


def _norm_rows(x: Any, shape: Sequence[int], outputs: str, inputs: str) -> list[Row]:
    """A table for results and operands that have rows ("r"), or a vector per column ("c")."""
    rows: list[Row] = [([R] * len(outputs), [R] * len(inputs))]
    for dim in _row_dims(x, shape):
        of = {"r": S(dim), "c": R}
        rows.append(([of[kind] for kind in outputs], [of[kind] for kind in inputs]))
    return rows


def _norm_backward_rows(
    x: Any, shape: Sequence[int], mask: Sequence[bool], outputs: str, inputs: str
) -> list[Row]:
    """The same for a backward; a vector among the results is a sum over the rows."""
    rows: list[Row] = [(picked(mask, *[R] * len(outputs)), [R] * len(inputs))]
    for dim in _row_dims(x, shape):
        of = {"r": S(dim), "c": R}
        placed = [S(dim) if kind == "r" else P for kind in outputs]
        rows.append((picked(mask, *placed), [of[kind] for kind in inputs]))
    return rows


def layer_norm(x: Any, shape: Sequence[int], *_: Any) -> list[Row]:
    return _norm_rows(x, shape, "rrr", "rcc")


def layer_norm_backward(
    dy: Any, x: Any, shape: Sequence[int], w: Any, mean: Any, rstd: Any, mask: Sequence[bool]
) -> list[Row]:
    return _norm_backward_rows(x, shape, mask, "rcc", "rrcrr")


def rms_norm(x: Any, shape: Sequence[int], *_: Any) -> list[Row]:
    return _norm_rows(x, shape, "rr", "rc")


def rms_norm_backward(
    dy: Any, x: Any, shape: Sequence[int], w: Any, rstd: Any, mask: Sequence[bool]
) -> list[Row]:
    return _norm_backward_rows(x, shape, mask, "rc", "rrcr")


def add_layer_norm(x: Any, residual: Any, shape: Sequence[int], *_: Any) -> list[Row]:
    return _norm_rows(x, shape, "rrrr", "rrcc")


def add_rms_norm(x: Any, residual: Any, shape: Sequence[int], *_: Any) -> list[Row]:
    return _norm_rows(x, shape, "rrr", "rrc")


def _added(total: Any, dtype: Any, mask: Sequence[bool]) -> list[bool]:
    """Which results the backward of an addition and norm returns."""
    differs = dtype != total.tensor_meta.dtype
    return [mask[0] or mask[1], mask[1] and differs, *mask[2:]]


def add_layer_norm_backward(
    ds: Any, dy: Any, total: Any, shape: Sequence[int], w: Any, mean: Any, rstd: Any,
    dtype: Any, mask: Sequence[bool],
) -> list[Row]:  # fmt: skip
    found = _added(total, dtype, mask)
    return _norm_backward_rows(total, shape, found, "rrcc", "rrrcrr")


def add_rms_norm_backward(
    ds: Any, dy: Any, total: Any, shape: Sequence[int], w: Any, rstd: Any,
    dtype: Any, mask: Sequence[bool],
) -> list[Row]:  # fmt: skip
    found = _added(total, dtype, mask)
    return _norm_backward_rows(total, shape, found, "rrcc"[: len(found)], "rrrcr")


# ---- groups ----


def group_norm(x: Any, groups: int, *_: Any) -> list[Row]:
    """Images; the vectors have an element per channel."""
    return [([R, R, R], [R, R, R]), ([S(0), S(0), S(0)], [S(0), R, R])]


def group_norm_backward(
    dy: Any, x: Any, groups: int, w: Any, mean: Any, rstd: Any, mask: Sequence[bool]
) -> list[Row]:
    rows: list[Row] = [(picked(mask, R, R, R), [R] * 5)]
    rows.append((picked(mask, S(0), P, P), [S(0), S(0), R, S(0), S(0)]))
    return rows


# ---- channels ----
#
# A call's tensors are of three kinds. "x" has the input's shape, "c" one element per channel. "mask" is
# flat: it has the bits of this rank's part of the input, so only a call with the same placements can
# read it.


def _placed(kinds: str, x: Any, c: Any, mask: Any) -> list[Any]:
    of = {"x": x, "c": c, "m": mask, "-": R}
    return [of[kind] for kind in kinds]


def _channel_rows(
    x: Any, results: str, operands: str, evaluation: bool, mask: Sequence[bool] | None = None
) -> list[Row]:
    """Rows of a forward, or with `mask` of a backward, whose "c" results are sums over the rest."""
    wanted = mask or [True] * len(results)

    def row(where: Any, channel: Any, sums: Any, bits: Any) -> Row:
        out = _placed(results, where, sums, bits)
        return picked(wanted, *out), _placed(operands, where, channel, bits)

    rows = [row(R, R, R, R), row(S(1), S(0), S(0), S(0))]
    if evaluation:  # every element by itself
        rows += [row(S(i), R, P if mask else R, S(0)) for i in range(x.ndim) if i != 1]
    return rows


def batch_norm(x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *_: Any) -> list[Row]:
    return _channel_rows(x, "xcc", "xcccc", not training)


def batch_norm_update(x: Any, *_: Any) -> list[Row]:
    return _channel_rows(x, "xcc", "xcccc", False)


def batch_norm_backward(
    dy: Any, x: Any, w: Any, mean: Any, rstd: Any, training: bool, mask: Sequence[bool]
) -> list[Row]:
    return _channel_rows(x, "xcc", "xxccc", not training, mask)


def _kind_of_bits(residual: Any) -> str:
    """Without a residual the forward keeps no mask: the result is an empty placeholder."""
    return "-" if residual is None else "m"


def batch_norm_relu(
    x: Any, residual: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, *_: Any
) -> list[Row]:
    return _channel_rows(x, "xcc" + _kind_of_bits(residual), "xxcccc", not training)


def batch_norm_relu_update(x: Any, residual: Any, *_: Any) -> list[Row]:
    return _channel_rows(x, "xcc" + _kind_of_bits(residual), "xxcccc", False)


def batch_norm_relu_backward(
    dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any, bits: Any, training: bool, mask: Any
) -> list[Row]:
    kind = "-" if bits.shape[0] == 0 else "m"
    return _channel_rows(x, "xccx", "xxcccc" + kind, not training, mask)


def batch_norm_activation_backward(
    dy: Any, x: Any, w: Any, b: Any, mean: Any, rstd: Any, training: bool, eps: float, name: str,
    mask: Sequence[bool],
) -> list[Row]:  # fmt: skip
    return _channel_rows(x, "xcc", "xxcccc", not training, mask)


def _convolved(update: bool) -> Callable[..., list[Row]]:
    """Over output channels: the statistics of a channel need all of its pixels."""
    results, operands = 5, 8 if update else 6

    def rows(x: Any, w: Any, b: Any, residual: Any, *options: Any) -> list[Row]:
        table: list[Row] = [([R] * results, [R] * operands)]
        if options[-1] == 1:
            bits = R if residual is None else S(0)
            channels = [S(0)] * (operands - 4)
            table.append(([S(1), S(1), S(0), S(0), bits], [R, S(0), S(0), S(1), *channels]))
        return table

    return rows


def conv2d_batch_norm_backward(
    dy: Any, sums: Any, skip: Any, x: Any, w: Any, a: Any, b: Any, mean: Any, rstd: Any, bits: Any,
    convolved: Any, *options: Any,
) -> list[Row]:  # fmt: skip
    *gate, _, _, _, _, _, groups, wanted, _ = options
    table: list[Row] = [([*picked(wanted, *[R] * 5), R if gate[0] is not None else None], [R] * 14)]
    # The gradient of x is a sum over the output channels: a skip would be added once per shard.
    if groups == 1 and skip is None:
        bits_of = R if bits.shape[0] == 0 else S(0)
        gradients = picked(wanted, P, S(0), S(1), S(0), S(0))
        channels = [S(0), S(0), S(0), S(0), S(0), bits_of]
        table.append(([*gradients, None], [S(1), S(0), R, R, *channels, S(1), R, R, R]))
    return table


def _convolved_pooled(update: bool) -> Callable[..., list[Row]]:
    """As `_convolved`; the codes are images, and the moments those of all windows."""
    results, operands = 5, 7 if update else 5

    def rows(x: Any, w: Any, b: Any, *options: Any) -> list[Row]:
        table: list[Row] = [([R] * results, [R] * operands)]
        groups, save = options[-7], options[-1]
        if groups == 1:
            codes = S(1) if save else R
            channels = [S(0)] * (operands - 3)
            table.append(([S(1), S(0), S(0), codes, R], [R, S(0), S(0), *channels]))
        return table

    return rows


def conv2d_batch_norm_relu_max_pool2d_backward(
    dy: Any, x: Any, w: Any, b: Any, norm_weight: Any, mean: Any, rstd: Any, codes: Any,
    moments: Any, *options: Any,
) -> list[Row]:  # fmt: skip
    groups, wanted = options[3], options[-1]
    table: list[Row] = [(picked(wanted, *[R] * 5), [R] * 9)]
    if groups == 1:  # the gradient of x is a sum over the output channels
        gradients = picked(wanted, P, S(0), S(0), S(0), S(0))
        table.append((gradients, [S(1), R, S(0), S(0), S(0), S(0), S(0), S(1), R]))
    return table


def _pooled(update: bool) -> Callable[..., list[Row]]:
    def rows(
        x: Any, w: Any, b: Any, mean: Any, var: Any, training: Any, *options: Any
    ) -> list[Row]:
        kept = "xx" if options[-1] else "--"  # codes and winners, if the backward will need them
        found = _channel_rows(x, "xcc" + kept, "xcccc", not update and not training)
        return [row for row in found if not _cuts_windows(row[1][0])]

    return rows


def _cuts_windows(placement: Any) -> bool:
    return placement in (S(2), S(3))


def batch_norm_relu_max_pool2d_backward(
    dy: Any, x: Any, codes: Any, winners: Any, w: Any, b: Any, mean: Any, rstd: Any,
    training: bool, *options: Any,
) -> list[Row]:  # fmt: skip
    found = _channel_rows(x, "xcc", "xxxxcccc", not training, options[-1])
    return [row for row in found if not _cuts_windows(row[1][0])]


def _batch(rows: Callable[..., list[Row]], update: bool = False) -> Rule:
    written = ("running_mean", "running_var") if update else ()
    return Rule(rows, kept=("input",), written=written, advice=BATCH_ADVICE)


RULES = {
    "layer_norm": Rule(layer_norm, kept=("weight", "bias"), advice=ROWS_ADVICE),
    "layer_norm_backward": Rule(layer_norm_backward, kept=("weight",), advice=ROWS_ADVICE),
    "rms_norm": Rule(rms_norm, kept=("weight",), advice=ROWS_ADVICE),
    "rms_norm_backward": Rule(rms_norm_backward, kept=("weight",), advice=ROWS_ADVICE),
    "add_layer_norm": Rule(add_layer_norm, kept=("weight", "bias"), advice=ROWS_ADVICE),
    "add_layer_norm_backward": Rule(add_layer_norm_backward, kept=("weight",), advice=ROWS_ADVICE),
    "add_rms_norm": Rule(add_rms_norm, kept=("weight",), advice=ROWS_ADVICE),
    "add_rms_norm_backward": Rule(add_rms_norm_backward, kept=("weight",), advice=ROWS_ADVICE),
    "group_norm": Rule(group_norm, kept=("weight", "bias"), advice=GROUPS_ADVICE),
    "group_norm_backward": Rule(group_norm_backward, kept=("weight",), advice=GROUPS_ADVICE),
    "batch_norm": _batch(batch_norm),
    "batch_norm_update": _batch(batch_norm_update, update=True),
    "batch_norm_backward": _batch(batch_norm_backward),
    "batch_norm_relu": _batch(batch_norm_relu),
    "batch_norm_relu_update": _batch(batch_norm_relu_update, update=True),
    "batch_norm_relu_backward": _batch(batch_norm_relu_backward),
    "batch_norm_activation": _batch(batch_norm),
    "batch_norm_activation_update": _batch(batch_norm_update, update=True),
    "batch_norm_activation_backward": _batch(batch_norm_activation_backward),
    "conv2d_batch_norm": Rule(_convolved(update=False), kept=("weight",), advice=BATCH_ADVICE),
    "conv2d_batch_norm_update": Rule(
        _convolved(update=True),
        kept=("weight",),
        written=("running_mean", "running_var"),
        advice=BATCH_ADVICE,
    ),
    "conv2d_batch_norm_backward": Rule(
        conv2d_batch_norm_backward, kept=("weight",), advice=BATCH_ADVICE
    ),
    "conv2d_batch_norm_relu_max_pool2d": Rule(
        _convolved_pooled(update=False), kept=("weight",), advice=BATCH_ADVICE
    ),
    "conv2d_batch_norm_relu_max_pool2d_update": Rule(
        _convolved_pooled(update=True),
        kept=("weight",),
        written=("running_mean", "running_var"),
        advice=BATCH_ADVICE,
    ),
    "conv2d_batch_norm_relu_max_pool2d_backward": Rule(
        conv2d_batch_norm_relu_max_pool2d_backward, kept=("weight",), advice=BATCH_ADVICE
    ),
    "batch_norm_relu_max_pool2d": _batch(_pooled(update=False)),
    "batch_norm_relu_max_pool2d_update": _batch(_pooled(update=True), update=True),
    "batch_norm_relu_max_pool2d_backward": _batch(batch_norm_relu_max_pool2d_backward),
}
