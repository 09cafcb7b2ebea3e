"""Cases of convolution by transforms. Native's form is a chain of torch.fft calls; docs/kernels/fft_conv.md
has direct convolution next to both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _work
from .cases import NCHW, ROWS, Case, Inputs, _randn


def fast_size(points: int) -> int:
    """The smallest even product of 2, 3, 5 and 7 from ``points`` on."""
    best = 1 << max(points - 1, 1).bit_length()
    for a in (1, 3, 9, 27, 81):
        for b in (1, 5, 25):
            for c in (1, 7):
                size = 2 * a * b * c
                while size < points:
                    size *= 2
                best = min(best, size)
    return best


def fft_chain(x: Tensor, weight: Tensor, bias: Tensor, before: tuple[int, ...]) -> Tensor:
    """Depthwise convolution by torch.fft, with ``before`` zeros before each dimension. The windows
    wrap into those zeros, so the other side needs none."""
    dims = tuple(range(2, x.dim()))
    double = x.dtype == torch.float64
    wide = x if double else x.float()
    ends = [n for pad in reversed(before) for n in (pad, 0)]
    sizes = [fast_size(x.shape[d] + pad) for d, pad in zip(dims, before, strict=True)]
    padded = torch.nn.functional.pad(wide, ends)
    signal = torch.fft.rfftn(padded, s=sizes, dim=dims)
    kernel = torch.fft.rfftn(weight[:, 0].to(wide.dtype), s=sizes, dim=[d - 1 for d in dims])
    y = torch.fft.irfftn(signal * kernel.conj(), s=sizes, dim=dims)
    for d in dims:
        y = y.narrow(d, 0, x.shape[d])
    return (y + bias.view(-1, *[1] * len(dims)).to(wide.dtype)).to(x.dtype)


def _fft_conv(
    op: str, shape: tuple[int, ...], taps: tuple[int, ...], padding: str, dtype: torch.dtype
) -> Case:
    """Depthwise; as many outputs as inputs."""
    c = shape[1]
    before = tuple(s - 1 if padding == "causal" else (s - 1) // 2 for s in taps)
    elements = torch.Size(shape).numel()
    weights = c * torch.Size(taps).numel()
    work = _work.product(elements, weights, elements, 0.0, dtype.itemsize)

    def make(device: str) -> Inputs:
        weight = torch.randn(c, 1, *taps, device=device) / torch.Size(taps).numel() ** 0.5
        return {
            "x": _randn(shape, dtype, device),
            "weight": weight.to(dtype).requires_grad_(),
            "bias": _randn((c,), dtype, device),
        }

    def call(F: Any, i: Inputs) -> Tensor:
        return getattr(F, op)(i["x"], i["weight"], i["bias"], padding=padding, groups=c)  # type: ignore[no-any-return]

    return Case(
        op,
        f"{'x'.join(map(str, shape))} k{'x'.join(map(str, taps))} {padding}",
        dtype,
        NCHW if len(taps) == 2 else ROWS,
        make,
        call,
        work.of("bytes"),
        native=lambda F, i: fft_chain(i["x"], i["weight"], i["bias"], before),
    )


def _fft_conv1d(shape: tuple[int, int, int], taps: int, dtype: torch.dtype) -> Case:
    return _fft_conv("fft_conv1d", shape, (taps,), "causal", dtype)


def _fft_conv2d(shape: tuple[int, int, int, int], taps: int, dtype: torch.dtype) -> Case:
    return _fft_conv("fft_conv2d", shape, (taps, taps), "same", dtype)
