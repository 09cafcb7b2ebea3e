"""Every op, and all that the rest of the package knows about it: the one table that others derive from.

`OPS` has a record per function of :mod:`warpwright.functional` and per optimizer. `OPERATORS` has the
operators of ``torch.ops.warpwright`` that they are made of. Modules that read the table are not
imported here, so it gives layers and explaining functions by their names. tests/test_catalog.py
compares the table with the C++ sources, the library and the rest of the package. An entry that is
missing on either side fails there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import _aten, _aten_row_norms, _examples, _native, _work
from ._op import Chain, Function, Op, Operator, Route
from ._operators import (
    ADAM,
    ATTENTION,
    ATTENTION_VARLEN,
    ATTENTION_WITH_KV_CACHE,
    BATCH_NORM_ACTIVATION,
    BATCH_NORM_RELU,
    CONV2D_BATCH_NORM,
    CONV2D_BATCH_NORM_RELU_MAX_POOL2D,
    CONV_TRANSPOSE2D,
    CONV_TRANSPOSE2D_CAT,
    CROSS_ENTROPY,
    FFT_CONV,
    GATED_ACTIVATION,
    GLOBAL_AVG_POOL2D,
    LAYER_SCALE_ADD,
    LINEAR,
    LINEAR_ACTIVATION,
    LINEAR_QUANTIZED,
    MAX_POOL2D,
    MLP,
    NORM_WITH_RESIDUAL,
    ROTARY_EMBEDDING,
    SGD,
    SQUEEZE_EXCITATION,
    always,
)
from ._pointwise_ops import POINTWISE_OPS
from ._row_ops import ROW_OPS

native = nn.functional


def _in_evaluation(args: tuple[Any, ...]) -> bool:
    """Batch norm's sixth argument is ``training``."""
    return not args[5]


_RECORDS = (
    Op(
        "conv2d",
        (
            Operator("conv2d", torch.conv2d, torch.conv2d, autocast=True, flops=_work.conv2d_flops),
            Operator("conv2d_padding", torch.conv2d, torch.conv2d, composed=True),
            Operator("conv2d_join_skip", composed=True, differentiable=False),
            Operator(
                "conv2d_backward", aten=_aten.conv2d_backward, flops=_work.conv2d_backward_flops
            ),
        ),
        modules=((nn.Conv2d, "Conv2d"),),
        routes=(Route(native.conv2d),),
        work=_work.conv2d_of_call,
        explain="conv2d",
        example=_examples.conv2d,
    ),
    Op(
        "conv_transpose2d",
        CONV_TRANSPOSE2D,
        modules=((nn.ConvTranspose2d, "ConvTranspose2d"),),
        routes=(Route(native.conv_transpose2d),),
        work=_work.conv_transpose2d_of_call,
        explain="conv_transpose2d",
        example=_examples.conv_transpose2d,
        folders=("conv2d", "conv_transpose2d"),
    ),
    Op(
        "conv_transpose2d_cat",
        CONV_TRANSPOSE2D_CAT,
        is_plain=True,
        explain="conv_transpose2d_cat",
        folders=("conv2d", "conv_transpose2d"),
    ),
    *(
        Op(
            name,
            FFT_CONV,
            is_plain=True,
            explain="fft_conv",
            folders=("fft_conv",),
        )
        for name in ("fft_conv1d", "fft_conv2d")
    ),
    Op(
        "batch_norm",
        (
            Operator(
                "batch_norm",
                _native.batch_norm,
                _aten.batch_norm,
                is_fused_by_inductor=_in_evaluation,
            ),
            Operator("batch_norm_update", _native.batch_norm_update, _aten.batch_norm_update),
            Operator("batch_norm_backward", aten=_aten.batch_norm_backward),
        ),
        modules=(
            (nn.BatchNorm1d, "BatchNorm1d"),
            (nn.BatchNorm2d, "BatchNorm2d"),
            (nn.BatchNorm3d, "BatchNorm3d"),
            (nn.SyncBatchNorm, "SyncBatchNorm"),
        ),
        routes=(Route(native.batch_norm),),
        work=_work.traffic_of_call(2, 3),
        explain="batch_norm",
        cpu="vectorised loops; a block's mean, then its deviations, merged in double",
        example=_examples.batch_norm,
        operations=3.0,
    ),
    Op(
        "batch_norm_relu",
        BATCH_NORM_RELU,
        chain=Chain(("batch_norm", "relu"), "BatchNormReLU2d"),
        explain="batch_norm",
        cpu="batch norm's loops; the backward masks grad_output first",
        folders=("batch_norm",),
    ),
    Op(
        "batch_norm_add_relu",
        BATCH_NORM_RELU,
        chain=Chain(("batch_norm", "add", "relu"), "BatchNormAddReLU2d"),
        explain="batch_norm",
        cpu="batch norm's loops; the backward masks grad_output first",
        folders=("batch_norm",),
    ),
    *(
        Op(
            f"batch_norm_{activation}",
            BATCH_NORM_ACTIVATION,
            chain=Chain(("batch_norm", activation), module),
            explain="batch_norm",
            cpu="batch norm's loops; the backward multiplies grad_output by the derivative first",
            folders=("batch_norm",),
        )
        for activation, module in (
            ("silu", "BatchNormSiLU2d"),
            ("hardswish", "BatchNormHardswish2d"),
        )
    ),
    Op(
        "batch_norm_relu_max_pool2d",
        (
            Operator(
                "batch_norm_relu_max_pool2d",
                _native.batch_norm_relu_max_pool2d,
                _aten.batch_norm_relu_max_pool2d,
            ),
            Operator(
                "batch_norm_relu_max_pool2d_update",
                _native.batch_norm_relu_max_pool2d_update,
                _aten.batch_norm_relu_max_pool2d_update,
            ),
            Operator(
                "batch_norm_relu_max_pool2d_backward",
                aten=_aten.batch_norm_relu_max_pool2d_backward,
            ),
        ),
        chain=Chain(("batch_norm", "relu", "max_pool2d"), "BatchNormReLUMaxPool2d"),
        explain="batch_norm_relu_max_pool2d",
        cpu="batch norm's statistics, then max pooling's loops over rows",
        folders=("batch_norm", "batch_norm_relu_max_pool2d", "max_pool2d"),
    ),
    *(
        Op(
            f"conv2d_batch_norm{suffix}",
            CONV2D_BATCH_NORM,
            layer=layer,
            explain="conv2d_batch_norm",
            folders=("batch_norm", "conv2d", "conv2d_batch_norm"),
        )
        for suffix, layer in (
            ("", "Conv2dBatchNorm2d"),
            ("_relu", "Conv2dBatchNormReLU2d"),
            ("_add_relu", "Conv2dBatchNormAddReLU2d"),
            ("_silu", "Conv2dBatchNormSiLU2d"),
            ("_hardswish", "Conv2dBatchNormHardswish2d"),
        )
    ),
    Op(
        "conv2d_batch_norm_relu_max_pool2d",
        CONV2D_BATCH_NORM_RELU_MAX_POOL2D,
        layer="Conv2dBatchNormReLUMaxPool2d",
        explain="conv2d_batch_norm_relu_max_pool2d",
        folders=(
            *("batch_norm", "batch_norm_relu_max_pool2d", "conv2d"),
            *("conv2d_batch_norm_relu_max_pool2d", "max_pool2d"),
        ),
    ),
    Op(
        "layer_norm",
        (
            Operator("layer_norm", _native.layer_norm, _aten_row_norms.layer_norm, autocast=True),
            Operator("layer_norm_backward", aten=_aten_row_norms.layer_norm_backward),
        ),
        modules=((nn.LayerNorm, "LayerNorm"),),
        routes=(Route(native.layer_norm),),
        work=_work.traffic_of_call(2, 3),
        explain="layer_norm",
        cpu="vectorised loops over rows; each row's mean, then its deviations",
        example=_examples.layer_norm,
        operations=3.0,
    ),
    Op(
        "rms_norm",
        (
            Operator("rms_norm", _native.rms_norm, _aten_row_norms.rms_norm),
            Operator("rms_norm_backward", aten=_aten_row_norms.rms_norm_backward),
        ),
        modules=((nn.RMSNorm, "RMSNorm"),),
        routes=(Route(native.rms_norm), Route(torch.rms_norm)),
        work=_work.traffic_of_call(2, 3),
        explain="rms_norm",
        cpu="vectorised loops over rows",
        example=_examples.rms_norm,
        operations=3.0,
        folders=("layer_norm",),
    ),
    Op(
        "add_layer_norm",
        (
            Operator(
                "add_layer_norm",
                _native.add_layer_norm,
                _aten_row_norms.add_layer_norm,
                autocast=True,
            ),
            Operator("add_layer_norm_backward", aten=_aten_row_norms.add_layer_norm_backward),
            NORM_WITH_RESIDUAL,
        ),
        layer="AddLayerNorm",
        explain="add_layer_norm",
        cpu="vectorised loops over rows; each row's sum, then its norm",
        operations=3.0,
        folders=("layer_norm",),
    ),
    Op(
        "add_rms_norm",
        (
            Operator("add_rms_norm", _native.add_rms_norm, _aten_row_norms.add_rms_norm),
            Operator("add_rms_norm_backward", aten=_aten_row_norms.add_rms_norm_backward),
            NORM_WITH_RESIDUAL,
        ),
        layer="AddRMSNorm",
        explain="add_rms_norm",
        cpu="vectorised loops over rows; each row's sum, then its norm",
        operations=3.0,
        folders=("layer_norm",),
    ),
    Op(
        "relu",
        (
            Operator("relu", torch.relu, torch.relu, is_fused_by_inductor=always),
            Operator("relu_", torch.relu_, torch.relu_, is_fused_by_inductor=always),
            Operator("relu_backward", aten=_aten.relu_backward, is_fused_by_inductor=always),
        ),
        modules=((nn.ReLU, "ReLU"),),
        routes=(
            Route(native.relu),
            Route(torch.relu),
            Route(Tensor.relu, first="self"),
            Route(torch.relu_, "relu_"),
            Route(Tensor.relu_, "relu_", first="self"),
        ),
        integers=True,
        work=_work.traffic_of_call(2, 3),
        explain="relu",
        cpu="vectorised loops",
        example=_examples.relu,
        operations=0.5,
    ),
    *(
        Op(
            name,
            GATED_ACTIVATION,
            layer=layer,
            explain="gated_activation",
            cpu="vectorised loops",
            folders=("gated_activation",),
        )
        for name, layer in (("swiglu", "SwiGLU"), ("geglu", "GEGLU"))
    ),
    Op(
        "layer_scale_add",
        LAYER_SCALE_ADD,
        is_plain=True,
        explain="layer_scale_add",
        cpu="ATen's operators, as native's formula",
    ),
    Op(
        "rotary_embedding",
        ROTARY_EMBEDDING,
        layer="RotaryEmbedding",
        explain="rotary_embedding",
        cpu="loops over heads, once for query and once for key",
    ),
    Op(
        "squeeze_excitation",
        SQUEEZE_EXCITATION,
        layer="SqueezeExcitation",
        explain="squeeze_excitation",
        cpu="ATen's operators, as native's chain",
    ),
    *POINTWISE_OPS,
    *ROW_OPS,
    Op(
        "max_pool2d",
        MAX_POOL2D,
        modules=((nn.MaxPool2d, "MaxPool2d"),),
        routes=(
            Route(native.max_pool2d),
            Route(torch.max_pool2d),
            Route(native.max_pool2d_with_indices, "max_pool2d_with_indices"),
        ),
        integers=True,
        work=_work.pooling_of_call,
        explain="max_pool2d",
        cpu="vectorised loops over rows, one byte per window for the backward",
        example=_examples.max_pool2d,
    ),
    Op(
        "relu_max_pool2d",
        (
            Operator(
                "relu_max_pool2d",
                _native.relu_max_pool2d,
                _native.relu_max_pool2d,
                is_fused_by_inductor=always,
            ),
            Operator("relu_max_pool2d_with_codes", aten=_aten.relu_max_pool2d_with_codes),
        ),
        chain=Chain(("relu", "max_pool2d"), "ReLUMaxPool2d", keeper=1),
        integers=True,
        explain="max_pool2d",
        cpu="vectorised loops over rows, one byte per window for the backward",
        folders=("max_pool2d",),
    ),
    Op(
        "adaptive_avg_pool2d",
        GLOBAL_AVG_POOL2D,
        modules=((nn.AdaptiveAvgPool2d, "AdaptiveAvgPool2d"),),
        routes=(Route(native.adaptive_avg_pool2d),),
        work=_work.traffic_of_call(1, 1),
        explain="adaptive_avg_pool2d",
        cpu="vectorised sums of planes or of channels",
        example=_examples.adaptive_avg_pool2d,
        folders=("reduction",),
    ),
    Op(
        "linear",
        LINEAR,
        modules=((nn.Linear, "Linear"),),
        routes=(Route(native.linear),),
        work=_work.linear_of_call,
        explain="linear",
        cpu="matrix products of ATen (MKL or oneDNN), which loops of ours would not beat",
        example=_examples.linear,
    ),
    *(
        Op(
            f"linear_{activation}",
            LINEAR_ACTIVATION,
            chain=Chain(("linear", activation), module),
            explain="linear_activation",
            cpu="linear's matrix products, then one vectorised pass",
            folders=("linear",),
        )
        for activation, module in (
            ("relu", "LinearReLU"),
            ("gelu", "LinearGELU"),
            ("silu", "LinearSiLU"),
        )
    ),
    Op(
        "mlp",
        MLP,
        layer="MLP",
        explain="mlp",
        cpu="linear's matrix products, one vectorised pass between them",
        folders=("linear",),
    ),
    Op(
        "linear_quantized",
        LINEAR_QUANTIZED,
        layer="QuantizedLinear",
        explain="linear_quantized",
        cpu="blocks of the weight become float32 in the cache, then ATen's matrix product",
        folders=("linear", "linear_quantized"),
    ),
    Op(
        "cross_entropy",
        CROSS_ENTROPY,
        modules=((nn.CrossEntropyLoss, "CrossEntropyLoss"),),
        routes=(Route(native.cross_entropy),),
        work=_work.traffic_of_call(1, 2),
        explain="cross_entropy",
        cpu="one pass per row, vectorised",
        example=_examples.cross_entropy,
        operations=4.0,
    ),
    Op(
        "linear_cross_entropy",
        (
            Operator(
                "linear_cross_entropy",
                _native.linear_cross_entropy,
                _native.linear_cross_entropy,
                composed=True,
                autocast=True,
            ),
            Operator(
                "linear_cross_entropy_extras",
                _native.linear_cross_entropy_extras,
                _native.linear_cross_entropy_extras,
                composed=True,
                autocast=True,
            ),
            Operator("linear_cross_entropy_forward", flops=_work.linear_cross_entropy_flops),
            Operator(
                "linear_cross_entropy_backward",
                flops=_work.linear_cross_entropy_backward_flops,
            ),
        ),
        layer="LinearCrossEntropy",
        explain="linear_cross_entropy",
        cpu="linear and cross_entropy over chunks of rows",
        folders=("cross_entropy", "linear", "linear_cross_entropy"),
    ),
    Op(
        "scaled_dot_product_attention",
        ATTENTION,
        modules=((nn.MultiheadAttention, "MultiheadAttention"),),
        routes=(Route(native.scaled_dot_product_attention, first="query"),),
        work=_work.attention_of_call,
        explain="attention",
        cpu="flash attention by tiles on ATen's matrix products, so that scores stay in cache",
        example=_examples.attention,
        folders=("attention",),
    ),
    Op(
        "attention_varlen",
        ATTENTION_VARLEN,
        is_plain=True,
        explain="attention_varlen",
        cpu="flash attention of one sequence after the other, so that scores stay in cache",
        folders=("attention",),
    ),
    Op(
        "attention_with_kv_cache",
        ATTENTION_WITH_KV_CACHE,
        is_plain=True,
        explain="attention_with_kv_cache",
        cpu="two passes over the keys of each head, which its query heads share",
    ),
    Op("sgd", SGD, folders=("optim",), is_optimizer=True),
    Op("adam", ADAM, folders=("optim",), is_optimizer=True),
    Op(
        "adamw",
        ADAM,
        operations=2.0,
        folders=("optim",),
        is_optimizer=True,
    ),
)

OPS: dict[str, Op] = {op.name: op for op in _RECORDS}
FUNCTIONALS: dict[str, Op] = {name: op for name, op in OPS.items() if not op.is_optimizer}
OPERATORS: dict[str, Operator] = {
    operator.name: operator for op in _RECORDS for operator in op.operators
}
# Names that native's functions have besides the op's: relu_ -> relu.
VARIANTS: dict[str, str] = {
    route.ours: op.name for op in _RECORDS for route in op.routes if route.ours
}
# The operators that users call, and what runs if no kernel of ours can.
NATIVE_OPERATORS: dict[str, Function] = {
    name: operator.native for name, operator in OPERATORS.items() if operator.native is not None
}
