"""Backward passes by hand: from the gradient of the output to the gradient of the input.

Use tensor functions, not autograd. docs/learn/autograd.md has the pattern.
"""

from __future__ import annotations

from torch import Tensor


def softmax(y: Tensor, dy: Tensor) -> Tensor:
    """dx of y = softmax(x, -1), from the output y alone."""
    raise NotImplementedError


def rms_norm(x: Tensor, dy: Tensor, eps: float) -> Tensor:
    """dx of y = x / sqrt(mean(x², -1) + eps)."""
    raise NotImplementedError


def broadcast(dy: Tensor, shape: tuple[int, ...]) -> Tensor:
    """db of y = x + b, where b has ``shape`` and was broadcast to dy's shape."""
    raise NotImplementedError
