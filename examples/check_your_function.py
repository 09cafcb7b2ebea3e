"""Holds a function of your own to the rule that warpwright's ops are held to.

    python examples/check_your_function.py

Three checks. gradcheck compares the derivative with finite differences. compare_with_native allows 1.5 times the
error of a reference implementation, measured against float64, for the result and every gradient. assert_same asks for
equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native


class SquaredReLU(torch.autograd.Function):
    """relu(x)², with a backward written by hand."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * F.relu(x)


def reference(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def wrong(x: Tensor) -> Tensor:
    """Right within 0.01 %, which a comparison with a wide tolerance does not notice."""
    return reference(x) * 1.0001


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    x = torch.randn(4, 8, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(SquaredReLU.apply, (x,))
    print("gradcheck: the derivative is right")

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 256, dtype=dtype, device=device, requires_grad=True)
        compare_with_native(SquaredReLU.apply, reference, [x])
        print(f"{dtype}: as exact as the reference")

    x = torch.randn(64, 256, device=device, requires_grad=True)
    try:
        compare_with_native(wrong, reference, [x])
    except AssertionError as error:
        print(f"the wrong one is found: {error}")

    assert_same(SquaredReLU.apply(x), SquaredReLU.apply(x))
    print("two runs: the same bits")
    print(warpwright.explain("relu", x))


if __name__ == "__main__":
    main()
