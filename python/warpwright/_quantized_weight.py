"""Weights in integer codes: their forms in memory, and linear_quantized in ATen's functions.

=========  =====================================================================================
int8       codes (N, K) int8, scales (N): ``w = q * s``
int4       codes (N, K / 2) uint8, the low nibble is the even column; scales (N, K / group);
           zeros likewise in uint8, or None: ``w = (q - z) * s`` with z = 8 if there are none
fragments  the same bytes in the order of the A operands of ``mma.m16n8k16``
           (csrc/ops/linear_quantized/linear_quantized.h), in a tensor of the same shape
=========  =====================================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

FEATURES = 16  # of a block of fragments


def bits_of(codes: Tensor) -> int:
    return 8 if codes.dtype == torch.int8 else 4


def pack_pairs(q: Tensor) -> Tensor:
    """(N, K) of 0..15 to (N, K / 2)."""
    q = q.to(torch.uint8)
    return q[..., 0::2] | (q[..., 1::2] << 4)


def unpack_pairs(codes: Tensor) -> Tensor:
    """(N, K / 2) to (N, K) of 0..15."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def has_fragments(codes: Tensor) -> bool:
    """Whether the codes are whole blocks of 16 features by 64 k (int4) or 32 k (int8)."""
    return codes.shape[0] % FEATURES == 0 and codes.shape[1] % 32 == 0 and codes.numel() > 0


def to_fragments(codes: Tensor) -> Tensor:
    """Plain codes in fragment order, contiguous."""
    outputs, columns = codes.shape
    if bits_of(codes) == 8:
        # (block, feature / 8, g, block of k, t, word, byte)
        v = codes.view(torch.uint8).reshape(-1, 2, 8, columns // 32, 4, 2, 4)
        v = v.permute(0, 3, 2, 4, 5, 1, 6) ^ 0x80
        return v.reshape(outputs, columns).view(torch.int8)
    # A k is 64 block + 32 c + 8 t + 4 word + 2 i1 + i0, and i0 is the nibble of the plain byte.
    v = codes.reshape(-1, 2, 8, columns // 32, 2, 4, 2, 2)
    v = v.permute(0, 3, 2, 5, 4, 6, 7, 1)  # (block, block of k, g, t, c, word, i1, feature / 8)
    even = (v[..., 0] & 15) | ((v[..., 1] & 15) << 4)
    odd = (v[..., 0] >> 4) | (v[..., 1] & 0xF0)
    return torch.stack((even, odd), -2).reshape(outputs, columns)


def from_fragments(codes: Tensor) -> Tensor:
    """Codes in fragment order in their plain order."""
    outputs, columns = codes.shape
    if bits_of(codes) == 8:
        v = codes.view(torch.uint8).reshape(-1, columns // 32, 8, 4, 2, 2, 4)
        v = v.permute(0, 5, 2, 1, 3, 4, 6) ^ 0x80
        return v.reshape(outputs, columns).view(torch.int8)
    v = codes.reshape(-1, columns // 32, 8, 4, 2, 2, 2, 2)
    even, odd = v[..., 0, :], v[..., 1, :]  # (block, block of k, g, t, c, word, i1)
    first = (even & 15) | ((odd & 15) << 4)
    second = (even >> 4) | (odd & 0xF0)
    v = torch.stack((first, second), 1)  # the features g, then g + 8
    return v.permute(0, 1, 3, 2, 5, 4, 6, 7).reshape(outputs, columns)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    fragments: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The weight (N, K). ``dtype``: the scales'. The product is rounded once."""
    dtype = scales.dtype if dtype is None else dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if fragments:
        codes = from_fragments(codes)
    if bits_of(codes) == 8:
        return (codes.to(wide) * scales.to(wide)[:, None]).to(dtype)
    q = unpack_pairs(codes)
    q = q.unflatten(1, (scales.shape[1], -1)) if q.shape[1] else q[:, None]
    offset = 8 if zeros is None else zeros.to(wide)[..., None]
    return ((q.to(wide) - offset) * scales.to(wide)[..., None]).flatten(1).to(dtype)


# ---- the operators ----


def linear_quantized(
    input: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    fragments: bool = False,
    ahead: bool = False,
) -> Tensor:
    weight = dequantize(codes, scales, zeros, fragments, input.dtype)
    return torch.nn.functional.linear(input, weight, bias)


def linear_quantized_backward(
    grad: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    fragments: bool = False,
) -> Tensor:
    return grad @ dequantize(codes, scales, zeros, fragments, grad.dtype)
