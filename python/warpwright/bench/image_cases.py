"""Cases of images: transposed convolutions, global pools, squeeze-and-excitation, ConvNeXt-T, first layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _squeeze_excitation, _work
from .cases import BF16, FP32, NCHW, NHWC, Case, Inputs, _conv2d, _randn

Forms = tuple[str, str]
EFFICIENTNET: Forms = ("silu", "sigmoid")
MOBILENET: Forms = ("relu", "hardsigmoid")


def _squeezed(
    shape: tuple[int, int, int, int],
    squeezed: int,
    dtype: torch.dtype,
    layout: str,
    forms: Forms = EFFICIENTNET,
) -> Case:
    """Weights in the input's type. The fewest bytes: an image on chip between mean and product."""
    e = torch.Size(shape).numel() * dtype.itemsize
    channels = shape[1]

    def make(device: str) -> Inputs:
        return {
            "x": _randn(shape, dtype, device, layout),
            "w1": _randn((squeezed, channels, 1, 1), dtype, device) / channels**0.5,
            "b1": _randn((squeezed,), dtype, device),
            "w2": _randn((channels, squeezed, 1, 1), dtype, device) / squeezed**0.5,
            "b2": _randn((channels,), dtype, device),
        }

    def native(F: Any, i: Inputs) -> Tensor:
        scale = F.adaptive_avg_pool2d(i["x"], 1)
        scale = getattr(F, forms[0])(F.conv2d(scale, i["w1"], i["b1"]))
        scale = F.conv2d(scale, i["w2"], i["b2"])
        result: Tensor = _squeeze_excitation.SCALE_ACTIVATIONS[forms[1]](scale) * i["x"]
        return result

    return Case(
        "squeeze_excitation",
        f"{'x'.join(map(str, shape))}, {squeezed} squeezed",
        dtype,
        layout,
        make,
        lambda F, i: F.squeeze_excitation(*i.values(), *forms),
        _work.traffic(e, 2, 3).of("bytes"),
        native=native,
    )


def _layer_scaled(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    layout: str,
    scales_samples: bool = False,
) -> Case:
    """A block's end under autocast: the residual and the scale stay float32.

    The fewest bytes: input, residual and output; the gradient of the output, the input and its
    gradient. The residual's gradient is the output's.
    """
    size = torch.Size(shape).numel()
    narrow, wide = size * dtype.itemsize, size * 4

    def make(device: str) -> Inputs:
        inputs = {
            "x": _randn(shape, dtype, device, layout),
            "residual": _randn(shape, FP32, device, layout),
            "scale": _randn((shape[1], 1, 1), FP32, device),
        }
        if scales_samples:
            kept = torch.rand((shape[0], 1, 1, 1), device=device) < 0.9
            inputs["sample_scale"] = (kept / 0.9).to(dtype)
        return inputs

    def native(F: Any, i: Inputs) -> Tensor:
        scaled = i["scale"] * i["x"]
        if scales_samples:
            scaled = scaled * i["sample_scale"]
        result: Tensor = i["residual"] + scaled
        return result

    return Case(
        "layer_scale_add",
        "x".join(map(str, shape)) + (", factors of samples" if scales_samples else ""),
        dtype,
        layout,
        make,
        lambda F, i: F.layer_scale_add(*i.values()),
        {"fwd": narrow + 2 * wide, "bwd": 2 * narrow + wide},
        native=native,
    )


def _global_pooled(shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str) -> Case:
    """The last pool of a network. Each direction moves the images and a number per plane."""
    moved = (torch.Size(shape).numel() + shape[0] * shape[1]) * dtype.itemsize
    return Case(
        "adaptive_avg_pool2d",
        "x".join(map(str, shape)),
        dtype,
        layout,
        lambda device: {"x": _randn(shape, dtype, device, layout)},
        lambda F, i: F.adaptive_avg_pool2d(i["x"], 1),
        {"fwd": moved, "bwd": moved},
    )


# (channels, side)
_OF_CONVNEXT = ((96, 56), (192, 28), (384, 14), (768, 7))


# (channels, squeezed, side)
_OF_EFFICIENTNET = (
    *((32, 8, 112), (96, 4, 56), (144, 6, 56), (144, 6, 28), (240, 10, 28)),
    *((480, 20, 14), (672, 28, 14), (1152, 48, 7)),
)
_OF_MOBILENET = ((72, 24, 28), (120, 32, 28), (480, 120, 14), (672, 168, 14), (960, 240, 7))


def _first_layer(shape: tuple[int, int, int, int], out: int, k: int, layout: str) -> Case:
    """Convolution, batch norm, relu and a pool of 2x2 of images that need no gradient, in training.

    Native calls one after the other. The fewest bytes: the image twice, and the pooled output with
    a byte per element.
    """
    plain = _conv2d(shape, out, k, 1, k // 2, FP32, layout)
    n, _, h, w = shape
    bytes = 2 * torch.Size(shape).numel() * 4 + n * out * (h // 2) * (w // 2) * 5

    def make(device: str) -> Inputs:
        inputs = plain.make(device)
        norm = {name: _randn((out,), FP32, device) for name in ("gamma", "beta")}
        return {"x": inputs["x"].detach(), "weight": inputs["weight"], **norm}

    def call(F: Any, i: Inputs) -> Tensor:
        result: Tensor = F.conv2d_batch_norm_relu_max_pool2d(
            i["x"],
            i["weight"],
            padding=k // 2,
            pool_kernel_size=2,
            norm_weight=i["gamma"],
            norm_bias=i["beta"],
            training=True,
        )
        return result

    def native(F: Any, i: Inputs) -> Tensor:
        y = F.conv2d(i["x"], i["weight"], None, 1, k // 2)
        y = F.batch_norm(y, None, None, i["gamma"], i["beta"], True)
        result: Tensor = F.max_pool2d(F.relu(y), 2)
        return result

    return Case(
        "conv2d_batch_norm_relu_max_pool2d",
        f"{'x'.join(map(str, shape))}->{out} k{k}",
        FP32,
        layout,
        make,
        call,
        {"fwd": bytes, "bwd": bytes},
        {"fwd": plain.flops["fwd"], "bwd": plain.flops["fwd"]},
        native=native,
        kinked=True,
    )


def _transposed(
    shape: tuple[int, int, int, int],
    out: int,
    k: int,
    s: int,
    p: int,
    dtype: torch.dtype,
    layout: str,
) -> Case:
    """A layer whose input, weight and bias need gradients."""
    n, c, h, w = shape
    size = [(side - 1) * s - 2 * p + k for side in (h, w)]
    output = n * out * size[0] * size[1]
    flops = 2.0 * n * h * w * c * out * k * k
    work = _work.product(n * c * h * w, c * out * k * k, output, flops, dtype.itemsize)

    def make(device: str) -> Inputs:
        weight = torch.randn(c, out, k, k, device=device).to(dtype) / (c * (k / s) ** 2) ** 0.5
        if layout == NHWC:
            weight = weight.contiguous(memory_format=torch.channels_last)
        return {
            "x": _randn(shape, dtype, device, layout),
            "weight": weight.requires_grad_(),
            "bias": _randn((out,), dtype, device),
        }

    return Case(
        "conv_transpose2d",
        f"{'x'.join(map(str, shape))}->{out} k{k}s{s}{f'p{p}' if p else ''}",
        dtype,
        layout,
        make,
        lambda F, i: F.conv_transpose2d(i["x"], i["weight"], i["bias"], s, p),
        work.of("bytes"),
        work.of("flops"),
        lambda i: {**i, "x": i["x"].detach()[:4].requires_grad_()},
    )


def _upsampled_cat(
    shape: tuple[int, int, int, int], out: int, dtype: torch.dtype, layout: str
) -> Case:
    """A decoder's 2 x 2 upsampling and the concatenation with as many channels of the encoder.

    The fewest bytes: the layer's, and the other operand once each way; its gradient is a view.
    """
    plain = _transposed(shape, out, 2, 2, 0, dtype, layout)
    n, _, h, w = shape
    kept = n * out * 4 * h * w * dtype.itemsize

    def make(device: str) -> Inputs:
        return {"skip": _randn((n, out, 2 * h, 2 * w), dtype, device, layout), **plain.make(device)}

    def native(F: Any, i: Inputs) -> Tensor:
        return torch.cat([i["skip"], F.conv_transpose2d(i["x"], i["weight"], i["bias"], 2)], 1)

    return Case(
        "conv_transpose2d_cat",
        f"{'x'.join(map(str, shape))}->{out} k2s2 cat {out}",
        dtype,
        layout,
        make,
        lambda F, i: F.conv_transpose2d_cat(i["skip"], i["x"], i["weight"], i["bias"], 2),
        {"fwd": plain.bytes["fwd"] + 2 * kept, "bwd": plain.bytes["bwd"]},
        plain.flops,
        native=native,
    )


# The decoder of a U-Net of width 64 (batch 16, 256 x 256): channels, side, channels out.
_OF_UNET = ((512, 32, 256), (256, 64, 128), (128, 128, 64))
# The generator of a DCGAN of width 64 (batch 128, 64 x 64).
_OF_DCGAN = ((512, 4, 256), (256, 8, 128), (128, 16, 64), (64, 32, 3))


IMAGES = [
    *(_transposed((16, c, n, n), k, 2, 2, 0, BF16, NHWC) for c, n, k in _OF_UNET),
    *(_upsampled_cat((16, c, n, n), k, BF16, NHWC) for c, n, k in _OF_UNET),
    _upsampled_cat((16, 128, 128, 128), 64, BF16, NCHW),
    _transposed((16, 128, 128, 128), 64, 2, 2, 0, BF16, NCHW),
    _transposed((16, 128, 128, 128), 64, 2, 2, 0, FP32, NHWC),
    *(_transposed((128, c, n, n), k, 4, 2, 1, BF16, NHWC) for c, n, k in _OF_DCGAN),
    *(_squeezed((256, c, n, n), s, BF16, NHWC) for c, s, n in _OF_EFFICIENTNET),
    *(_squeezed((256, c, n, n), s, BF16, NHWC, MOBILENET) for c, s, n in _OF_MOBILENET),
    _squeezed((256, 144, 56, 56), 6, BF16, NCHW),
    _squeezed((256, 144, 56, 56), 6, FP32, NHWC),
    *(_global_pooled((256, c, 7, 7), BF16, NHWC) for c in (2048, 1280, 960, 768)),
    *(_global_pooled((256, 2048, 7, 7), *form) for form in ((BF16, NCHW), (FP32, NHWC))),
    *(_layer_scaled((128, c, n, n), BF16, NHWC) for c, n in _OF_CONVNEXT),
    _layer_scaled((128, 96, 56, 56), BF16, NHWC, scales_samples=True),
    *(_first_layer((1024, 1, 28, 28), 32, 3, layout) for layout in (NHWC, NCHW)),
    *(_first_layer((1024, 1, 28, 28), 32, 5, layout) for layout in (NHWC, NCHW)),
    *(_first_layer((1024, 3, 32, 32), 64, 3, layout) for layout in (NHWC, NCHW)),
]
SMALL_IMAGES = [
    _transposed((4, 32, 16, 16), 16, 2, 2, 0, FP32, NHWC),
    _transposed((4, 32, 16, 16), 16, 4, 2, 1, FP32, NCHW),
    _upsampled_cat((4, 32, 16, 16), 16, FP32, NHWC),
    _squeezed((8, 96, 28, 28), 4, FP32, NCHW),
    _squeezed((8, 96, 28, 28), 4, FP32, NHWC, MOBILENET),
    *(_global_pooled((8, 256, 7, 7), FP32, layout) for layout in (NHWC, NCHW)),
    _layer_scaled((8, 96, 28, 28), FP32, NHWC, scales_samples=True),
    *(_first_layer((64, 1, 28, 28), 32, 3, layout) for layout in (NHWC, NCHW)),
]
