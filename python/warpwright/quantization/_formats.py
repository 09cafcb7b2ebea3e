"""The layouts in which other libraries store 4-bit weights, to and from the plain form.

==========  ============================================================================
GPTQ        ``qweight`` int32 (K / 8, N): nibble i is q[8 r + i, n]; ``qzeros`` (groups,
            N / 8) in order along n, as z - 1 in version 1; ``scales`` (groups, N)
AWQ         ``qweight`` int32 (K, N / 8) and ``qzeros`` (groups, N / 8): nibble i is of
            n = 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]; ``scales`` (groups, N)
tile-packed torch's ``_convert_weight_to_int4pack`` and torchao: int32 (N / 8, K / 128, 32,
            4), ``scale_and_zero`` (groups, N, 2) with w = (q - 8) * s + c
==========  ============================================================================
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._quantized_weight import pack_pairs, unpack_pairs
from ._quantizers import Codes

# Nibble i of a word holds element ORDER[i].
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NATURAL = tuple(range(8))


def _nibbles(what: str, words: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32 (...) to the eight elements of each word (..., 8), uint8."""
    if words.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{what}: expected words of torch.int32, got {words.dtype}")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    nibbles = (words[..., None] >> shifts) & 15
    inverse = sorted(range(8), key=order.__getitem__)
    return nibbles[..., inverse].to(torch.uint8)


def _words(elements: Tensor, order: tuple[int, ...]) -> Tensor:
    """The reverse: (..., 8) of 0..15 to int32."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=elements.device)
    words = (elements[..., list(order)].to(torch.int64) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _symmetric(zeros: Tensor) -> Tensor | None:
    return None if bool((zeros == 8).all()) else zeros


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, version: int = 1
) -> Codes:
    """The plain form of GPTQ's tensors.

    Args:
        qweight, qzeros, scales: as a checkpoint has them.
        g_idx: the group of each input feature. Features in another order than their groups'
            (``desc_act``) raise ValueError.
        version: 1 stores z - 1, 2 stores z (``checkpoint_format`` "gptq" and "gptq_v2").
    """
    if version not in (1, 2):
        raise ValueError(f"from_gptq: version: expected 1 or 2, got {version}")
    q = _nibbles("from_gptq: qweight", qweight.t(), NATURAL).flatten(1)
    group = q.shape[1] // scales.shape[0]
    if g_idx is not None:
        expected = torch.arange(q.shape[1], device=g_idx.device) // group
        if not torch.equal(g_idx.to(expected.dtype), expected):
            raise ValueError(
                "from_gptq: g_idx: expected groups of adjacent features; this checkpoint was made "
                "with desc_act, whose features are permuted"
            )
    zeros = _nibbles("from_gptq: qzeros", qzeros, NATURAL).flatten(1).t()
    zeros = ((zeros + (1 if version == 1 else 0)) & 15).contiguous()
    return pack_pairs(q), scales.t().contiguous(), _symmetric(zeros)


def to_gptq(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None, version: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """``qweight``, ``qzeros`` and ``scales`` of the plain form."""
    q = unpack_pairs(codes)
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if zeros is None else zeros
    stored = (zeros.t() - (1 if version == 1 else 0)) & 15
    qweight = _words(q.unflatten(1, (-1, 8)), NATURAL).t().contiguous()
    qzeros = _words(stored.unflatten(1, (-1, 8)), NATURAL)
    return qweight, qzeros, scales.t().contiguous()


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Codes:
    """The plain form of AWQ's tensors."""
    q = _nibbles("from_awq: qweight", qweight, ORDER).flatten(1).t()
    zeros = _nibbles("from_awq: qzeros", qzeros, ORDER).flatten(1).t().contiguous()
    return pack_pairs(q), scales.t().contiguous(), _symmetric(zeros)


def to_awq(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``qweight``, ``qzeros`` and ``scales`` of the plain form."""
    q = unpack_pairs(codes).t()
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if zeros is None else zeros
    qweight = _words(q.unflatten(1, (-1, 8)), ORDER)
    return qweight, _words(zeros.t().unflatten(1, (-1, 8)), ORDER), scales.t().contiguous()


def _tiles(q: Tensor) -> Tensor:
    """(N, K) as (N / 8, K / 128, lane, word, element): lane 4 (n % 8) + j holds in word i the k from
    32 i + 2 j: {0, 1, 8, 9, 16, 17, 24, 25}."""
    outputs, features = q.shape
    v = q.reshape(outputs // 8, 8, features // 128, 4, 4, 4, 2)  # (.., n, .., i, eighth, j, pair)
    return v.permute(0, 2, 1, 5, 3, 4, 6).reshape(outputs // 8, features // 128, 32, 4, 8)


def _untiled(tiles: Tensor) -> Tensor:
    rows, blocks = tiles.shape[:2]
    v = tiles.reshape(rows, blocks, 8, 4, 4, 4, 2).permute(0, 2, 1, 4, 5, 3, 6)
    return v.reshape(rows * 8, blocks * 128)


def from_tile_packed(
    packed: Tensor, scale_and_zero: Tensor, in_features: int | None = None
) -> Codes:
    """The plain form of ``torch._convert_weight_to_int4pack``'s tensor and of torchao's.

    Args:
        packed: (N / 8, K / 128, 32, 4) int32 (``inner_k_tiles`` 8).
        scale_and_zero: (groups, N, 2). Its zeros must be integers in units of the scale.
        in_features: cuts columns that torchao added to fill whole tiles.
    """
    scales, shift = scale_and_zero.float().unbind(-1)
    exact = 8 - shift / torch.where(scales == 0, torch.ones_like(scales), scales)
    zeros = exact.round()
    # A 16-bit shift is a rounded multiple of the scale.
    if bool(((zeros - exact).abs() > 0.05).any() | (zeros < 0).any() | (zeros > 15).any()):
        raise ValueError(
            "from_tile_packed: scale_and_zero: expected zeros that are integer codes from 0 to 15"
        )
    q = _untiled(_nibbles("from_tile_packed: packed", packed, ORDER))
    scales = scale_and_zero[..., 0].t()
    zeros = zeros.t().to(torch.uint8)
    if in_features is not None:
        groups = in_features * scales.shape[1] // q.shape[1]
        q, scales, zeros = q[:, :in_features], scales[:, :groups], zeros[:, :groups]
    return pack_pairs(q), scales.contiguous(), _symmetric(zeros.contiguous())


def to_tile_packed(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The packed tensor and ``scale_and_zero`` of the plain form, for ``_weight_int4pack_mm``."""
    packed = _words(_tiles(unpack_pairs(codes)), ORDER)
    offset = 0 if zeros is None else 8 - zeros.float()
    shift = (offset * scales.float()).to(scales.dtype).expand_as(scales)
    return packed, torch.stack((scales.t(), shift.t()), -1).contiguous()
