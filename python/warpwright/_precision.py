"""The precision that the settings allow to float32 products, and the error that goes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import _C

# In the order of Float32Precision in csrc/host/float32_precision.h.
LEVELS = (None, "highest", "high", "medium")

aten = torch.ops.aten
Products = dict[Any, tuple[int, ...]]
# Operators whose operands TF32 rounds, and where these stand among the arguments.
CONVOLUTIONS: Products = {aten.convolution: (0, 1), aten.convolution_backward: (0, 1, 2)}
MATRIX_PRODUCTS: Products = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
}

TF32_BITS = 11
# Operands of so many bits cost what sums of two TF32 numbers may: 6e-7 of the result, twice what
# the cut sums of tensor cores cost when emulated.
SPLIT_BITS = 20


def set_float32_matmul_precision(precision: str | None) -> None:
    """The precision of float32 matrix products in ``linear`` and what is built on it, on CUDA.

    The levels are those of :func:`torch.set_float32_matmul_precision`. It holds for all threads of
    the process, forward and backward, and leaves convolutions, attention, the CPU and native ops
    as they are.

    Args:
        precision:
            - ``"highest"``: IEEE float32 (24 bits).
            - ``"high"``: each float32 number as the sum of two TF32 numbers, of whose products the
              three most significant are kept: about 22 bits, added in float32. Where there is no
              such kernel (GPUs other than Hopper, rows that do not start at multiples of 16 bytes,
              ``WARPWRIGHT_PATH=portable``) or it would not be faster: IEEE float32.
            - ``"medium"``: TF32 (11 bits).
            - ``None``: what torch is set to, as native: IEEE float32 or TF32. The default.
    Raises:
        ValueError: another value.
    """
    if precision not in LEVELS:
        wanted = ", ".join(map(repr, LEVELS[1:]))
        raise ValueError(f"precision: expected {wanted} or None, got {precision!r}")
    _C.set_float32_precision(LEVELS.index(precision))


def get_float32_matmul_precision() -> str | None:
    """What :func:`set_float32_matmul_precision` was given last; ``None``: torch's setting holds."""
    return LEVELS[_C.float32_precision()]


def linear_allows_tf32() -> bool:
    """Whether our linear may round float32 operands to TF32."""
    own = get_float32_matmul_precision()
    return own == "medium" or (own is None and matmul_allows_tf32())


def linear_splits_float32() -> bool:
    """Whether our linear may take a float32 operand for the sum of two TF32 numbers."""
    return get_float32_matmul_precision() == "high"


def conv_allows_tf32() -> bool:
    """``torch.backends.cudnn.allow_tf32``, which raises once the newer setting was used.

    It speaks for cuDNN: with ``torch.backends.cudnn.enabled`` off, native computes IEEE float32.
    """
    cudnn: Any = torch.backends.cudnn
    return cudnn.enabled and cudnn.conv.fp32_precision == "tf32"


def matmul_allows_tf32() -> bool:
    """``torch.backends.cuda.matmul.allow_tf32``, which raises once the newer setting was used."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def tf32_products(device: torch.device) -> Products:
    """The operators that may round float32 operands to TF32 on ``device``."""
    if device.type != "cuda":
        return {}
    return (CONVOLUTIONS if conv_allows_tf32() else {}) | (
        MATRIX_PRODUCTS if linear_allows_tf32() else {}
    )


def split_products(device: torch.device) -> Products:
    """The operators that may take float32 operands for sums of two TF32 numbers on ``device``."""
    return MATRIX_PRODUCTS if device.type == "cuda" and linear_splits_float32() else {}


def rounded_to_tf32(x: Tensor, kept: int = TF32_BITS) -> Tensor:
    """A float64 tensor rounded to TF32's 11 bits, or to as many as are ``kept``, to nearest."""
    dropped = 53 - kept
    bits = (x.detach().view(torch.int64) + (1 << (dropped - 1))) & -(1 << dropped)
    return torch.where(x.isfinite(), bits.view(torch.float64), x)


class Tf32Products(TorchDispatchMode):
    """Inside, float64 ``products`` round their operands to TF32, ``split`` ones to SPLIT_BITS.

    All else stays exact.

    What comes out is what the best of all TF32 kernels would give, so its distance from the exact
    result is the error that the setting allows.
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
