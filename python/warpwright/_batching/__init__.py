"""Batching rules: ``torch.vmap`` over our operators is one call of the same operators.

A rule gets the operator's arguments, with the batch dimension of each in ``dims`` (None: not batched),
and returns the results with theirs. The batch is folded into a dimension that the kernel treats as
independent:

==================  ============================================================================
linear              rows; batched weights: ATen's batched matrix product
codes               rows
convolution         N; batched weights, and their gradient per sample: groups
layer and RMS norm  rows; gradients of the weight per sample: ATen's sums
group norm          N; with weights per sample, and in the backward, groups
squeeze-excitation  N, without weights per sample and their gradients
layer_scale_add     N, without scales per sample and their gradients
batch norm          N if only the input is batched and the statistics are given, else channels
pooling             N
cross-entropy       rows, without a reduction; the reduction per sample follows
attention           B; packed sequences: heads, with ends per sample rows; a cache: B or heads
elementwise ops     any dimension; dropout with other numbers per sample: sample by sample
embedding           positions; batched weights: columns, or with batched indices rows
scans, softmax      a dimension that is not scanned or normalised
reductions          a dimension that is kept
==================  ============================================================================

Operators that write into an argument have their rules in csrc/torch/batching.cpp. A call that no rule
folds (see `one_by_one`) runs once per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._ops import ops
from . import (
    _attention,
    _attention_forms,
    _codes,
    _elementwise,
    _embedding,
    _group_norm,
    _layer_scale,
    _linear_cross_entropy,
    _losses,
    _norm_and_pool,
    _products,
    _reduction,
    _row_norms,
    _scan,
    _softmax,
    _squeeze_excitation,
)
from ._fold import Rule


def composed(op: Any) -> Callable[..., Any]:
    """The operators that `op` is composed of, in C++, which have rules."""

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return run


RULES: dict[str, Rule] = {
    "relu_backward": _norm_and_pool.relu_backward,
    "activation": _elementwise.activation,
    "activation_backward": _elementwise.activation_backward,
    "dropout": _elementwise.dropout,
    "dropout_backward": _elementwise.dropout_backward,
    "gated_activation": _elementwise.gated_activation,
    "gated_activation_backward": _elementwise.gated_activation_backward,
    **_layer_scale.RULES,
    "rotary_embedding": _elementwise.rotary_embedding,
    "cumsum": _scan.plain_scan(ops.cumsum),
    "cumprod": _scan.plain_scan(ops.cumprod),
    "logcumsumexp": _scan.plain_scan(ops.logcumsumexp),
    **{
        name: _reduction.reduction(getattr(ops, name))
        for name in ("sum", "mean", "amax", "logsumexp", "var", "std")
    },
    "global_avg_pool2d": _norm_and_pool.pool(ops.global_avg_pool2d),
    "global_avg_pool2d_backward": _norm_and_pool.global_avg_pool2d_backward,
    "linear_scan": _scan.linear_scan,
    "quantize_rows": _codes.quantize_rows,
    "scaled_linear": _codes.scaled_linear,
    "linear_int8": _codes.linear_int8,
    "linear_fp8": _codes.linear_fp8,
    **_softmax.RULES,
    "embedding": _embedding.embedding,
    "embedding_backward": _embedding.embedding_backward,
    **_group_norm.RULES,
    **_squeeze_excitation.RULES,
    "linear": _products.linear,
    "linear_backward": _products.linear_backward,
    "linear_activation": _products.linear_activation,
    "linear_quantized": _products.linear_quantized,
    "linear_quantized_backward": _products.linear_quantized_backward,
    "linear_activation_backward": _products.linear_activation_backward,
    "mlp_hidden_gradient": _products.mlp_hidden_gradient,
    "conv2d": _products.conv2d,
    "conv2d_backward": _products.conv2d_backward,
    "conv_transpose2d": _products.conv_transpose2d,
    "conv_transpose2d_cat": _products.conv_transpose2d_cat,
    "conv_transpose2d_backward": _products.conv_transpose2d_backward,
    "fft_conv": _products.fft_conv,
    **_norm_and_pool.BATCH_NORM_RULES,
    "layer_norm": _row_norms.layer_norm,
    "layer_norm_backward": _row_norms.layer_norm_backward,
    "rms_norm": _row_norms.rms_norm,
    "rms_norm_backward": _row_norms.rms_norm_backward,
    "add_layer_norm": _row_norms.add_layer_norm,
    "add_layer_norm_backward": _row_norms.add_layer_norm_backward,
    "add_rms_norm": _row_norms.add_rms_norm,
    "add_rms_norm_backward": _row_norms.add_rms_norm_backward,
    "max_pool2d": _norm_and_pool.pool(ops.max_pool2d),
    "max_pool2d_with_codes": _norm_and_pool.pool(ops.max_pool2d_with_codes),
    "relu_max_pool2d": _norm_and_pool.pool(ops.relu_max_pool2d),
    "relu_max_pool2d_with_codes": _norm_and_pool.pool(ops.relu_max_pool2d_with_codes),
    "max_pool2d_backward": _norm_and_pool.max_pool2d_backward,
    "max_pool2d_indices": _norm_and_pool.max_pool2d_indices,
    "max_pool2d_gather": _norm_and_pool.max_pool2d_gather,
    "cross_entropy_forward": _losses.cross_entropy_forward,
    "cross_entropy_forward_gradient": _losses.cross_entropy_forward_gradient,
    "cross_entropy_backward": _losses.cross_entropy_backward,
    "cross_entropy_lse": _losses.cross_entropy_lse,
    "cross_entropy_double_backward": _losses.cross_entropy_double_backward,
    "attention": _attention.attention,
    "attention_backward": _attention.attention_backward,
    "attention_varlen": _attention_forms.attention_varlen,
    "attention_varlen_backward": _attention_forms.attention_varlen_backward,
    "attention_with_kv_cache": _attention_forms.attention_with_kv_cache,
    "linear_cross_entropy_forward": _linear_cross_entropy.forward,
    "linear_cross_entropy_backward": _linear_cross_entropy.backward,
}
COMPOSED = (
    "conv2d_padding",
    "conv2d_join_skip",
    "max_pool2d_with_indices",
    "cross_entropy",
    "cross_entropy_extras",
    "linear_cross_entropy",
    "linear_cross_entropy_extras",
    "mlp",
    "norm_with_residual",
    "layer_scale_add_with_copy",
    "cast_with_residual",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_extras",
    "scaled_dot_product_attention_lse",
    "split_qkv",
    "attention_varlen_second_order",
    "attention_second_order",
)

_library = torch.library.Library("warpwright", "FRAGMENT")


def _with_defaults(rule: Rule, op: Any) -> Rule:
    """The dispatcher leaves out trailing arguments that have their default."""
    defaults = [argument.default_value for argument in op._schema.arguments]

    def complete(info: Any, dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        missing = defaults[len(args) :]
        return rule(info, (*dims, *(None for _ in missing)), *args, *missing)

    return complete


def register_batching_rules() -> None:
    """Registers every rule; `_ops` has loaded the operators."""
    for name, rule in RULES.items():
        complete = _with_defaults(rule, getattr(ops, name))
        torch.library.register_vmap(f"warpwright::{name}", complete, lib=_library)
    for name in COMPOSED:
        _library.impl(name, composed(getattr(ops, name)), "FuncTorchBatched", with_keyset=True)
