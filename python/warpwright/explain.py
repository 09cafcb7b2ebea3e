"""Which kernel and tile a call would take, and why. The op's own choice function answers."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from . import _C, _explain_cpu, _explain_images, functional
from ._arch import why_no_kernel
from ._arguments import shown
from ._catalog import FUNCTIONALS, VARIANTS
from ._explain_common import Arguments, Lines, dtype_name, may_take_sm90, operand_of
from ._gpu import current_gpu
from ._precision import linear_allows_tf32, linear_splits_float32

__all__ = ["explain"]


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
        ValueError: the op or the device is unknown.
        TypeError: the function does not take these arguments, the first one is no tensor, or ``op``
            is a module.
    """
    if isinstance(op, nn.Module):
        raise TypeError(
            f"op: expected the name of a function, got a {type(op).__name__}: name its function and "
            "pass its tensors, as in explain('conv2d', input, layer.weight)"
        )
    name = op if isinstance(op, str) else getattr(op, "__name__", str(op))
    name = VARIANTS.get(name, name)
    if name == "ring_attention":
        from .distributed.sequence.cost import explain_call

        return explain_call(*args, **kwargs)
    if name not in EXPLAINERS:
        near = ", ".join(map(repr, difflib.get_close_matches(name, EXPLAINERS)))
        known = f"near it: {near}" if near else f"one of {', '.join(EXPLAINERS)}"
        raise ValueError(
            f"op: got {shown(name)}, expected a function of warpwright.functional, {known}"
        )
    try:
        bound = inspect.signature(getattr(functional, name)).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    bound.apply_defaults()
    arguments = bound.arguments
    main = next(iter(arguments.values()))
    if not isinstance(main, Tensor):
        raise TypeError(f"{name}: expected a tensor first, got {type(main).__name__}")
    named = _C.named_devices().get(device) if isinstance(device, str) else None
    where = main.device if device is None else _device("cuda" if named else device)
    title = f"{name}, {dtype_name(main)} {tuple(main.shape)} on {device if named else where}"
    reason = why_no_kernel(main, any_dtype=FUNCTIONALS[name].integers)
    if name == "embedding":
        reason = "sparse=True" if arguments["sparse"] else why_no_kernel(arguments["weight"])
    if reason is not None:
        return f"{title}\n  native torch: {reason}"
    if where.type == "cpu":
        title += f" ({_explain_cpu.machine()})"
        lines = _explain_cpu.lines_of(name, arguments)
    elif where.type == "cuda":
        gpu, note = (named, f" ({named.num_sms} SMs)") if named else current_gpu(where)
        title += note
        lines = EXPLAINERS[name](arguments, gpu)
    else:
        lines = [("forward, backward", "shapes only: no kernel runs on a meta tensor")]
    width = max(len(role) for role, _ in lines)
    return "\n".join([title, *(f"  {role:<{width}}  {text}" for role, text in lines)])


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        gpus = ", ".join(map(repr, _C.named_devices()))
        raise ValueError(
            f"device: expected a torch.device, 'cpu', 'cuda' or one of {gpus}, got {shown(device)}"
        ) from None


def _elementwise(op: Callable[..., Lines], a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    return op(dtype_name(a["input"]), operand_of(a["input"]))


_relu, _activation = (partial(_elementwise, f) for f in (_C.explain_relu, _C.explain_activation))
_dropout = partial(_elementwise, _C.explain_dropout)


def _scan(op: str) -> Callable[[Arguments, _C.DeviceInfo], Lines]:
    def lines(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
        x = a["input"]
        dtype = a.get("dtype") or (x.dtype if x.is_floating_point() else torch.int64)
        operand = (
            operand_of(x) if x.dtype == dtype and x.is_contiguous() else operand_of(x.to("meta"))
        )
        name = str(dtype).removeprefix("torch.")
        return _C.explain_scan(op, name, operand, a["dim"] % max(x.dim(), 1))

    return lines


def _softmax(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    dtype = a["dtype"] or x.dtype
    narrow = dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    read = x if narrow or x.dtype == dtype else x.to("meta").to(dtype)
    operand = operand_of(read if read.is_contiguous() else read.to("meta"))
    dim = a["dim"] if a["dim"] is not None else -1
    result = str(dtype).removeprefix("torch.")
    return _C.explain_softmax(dtype_name(read), result, operand, dim % max(x.dim(), 1), gpu)


def _embedding(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    weight = a["weight"]
    lines = _C.explain_embedding(dtype_name(weight), operand_of(weight), a["input"].numel(), gpu)
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
        return _C.explain_reduction(kind, dtype_name(x), operand_of(x), wrapped, gpu)

    return lines


_sum, _mean, _amax, _logsumexp, _var, _std = map(
    _reduction, ("sum", "mean", "amax", "logsumexp", "var", "std")
)


def _quantize_rows(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    codes = str(a["dtype"]).removeprefix("torch.")
    operand = operand_of(x if x.is_contiguous() else x.to("meta"))
    return _C.explain_quantize_rows(dtype_name(x), codes, operand, a["per_tensor"], gpu)


def _linear_8bit(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, weight, exact = a["input"], a["weight"], a.get("accumulate") != "fast"
    result = (a["out_dtype"] or torch.bfloat16) if x.itemsize == 1 else x.dtype
    name = str(result).removeprefix("torch.")
    lines = _C.explain_product_8bit(
        dtype_name(weight), name, operand_of(x), operand_of(weight), exact, gpu, may_take_sm90()
    )
    if x.dtype == weight.dtype or x.itemsize == 1:
        return lines
    backward = ("grad_input", "linear's product of (grad_output * weight_scale) and the codes")
    return [*_quantize_rows({**a, "dtype": weight.dtype}, gpu), *lines, backward]


def _gated_activation(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    gate, up = a["gate"], a["up"]
    return _C.explain_gated_activation(dtype_name(gate), operand_of(gate), up is None)


def _layer_scale_add(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x, residual, scale, sample_scale = a["input"], a["residual"], a["scale"], a["sample_scale"]
    tensors = [t for t in (x, residual, scale, sample_scale) if t is not None]
    dtype = reduce(torch.promote_types, [t.dtype for t in tensors])
    channels = [x.dim() + d for d in range(-scale.dim(), 0) if scale.shape[d] != 1]
    return _C.explain_layer_scale_add(
        dtype_name(x),
        dtype_name(residual),
        str(dtype).removeprefix("torch."),
        operand_of(x),
        operand_of(residual),
        channels[0] if channels else -1,
        sample_scale is not None,
        gpu,
    )


def _rotary_embedding(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    query, key, cos, sin = a["query"], a["key"], a["cos"], a["sin"]
    tables = [operand_of(table if table.dim() == 3 else table.unsqueeze(0)) for table in (cos, sin)]
    return _C.explain_rotary_embedding(
        dtype_name(query), dtype_name(cos), operand_of(query), operand_of(key), *tables
    )


def _linear(a: Arguments, gpu: _C.DeviceInfo, sums_bias: bool = True) -> Lines:
    """``sums_bias``: a product of the backward may bring the bias gradient, too."""
    x, weight = a["input"], a["weight"]
    return _C.explain_linear(
        dtype_name(x),
        linear_allows_tf32(),
        operand_of(x),
        operand_of(weight[None] if weight.dim() == 1 else weight),
        gpu,
        may_take_sm90(),
        linear_splits_float32(),
        sums_bias and a["bias"] is not None,
    )


def _linear_cross_entropy(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    x = a["input"]
    return _C.explain_linear_cross_entropy(
        dtype_name(x),
        linear_allows_tf32(),
        operand_of(x),
        operand_of(a["weight"]),
        a["chunk_rows"] or 0,
        gpu,
        may_take_sm90(),
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
            dtype_name(x),
            operand_of(rows),
            codes.dtype == torch.int8,
            fragments,
            operand_of(codes),
            str(wide).removeprefix("torch."),
            operand_of(scales),
            None if zeros is None else operand_of(zeros),
            gpu,
            may_take_sm90(),
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
        dtype_name(x), operand_of(hidden), operand_of(a["weight2"]), gpu, may_take_sm90()
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


def _row_norm(a: Arguments, gpu: _C.DeviceInfo, centered: bool, adds: bool = False) -> Lines:
    x = a["input"]
    if adds and a["residual"].dtype.itemsize > x.dtype.itemsize:
        x = a["residual"]
    dims = len(a["normalized_shape"])
    return _C.explain_layer_norm(dtype_name(x), centered, adds, operand_of(x), dims, gpu)


_layer_norm, _rms_norm = (partial(_row_norm, centered=centered) for centered in (True, False))
_add_layer_norm = partial(_row_norm, centered=True, adds=True)
_add_rms_norm = partial(_row_norm, centered=False, adds=True)


def _cross_entropy(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    probabilities = a["target"].shape == a["input"].shape
    return _C.explain_cross_entropy(
        dtype_name(a["input"]),
        operand_of(a["input"]),
        probabilities,
        a["label_smoothing"] > 0,
        gpu,
        may_take_sm90(),
    )


def _attention(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    query, mask = a["query"], a["attn_mask"]
    scale = a["scale"] if a["scale"] is not None else max(query.shape[-1], 1) ** -0.5
    return _C.explain_scaled_dot_product_attention(
        dtype_name(query),
        operand_of(query),
        operand_of(a["key"]),
        operand_of(a["value"]),
        scale,
        "" if mask is None else dtype_name(mask),
        operand_of(query if mask is None else mask),
        mask is not None and mask.requires_grad,
        a["dropout_p"] > 0,
        a["is_causal"],
        a["window_size"] or (-1, -1),
        a["softcap"] or 0.0,
        gpu,
        may_take_sm90(),
    )


def _attention_varlen(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    return _C.explain_attention_varlen(
        dtype_name(a["query"]),
        operand_of(a["query"]),
        operand_of(a["key"]),
        operand_of(a["value"]),
        a["cu_seqlens_q"].shape[0] - 1,
        (a["max_seqlen_q"], a["max_seqlen_k"]),
        a["scale"] if a["scale"] is not None else max(a["query"].shape[-1], 1) ** -0.5,
        a["is_causal"],
        a["window_size"] or (-1, -1),
        a["softcap"] or 0.0,
        gpu,
        may_take_sm90(),
    )


def _attention_with_kv_cache(a: Arguments, gpu: _C.DeviceInfo) -> Lines:
    query, table, k = a["query"], a["block_table"], a["k"]
    return _C.explain_attention_with_kv_cache(
        dtype_name(query),
        operand_of(query),
        operand_of(a["k_cache"]),
        operand_of(a["v_cache"]),
        [] if k is None else [operand_of(k), operand_of(a["v"])],
        1 if table is None else table.shape[1],
        gpu,
    )


EXPLAINERS: dict[str, Callable[[Arguments, _C.DeviceInfo], Lines]] = {
    name: getattr(_explain_images, op.explain, None) or globals()[f"_{op.explain}"]
    for name, op in FUNCTIONALS.items()
}
