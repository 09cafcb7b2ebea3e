"""Native ops in place of ours on a GPU that this build has no kernel for.

Looked at when CUDA starts, not at import: the import makes no CUDA call, so a process may still
fork after it. Where every GPU has its kernels nothing is put in the way of a call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._arch import why_no_gpu_kernel

native = torch.nn.functional


def _batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
) -> tuple[Tensor]:
    return (native.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps),)


def _batch_norm_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor]:
    return (native.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps),)


def _relu(normalized: Tensor, residual: Tensor | None) -> tuple[Tensor]:
    return (torch.relu(normalized if residual is None else normalized + residual),)


def _batch_norm_relu(input: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor]:
    return _relu(_batch_norm(input, *args)[0], residual)


def _batch_norm_relu_update(input: Tensor, residual: Tensor | None, *args: Any) -> tuple[Tensor]:
    return _relu(_batch_norm_update(input, *args)[0], residual)


def _linear_cross_entropy(input: Tensor, *args: Any) -> Tensor:
    return _linear_cross_entropy_extras(input, *args)[0]


def _linear_cross_entropy_extras(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    chunk_rows: int | None,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    return_lse: bool = False,
    return_argmax: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, leading = input.flatten(0, -2) if input.dim() > 1 else input[None], input.shape[:-1]
    logits = native.linear(rows, weight, bias)
    labels = target.reshape(-1) if target.shape == leading else target.reshape(logits.shape)
    loss, lse, argmax = _cross_entropy_extras(
        *(logits, labels, class_weight, reduction, ignore_index, label_smoothing),
        *(z_loss, softcap, return_lse, return_argmax, False),
    )
    return (
        loss.view(leading) if reduction == 0 else loss,
        None if lse is None else lse.view(leading),
        None if argmax is None else argmax.view(leading),
    )


def _relu_max_pool2d(input: Tensor, *args: Any) -> Tensor:
    return torch.max_pool2d(torch.relu(input), *args)


def _cross_entropy_extras(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    return_lse: bool,
    return_argmax: bool,
    inplace_backward: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dim = min(1, input.dim() - 1)
    accum = torch.promote_types(input.dtype, torch.float32)
    logits = softcap * torch.tanh(input.to(accum) / softcap) if softcap else input
    options = (reduction, ignore_index, label_smoothing)
    loss = torch.ops.aten.cross_entropy_loss(logits, target, weight, *options)
    lse = logits.to(accum).logsumexp(dim)
    if z_loss:
        labels = target.shape != input.shape
        counted = target != ignore_index if labels else torch.ones_like(lse, dtype=torch.bool)
        extra = z_loss * lse.square() * counted.reshape(lse.shape)
        if reduction != 0:
            extra = extra.sum()
        if reduction == 1:
            flat = target.clamp(0, input.shape[dim] - 1)
            weights = counted if weight is None or not labels else weight[flat] * counted
            extra = extra / weights.sum()
        loss = loss + extra
    argmax = input.argmax(dim) if return_argmax else None
    return loss.to(input.dtype), lse if return_lse else None, argmax


def _batch_norm_relu_max_pool2d(input: Tensor, *args: Any) -> tuple[Tensor]:
    return (_relu_max_pool2d(_batch_norm(input, *args[:6])[0], *args[6:]),)


def _batch_norm_relu_max_pool2d_update(input: Tensor, *args: Any) -> tuple[Tensor]:
    return (_relu_max_pool2d(_batch_norm_update(input, *args[:6])[0], *args[6:]),)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": native.gelu,
    "gelu_tanh": functools.partial(native.gelu, approximate="tanh"),
    "silu": native.silu,
}


def _linear_activation(
    input: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor]:
    return (ACTIVATIONS[activation](native.linear(input, weight, bias)),)


# name in `ops` -> native, called with the same arguments
NATIVE: dict[str, Callable[..., Any]] = {
    "relu": torch.relu,
    "relu_": torch.relu_,
    "linear": native.linear,
    "linear_activation": _linear_activation,
    "max_pool2d": torch.max_pool2d,
    "relu_max_pool2d": _relu_max_pool2d,
    "max_pool2d_with_indices": torch.ops.aten.max_pool2d_with_indices.default,
    "conv2d": torch.conv2d,
    "conv2d_padding": torch.conv2d,
    "batch_norm": _batch_norm,
    "batch_norm_update": _batch_norm_update,
    "batch_norm_relu": _batch_norm_relu,
    "batch_norm_relu_update": _batch_norm_relu_update,
    "batch_norm_relu_max_pool2d": _batch_norm_relu_max_pool2d,
    "batch_norm_relu_max_pool2d_update": _batch_norm_relu_max_pool2d_update,
    "cross_entropy": torch.ops.aten.cross_entropy_loss.default,
    "cross_entropy_extras": _cross_entropy_extras,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_extras": _linear_cross_entropy_extras,
    "scaled_dot_product_attention": native.scaled_dot_product_attention,
}


def watch_gpus() -> None:
    """Looks at the GPUs as soon as this process uses CUDA."""
    torch.cuda._lazy_call(check_gpus)


def check_gpus() -> None:
    """Routes the ops past GPUs without a kernel, and says so once."""
    reasons = {i: why_no_gpu_kernel(i) for i in range(torch.cuda.device_count())}
    without = frozenset(i for i, reason in reasons.items() if reason is not None)
    if not without:
        return
    for name in NATIVE:
        setattr(_ops.ops, name, _routed(name, without))
    why = "; ".join(dict.fromkeys(r for r in reasons.values() if r is not None))
    warnings.warn(
        f"warpwright: {why}. Native torch ops run there instead. To build for this GPU: "
        "`TORCH_CUDA_ARCH_LIST=<its arch> pip install --no-build-isolation -e .`",
        stacklevel=2,
    )


def _routed(name: str, without: frozenset[int]) -> Callable[..., Any]:
    ours, theirs = getattr(_ops.ops, name), NATIVE[name]

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.is_cuda and input.device.index in without:
            return theirs(input, *args, **kwargs)
        return ours(input, *args, **kwargs)

    return call
