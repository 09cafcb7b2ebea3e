"""Calls of conv2d_batch_norm_relu_max_pool2d, and the chain of native ops that it replaces."""

import pytest
import torch
from torch import nn

import warpwright.functional as F

native = nn.functional
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)

POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)

# Input channels, window, padding, output channels, images, height, width: the sizes of a tile and
# below, several tiles, odd extents, whose last row no pool window reaches, and a single window.
SHAPES = {
    "mnist": (1, 3, 1, 32, 5, 28, 28),
    "odd": (1, 3, (0, 2), 12, 3, 9, 12),
    "wide": (1, 3, 1, 8, 2, 37, 151),
    "one_window": (1, 3, 0, 4, 3, 4, 5),
    "many_channels": (1, 3, 1, 512, 2, 6, 6),
    "lenet": (1, 5, 2, 20, 4, 28, 28),
    "lenet_valid": (1, 5, 0, 8, 3, 13, 19),
    "cifar": (3, 3, 1, 64, 3, 32, 32),
    "cifar_valid": (3, 3, 0, 4, 2, 9, 70),
    "many_images": (1, 3, 1, 16, 700, 8, 6),
}
every_shape = pytest.mark.parametrize("name", SHAPES)


def operands(name, layout, device="cpu", dtype=torch.float64, offset=0.0):
    """Image, weight, bias, the norm's weight and bias."""
    c, window, padding, k, n, h, w = SHAPES[name]
    generator = torch.Generator().manual_seed(n + k)

    def t(*sizes):
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    x, weight = t(n, c, h, w) + offset, t(k, c, window, window) / (c * window**2) ** 0.5
    vectors = t(k), t(k), t(k) / 2 + 0.3
    x, weight = (v.to(memory_format=LAYOUTS[layout]) for v in (x, weight))
    parameters = [v.to(device, dtype).requires_grad_() for v in (weight, *vectors)]
    return [x.to(device, dtype), *parameters], padding


def statistics(k, device, dtype):
    return [torch.full((k,), value, device=device, dtype=dtype) for value in (0.5, 2.0)]


def chain(x, weight, bias, norm_weight, norm_bias, padding, stats=(None, None), pool=2):
    y = native.conv2d(x, weight, bias, 1, padding)
    y = native.batch_norm(y, *stats, norm_weight, norm_bias, training=True, momentum=0.3)
    return native.max_pool2d(native.relu(y), pool)


def fused(x, weight, bias, norm_weight, norm_bias, padding, stats=(None, None), pool=2):
    return F.conv2d_batch_norm_relu_max_pool2d(
        *(x, weight, bias, 1, padding),
        pool_kernel_size=pool,
        **dict(zip(("running_mean", "running_var"), stats, strict=True)),
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        training=True,
        momentum=0.3,
    )


def step(function, tensors, padding):
    """Output, running statistics, and the gradients of the four parameters."""
    x, weight, *vectors = tensors
    stats = statistics(weight.shape[0], x.device, x.dtype)
    y = function(x, weight, *vectors, padding, stats)
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    dy = dy.to(y).contiguous(memory_format=LAYOUTS["nhwc"])
    parameters = [t for t in (weight, *vectors) if t is not None]
    return y.detach(), *stats, *torch.autograd.grad(y, parameters, dy)
