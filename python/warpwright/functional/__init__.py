"""Drop-in versions of `torch.nn.functional`: same names, arguments, defaults and errors."""

from ._activation import geglu, relu, relu_, swiglu
from ._attention import scaled_dot_product_attention
from ._conv import conv2d
from ._conv_norm import conv2d_batch_norm, conv2d_batch_norm_add_relu, conv2d_batch_norm_relu
from ._fft_conv import fft_conv1d, fft_conv2d
from ._kv_cache import attention_with_kv_cache
from ._linear import linear, linear_gelu, linear_relu, linear_silu, mlp
from ._loss import cross_entropy, linear_cross_entropy
from ._norm import (
    batch_norm,
    batch_norm_add_relu,
    batch_norm_relu,
    batch_norm_relu_max_pool2d,
)
from ._pool import max_pool2d, max_pool2d_with_indices, relu_max_pool2d
from ._rotary import rotary_embedding
from ._row_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from ._scan import cumsum, linear_scan

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention_with_kv_cache",
    "batch_norm",
    "batch_norm_add_relu",
    "batch_norm_relu",
    "batch_norm_relu_max_pool2d",
    "conv2d",
    "conv2d_batch_norm",
    "conv2d_batch_norm_add_relu",
    "conv2d_batch_norm_relu",
    "cross_entropy",
    "cumsum",
    "fft_conv1d",
    "fft_conv2d",
    "geglu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_gelu",
    "linear_relu",
    "linear_scan",
    "linear_silu",
    "max_pool2d",
    "max_pool2d_with_indices",
    "mlp",
    "relu",
    "relu_",
    "relu_max_pool2d",
    "rms_norm",
    "rotary_embedding",
    "scaled_dot_product_attention",
    "swiglu",
]

# Pickles and generated forwards import a function by this module, not by the file that defines it.
for _name in __all__:
    globals()[_name].__module__ = __name__
