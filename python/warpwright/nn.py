"""Drop-in modules: each subclasses ``torch.nn.X`` and overrides only ``forward``.

Constructor, parameters, buffers, ``state_dict`` and pickling are native's. :func:`warpwright.swap`
therefore only changes the ``__class__`` of a native instance. ``repr`` prints
``warpwright.Conv2d(...)``, so that a printed model shows what runs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import functional as F
from ._conv_norm_layers import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    BatchNormAddReLU2d,
    BatchNormHardswish2d,
    BatchNormReLU2d,
    BatchNormReLUMaxPool2d,
    BatchNormSiLU2d,
    Conv2d,
    Conv2dBatchNorm2d,
    Conv2dBatchNormAddReLU2d,
    Conv2dBatchNormHardswish2d,
    Conv2dBatchNormReLU2d,
    Conv2dBatchNormReLUMaxPool2d,
    Conv2dBatchNormSiLU2d,
    ConvTranspose2d,
    SyncBatchNorm,
)
from ._group_norm_layers import GroupNorm, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from ._loss_layers import CrossEntropyLoss, LinearCrossEntropy
from ._multihead import multi_head_attention
from ._quantized_layers import QuantizedLinear
from ._squeeze_excitation_layer import SqueezeExcitation
from ._tools import Named

__all__ = [
    "GEGLU",
    "GELU",
    "MLP",
    "AdaptiveAvgPool2d",
    "AddLayerNorm",
    "AddRMSNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "BatchNormAddReLU2d",
    "BatchNormHardswish2d",
    "BatchNormReLU2d",
    "BatchNormReLUMaxPool2d",
    "BatchNormSiLU2d",
    "Conv2d",
    "Conv2dBatchNorm2d",
    "Conv2dBatchNormAddReLU2d",
    "Conv2dBatchNormHardswish2d",
    "Conv2dBatchNormReLU2d",
    "Conv2dBatchNormReLUMaxPool2d",
    "Conv2dBatchNormSiLU2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "LinearGELU",
    "LinearReLU",
    "LinearSiLU",
    "LogSoftmax",
    "MaxPool2d",
    "MultiheadAttention",
    "QuantizedLinear",
    "RMSNorm",
    "ReLU",
    "ReLUMaxPool2d",
    "RotaryEmbedding",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softmax2d",
    "SqueezeExcitation",
    "SwiGLU",
    "SyncBatchNorm",
    "Tanh",
]


class LayerNorm(Named, nn.LayerNorm):
    """``torch.nn.LayerNorm`` on :func:`warpwright.functional.layer_norm`.

    ``dtype``, an addition to native's arguments, is the dtype of the output.
    """

    def forward(self, input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return F.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps, dtype=dtype
        )


class RMSNorm(Named, nn.RMSNorm):
    """``torch.nn.RMSNorm`` on :func:`warpwright.functional.rms_norm`.

    ``dtype``, an addition to native's arguments, is the dtype of the output.
    """

    def forward(self, input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return F.rms_norm(input, self.normalized_shape, self.weight, self.eps, dtype=dtype)


class AddLayerNorm(Named, nn.LayerNorm):
    """``torch.nn.LayerNorm`` of ``residual + input``, by :func:`warpwright.functional.add_layer_norm`.

    Returns the sum and its norm. ``dtype`` is the norm's.
    """

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        return F.add_layer_norm(
            *(input, residual, self.normalized_shape),
            *(self.weight, self.bias, self.eps),
            dtype=dtype,
        )


class AddRMSNorm(Named, nn.RMSNorm):
    """``torch.nn.RMSNorm`` of ``residual + input``, by :func:`warpwright.functional.add_rms_norm`.

    Returns the sum and its norm. ``dtype`` is the norm's.
    """

    def forward(  # type: ignore[override]
        self, input: Tensor, residual: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        return F.add_rms_norm(
            input, residual, self.normalized_shape, self.weight, self.eps, dtype=dtype
        )


class Embedding(Named, nn.Embedding):
    """``torch.nn.Embedding`` on :func:`warpwright.functional.embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class ReLU(Named, nn.ReLU):
    """``torch.nn.ReLU`` on :func:`warpwright.functional.relu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, inplace=self.inplace)


class GELU(Named, nn.GELU):
    """``torch.nn.GELU`` on :func:`warpwright.functional.gelu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate)


class SiLU(Named, nn.SiLU):
    """``torch.nn.SiLU`` on :func:`warpwright.functional.silu`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, self.inplace)


class Sigmoid(Named, nn.Sigmoid):
    """``torch.nn.Sigmoid`` on :func:`warpwright.functional.sigmoid`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.sigmoid(input)


class Tanh(Named, nn.Tanh):
    """``torch.nn.Tanh`` on :func:`warpwright.functional.tanh`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.tanh(input)


class Dropout(Named, nn.Dropout):
    """``torch.nn.Dropout`` on :func:`warpwright.functional.dropout`.

    ``swap`` does not put it in, because a seed would then give other zeros.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, self.training, self.inplace)


class Softmax(Named, nn.Softmax):
    """``torch.nn.Softmax`` on :func:`warpwright.functional.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softmax(input, self.dim, _stacklevel=5)


class LogSoftmax(Named, nn.LogSoftmax):
    """``torch.nn.LogSoftmax`` on :func:`warpwright.functional.log_softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.log_softmax(input, self.dim, _stacklevel=5)


class Softmax2d(Named, nn.Softmax2d):
    """``torch.nn.Softmax2d`` on :func:`warpwright.functional.softmax`."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in (3, 4):
            raise ValueError(
                f"Softmax2d: expected input to be 3D or 4D, got {input.dim()}D instead"
            )
        return F.softmax(input, -3, _stacklevel=5)


class MaxPool2d(Named, nn.MaxPool2d):
    """``torch.nn.MaxPool2d`` on :func:`warpwright.functional.max_pool2d`."""

    def forward(self, input: Tensor) -> Any:  # with return_indices a pair
        return F.max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            ceil_mode=self.ceil_mode,
            return_indices=self.return_indices,
        )


class AdaptiveAvgPool2d(Named, nn.AdaptiveAvgPool2d):
    """``torch.nn.AdaptiveAvgPool2d`` on :func:`warpwright.functional.adaptive_avg_pool2d`.

    An output size of 1 has a kernel. Native computes the others.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(input, self.output_size)


class ReLUMaxPool2d(Named, nn.MaxPool2d):
    """A ReLU and the ``torch.nn.MaxPool2d`` after it, as one op.

    Constructor and attributes are those of ``nn.MaxPool2d``, without indices; see
    :func:`warpwright.functional.relu_max_pool2d`.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.return_indices:
            raise ValueError("ReLUMaxPool2d: return_indices: expected False, got True")
        return F.relu_max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        )


class Linear(Named, nn.Linear):
    """``torch.nn.Linear`` on :func:`warpwright.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class LinearReLU(Named, nn.Linear):
    """``torch.nn.Linear`` and the ReLU after it, as one op.

    Parameters and ``state_dict`` are those of ``nn.Linear``; see
    :func:`warpwright.functional.linear_relu`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear_relu(input, self.weight, self.bias)


class LinearGELU(Named, nn.Linear):
    """``torch.nn.Linear`` and the GELU after it, as one op.

    Parameters and ``state_dict`` are those of ``nn.Linear``; see
    :func:`warpwright.functional.linear_gelu`.

    Args:
        approximate: as for ``nn.GELU``.
    """

    approximate: str = "none"  # of an ``nn.Linear`` whose class was changed

    def __init__(self, *args: Any, approximate: str = "none", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.approximate = approximate

    def forward(self, input: Tensor) -> Tensor:
        return F.linear_gelu(input, self.weight, self.bias, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, approximate={self.approximate!r}"


class LinearSiLU(Named, nn.Linear):
    """``torch.nn.Linear`` and the SiLU after it, as one op.

    Parameters and ``state_dict`` are those of ``nn.Linear``; see
    :func:`warpwright.functional.linear_silu`.
    """

    def forward(self, input: Tensor) -> Tensor:
        return F.linear_silu(input, self.weight, self.bias)


class MultiheadAttention(Named, nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` on :func:`warpwright.functional.linear` and
    :func:`warpwright.functional.scaled_dot_product_attention`.

    Native's code runs if the weights are asked for (``need_weights=True``), with ``add_bias_kv`` or
    ``add_zero_attn``, and for nested tensors. With ``batch_first`` the output is contiguous.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not need_weights:
            output = multi_head_attention(
                self, query, key, value, key_padding_mask, attn_mask, is_causal
            )
            if output is not None:
                return output, None
        return super().forward(
            *(query, key, value, key_padding_mask, need_weights, attn_mask),
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )


class SwiGLU(Named, nn.Module):
    """:func:`warpwright.functional.swiglu` as a layer, without parameters.

    Shape: two tensors of one shape, or one whose last dimension holds the gate and then the other.
    """

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.swiglu(gate, up)


class GEGLU(Named, nn.Module):
    """:func:`warpwright.functional.geglu` as a layer, without parameters.

    Args:
        approximate: as for ``nn.GELU``.

    Shape: as :class:`SwiGLU`.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.geglu(gate, up, approximate=self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class RotaryEmbedding(Named, nn.Module):
    """Rotates query and key by their positions, with tables made once (arXiv 2104.09864).

    The angle of pair i at position p is ``p * base ** (-2 * i / size)``. The tables are float32
    buffers outside of the state dict. :func:`warpwright.functional.rotary_embedding` takes tables
    of other angles.

    Args:
        size: rotated columns of a head, even; later columns are copied.
        tokens: positions that the tables have.
        base: see above.
        interleaved: pairs are columns (2 i, 2 i + 1), else (i, i + size / 2).

    Shape: query (batch, heads, tokens, columns), key the same with any number of heads; positions
    (tokens) or (batch, tokens), by default counted from 0. Returns the rotated query and key.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, size: int, tokens: int, base: float = 10000.0, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        if size % 2 != 0:
            raise ValueError(f"size: expected an even number, got {size}")
        self.size, self.tokens, self.base, self.interleaved = size, tokens, base, interleaved
        steps = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64), steps)
        angles = angles.repeat_interleave(2, 1) if interleaved else angles.repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos, self.sin
        if positions is not None:
            cos, sin = cos[positions], sin[positions]
        elif query.dim() == 4:
            if query.shape[2] > self.tokens:
                raise RuntimeError(
                    f"query: expected at most {self.tokens} tokens, got {query.shape[2]}"
                )
            cos, sin = cos[: query.shape[2]], sin[: query.shape[2]]
        if query.dtype == torch.float64:
            cos, sin = cos.double(), sin.double()
        return F.rotary_embedding(query, key, cos, sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.size}, {self.tokens}, base={self.base}, interleaved={self.interleaved}"


class MLP(Named, nn.Module):
    """Linear, activation, linear, as :func:`warpwright.functional.mlp`.

    Args:
        in_features, hidden_features: widths of the input and between the layers.
        out_features: width of the output; ``in_features`` if None.
        activation: ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
        bias: both layers have one.

    Shape: (..., in_features) to (..., out_features). The layers are ``fc1`` and ``fc2``.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if activation not in self._FIRST:
            raise ValueError(
                f"activation: expected one of {', '.join(self._FIRST)}; got {activation!r}"
            )
        self.activation = activation
        where = {"device": device, "dtype": dtype}
        self.fc1 = self._FIRST[activation](in_features, hidden_features, bias, **where)
        if isinstance(self.fc1, LinearGELU):
            self.fc1.approximate = "tanh" if activation == "gelu_tanh" else "none"
        out_features = in_features if out_features is None else out_features
        self.fc2 = Linear(hidden_features, out_features, bias, **where)

    _FIRST: ClassVar[dict[str, type[nn.Linear]]] = {
        "relu": LinearReLU,
        "gelu": LinearGELU,
        "gelu_tanh": LinearGELU,
        "silu": LinearSiLU,
    }

    def forward(self, input: Tensor) -> Tensor:
        return self.fc2(self.fc1(input))


# Pickles import a class by this module, not by the file that defines it.
for _name in __all__:
    globals()[_name].__module__ = __name__
