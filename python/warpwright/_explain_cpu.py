"""Which loops and kernels a call runs on the CPU, and why. Called by :mod:`warpwright.explain`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _C, _explain_images
from ._catalog import FUNCTIONALS
from ._explain_common import Arguments, Lines, dtype_name, has_rows, operand_of

Explainer = Callable[[Arguments], Lines]

FORWARD_BACKWARD = "forward, backward"


def machine() -> str:
    """What the choice and the speed depend on."""
    return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def lines_of(name: str, a: Arguments) -> Lines:
    if name in SPECIAL:
        return SPECIAL[name](a)
    return [(FORWARD_BACKWARD, FUNCTIONALS[name].cpu)]


def _onednn() -> bool:
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.is_available() and mkldnn.enabled)


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


# ---- convolutions ----


def _conv2d(a: Arguments) -> Lines:
    return _C.explain_conv2d_cpu(
        dtype_name(a["input"]),
        *_explain_images.conv2d_shape(a),
        _onednn(),
        _has_avx512(),
    )


def _conv_transpose2d(a: Arguments) -> Lines:
    x, weight = _explain_images.transposed_operands(a)
    return _C.explain_conv_transpose2d_cpu(
        dtype_name(a["input"]),
        x,
        weight,
        *_explain_images.transposed_shape(a),
        _onednn(),
        _has_avx512(),
    )


def _conv_transpose2d_cat(a: Arguments) -> Lines:
    return [*_conv_transpose2d(a), ("concatenation", "ATen's")]


def _conv_norm(name: str, a: Arguments) -> Lines:
    """A convolution, and after it batch norm with what follows."""
    rows = _explain_images.conv2d_shape(a)[3]
    after = name.removeprefix("conv2d_")
    return [
        *((f"convolution, {role}", text) for role, text in _conv2d(a)),
        (after, f"{FUNCTIONALS[after].cpu}; {_order(rows)}"),
    ]


# ---- the layout decides ----


def _order(rows: bool) -> str:
    if rows:
        return "a lane per channel, because channels are innermost"
    return "plane by plane, because the pixels of a channel are neighbours"


def _by_layout(name: str, a: Arguments) -> Lines:
    return [(FORWARD_BACKWARD, f"{FUNCTIONALS[name].cpu}; {_order(has_rows(a['input']))}")]


def _batch_norm(name: str, a: Arguments) -> Lines:
    x = a["input"]
    rows = has_rows(x) or math.prod(x.shape[2:]) == 1
    return [(FORWARD_BACKWARD, f"{FUNCTIONALS[name].cpu}; {_order(rows)}")]


def _instance_norm(a: Arguments) -> Lines:
    return _by_layout("group_norm", a) if a["use_input_stats"] else _batch_norm("batch_norm", a)


def _adaptive_avg_pool2d(a: Arguments) -> Lines:
    return _explain_images.why_native_pool(a) or _by_layout("adaptive_avg_pool2d", a)


def _along(dim: int, x: Tensor) -> bool:
    """Whether no further dimension has more than one element: the dimension's rows are in order."""
    return math.prod(x.shape[dim % max(x.dim(), 1) + 1 :]) == 1


def _scan(name: str, a: Arguments) -> Lines:
    if _along(a["dim"], a["input"]):
        how = "four rows at a time, because dim is the innermost dimension"
    else:
        how = "runs of columns, because dim is not the innermost dimension"
    return [(FORWARD_BACKWARD, f"{how}; {FUNCTIONALS[name].cpu}")]


def _softmax(name: str, a: Arguments) -> Lines:
    if _along(-1 if a["dim"] is None else a["dim"], a["input"]):
        how = "row by row, because dim is the innermost dimension"
    else:
        how = "strips of columns that stay in cache, because dim is not the innermost dimension"
    return [(FORWARD_BACKWARD, f"{how}; {FUNCTIONALS[name].cpu}")]


def _reduction(name: str, a: Arguments) -> Lines:
    x, dim = a["input"], a["dim"]
    dims: Sequence[int] = [dim] if isinstance(dim, int) else dim or []
    wrapped = [d % max(x.dim(), 1) for d in dims]
    return _C.explain_reduction_cpu(name, dtype_name(x), operand_of(x), wrapped)


def _activation(name: str, a: Arguments) -> Lines:
    x = a["input"]
    kind = name if a.get("approximate", "none") == "none" else f"{name}_{a['approximate']}"
    dense = x.dtype == torch.float32 and torch.ops.aten.is_non_overlapping_and_dense(x)
    return _C.explain_activation_cpu(kind, dense, x.numel(), _onednn())


def _named(explainer: Callable[[str, Arguments], Lines], *names: str) -> dict[str, Explainer]:
    return {name: partial(explainer, name) for name in names}


SPECIAL: dict[str, Explainer] = {
    "conv2d": _conv2d,
    "conv_transpose2d": _conv_transpose2d,
    "conv_transpose2d_cat": _conv_transpose2d_cat,
    "fft_conv1d": lambda a: _explain_images.fft_conv(a, None),
    "fft_conv2d": lambda a: _explain_images.fft_conv(a, None),
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "instance_norm": _instance_norm,
    **_named(_conv_norm, *(n for n in FUNCTIONALS if n.startswith("conv2d_batch_norm"))),
    **_named(_batch_norm, *(n for n in FUNCTIONALS if n.startswith("batch_norm"))),
    **_named(_by_layout, "group_norm", "max_pool2d", "relu_max_pool2d"),
    **_named(_scan, "cumsum", "cumprod", "logcumsumexp", "linear_scan"),
    **_named(_softmax, "softmax", "log_softmax"),
    **_named(_reduction, "sum", "mean", "amax", "logsumexp", "var", "std"),
    **_named(_activation, "gelu", "silu", "sigmoid", "tanh"),
}
