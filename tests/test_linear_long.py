"""linear in sizes of transformers: large tiles, a long k in parts, and shared row sums."""

import re

import pytest
import torch

import warpwright.functional as F
from warpwright import _C
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.linear

# (rows, in, out). The last rows and columns of tiles are ragged in some.
SIZES = [
    (16384, 768, 3072),
    (16384, 3072, 768),
    (16384, 768, 768),
    (16384, 768, 2304),
    (8200, 776, 1032),
    (4096, 4096, 1024),
    (4096, 50304, 768),
    (32768, 1024, 1024),
]
HALF = [torch.bfloat16, torch.float16]
ROLES = ("forward", "grad_input", "grad_weight")


def operands(rows, k, n, dtype, integers=False):
    return [
        (torch.randint(-3, 4, s, device="cuda") if integers else torch.randn(s, device="cuda"))
        .to(dtype)
        .requires_grad_()
        for s in ((rows, k), (n, k), (n,))
    ]


def gradients(function, inputs):
    y = function(*inputs)
    dy = (torch.arange(y.numel(), device="cuda") % 5 - 2).to(y.dtype).view(y.shape)
    return [y, *torch.autograd.grad(y, inputs, dy)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values(sizes, dtype):
    compare_with_native(F.linear, native, operands(*sizes, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_integers_are_exact_and_repeat(sizes, dtype):
    inputs = operands(*sizes, dtype, integers=True)
    found = gradients(F.linear, inputs)
    exact = gradients(native, [t.detach().double().requires_grad_() for t in inputs])
    # A sum of one product may be -0.
    assert_same([t + 0 for t in found], [t.to(dtype) + 0 for t in exact])
    noise = operands(*sizes, dtype)
    first = gradients(F.linear, noise)
    for _ in range(3):
        assert_same(gradients(F.linear, noise), first)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_activations(sizes, activation):
    ours = getattr(F, f"linear_{activation}")
    theirs = getattr(torch.nn.functional, activation)
    inputs = operands(*sizes, torch.bfloat16)
    compare_with_native(ours, lambda *x: theirs(native(*x)), inputs)


def tiles(rows, k, n):
    x, w = _C.Operand([rows, k], [k, 1], 0), _C.Operand([n, k], [k, 1], 0)
    lines = dict(_C.explain_linear("bfloat16", False, x, w, _C.DeviceInfo(), True))
    return {role: lines[role] for role in ROLES}


def test_the_sizes_reach_large_tiles_and_parts():
    found = [(role, text) for sizes in SIZES for role, text in tiles(*sizes).items()]
    sizes = {re.search(r"tile (\d+x\d+)", text)[1] for _, text in found}
    assert {"128x128", "128x256", "128x192"} <= sizes
    assert any("split-k" in text for role, text in found if role == "grad_weight")
