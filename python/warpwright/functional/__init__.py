"""Drop-in versions of `torch.nn.functional`: same names, arguments, defaults and errors."""

from ._activation import geglu, gelu, relu, relu_, sigmoid, silu, swiglu, tanh
from ._attention import scaled_dot_product_attention
from ._conv import conv2d
from ._conv_norm import (
    conv2d_batch_norm,
    conv2d_batch_norm_add_relu,
    conv2d_batch_norm_hardswish,
    conv2d_batch_norm_relu,
    conv2d_batch_norm_relu_max_pool2d,
    conv2d_batch_norm_silu,
)
from ._conv_transpose import conv_transpose2d, conv_transpose2d_cat
from ._dropout import dropout
from ._embedding import embedding
from ._fft_conv import fft_conv1d, fft_conv2d
from ._group_norm import group_norm, instance_norm
from ._kv_cache import attention_with_kv_cache
from ._layer_scale import layer_scale_add
from ._linear import linear, linear_gelu, linear_relu, linear_silu, mlp
from ._linear_8bit import linear_fp8, linear_int8, quantize_rows
from ._loss import cross_entropy, linear_cross_entropy
from ._norm import (
    batch_norm,
    batch_norm_add_relu,
    batch_norm_hardswish,
    batch_norm_relu,
    batch_norm_relu_max_pool2d,
    batch_norm_silu,
)
from ._pool import adaptive_avg_pool2d, max_pool2d, max_pool2d_with_indices, relu_max_pool2d
from ._quantized import linear_quantized
from ._reduction import amax, logsumexp, mean, std, sum, var
from ._rotary import rotary_embedding
from ._row_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ._scan import cumprod, cumsum, linear_scan, logcumsumexp
from ._softmax import log_softmax, softmax
from ._squeeze_excitation import squeeze_excitation
from ._varlen import attention_varlen

__all__ = [
    "adaptive_avg_pool2d",
    "add_layer_norm",
    "add_rms_norm",
    "amax",
    "attention_varlen",
    "attention_with_kv_cache",
    "batch_norm",
    "batch_norm_add_relu",
    "batch_norm_hardswish",
    "batch_norm_relu",
    "batch_norm_relu_max_pool2d",
    "batch_norm_silu",
    "conv2d",
    "conv2d_batch_norm",
    "conv2d_batch_norm_add_relu",
    "conv2d_batch_norm_hardswish",
    "conv2d_batch_norm_relu",
    "conv2d_batch_norm_relu_max_pool2d",
    "conv2d_batch_norm_silu",
    "conv_transpose2d",
    "conv_transpose2d_cat",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "dropout",
    "embedding",
    "fft_conv1d",
    "fft_conv2d",
    "geglu",
    "gelu",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "layer_scale_add",
    "linear",
    "linear_cross_entropy",
    "linear_fp8",
    "linear_gelu",
    "linear_int8",
    "linear_quantized",
    "linear_relu",
    "linear_scan",
    "linear_silu",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "max_pool2d",
    "max_pool2d_with_indices",
    "mean",
    "mlp",
    "quantize_rows",
    "relu",
    "relu_",
    "relu_max_pool2d",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "squeeze_excitation",
    "std",
    "sum",
    "swiglu",
    "tanh",
    "var",
]

# Pickles and generated forwards import a function by this module, not by the file that defines it.
for _name in __all__:
    globals()[_name].__module__ = __name__
