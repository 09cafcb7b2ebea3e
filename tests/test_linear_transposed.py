"""Weights that a layer holds transposed, as Conv1D does: their gradient has their layout."""

import pytest
import torch
from common import opcheck, subsets

import warpwright.functional as F
from warpwright.testing import assert_same

ops = torch.ops.warpwright
LOW = [torch.bfloat16, torch.float16]
low_types = pytest.mark.parametrize("low", LOW, ids=str)


def made(device, dtype, rows, features, outputs, integers=False):
    """x, W as the transpose of a dense matrix, and dy."""

    def rows_of(*shape):
        if integers:
            return torch.randint(-3, 4, shape, device=device).to(dtype)
        return torch.randn(shape, device=device).to(dtype)

    return rows_of(rows, features), rows_of(features, outputs).t(), rows_of(rows, outputs)


@pytest.mark.parametrize("mask", subsets(3), ids=str)
@pytest.mark.parametrize("shape", [(6, 16, 8), (1, 3, 2), (65, 1, 7), (65, 7, 1)], ids=str)
def test_gradients(device, dtype, shape, mask):
    """Values are those of a dense copy; integers make the orders of sums agree."""
    x, w, dy = made(device, dtype, *shape, integers=True)
    wides = [(False,) * 3] + [(True,) * 3, (False, True, False)] * (dtype in LOW)
    for wide in wides:
        grads = ops.linear_backward(dy, x, w, mask, wide)
        dense = ops.linear_backward(dy, x, w.contiguous(), mask, wide)
        assert_same([g for g in grads if g is not None], [g for g in dense if g is not None])
        if mask[1] and min(shape[1:]) > 1:
            follows = wide[1] or dtype not in LOW
            assert grads[1].stride() == (w.stride() if follows else (shape[1], 1))


def test_without_the_weight(device):
    x, _, dy = made(device, torch.float32, 6, 16, 8)
    grads = ops.linear_backward(dy, x, None, (False, True, True))
    assert grads[1].is_contiguous()
    part = made(device, torch.float32, 6, 16, 16)[1][:8]  # not dense
    assert ops.linear_backward(dy, x, part, (False, True, True))[1].is_contiguous()


@low_types
def test_the_engine_copies_nothing(device, low):
    parameter = torch.randn(16, 8, device=device, requires_grad=True)
    bias = torch.randn(8, device=device, requires_grad=True)
    x = torch.randn(2, 5, 16, device=device, requires_grad=True) * 1
    with torch.autocast(device, low):
        y = F.linear(x, parameter.t(), bias)
    y.float().square().sum().backward()
    assert parameter.grad.is_contiguous()
    expected = (2 * y.detach().double()).to(low).double()
    wanted = x.detach().to(low).double().flatten(0, 1).t() @ expected.flatten(0, 1)
    assert (parameter.grad - wanted).norm() <= 1e-2 * wanted.norm()


@low_types
def test_opcheck(device, low):
    x, w, dy = made(device, low, 6, 4, 5)
    opcheck(ops.linear_backward.default, (dy, x, w, (True,) * 3, (True,) * 3))
    opcheck(ops.linear_backward.default, (dy, x, w, (True,) * 3, (False,) * 3))
    x, w, dy = made(device, torch.float32, 6, 4, 5)
    opcheck(ops.linear_backward.default, (dy, x, w, (True,) * 3))


def test_compiled(device):
    """Strides of the traced gradient are those of the real one."""

    def run(x, parameter, bias):
        with torch.autocast(device, torch.bfloat16):
            return F.linear(x, parameter.t(), bias).float().square().sum()

    inputs = [torch.randn(s, device=device, requires_grad=True) for s in ((4, 16), (16, 8), (8,))]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    mine = torch.autograd.grad(compiled(*inputs), inputs)
    for a, b in zip(mine, torch.autograd.grad(run(*inputs), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@low_types
@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 8),
        (64, 128, 10),
        (96, 2056, 520),
        (1023, 333, 515),  # rows that TMA cannot load
        (65536, 384, 64),  # k is split
        (16384, 768, 768),  # split, with shares of the sums
        (4096, 2048, 1024),
        (16384, 768, 2304),
        (16384, 3072, 768),
        (5000, 1000, 1352),
    ],
    ids=str,
)
def test_kernels(low, shape, monkeypatch):
    x, w, dy = made("cuda", low, *shape)
    wanted = dy.double() @ w.double(), dy.double().t() @ x.double(), dy.double().sum(0)
    dense = ops.linear_backward(dy, x, w.contiguous(), (True,) * 3, (True,) * 3)
    for mask in subsets(3):
        grads = ops.linear_backward(dy, x, w, mask, (True,) * 3)
        for i, (grad, value) in enumerate(zip(grads, wanted, strict=True)):
            if not mask[i]:
                continue
            assert grad.dtype == torch.float32
            # Another choice of gradients may take another tile.
            assert (grad - value).norm() <= 1.5 * (dense[i] - value).norm()
        again = ops.linear_backward(dy, x, w, mask, (True,) * 3)
        assert_same([g for g in again if g is not None], [g for g in grads if g is not None])
    assert_same(ops.linear_backward(dy, x, w, (True,) * 3, (True,) * 3)[1], dense[1])
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    portable = ops.linear_backward(dy, x, w, (True,) * 3, (True,) * 3)
    portable_dense = ops.linear_backward(dy, x, w.contiguous(), (True,) * 3, (True,) * 3)
    for grad, other, value in zip(portable, portable_dense, wanted, strict=True):
        assert (grad - value).norm() <= 1.5 * (other - value).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("shape", [(64, 128, 10), (4096, 512, 768), (1023, 333, 515)], ids=str)
def test_float32_kernels(precision, shape):
    import warpwright

    x, w, dy = made("cuda", torch.float32, *shape)
    wanted = dy.double() @ w.double(), dy.double().t() @ x.double(), dy.double().sum(0)
    warpwright.set_float32_matmul_precision(precision)
    try:
        grads = ops.linear_backward(dy, x, w, (True,) * 3)
    finally:
        warpwright.set_float32_matmul_precision(None)
    assert grads[1].t().is_contiguous()
    for grad, value in zip(grads, wanted, strict=True):
        assert (grad - value).norm() <= (1e-3 if precision == "medium" else 1e-5) * value.norm()
