"""The fewest bytes and FLOPs that an op needs, and its FLOPs as torch.utils.flop_counter counts them.

A multiplication and an addition count as two FLOPs. Bytes count every input once and every output
once. docs/measuring.md says how a floor is made from both.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pass(NamedTuple):
    """What one direction of a call needs at least."""

    bytes: float
    flops: float = 0.0


class Work(NamedTuple):
    forward: Pass
    backward: Pass

    def of(self, field: str) -> dict[str, float]:
        """``{"fwd": ..., "bwd": ...}`` of ``"bytes"`` or ``"flops"``."""
        return {"fwd": getattr(self.forward, field), "bwd": getattr(self.backward, field)}


# ---- by sizes ----


def traffic(size: float, forward: float, backward: float) -> Work:
    """An op without products: multiples of the input's ``size`` in bytes."""
    return Work(Pass(forward * size), Pass(backward * size))


def pooling(input: int, output: int, itemsize: int) -> Work:
    """``input`` and ``output`` in elements. The backward reads one byte of window code per output."""
    moved = input * itemsize + output * (itemsize + 1)
    return Work(Pass(moved), Pass(moved))


def product(
    input: int,
    weight: int,
    output: int,
    flops: float,
    itemsize: int,
    *,
    read: int | None = None,
    wanted: tuple[bool, bool] = (True, True),
) -> Work:
    """A matrix product or a convolution; ``input``, ``weight`` and ``output`` in elements.

    Args:
        flops: of the forward; each gradient has as many.
        read: elements of the input that the forward and the weight's gradient read, if not all.
        wanted: whether the input and the weight get a gradient.
    """
    read = input if read is None else read
    of_input, of_weight = wanted
    backward = output + (read + weight if of_weight else 0) + (weight + input if of_input else 0)
    return Work(
        Pass(itemsize * (read + weight + output), flops),
        Pass(itemsize * backward, (of_input + of_weight) * flops),
    )


def attention(query: int, key: int, output: int, flops: float, itemsize: int) -> Work:
    """``query``, ``key`` (the value has as many) and ``output`` in elements; ``flops`` of the forward.

    The backward computes the scores again: five products instead of two.
    """
    moved = itemsize * (query + 2 * key + output)
    return Work(Pass(moved, flops), Pass(2.0 * moved, 2.5 * flops))


# ---- of a call that was seen ----

# Takes the input, the output and {"args", "kwargs", "weight"}; None if the call does not say.
OfCall = Callable[[Tensor, Tensor, dict[str, Any]], "Work | None"]


def _computed_in(x: Tensor) -> int:
    """Bytes per element that a matrix op reads under autocast."""
    kind = x.device.type
    if x.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind).itemsize
    return x.dtype.itemsize


def _product_of_call(x: Tensor, y: Tensor, weight: Tensor | None, terms: int) -> Work | None:
    if weight is None:
        return None
    wanted = (x.requires_grad, weight.requires_grad)
    flops = 2.0 * y.numel() * terms
    return product(x.numel(), weight.numel(), y.numel(), flops, _computed_in(x), wanted=wanted)


def linear_of_call(x: Tensor, y: Tensor, a: dict[str, Any]) -> Work | None:
    return _product_of_call(x, y, a["weight"], x.shape[-1])


def conv2d_of_call(x: Tensor, y: Tensor, a: dict[str, Any]) -> Work | None:
    weight = a["weight"]
    return _product_of_call(x, y, weight, 0 if weight is None else math.prod(weight.shape[1:]))


def conv_transpose2d_of_call(x: Tensor, y: Tensor, a: dict[str, Any]) -> Work | None:
    weight = a["weight"]
    if weight is None:
        return None
    wanted = (x.requires_grad, weight.requires_grad)
    flops = 2.0 * x.numel() * math.prod(weight.shape[1:])
    return product(x.numel(), weight.numel(), y.numel(), flops, _computed_in(x), wanted=wanted)


def traffic_of_call(forward: float, backward: float) -> OfCall:
    """Multiples of the input's bytes."""
    return lambda x, y, a: traffic(x.numel() * x.dtype.itemsize, forward, backward)


def embedding(positions: int, columns: int, rows: int, itemsize: int, index_size: int = 8) -> Work:
    """The backward writes all rows of the weight's gradient, most of them as zeros."""
    moved, read = positions * columns * itemsize, positions * index_size
    return Work(Pass(2.0 * moved + read), Pass(float(moved + read + rows * columns * itemsize)))


def embedding_of_call(x: Tensor, y: Tensor, a: dict[str, Any]) -> Work | None:
    weight = a["weight"]
    if weight is None:
        return None
    return embedding(x.numel(), weight.shape[1], weight.shape[0], weight.dtype.itemsize, x.itemsize)


def pooling_of_call(x: Tensor, y: Tensor, a: dict[str, Any]) -> Work:
    return pooling(x.numel(), y.numel(), x.dtype.itemsize)


def _visible(queries: int, keys: int, is_causal: bool, window: tuple[int, int] | None) -> float:
    """The fraction of all scores that attention needs, about."""
    left, right = window or (-1, -1)
    if left < 0 and right < 0:
        return 0.5 if is_causal else 1.0
    behind = min(queries / 2, left) if left >= 0 else queries / 2
    ahead = 0 if is_causal else min(keys / 2, right) if right >= 0 else keys / 2
    return min(1.0, (behind + ahead + 1) / max(keys, 1))


def attention_of_call(x: Tensor, y: Tensor, a: dict[str, Any]) -> Work:
    args, kwargs = a["args"], a["kwargs"]
    key = kwargs.get("key", args[1] if len(args) > 1 else x)
    causal = kwargs.get("is_causal", args[5] if len(args) > 5 else False)
    heads = math.prod(x.shape[:-2])
    flops = 2.0 * heads * x.shape[-2] * key.shape[-2] * (x.shape[-1] + y.shape[-1])
    flops *= _visible(x.shape[-2], key.shape[-2], causal, kwargs.get("window_size"))
    return attention(x.numel(), key.numel(), y.numel(), flops, _computed_in(x))


# ---- for torch.utils.flop_counter: takes the operator's arguments, shapes in place of tensors ----

Shape = Sequence[int]


def linear_flops(x: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * math.prod(weight[:-1])


def scaled_linear_flops(x: Shape, x_scale: Any, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return linear_flops(x, weight)


def linear_backward_flops(
    dy: Shape,
    x: Shape | None,
    weight: Shape | None,
    mask: Sequence[bool],
    float32_mask: Sequence[bool] = (),
    **kwargs: Any,
) -> int:
    products = 0
    if mask[0] and weight is not None:
        products += math.prod(dy) * weight[-1]
    if mask[1] and x is not None:
        products += math.prod(dy) * x[-1]
    return 2 * products


def linear_quantized_flops(x: Shape, codes: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(x) * codes[0]


def linear_quantized_backward_flops(
    dy: Shape, codes: Shape, scales: Shape, *args: Any, **kwargs: Any
) -> int:
    features = codes[1] * (2 if len(scales) == 2 else 1)  # a scale per channel: bytes of int8
    return 2 * math.prod(dy) * features


def squeeze_excitation_flops(x: Shape, weight1: Shape, *args: Any, **kwargs: Any) -> int:
    """The two layers, on a mean per image and channel."""
    return 4 * x[0] * math.prod(weight1)


def squeeze_excitation_backward_flops(
    dy: Shape, x: Shape, weight1: Shape, *args: Any, **kwargs: Any
) -> int:
    """Of both layers the gradients of weight and input that are asked for, as native counts them."""
    mask: Sequence[bool] = args[8]  # input, weights and biases
    products = sum((mask[3], any(mask[:3]), mask[1], mask[0]))
    return 2 * x[0] * math.prod(weight1) * products


def _counter() -> Any:
    """The module that asks; it is slow to import, and only its own calls come here."""
    return importlib.import_module("torch.utils.flop_counter")


def _batched(shape: Shape) -> Shape:
    return shape if len(shape) == 4 else (1, *shape)


def conv2d_flops(x: Shape, weight: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(_counter().conv_flop_count(_batched(x), weight, _batched(out_shape)))


def conv2d_batch_norm_flops(
    x: Shape, weight: Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(_counter().conv_flop_count(x, weight, out_shape[1]))


def _convolution_flops(x: Shape, weight: Shape, windows: Sequence[Any]) -> int:
    """Of a convolution whose output is no result. ``windows``: stride, padding, dilation, ..."""
    stride, padding, dilation = ((*w, *w)[:2] for w in windows[:3])
    rows, columns = (
        (x[2 + i] + 2 * padding[i] - dilation[i] * (weight[2 + i] - 1) - 1) // stride[i] + 1
        for i in (0, 1)
    )
    return int(2 * x[0] * math.prod(weight) * rows * columns)


def conv_norm_pool_flops(x: Shape, weight: Shape, bias: Any, *args: Any, **kwargs: Any) -> int:
    return _convolution_flops(x, weight, args[3:])


def conv_norm_pool_update_flops(
    x: Shape, weight: Shape, bias: Any, *args: Any, **kwargs: Any
) -> int:
    return _convolution_flops(x, weight, args[6:])


def conv_norm_pool_backward_flops(
    dy: Shape, x: Shape, weight: Shape, *args: Any, **kwargs: Any
) -> int:
    """Of the gradients that are asked for; not of a convolution that runs again."""
    wanted: Sequence[bool] = args[-1]
    return _convolution_flops(x, weight, args[5:]) * (wanted[0] + wanted[1])


def conv2d_backward_flops(
    dy: Shape, x: Shape, weight: Shape, stride: Any, padding: Any, dilation: Any, groups: int,
    mask: Sequence[bool], addend: Any = None, float32_parameters: bool = False,
    out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    dx, *rest = out_shape
    window = (None, stride, padding, dilation, False, None, groups, mask)
    outputs = (_batched(dx) if mask[0] else dx, *rest)
    return int(
        _counter().conv_backward_flop(_batched(dy), _batched(x), weight, *window, out_val=outputs)
    )


def mlp_hidden_gradient_flops(dy: Shape, weight: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(dy) * weight[1]


def conv2d_batch_norm_backward_flops(
    dy: Shape, sums: Any, skip: Any, x: Shape, weight: Shape, *rest: Any,
    out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    stride, padding, dilation, groups, mask = rest[11:16]  # the flag after them may be left out
    windows = (stride, padding, dilation, groups, (*mask[:2], False))
    return conv2d_backward_flops(dy, x, weight, *windows, out_shape=(*out_shape[:2], None))


def conv_transpose2d_flops(
    x: Shape, weight: Shape, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(
        _counter().conv_flop_count(_batched(x), weight, _batched(out_shape), transposed=True)
    )


def conv_transpose2d_cat_flops(
    skip: Shape, x: Shape, weight: Shape, *args: Any, **kwargs: Any
) -> int:
    return int(2 * math.prod(x) * math.prod(weight[1:]))


def conv_transpose2d_backward_flops(
    dy: Shape, x: Shape, weight: Shape, stride: Any, padding: Any, output_padding: Any,
    groups: int, dilation: Any, mask: Sequence[bool], out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    dx, *rest = out_shape
    window = (None, stride, padding, dilation, True, output_padding, groups, mask)
    outputs = (_batched(dx) if mask[0] else dx, *rest)
    return int(
        _counter().conv_backward_flop(_batched(dy), _batched(x), weight, *window, out_val=outputs)
    )


def fft_conv_flops(
    first: Shape, second: Shape, bias: Any, padding: Any, groups: int, wanted: str = "output",
    *args: Any, out_shape: Any = None, **kwargs: Any,
) -> int:  # fmt: skip
    """Of direct convolution, as native's counter has it: the FLOPs of the task, not of transforms."""
    tensors = {
        "output": (out_shape, second),
        "input": (first, second),
        "weight": (second, out_shape),
    }
    output, weight = tensors[wanted]
    return int(2 * math.prod(output) * math.prod(weight[1:]))


def attention_flops(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def kv_cache_attention_flops(
    query: Shape, k_cache: Shape, v_cache: Shape, seqlens: Shape, table: Shape | None = None,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """As if the cache were full: the lengths are on the device."""
    tokens = k_cache[1] * (table[1] if table is not None else 1)
    return 4 * math.prod(query) * tokens


def varlen_attention_flops(
    query: Shape, key: Shape, value: Shape, cu_q: Shape, cu_k: Shape, max_q: int, max_k: int,
    *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """As if each query saw as many keys as the longest sequence has: the lengths are on the device."""
    return 2 * math.prod(query[:-1]) * min(key[0], max_k) * (query[-1] + value[-1])


def varlen_attention_backward_flops(
    dy: Shape, query: Shape, key: Shape, value: Shape, cu_q: Shape, cu_k: Shape, out: Shape,
    lse: Shape, max_q: int, max_k: int, *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return 2 * math.prod(query[:-1]) * min(key[0], max_k) * (3 * query[-1] + 2 * value[-1])


def attention_backward_flops(
    dy: Shape, query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any
) -> int:
    """The scores once more, and the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def linear_cross_entropy_flops(
    x: Shape, weight: Shape, bias: Any, target: Any, class_weight: Any, reduction: int,
    ignore_index: int, label_smoothing: float, chunk_rows: int, dtype: Any,
    mask: Sequence[bool], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return linear_flops(x, weight) * (1 + mask[0] + mask[1])


def linear_cross_entropy_backward_flops(
    dy: Shape, x: Shape, weight: Shape, bias: Any, target: Any, class_weight: Any,
    reduction: int, ignore_index: int, label_smoothing: float, chunk_rows: int,
    mask: Sequence[bool], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    return linear_flops(x, weight) * (1 + mask[0] + mask[1])
