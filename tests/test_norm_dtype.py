"""layer_norm and rms_norm whose result has another dtype than their input."""

import pytest
import torch
import torch.nn.functional as native
from common import gradcheck, opcheck

import warpwright
import warpwright.functional as F
from warpwright import nn
from warpwright.testing import assert_same, compare_with_native

both = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Lanes of a warp, several warps, element accesses, rows that start inside vectors.
SHAPES = [((7, 5), 1), ((2, 3, 4, 8), 2), ((33, 64), 1), ((100, 768), 1), ((9, 1001), 1)]
# On a GPU: persistent blocks, a block per row, rows that no group holds.
LARGE = [
    ((3000, 2048), 1),
    ((700, 4096), 1),
    ((300, 8192), 1),
    ((270, 16384), 1),
    ((12, 40000), 1),
    ((5, 40001), 1),
]


def vectors(name, shape, device):
    count = 2 if name == "layer_norm" else 1
    return [torch.randn(shape, device=device, requires_grad=True) for _ in range(count)]


def rounded(name, shape, dtype):
    """Native's norm and a cast; float64 is the exact result."""

    def run(x, *v):
        y = getattr(native, name)(x, shape, *v)
        return y if y.dtype == torch.float64 else y.to(dtype)

    return run


def compare(name, shape, dims, dtype, device):
    normalized = shape[-dims:]
    x = (torch.randn(shape, device=device) * 2 + 1).requires_grad_()
    args = (x, *vectors(name, normalized, device))
    compare_with_native(
        lambda x, *v: getattr(F, name)(x, normalized, *v, dtype=dtype),
        rounded(name, normalized, dtype),
        args,
    )


@both
@narrow
@pytest.mark.parametrize(("shape", "dims"), SHAPES, ids=str)
def test_error_rule(device, name, dtype, shape, dims):
    compare(name, shape, dims, dtype, device)


@pytest.mark.gpu
@both
@narrow
@pytest.mark.parametrize(("shape", "dims"), LARGE, ids=str)
def test_large(name, dtype, shape, dims):
    compare(name, shape, dims, dtype, "cuda")


@both
@narrow
def test_one_rounding_and_equal_bits(device, name, dtype):
    """The result is the float32 result, rounded; the gradients are those of the rounded dy."""
    x = torch.randn(50, 128, device=device, requires_grad=True)
    v = vectors(name, (128,), device)
    function = getattr(F, name)
    wide, result = function(x, (128,), *v), function(x, (128,), *v, dtype=dtype)
    assert_same(result, wide.to(dtype))
    dy = torch.randn_like(result)
    grads = torch.autograd.grad(result, (x, *v), dy)
    assert [g.dtype for g in grads] == [torch.float32] * len(grads)
    assert_same(grads, torch.autograd.grad(wide, (x, *v), dy.float()))
    for _ in range(3):
        assert_same(function(x, (128,), *v, dtype=dtype), result)


@both
def test_the_inputs_own_dtype(device, dtype, name):
    x = torch.randn(4, 16, device=device).to(dtype)
    function = getattr(F, name)
    assert_same(function(x, (16,), dtype=dtype), function(x, (16,)))


@both
def test_strided_rows_and_gradients(device, name):
    """Rows at any address; an aligned address may sum in another order."""
    wide = torch.randn(6, 5, 200, device=device)
    function = getattr(F, name)
    for view in (wide[:, :, :64], wide[:, 1, 3:67], wide.transpose(0, 1)[:, :, 8:72]):
        x = view.detach().requires_grad_()
        y = function(x, (64,), dtype=torch.bfloat16)
        assert y.is_contiguous()
        dy = torch.randn(*y.shape[:-1], 128, device=device).bfloat16()[..., ::2]
        copy = view.contiguous().requires_grad_()
        dense = function(copy, (64,), dtype=torch.bfloat16)
        torch.testing.assert_close(y, dense)
        (dx,) = torch.autograd.grad(y, x, dy)
        (expected,) = torch.autograd.grad(dense, copy, dy.contiguous())
        torch.testing.assert_close(dx, expected)


@both
def test_empty(device, name):
    for shape in ((0, 8), (4, 0)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = getattr(F, name)(x, shape[1:], dtype=torch.bfloat16)
        assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
        assert torch.autograd.grad(y.sum(), x)[0].dtype == torch.float32


@both
def test_errors(device, name):
    function = getattr(F, name)
    x = torch.randn(4, 8, device=device)
    for input, dtype, expected in (
        (x, torch.float64, "Float, BFloat16 or Half"),
        (x, torch.int32, "Float, BFloat16 or Half"),
        (x.bfloat16(), torch.float32, "BFloat16, the input's"),
        (x.half(), torch.bfloat16, "Half, the input's"),
        (x.double(), torch.bfloat16, "Double, the input's"),
    ):
        with pytest.raises(RuntimeError, match=rf"{name}: dtype: expected {expected}, got"):
            function(input, (8,), dtype=dtype)
    with pytest.raises(TypeError, match="dtype"):
        function(x, (8,), dtype="bfloat16")


@both
def test_modules(device, name):
    layer = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}[name](16, device=device)
    x = torch.randn(3, 16, device=device)
    assert layer(x).dtype == torch.float32
    assert_same(layer(x, dtype=torch.bfloat16), layer(x).bfloat16())


@both
def test_derivatives(device, name):
    """Of second order and forward mode: dy is rounded, so float32's own results are the measure."""
    x = torch.randn(5, 8, device=device, requires_grad=True)
    v = vectors(name, (8,), device)
    function = getattr(F, name)
    t = torch.randn_like(x)
    _, tangent = torch.func.jvp(lambda x: function(x, (8,), *v, dtype=torch.bfloat16), (x,), (t,))
    _, wide = torch.func.jvp(lambda x: function(x, (8,), *v), (x,), (t,))
    assert_same(tangent, wide.bfloat16())
    dy = torch.randn(5, 8, device=device).bfloat16()

    def second(dtype):
        y = function(x, (8,), *v, dtype=dtype)
        grads = torch.autograd.grad(y, (x, *v), dy.to(y.dtype), create_graph=True)
        return torch.autograd.grad([g.sin().sum() for g in grads[:2]], (x, v[0]))

    torch.testing.assert_close(second(torch.bfloat16), second(None), rtol=1e-2, atol=1e-3)


@both
def test_registration(device, name):
    op = getattr(torch.ops.warpwright, name).default
    x = torch.randn(3, 4, 8, device=device, requires_grad=True)
    v = vectors(name, (8,), device)
    opcheck(op, (x, [8], *v, 1e-5, torch.bfloat16))
    y, *statistics = op(x, [8], *v, 1e-5, torch.bfloat16)
    statistics = [s.detach() for s in statistics]
    mask = [True] * (1 + len(v))
    backward = getattr(torch.ops.warpwright, f"{name}_backward").default
    args = (torch.randn_like(y), x.detach(), [8], v[0].detach(), *statistics, mask)
    opcheck(backward, args)


@both
def test_vmap(device, name):
    function = getattr(F, name)
    x = torch.randn(3, 5, 8, device=device)
    v = [t.detach() for t in vectors(name, (8,), device)]
    expected = function(x, (8,), *v, dtype=torch.bfloat16)
    got = torch.func.vmap(lambda x: function(x, (8,), *v, dtype=torch.bfloat16))(x)
    assert_same(got, expected)
    per_sample = torch.randn(3, 8, device=device)
    got = torch.func.vmap(lambda x, w: function(x, (8,), w, dtype=torch.bfloat16))(x, per_sample)
    expected = [function(x[i], (8,), per_sample[i], dtype=torch.bfloat16) for i in range(3)]
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@both
def test_autocast(name):
    """A 16-bit input of the result's dtype is read as it is; another is widened first."""
    v = vectors(name, (64,), "cuda")
    x = torch.randn(9, 64, device="cuda")
    function = getattr(F, name)
    with torch.autocast("cuda", torch.bfloat16):
        assert function(x, (64,), *v, dtype=torch.bfloat16).dtype == torch.bfloat16
        if name == "layer_norm":
            half = function(x.half(), (64,), *v, dtype=torch.bfloat16)
            assert_same(half, function(x.half().float(), (64,), *v, dtype=torch.bfloat16))
            own = function(x.bfloat16(), (64,), *v, dtype=torch.bfloat16)
            assert_same(own, function(x.bfloat16().float(), (64,), *v).bfloat16())


def test_gradcheck_with_dtype():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda x: F.layer_norm(x, (4,), dtype=torch.float64), (x,))


def test_explain():
    x = torch.randn(64, 768, device="meta")
    text = warpwright.explain("layer_norm", x, (768,), dtype=torch.bfloat16, device="cuda")
    assert "persistent blocks" in text
