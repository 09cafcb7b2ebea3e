"""A small call per function, whose overhead is measured: its label, arguments and keywords."""

from __future__ import annotations

import torch
from torch import Tensor

from ._op import Example


def _leaf(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, requires_grad=True)


def relu(device: str) -> Example:
    return "4x8", (_leaf(device, 4, 8),), {}


def linear(device: str) -> Example:
    return "4x8 -> 8", (_leaf(device, 4, 8), _leaf(device, 8, 8), _leaf(device, 8)), {}


def conv2d(device: str) -> Example:
    operands = (_leaf(device, 1, 4, 6, 6), _leaf(device, 4, 4, 3, 3), _leaf(device, 4))
    return "1x4x6x6 -> 4, 3x3", operands, {"padding": 1}


def conv_transpose2d(device: str) -> Example:
    operands = (_leaf(device, 1, 4, 6, 6), _leaf(device, 4, 4, 2, 2), _leaf(device, 4))
    return "1x4x6x6 -> 4, 2x2, stride 2", operands, {"stride": 2}


def batch_norm(device: str) -> Example:
    statistics = torch.zeros(4, device=device), torch.ones(4, device=device)
    affine = _leaf(device, 4), _leaf(device, 4)
    return "1x4x6x6", (_leaf(device, 1, 4, 6, 6), *statistics, *affine, True), {}


def layer_norm(device: str) -> Example:
    return "4x8", (_leaf(device, 4, 8), (8,), _leaf(device, 8), _leaf(device, 8)), {}


def rms_norm(device: str) -> Example:
    return "4x8", (_leaf(device, 4, 8), (8,), _leaf(device, 8)), {}


def group_norm(device: str) -> Example:
    affine = _leaf(device, 4), _leaf(device, 4)
    return "1x4x6x6, 2 groups", (_leaf(device, 1, 4, 6, 6), 2, *affine), {}


def instance_norm(device: str) -> Example:
    return "1x4x6x6", (_leaf(device, 1, 4, 6, 6),), {}


def embedding(device: str) -> Example:
    return "4 of 8x8", (torch.tensor([0, 1, 1, 7], device=device), _leaf(device, 8, 8)), {}


def softmax(device: str) -> Example:
    return "4x8", (_leaf(device, 4, 8), 1), {}


def max_pool2d(device: str) -> Example:
    return "1x4x6x6, 2", (_leaf(device, 1, 4, 6, 6), 2), {}


def adaptive_avg_pool2d(device: str) -> Example:
    return "1x4x6x6, 1", (_leaf(device, 1, 4, 6, 6), 1), {}


def cross_entropy(device: str) -> Example:
    return "4x8", (_leaf(device, 4, 8), torch.tensor([0, 1, 2, 3], device=device)), {}


def attention(device: str) -> Example:
    return "1x1x8x16", tuple(_leaf(device, 1, 1, 8, 16) for _ in range(3)), {}
