"""The precision that the settings allow for float32 products, and its error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C

# In the order of Float32Precision in csrc/host/float32_precision.h.
LEVELS = (None, "highest", "high", "medium")

aten = torch.ops.aten
Products = dict[Any, tuple[int, ...]]
# Operators whose operands TF32 rounds, with the operands' positions among the arguments.
CONVOLUTIONS: Products = {aten.convolution: (0, 1), aten.convolution_backward: (0, 1, 2)}
MATRIX_PRODUCTS: Products = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
}

TF32_BITS = 11
# Operands of 20 bits have the error that sums of two TF32 numbers may have: 6e-7 of the result, twice
# the emulated error of the tensor cores' truncated sums.
SPLIT_BITS = 20


def set_float32_matmul_precision(precision: str | None) -> None:
    """The precision of float32 matrix products in ``linear`` and what is built on it, on CUDA.

    The levels are those of :func:`torch.set_float32_matmul_precision`. The setting holds for all
    threads of the process, forward and backward. It does not affect convolutions, attention, the CPU
    and native ops.

    Args:
        precision:
            - ``"highest"``: IEEE float32 (24 bits).
            - ``"high"``: each float32 number as the sum of two TF32 numbers. The three most
              significant products are added in float32: about 22 bits. IEEE float32 if there is no
              such kernel (GPUs other than Hopper, rows that do not start at multiples of 16 bytes,
              ``WARPWRIGHT_PATH=portable``) or if it would not be faster.
            - ``"medium"``: TF32 (11 bits).
            - ``None``: torch's setting, as native: IEEE float32 or TF32. The default.
    Raises:
        ValueError: any other value.
    """
    if precision not in LEVELS:
        wanted = ", ".join(map(repr, LEVELS[1:]))
        raise ValueError(f"precision: expected {wanted} or None, got {precision!r}")
    _C.set_float32_precision(LEVELS.index(precision))


def get_float32_matmul_precision() -> str | None:
    """The last value of :func:`set_float32_matmul_precision`; ``None``: torch's setting holds."""
    return LEVELS[_C.float32_precision()]


def linear_allows_tf32() -> bool:
    """Whether our linear may round float32 operands to TF32."""
    own = get_float32_matmul_precision()
    return own == "medium" or (own is None and matmul_allows_tf32())


def linear_splits_float32() -> bool:
    """Whether our linear may represent a float32 operand as the sum of two TF32 numbers."""
    return get_float32_matmul_precision() == "high"


def conv_allows_tf32() -> bool:
    """As ``torch.backends.cudnn.allow_tf32``, which raises once the newer setting was used.

    The setting is cuDNN's: with ``torch.backends.cudnn.enabled`` off, native computes IEEE float32.
    """
    cudnn: Any = torch.backends.cudnn
    return cudnn.enabled and cudnn.conv.fp32_precision == "tf32"


def matmul_allows_tf32() -> bool:
    """As ``torch.backends.cuda.matmul.allow_tf32``, which raises once the newer setting was used."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def tf32_products(device: torch.device) -> Products:
    """The operators that may round float32 operands to TF32 on ``device``."""
    if device.type != "cuda":
        return {}
    return (CONVOLUTIONS if conv_allows_tf32() else {}) | (
        MATRIX_PRODUCTS if linear_allows_tf32() else {}
    )


def split_products(device: torch.device) -> Products:
    """The operators that may represent float32 operands as sums of two TF32 numbers on ``device``."""
    return MATRIX_PRODUCTS if device.type == "cuda" and linear_splits_float32() else {}


def rounded_to_tf32(x: Tensor, kept: int = TF32_BITS) -> Tensor:
    """A float64 tensor rounded to nearest, to TF32's 11 bits or to ``kept`` bits."""
    dropped = 53 - kept
    bits = (x.detach().view(torch.int64) + (1 << (dropped - 1))) & -(1 << dropped)
    return torch.where(x.isfinite(), bits.view(torch.float64), x)


class Tf32Products(TorchDispatchMode):
    """Inside, float64 ``products`` round their operands to TF32, ``split`` ones to SPLIT_BITS.

    Everything else stays exact. The result is that of a perfect TF32 kernel, so its distance from the
    exact result is the error that the setting allows.
    """

    def __init__(self, products: Products, split: Products) -> None:
        super().__init__()
        self.products = products
        self.split = split

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        kept, places = TF32_BITS, self.products.get(func.overloadpacket, ())
        if not places:
            kept, places = SPLIT_BITS, self.split.get(func.overloadpacket, ())
        rounded = [
            rounded_to_tf32(a, kept) if i in places and a.dtype == torch.float64 else a
            for i, a in enumerate(args)
        ]
        result = func(*rounded, **kwargs)
        if places and func.overloadpacket is aten.convolution_backward and args[-1][2]:
            # The bias gradient is a sum, not a product.
            result = (*result[:2], func(*args[:-1], [False, False, True], **kwargs)[2])
        return result


class KeepsDouble(TorchFunctionMode):
    """Inside, calls that would convert a float64 tensor to float32 leave it in float64.

    Norms and softmax of many libraries compute in float32 by name. With this mode the float64 copy
    of such a model is exact.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
