"""The operators of ``torch.ops.warpwright``, by the function that is made of them. See _catalog."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import (
    _aten,
    _aten_conv_norms,
    _aten_row_norms,
    _native,
    _native_8bit,
    _native_reductions,
    _quantized_weight,
    _squeeze_excitation,
    _work,
)
from ._op import Operator

native = nn.functional


def always(args: tuple[Any, ...]) -> bool:
    return True


def _is_on_cpu(args: tuple[Any, ...]) -> bool:
    return bool(args[0].device.type == "cpu")


LINEAR = (
    Operator("linear", native.linear, native.linear, autocast=True, flops=_work.linear_flops),
    Operator("linear_backward", aten=_aten.linear_backward, flops=_work.linear_backward_flops),
)
LINEAR_ACTIVATION = (
    Operator(
        "linear_activation",
        _native.linear_activation,
        _aten.linear_activation,
        autocast=True,
        flops=_work.linear_flops,
    ),
    Operator("linear_activation_backward", aten=_aten.linear_activation_backward),
    *LINEAR,
)
MLP = (
    Operator("mlp", _native.mlp, _native.mlp, composed=True),
    Operator("mlp_hidden_gradient", flops=_work.mlp_hidden_gradient_flops),
    *LINEAR_ACTIVATION,
)
NORM_WITH_RESIDUAL = Operator("norm_with_residual", composed=True)
LINEAR_QUANTIZED = (
    Operator(
        "linear_quantized",
        _quantized_weight.linear_quantized,
        _quantized_weight.linear_quantized,
        autocast=True,
        flops=_work.linear_quantized_flops,
    ),
    Operator(
        "linear_quantized_backward",
        aten=_quantized_weight.linear_quantized_backward,
        flops=_work.linear_quantized_backward_flops,
    ),
)
ACTIVATION = (
    Operator("activation", _native.activation, _native.activation, is_fused_by_inductor=always),
    Operator("activation_backward", aten=_aten.activation_backward, is_fused_by_inductor=always),
)
DROPOUT = (Operator("dropout", _native.dropout), Operator("dropout_backward"))
GATED_ACTIVATION = (
    Operator(
        "gated_activation",
        _native.gated_activation,
        _native.gated_activation,
        is_fused_by_inductor=always,
    ),
    Operator(
        "gated_activation_backward",
        aten=_aten.gated_activation_backward,
        is_fused_by_inductor=always,
    ),
)
LAYER_SCALE_ADD = (
    Operator(
        "layer_scale_add",
        _native.layer_scale_add,
        _native.layer_scale_add,
        is_fused_by_inductor=always,
    ),
    Operator(
        "layer_scale_add_backward",
        aten=_aten.layer_scale_add_backward,
        is_fused_by_inductor=always,
    ),
    Operator("layer_scale_add_with_copy", composed=True),
    Operator("cast_with_residual", composed=True),
)
QUANTIZE_ROWS = Operator("quantize_rows", _native_8bit.quantize_rows, _native_8bit.quantize_rows)
SCALED_LINEAR = Operator(
    "scaled_linear",
    _native_8bit.scaled_linear,
    _native_8bit.scaled_linear,
    inference_only=True,
    flops=_work.scaled_linear_flops,
)
LINEAR_INT8, LINEAR_FP8 = (
    (
        Operator(name, function, function, autocast=True, flops=_work.linear_flops),
        QUANTIZE_ROWS,
        SCALED_LINEAR,
        LINEAR[1],
    )
    for name, function in (
        ("linear_int8", _native_8bit.linear_int8),
        ("linear_fp8", _native_8bit.linear_fp8),
    )
)
_SDPA = native.scaled_dot_product_attention
_EXTRA = _native.scaled_dot_product_attention_extras
_WITH_LSE = _native.scaled_dot_product_attention_lse
ATTENTION = (
    Operator("scaled_dot_product_attention", _SDPA, _SDPA, composed=True, autocast=True),
    Operator("scaled_dot_product_attention_extras", _EXTRA, _EXTRA, composed=True, autocast=True),
    Operator(
        "scaled_dot_product_attention_lse", _WITH_LSE, _WITH_LSE, composed=True, autocast=True
    ),
    Operator("attention", flops=_work.attention_flops),
    Operator("attention_backward", flops=_work.attention_backward_flops),
    Operator("attention_dropout_factors"),
    Operator("attention_second_order", composed=True),
    Operator("split_qkv", aten=_aten.split_qkv, composed=True),
)
_VARLEN = _native.attention_varlen
ATTENTION_VARLEN = (
    Operator(
        "attention_varlen", _VARLEN, _VARLEN, autocast=True, flops=_work.varlen_attention_flops
    ),
    Operator("attention_varlen_backward", flops=_work.varlen_attention_backward_flops),
    Operator("attention_varlen_second_order", composed=True),
)
_ROTARY = _native.rotary_embedding
ROTARY_EMBEDDING = (Operator("rotary_embedding", _ROTARY, _ROTARY),)
GROUP_NORM = (
    Operator(
        "group_norm",
        _native.group_norm,
        _aten_row_norms.group_norm,
        autocast=True,
        is_fused_by_inductor=always,
    ),
    Operator(
        "group_norm_backward",
        aten=_aten_row_norms.group_norm_backward,
        is_fused_by_inductor=always,
    ),
)
SQUEEZE_EXCITATION = (
    Operator(
        "squeeze_excitation",
        _squeeze_excitation.squeeze_excitation,
        _squeeze_excitation.aten_squeeze_excitation,
        autocast=True,
        is_fused_by_inductor=_is_on_cpu,
        flops=_work.squeeze_excitation_flops,
    ),
    Operator(
        "squeeze_excitation_backward",
        aten=_squeeze_excitation.aten_squeeze_excitation_backward,
        is_fused_by_inductor=_is_on_cpu,
        flops=_work.squeeze_excitation_backward_flops,
    ),
)
EMBEDDING = (
    # Inductor fuses the gather with its neighbours; the gradient of the weight stays ours.
    Operator("embedding", _native.embedding, torch.embedding, is_fused_by_inductor=always),
    Operator("embedding_backward", aten=torch.ops.aten.embedding_dense_backward.default),
    Operator("embedding_renorm_", _native.embedding_renorm_, _native.embedding_renorm_),
)
SOFTMAX = (
    Operator("softmax", torch.softmax, torch.softmax, autocast=True, is_fused_by_inductor=always),
    Operator("softmax_backward", aten=_aten.softmax_backward, is_fused_by_inductor=always),
)
LOG_SOFTMAX = (
    Operator(
        "log_softmax",
        torch.log_softmax,
        torch.log_softmax,
        autocast=True,
        is_fused_by_inductor=always,
    ),
    Operator("log_softmax_backward", aten=_aten.log_softmax_backward, is_fused_by_inductor=always),
)
CUMSUM = (Operator("cumsum", _native.cumsum, _native.cumsum),)
CUMPROD = (
    Operator("cumprod", _native_reductions.cumprod, _native_reductions.cumprod, autocast=True),
)
LOGCUMSUMEXP = (
    Operator("logcumsumexp", _native_reductions.logcumsumexp, _native_reductions.logcumsumexp),
)
REDUCTIONS = {
    "sum": Operator("sum", _native_reductions.total, _native_reductions.total, autocast=True),
    "mean": Operator("mean", _native_reductions.mean, _native_reductions.mean),
    "amax": Operator("amax", torch.amax, torch.amax),
    "logsumexp": Operator(
        "logsumexp", _native_reductions.logsumexp, _native_reductions.logsumexp, autocast=True
    ),
    "var": Operator("var", _native_reductions.var, _native_reductions.var),
    "std": Operator("std", _native_reductions.std, _native_reductions.std),
}
LINEAR_SCAN = (Operator("linear_scan", _native.linear_scan, _native.linear_scan),)
FFT_CONV = (
    Operator(
        "fft_conv", _native.fft_conv, _native.fft_conv, autocast=True, flops=_work.fft_conv_flops
    ),
)
ATTENTION_WITH_KV_CACHE = (
    Operator(
        "attention_with_kv_cache",
        _native.attention_with_kv_cache,
        _native.attention_with_kv_cache,
        inference_only=True,
        flops=_work.kv_cache_attention_flops,
    ),
    Operator("kv_cache_append_", _native.kv_cache_append_, _native.kv_cache_append_),
)
BATCH_NORM_RELU = (
    Operator("batch_norm_relu", _native.batch_norm_relu, _aten.batch_norm_relu),
    Operator(
        "batch_norm_relu_update", _native.batch_norm_relu_update, _aten.batch_norm_relu_update
    ),
    Operator("batch_norm_relu_backward", aten=_aten.batch_norm_relu_backward),
)
BATCH_NORM_ACTIVATION = (
    Operator("batch_norm_activation", _native.batch_norm_activation, _aten.batch_norm_activation),
    Operator(
        "batch_norm_activation_update",
        _native.batch_norm_activation_update,
        _aten.batch_norm_activation_update,
    ),
    Operator("batch_norm_activation_backward", aten=_aten.batch_norm_activation_backward),
)
CONV2D_BATCH_NORM = (
    Operator(
        "conv2d_batch_norm",
        _native.conv2d_batch_norm,
        _aten_conv_norms.conv2d_batch_norm,
        autocast=True,
        flops=_work.conv2d_batch_norm_flops,
    ),
    Operator(
        "conv2d_batch_norm_update",
        _native.conv2d_batch_norm_update,
        _aten_conv_norms.conv2d_batch_norm_update,
        autocast=True,
        flops=_work.conv2d_batch_norm_flops,
    ),
    Operator("conv2d_batch_norm_backward", flops=_work.conv2d_batch_norm_backward_flops),
)
CONV2D_BATCH_NORM_RELU_MAX_POOL2D = (
    Operator(
        "conv2d_batch_norm_relu_max_pool2d",
        _native.conv2d_batch_norm_relu_max_pool2d,
        _aten_conv_norms.conv2d_batch_norm_relu_max_pool2d,
        autocast=True,
        flops=_work.conv_norm_pool_flops,
    ),
    Operator(
        "conv2d_batch_norm_relu_max_pool2d_update",
        _native.conv2d_batch_norm_relu_max_pool2d_update,
        _aten_conv_norms.conv2d_batch_norm_relu_max_pool2d_update,
        autocast=True,
        flops=_work.conv_norm_pool_update_flops,
    ),
    Operator(
        "conv2d_batch_norm_relu_max_pool2d_backward",
        aten=_aten_conv_norms.conv2d_batch_norm_relu_max_pool2d_backward,
        flops=_work.conv_norm_pool_backward_flops,
    ),
)
CONV_TRANSPOSE2D = (
    Operator(
        "conv_transpose2d",
        torch.conv_transpose2d,
        torch.conv_transpose2d,
        autocast=True,
        flops=_work.conv_transpose2d_flops,
    ),
    Operator(
        "conv_transpose2d_backward",
        aten=_aten.conv_transpose2d_backward,
        flops=_work.conv_transpose2d_backward_flops,
    ),
)
CONV_TRANSPOSE2D_CAT = (
    Operator(
        "conv_transpose2d_cat",
        _native.conv_transpose2d_cat,
        _native.conv_transpose2d_cat,
        autocast=True,
        flops=_work.conv_transpose2d_cat_flops,
    ),
    *CONV_TRANSPOSE2D,
)
CROSS_ENTROPY = (
    Operator(
        "cross_entropy",
        torch.ops.aten.cross_entropy_loss.default,
        torch.ops.aten.cross_entropy_loss.default,
        composed=True,
        autocast=True,
    ),
    Operator(
        "cross_entropy_extras",
        _native.cross_entropy_extras,
        _native.cross_entropy_extras,
        composed=True,
        autocast=True,
    ),
    Operator("cross_entropy_forward"),
    Operator("cross_entropy_forward_gradient"),
    Operator("cross_entropy_lse"),
    Operator("cross_entropy_scale_"),
    Operator("cross_entropy_backward"),
    Operator("cross_entropy_backward_"),
    Operator("cross_entropy_double_backward"),
)
MAX_POOL2D = (
    Operator("max_pool2d", torch.max_pool2d, torch.max_pool2d, is_fused_by_inductor=always),
    Operator(
        "max_pool2d_with_indices",
        torch.ops.aten.max_pool2d_with_indices.default,
        torch.ops.aten.max_pool2d_with_indices.default,
        composed=True,
    ),
    Operator("max_pool2d_with_codes", aten=_aten.max_pool2d_with_codes),
    Operator("max_pool2d_indices", aten=_aten.max_pool2d_indices, differentiable=False),
    Operator("max_pool2d_backward", aten=_aten.max_pool2d_backward),
    Operator("max_pool2d_gather", aten=_aten.max_pool2d_gather),
)
GLOBAL_AVG_POOL2D = (
    Operator(
        "global_avg_pool2d",
        _native_reductions.global_avg_pool2d,
        _native_reductions.global_avg_pool2d,
        is_fused_by_inductor=_is_on_cpu,
    ),
    Operator(
        "global_avg_pool2d_backward",
        aten=_aten.global_avg_pool2d_backward,
        is_fused_by_inductor=_is_on_cpu,
    ),
)
GRAD_NORM = Operator("grad_norm")
SGD = (Operator("sgd_step_"), GRAD_NORM)
ADAM = (Operator("adam_step_"), GRAD_NORM)
