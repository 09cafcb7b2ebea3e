"""Which kernel and tile a call would take, and why. The op's own choice function answers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from . import _C, functional
from ._arch import built_archs, why_no_kernel
from ._catalog import FUNCTIONALS, VARIANTS
from ._gpu import current_gpu
from ._precision import conv_allows_tf32, linear_allows_tf32, linear_splits_float32
from .functional._fft_conv import call_of

__all__ = ["explain"]

Lines = list[tuple[str, str]]
Arguments = dict[str, Any]


def explain(
    op: str | Callable[..., Any],
    *args: Any,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> str:
    """Says which kernels ``op`` and its backward would run for these arguments, and why.

    Runs nothing. The function that chooses at every call answers, so the text depends on alignment
    and strides too. Meta tensors have no alignment: they count as freshly allocated.

    Args:
        op: a name in :mod:`warpwright.functional`, or the function (ours or native's).
            ``"ring_attention"`` takes one rank's query, key and value, and ``ranks``, ``is_causal``,
            ``layout`` and ``link`` (``"nvlink"``, ``"infiniband"``): the text predicts what ring
            attention and Ulysses cost, and says which is better.
        args, kwargs: as for the function.
        device: answer as if the tensors were on this device. ``"cuda"`` explains the GPU kernels for
            tensors of any device; without a GPU it assumes an sm_90 with 132 SMs. ``"h100"``,
            ``"h200"``, ``"h100-pcie"``, ``"gh200"``, ``"a100"`` and ``"l40s"`` explain them for that
            GPU.
    Returns:
        A line for the call, then a line per kernel: its role, what it takes, and why.
    Raises:
        ValueError: the op is unknown.
        TypeError: the function does not take these arguments, or the first one is no tensor.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    name = VARIANTS.get(name, name)
    if name == "ring_attention":
        from .distributed.sequence.cost import explain_call

        return explain_call(*args, **kwargs)
    if name not in EXPLAINERS:
        raise ValueError(f"op: expected one of {', '.join(EXPLAINERS)}; got {name!r}")
    bound = inspect.signature(getattr(functional, name)).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    main = next(iter(arguments.values()))
    if not isinstance(main, Tensor):
        raise TypeError(f"{name}: expected a tensor first, got {type(main).__name__}")
    named = _C.named_devices().get(device) if isinstance(device, str) else None
    where = torch.device("cuda" if named else device) if device is not None else main.device
    title = f"{name}, {_dtype(main)} {tuple(main.shape)} on {device if named else where}"
    reason = why_no_kernel(main, any_dtype=FUNCTIONALS[name].integers)
    if name == "embedding":
        reason = "sparse=True" if arguments["sparse"] else why_no_kernel(arguments["weight"])
    if reason is not None:
        return f"{title}\n  native torch: {reason}"
    if where.type == "cpu" and name == "conv2d":
        lines = _conv2d_cpu(arguments)
    elif where.type == "cpu" and FUNCTIONALS[name].explain == "fft_conv":
        lines = _fft_conv(arguments, None)
    elif where.type == "cpu":
        lines = [
            ("forward, backward", f"{FUNCTIONALS[name].cpu}, {torch.get_num_threads()} threads")
        ]
    elif where.type == "cuda":
        gpu, note = (named, f" ({named.num_sms} SMs)") if named else current_gpu(where)
        title += note
        lines = EXPLAINERS[name](arguments, gpu)
    else:
        lines = [("forward, backward", "shapes only: no kernel runs on a meta tensor")]
    width = max(len(role) for role, _ in lines)
    return "\n".join([title, *(f"  {role:<{width}}  {text}" for role, text in lines)])


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _operand(tensor: Tensor) -> _C.Operand:
    # A tensor of another device counts as one that starts where allocations start.
    address = tensor.data_ptr() if tensor.is_cuda else 0
    return _C.Operand(tensor.shape, tensor.stride(), address)


def _pair(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return pair if len(pair) == 2 else (pair[0], pair[0])


def _has_rows(x: Tensor) -> bool:
    """Whether the channels of a pixel are adjacent: rows of channels."""
    return suggest_memory_format(x) in (torch.channels_last, torch.channels_last_3d)


def _elementwise(op: Callable[..., Lines], a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    return op(_dtype(a["input"]), _operand(a["input"]))


_relu, _activation = (partial(_elementwise, f) for f in (_C.explain_relu, _C.explain_activation))
_dropout = partial(_elementwise, _C.explain_dropout)


def _scan(op: str) -> Callable[[Arguments, _C.DeviceInfo], Lines]:
    def lines(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
        x = a["input"]
        dtype = a.get("dtype") or (x.dtype if x.is_floating_point() else torch.int64)
        operand = _operand(x) if x.dtype == dtype and x.is_contiguous() else _operand(x.to("meta"))
        name = str(dtype).removeprefix("torch.")
        return _C.explain_scan(op, name, operand, a["dim"] % max(x.dim(), 1))

    return lines


def _softmax(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    dtype = a["dtype"] or x.dtype
    narrow = dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    read = x if narrow or x.dtype == dtype else x.to("meta").to(dtype)
    operand = _operand(read if read.is_contiguous() else read.to("meta"))
    dim = a["dim"] if a["dim"] is not None else -1
    result = str(dtype).removeprefix("torch.")
    return _C.explain_softmax(_dtype(read), result, operand, dim % max(x.dim(), 1), gpu)


def _embedding(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    weight = a["weight"]
    lines = _C.explain_embedding(_dtype(weight), _operand(weight), a["input"].numel(), gpu)
    return lines if a["max_norm"] is None else [("norms, in place", "a warp per row"), *lines]


_cumsum, _cumprod, _logcumsumexp, _linear_scan = map(
    _scan, ("cumsum", "cumprod", "logcumsumexp", "linear_scan")
)


def _reduction(kind: str) -> Callable[[Arguments, _C.DeviceInfo], Lines]:
    def lines(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
        x, dim = a["input"], a["dim"]
        dtype = a.get("dtype") or x.dtype
        is_half = x.dtype in (torch.bfloat16, torch.float16)
        if dtype != x.dtype and not (is_half and dtype == torch.float32):
            x = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta")
        if not x.is_floating_point():
            return [("forward, backward", f"native {kind}: {x.dtype} has no kernel")]
        dims = [dim] if isinstance(dim, int) and not isinstance(dim, bool) else dim or []
        wrapped = [d % max(x.dim(), 1) for d in dims] if isinstance(dims, (list, tuple)) else []
        return _C.explain_reduction(kind, _dtype(x), _operand(x), wrapped, gpu)

    return lines


_sum, _mean, _amax, _logsumexp, _var, _std = map(
    _reduction, ("sum", "mean", "amax", "logsumexp", "var", "std")
)


def _quantize_rows(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    codes = str(a["dtype"]).removeprefix("torch.")
    operand = _operand(x if x.is_contiguous() else x.to("meta"))
    return _C.explain_quantize_rows(_dtype(x), codes, operand, a["per_tensor"], gpu)


def _linear_8bit(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, weight, exact = a["input"], a["weight"], a.get("accumulate") != "fast"
    result = (a["out_dtype"] or torch.bfloat16) if x.itemsize == 1 else x.dtype
    name = str(result).removeprefix("torch.")
    lines = _C.explain_product_8bit(
        _dtype(weight), name, _operand(x), _operand(weight), exact, gpu, _may_take_sm90()
    )
    if x.dtype == weight.dtype or x.itemsize == 1:
        return lines
    backward = ("grad_input", "linear's product of (grad_output * weight_scale) and the codes")
    return [*_quantize_rows({**a, "dtype": weight.dtype}, gpu), *lines, backward]


def _gated_activation(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    gate, up = a["gate"], a["up"]
    return _C.explain_gated_activation(_dtype(gate), _operand(gate), up is None)


def _rotary_embedding(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    query, key, cos, sin = a["query"], a["key"], a["cos"], a["sin"]
    tables = [_operand(table if table.dim() == 3 else table.unsqueeze(0)) for table in (cos, sin)]
    return _C.explain_rotary_embedding(
        _dtype(query), _dtype(cos), _operand(query), _operand(key), *tables
    )


def _linear(a: Arguments, gpu: _C.DeviceInfo, sums_bias: bool = True) -> Lines:
    """``sums_bias``: a product of the backward may bring the bias gradient, too."""
    x, weight = a["input"], a["weight"]
    return _C.explain_linear(
        _dtype(x),
        linear_allows_tf32(),
        _operand(x),
        _operand(weight[None] if weight.dim() == 1 else weight),
        gpu,
        _may_take_sm90(),
        linear_splits_float32(),
        sums_bias and a["bias"] is not None,
    )


def _may_take_sm90() -> bool:
    built = not built_archs() or any(arch.startswith("9.0a") for arch in built_archs())
    return built and os.environ.get("WARPWRIGHT_PATH") != "portable"


def _linear_cross_entropy(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    return _C.explain_linear_cross_entropy(
        _dtype(x),
        linear_allows_tf32(),
        _operand(x),
        _operand(a["weight"]),
        a["chunk_rows"] or 0,
        gpu,
        _may_take_sm90(),
        linear_splits_float32(),
    )


def _linear_activation(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    lines = dict(_linear(a, gpu, sums_bias=False))
    lines["forward"] += ", the activation in the epilogue"
    gradients = {"grad_input": lines["grad_input"], "grad_weight": lines["grad_weight"]}
    one_pass = {"grad_preactivation": "the activation's gradient, one pass"}
    if a["bias"] is not None:
        one_pass = {
            "grad_preactivation, grad_bias": "the activation's gradient and its column sums, one pass"
        }
    return list(({"forward": lines["forward"]} | one_pass | gradients).items())


def _linear_quantized(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, codes, scales = a["input"], a["codes"], a["scales"]
    zeros, fragments = a["zeros"], a["fragments"]
    wide = scales.dtype if scales.dtype == x.dtype else torch.float32

    def plan(rows: Tensor, gradient: bool) -> tuple[str, bool]:
        return _C.explain_linear_quantized(
            _dtype(x),
            _operand(rows),
            codes.dtype == torch.int8,
            fragments,
            _operand(codes),
            str(wide).removeprefix("torch."),
            _operand(scales),
            None if zeros is None else _operand(zeros),
            gpu,
            _may_take_sm90(),
            gradient,
        )

    forward, is_fused = plan(x, False)
    dy = torch.empty(*x.shape[:-1], codes.shape[0], dtype=x.dtype, device="meta")
    backward, backward_is_fused = plan(dy, True)
    features = codes.shape[1] * (1 if codes.dtype == torch.int8 else 2)
    weight = torch.empty(codes.shape[0], features, dtype=x.dtype, device="meta")
    product = dict(_linear({"input": x, "weight": weight, "bias": None}, gpu))
    lines = [("forward", forward)]
    if not is_fused:
        lines.append(("forward, product", product["forward"]))
    lines.append(("grad_input", backward))
    if not backward_is_fused:
        lines.append(("grad_input, product", product["grad_input"]))
    return lines


def _mlp(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, width = a["input"], a["weight1"].shape[0]
    hidden = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device="meta")
    first = {"input": x, "weight": a["weight1"], "bias": a["bias1"]}
    second = {"input": hidden, "weight": a["weight2"], "bias": a["bias2"]}
    text, is_fused = _C.explain_mlp(
        _dtype(x), _operand(hidden), _operand(a["weight2"]), gpu, _may_take_sm90()
    )
    if not is_fused:
        return [
            *((f"1 {role}", text) for role, text in _linear_activation(first, gpu)),
            *((f"2 {role}", text) for role, text in _linear(second, gpu)),
        ]
    one, two = dict(_linear(first, gpu)), dict(_linear(second, gpu))
    one["forward"] += ", the activation in the epilogue"
    two["grad_input"] = f"that of the first layer's sums: {text}"
    return [
        *((f"1 {role}", text) for role, text in one.items()),
        *((f"2 {role}", text) for role, text in two.items()),
    ]


def _max_pool2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    stride = a["stride"] if a["stride"] not in (None, ()) else a["kernel_size"]
    kernel, stride, pad, dilation = (
        _pair(w) for w in (a["kernel_size"], stride, a["padding"], a["dilation"])
    )
    output: Tensor = torch.nn.functional.max_pool2d(
        x.to("meta"), kernel, stride, pad, dilation, a["ceil_mode"]
    )
    window = [*kernel, *stride, *pad, *dilation]
    return _C.explain_max_pool2d(_dtype(x), _operand(x), _has_rows(x), window, output.shape[-2:])


def _batch_norm_relu_max_pool2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    (_, statistics), _ = _C.explain_batch_norm(_dtype(x), _operand(x), _has_rows(x), 0, gpu)
    (_, forward), (_, backward) = _max_pool2d(a, gpu)
    return [
        ("statistics", statistics),
        ("forward", f"{forward}; normalised tap by tap"),
        ("backward", f"batch norm's sums over the winners, then {backward}"),
    ]


def _conv2d_shape(
    a: Arguments,
) -> tuple[_C.Operand, _C.Operand, Sequence[int], bool, list[int], int]:
    """Operands, output size, layout, window and groups, as the explainers of conv2d take them."""
    x, weight = a["input"], a["weight"]
    x = x[None] if x.dim() == 3 else x
    window = {name: a[name] for name in ("stride", "padding", "dilation", "groups")}
    output = functional.conv2d(x.to("meta"), weight.to("meta"), None, **window)
    stride, dilation = _pair(a["stride"]), _pair(a["dilation"])
    if a["padding"] == "same":  # an odd row goes after the last one
        before = tuple(d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True))
    else:
        before = (0, 0) if a["padding"] == "valid" else _pair(a["padding"])
    channels_last = torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight))
    return (
        _operand(x),
        _operand(weight),
        output.shape[2:],
        channels_last,
        [*stride, *before, *dilation],
        a["groups"],
    )


def _conv2d(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    shape = _conv2d_shape(a)
    tf32, sm90 = conv_allows_tf32(), _may_take_sm90()
    return _C.explain_conv2d(_dtype(a["input"]), tf32, *shape, gpu, sm90)


def _conv2d_cpu(a: Arguments) -> Lines:
    mkldnn: Any = torch.backends.mkldnn
    onednn = mkldnn.is_available() and mkldnn.enabled
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    lines = _C.explain_conv2d_cpu(_dtype(a["input"]), *_conv2d_shape(a), onednn, avx512)
    threads = f", {torch.get_num_threads()} threads"
    return [(role, text + threads) for role, text in lines]


def _fft_conv(a: Arguments, gpu: _C.DeviceInfo | None) -> Lines:
    call = call_of(a["input"], a["weight"], a["padding"], a["groups"])
    return _C.explain_fft_conv(call, conv_allows_tf32(), gpu)


def _batch_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    return _C.explain_batch_norm(_dtype(x), _operand(x), _has_rows(x), 1 + ("residual" in a), gpu)


def _conv2d_batch_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    shape = _conv2d_shape(a)
    dtype, sm90 = _dtype(a["input"]), _may_take_sm90()
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
        *((f"norm, {role}", text) for role, text in _batch_norm({"input": convolved}, gpu)),
        *backward,
    ]


def _group_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    sm90 = _may_take_sm90() and gpu.sm_arch == 90
    return _C.explain_group_norm(_dtype(x), _operand(x), _has_rows(x), a["num_groups"], sm90, gpu)


def _instance_norm(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    if not a["use_input_stats"]:
        return _batch_norm(a, gpu)
    return _group_norm({"input": a["input"], "num_groups": a["input"].shape[1]}, gpu)


def _squeeze_excitation(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"] if a["input"].dim() == 4 else a["input"][None]
    return _C.explain_squeeze_excitation(_dtype(x), _operand(x), _has_rows(x), gpu)


def _row_norm(a: Arguments, gpu: _C.DeviceInfo, centered: bool, adds: bool = False) -> Lines:
    x = a["input"]
    if adds and a["residual"].dtype.itemsize > x.dtype.itemsize:
        x = a["residual"]
    dims = len(a["normalized_shape"])
    return _C.explain_layer_norm(_dtype(x), centered, adds, _operand(x), dims, gpu)


_layer_norm, _rms_norm = (partial(_row_norm, centered=centered) for centered in (True, False))
_add_layer_norm = partial(_row_norm, centered=True, adds=True)
_add_rms_norm = partial(_row_norm, centered=False, adds=True)


def _cross_entropy(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    probabilities = a["target"].shape == a["input"].shape
    return _C.explain_cross_entropy(
        _dtype(a["input"]),
        _operand(a["input"]),
        probabilities,
        a["label_smoothing"] > 0,
        gpu,
        _may_take_sm90(),
    )


def _attention(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    query, mask = a["query"], a["attn_mask"]
    scale = a["scale"] if a["scale"] is not None else max(query.shape[-1], 1) ** -0.5
    return _C.explain_scaled_dot_product_attention(
        _dtype(query),
        _operand(query),
        _operand(a["key"]),
        _operand(a["value"]),
        scale,
        "" if mask is None else _dtype(mask),
        _operand(query if mask is None else mask),
        mask is not None and mask.requires_grad,
        a["dropout_p"] > 0,
        a["is_causal"],
        a["window_size"] or (-1, -1),
        a["softcap"] or 0.0,
        gpu,
        _may_take_sm90(),
    )


def _attention_varlen(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    return _C.explain_attention_varlen(
        _dtype(a["query"]),
        _operand(a["query"]),
        _operand(a["key"]),
        _operand(a["value"]),
        a["cu_seqlens_q"].shape[0] - 1,
        (a["max_seqlen_q"], a["max_seqlen_k"]),
        a["scale"] if a["scale"] is not None else max(a["query"].shape[-1], 1) ** -0.5,
        a["is_causal"],
        a["window_size"] or (-1, -1),
        a["softcap"] or 0.0,
        gpu,
        _may_take_sm90(),
    )


def _attention_with_kv_cache(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    query, table, k = a["query"], a["block_table"], a["k"]
    return _C.explain_attention_with_kv_cache(
        _dtype(query),
        _operand(query),
        _operand(a["k_cache"]),
        _operand(a["v_cache"]),
        [] if k is None else [_operand(k), _operand(a["v"])],
        1 if table is None else table.shape[1],
        gpu,
    )


EXPLAINERS: dict[str, Callable[[Arguments, _C.DeviceInfo], Lines]] = {
    name: globals()[f"_{op.explain}"] for name, op in FUNCTIONALS.items()
}
