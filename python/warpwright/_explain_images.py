"""Explainers of convolutions, pools, and the norms of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from . import _C, functional
from ._explain_common import (
    Arguments,
    Lines,
    dtype_name,
    has_rows,
    may_take_sm90,
    operand_of,
    pair_of,
)
from ._precision import conv_allows_tf32
from .functional._fft_conv import call_of
from .functional._pool import WHY_NOT_GLOBAL, is_global_pool


def max_pool2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    stride = a["stride"] if a["stride"] not in (None, ()) else a["kernel_size"]
    kernel, stride, pad, dilation = (
        pair_of(w) for w in (a["kernel_size"], stride, a["padding"], a["dilation"])
    )
    output: Tensor = torch.nn.functional.max_pool2d(
        x.to("meta"), kernel, stride, pad, dilation, a["ceil_mode"]
    )
    window = [*kernel, *stride, *pad, *dilation]
    return _C.explain_max_pool2d(
        dtype_name(x), operand_of(x), has_rows(x), window, output.shape[-2:]
    )


def why_native_pool(a: Arguments) -> Lines:
    """Empty if the pool is global, which ours computes."""
    if is_global_pool(a["input"], a["output_size"]):
        return []
    return [("forward, backward", f"native adaptive_avg_pool2d: {WHY_NOT_GLOBAL}")]


def adaptive_avg_pool2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    return why_native_pool(a) or _C.explain_global_avg_pool2d(
        dtype_name(x), operand_of(x), has_rows(x), gpu
    )


def batch_norm_relu_max_pool2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    (_, statistics), _ = _C.explain_batch_norm(dtype_name(x), operand_of(x), has_rows(x), 0, gpu)
    (_, forward), (_, backward) = max_pool2d(a, gpu)
    return [
        ("statistics", statistics),
        ("forward", f"{forward}; normalised tap by tap"),
        ("backward", f"batch norm's sums over the winners, then {backward}"),
    ]


def conv2d_shape(
    a: Arguments,
) -> tuple[_C.Operand, _C.Operand, Sequence[int], bool, list[int], int]:
    """Operands, output size, layout, window and groups, as the explainers of conv2d take them."""
    x, weight = a["input"], a["weight"]
    x = x[None] if x.dim() == 3 else x
    window = {name: a[name] for name in ("stride", "padding", "dilation", "groups")}
    output = functional.conv2d(x.to("meta"), weight.to("meta"), None, **window)
    stride, dilation = pair_of(a["stride"]), pair_of(a["dilation"])
    if a["padding"] == "same":  # an odd row goes after the last one
        before = tuple(d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True))
    else:
        before = (0, 0) if a["padding"] == "valid" else pair_of(a["padding"])
    channels_last = torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
    return (
        operand_of(x),
        operand_of(weight),
        output.shape[2:],
        channels_last,
        [*stride, *before, *dilation],
        a["groups"],
    )


def conv2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    shape = conv2d_shape(a)
    tf32, sm90 = conv_allows_tf32(), may_take_sm90()
    return _C.explain_conv2d(dtype_name(a["input"]), tf32, *shape, gpu, sm90)


def transposed_shape(
    a: Arguments,
) -> tuple[Sequence[int], Sequence[int], bool, Sequence[int], int]:
    """Output size, pixels of x, layout, window and groups, as the explainers take them."""
    x, weight = a["input"], a["weight"]
    x = x if x.dim() == 4 else x.unsqueeze(0)
    stride, padding, more, dilation = (
        pair_of(a[name]) for name in ("stride", "padding", "output_padding", "dilation")
    )
    windows = (stride, padding, more, a["groups"], dilation)
    output = functional.conv_transpose2d(x.to("meta"), weight.to("meta"), None, *windows)
    pixels = [
        size + rows // step for size, rows, step in zip(x.shape[2:], more, stride, strict=True)
    ]
    channels_last = torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
    window = [*stride, *padding, *dilation]
    return output.shape[2:], pixels, channels_last, window, a["groups"]


def transposed_operands(a: Arguments) -> tuple[_C.Operand, _C.Operand]:
    x = a["input"]
    return operand_of(x if x.dim() == 4 else x.unsqueeze(0)), operand_of(a["weight"])


def conv_transpose2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, weight = transposed_operands(a)
    bias = a["bias"].data_ptr() if a["bias"] is not None and a["bias"].is_cuda else 0
    dtype, tf32, sm90 = dtype_name(a["input"]), conv_allows_tf32(), may_take_sm90()
    return _C.explain_conv_transpose2d(
        dtype, tf32, x, weight, bias, *transposed_shape(a), 0, gpu, sm90
    )


def conv_transpose2d_cat(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, weight = transposed_operands(a)
    skip, up = a["skip"], a["input"]
    bias = a["bias"].data_ptr() if a["bias"] is not None and a["bias"].is_cuda else 0
    dtype, tf32, sm90 = dtype_name(up), conv_allows_tf32(), may_take_sm90()
    shape = transposed_shape(a)
    rows = suggest_memory_format(skip) == torch.channels_last and skip.dtype == up.dtype
    pitch = skip.shape[1] + a["weight"].shape[1] * a["groups"] if rows and skip.dim() == 4 else -1
    return _C.explain_conv_transpose2d(dtype, tf32, x, weight, bias, *shape, pitch, gpu, sm90)


def fft_conv(a: Arguments, gpu: _C.DeviceInfo | None) -> Lines:
    call = call_of(a["input"], a["weight"], a["padding"], a["groups"])
    return _C.explain_fft_conv(call, conv_allows_tf32(), gpu)


def batch_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    return _C.explain_batch_norm(
        dtype_name(x), operand_of(x), has_rows(x), 1 + ("residual" in a), gpu
    )


def conv2d_batch_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    shape = conv2d_shape(a)
    dtype, sm90 = dtype_name(a["input"]), may_take_sm90()
    forward, *backward = _C.explain_conv2d(dtype, conv_allows_tf32(), *shape, gpu, sm90)
    _, _, extents, channels_last, *_ = shape
    convolved = torch.empty(
        (*a["input"].shape[:-3], a["weight"].size(0), *extents),
        dtype=a["input"].dtype,
        device="meta",
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    return [
        ("convolution", forward[1]),
        *_C.explain_conv2d_moments(dtype, *shape, 1 + ("residual" in a), gpu, sm90),
        *((f"norm, {role}", text) for role, text in batch_norm({"input": convolved}, gpu)),
        *backward,
    ]


def conv2d_batch_norm_relu_max_pool2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    shape = conv2d_shape(a)
    _, _, extents, channels_last, *_ = shape
    kernel, padding, dilation = (
        pair_of(a[name]) for name in ("pool_kernel_size", "pool_padding", "pool_dilation")
    )
    stride = kernel if a["pool_stride"] in (None, ()) else pair_of(a["pool_stride"])
    convolved = torch.empty(
        (a["input"].size(0), a["weight"].size(0), *extents),
        dtype=a["input"].dtype,
        device="meta",
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    window = (kernel, stride, padding, dilation)
    pooled: Tensor = torch.nn.functional.max_pool2d(convolved, *window, a["ceil_mode"])
    windows = [extent for pair in window for extent in pair]
    fused = _C.explain_conv_norm_pool(
        dtype_name(convolved), *shape, windows, pooled.shape[-2:], gpu
    )
    names = ("kernel_size", "stride", "padding", "dilation")
    pool = dict(zip(names, window, strict=True)) | {"ceil_mode": a["ceil_mode"]}
    after = batch_norm_relu_max_pool2d({"input": convolved, **pool}, gpu)
    return [
        *fused,
        *((f"else convolution, {role}", text) for role, text in conv2d(a, gpu)),
        *((f"else norm and pool, {role}", text) for role, text in after),
    ]


def group_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    sm90 = may_take_sm90() and gpu.sm_arch == 90
    return _C.explain_group_norm(
        dtype_name(x), operand_of(x), has_rows(x), a["num_groups"], sm90, gpu
    )


def instance_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    if not a["use_input_stats"]:
        return batch_norm(a, gpu)
    return group_norm({"input": a["input"], "num_groups": a["input"].shape[1]}, gpu)


def squeeze_excitation(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"] if a["input"].dim() == 4 else a["input"][None]
    return _C.explain_squeeze_excitation(dtype_name(x), operand_of(x), has_rows(x), gpu)
