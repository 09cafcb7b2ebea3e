"""The linear layer whose weight is stored in integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import functional as F
from ._quantized_weight import (
    bits_of,
    dequantize,
    from_fragments,
    has_fragments,
    to_fragments,
)
from ._tools import Named


class QuantizedLinear(Named, nn.Linear):
    """``torch.nn.Linear`` with a frozen weight in integers, on
    :func:`warpwright.functional.linear_quantized`.

    ``codes``, ``scales`` and ``zeros`` (or None) are buffers in the plain form of that function.
    ``weight`` is computed from them at each access. :func:`warpwright.quantize` makes such layers of
    a model's linear ones; :meth:`from_codes` makes one of codes that exist.

    On a GPU the codes lie in fragment order, which moving, saving and loading the layer undo. So
    ``state_dict`` has the plain form, on every device. Codes are read while the previous kernel still
    runs: replace them by ``load_state_dict``, not in place.

    Args:
        in_features, out_features, bias, device: as for ``torch.nn.Linear``.
        bits: 4 or 8.
        group: input features per scale, for 4 bits; it divides ``in_features``.
        symmetric: no zero points, for 4 bits.
        dtype: of scales and bias.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    fragments: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bits: int = 4,
        group: int = 128,
        symmetric: bool = True,
    ) -> None:
        nn.Module.__init__(self)
        if bits not in (4, 8):
            raise ValueError(f"QuantizedLinear: bits: expected 4 or 8, got {bits}")
        if bits == 4 and (group <= 0 or group % 2 or in_features % group):
            raise ValueError(
                "QuantizedLinear: group: expected an even divisor of in_features = "
                f"{in_features}, got {group}"
            )
        self.in_features, self.out_features = in_features, out_features
        options = {"device": device, "dtype": dtype}
        zero = torch.zeros(out_features, **options) if bias else None
        self.register_parameter("bias", None if zero is None else nn.Parameter(zero))
        if bits == 8:
            codes = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
            scales = torch.ones(out_features, **options)
        else:
            shape = out_features, in_features // 2
            codes = torch.full(shape, 0x88, dtype=torch.uint8, device=device)
            scales = torch.ones(out_features, in_features // group, **options)
        zeros = None
        if bits == 4 and not symmetric:
            zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=device)
        self._set_codes(codes, scales, zeros)

    @classmethod
    def from_codes(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> QuantizedLinear:
        """A layer of plain codes, such as :mod:`warpwright.quantization` reads from other formats.

        Raises:
            RuntimeError: shapes or dtypes are not those of
                :func:`warpwright.functional.linear_quantized`.
            TypeError: ``codes`` or ``scales`` is no tensor.
        """
        for name, tensor in (("codes", codes), ("scales", scales)):
            if not isinstance(tensor, Tensor):
                got = type(tensor).__name__
                raise TypeError(f"QuantizedLinear: {name}: expected a tensor, got {got}")
        features = codes.shape[-1] * (8 // bits_of(codes))
        # A product without rows: the operator checks the operands.
        rows = (scales if bias is None else bias).detach().new_empty(0, features)
        F.linear_quantized(rows, codes, scales, zeros, bias)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = features, codes.shape[0]
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        layer._set_codes(codes, scales, zeros)
        return layer

    def _set_codes(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.fragments = False
        self._order()

    # ---- the order of the codes ----

    def _order(self) -> None:
        """On a GPU: fragments, and neighbouring features adjacent in scales and zeros."""
        if self.fragments or not self.codes.is_cuda or not has_fragments(self.codes):
            return
        self.codes = to_fragments(self.codes)
        if self.scales.dim() == 2:
            self.scales = self.scales.t().contiguous().t()
            self.zeros = None if self.zeros is None else self.zeros.t().contiguous().t()
        self.fragments = True
        # The next kernel may read codes before the previous one ends (`ahead`). This one writes none.
        torch.zeros(1, device=self.codes.device)

    def _plain(self) -> None:
        if self.fragments:
            self.codes = from_fragments(self.codes)
            self.scales = self.scales.contiguous()
            self.zeros = None if self.zeros is None else self.zeros.contiguous()
            self.fragments = False

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._plain()
        result = super()._apply(fn, recurse)
        self._order()
        return result

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.fragments:
            destination[prefix + "codes"] = from_fragments(self.codes)
            for name in ("scales", "zeros"):
                if prefix + name in destination:
                    destination[prefix + name] = destination[prefix + name].contiguous()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self._plain()
        zeros = state_dict.get(prefix + "zeros")
        if zeros is None:
            self.zeros = None
        elif self.zeros is None and bits_of(self.codes) == 4:
            self.zeros = torch.zeros_like(self.scales, dtype=torch.uint8)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._order()

    # ---- a linear layer's face ----

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The numbers that the codes stand for, (out_features, in_features), in the scales' dtype."""
        return dequantize(self.codes, self.scales, self.zeros, self.fragments)

    def reset_parameters(self) -> None:
        """Nothing: codes have no initial distribution."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear_quantized(
            input,
            self.codes,
            self.scales,
            self.zeros,
            self.bias,
            fragments=self.fragments,
            ahead=self.fragments,
        )

    def extra_repr(self) -> str:
        bits = bits_of(self.codes)
        form = f"int{bits}"
        if bits == 4:
            form += f", group={self.in_features // max(self.scales.shape[1], 1)}"
            form += "" if self.zeros is None else ", zero points"
        return f"{super().extra_repr()}, {form}"
