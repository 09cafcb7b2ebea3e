"""gelu, silu, sigmoid and tanh against native."""

import functools

import pytest
import torch
import torch.nn.functional as native
from common import (
    assert_no_leak,
    assert_replays,
    assert_transforms_agree,
    gradcheck,
    layouts,
    opcheck,
)
from native_suites import gelu_of_infinity
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
CALLS = {
    "gelu": ("gelu", {}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
    "sigmoid": ("sigmoid", {}),
    "tanh": ("tanh", {}),
}
each = pytest.mark.parametrize("form", CALLS)
SPECIAL = [float("inf"), 0.0, -0.0, 1e-4, -1e-4, 0.6, -0.6, 9.0, -9.0, 60.0, -60.0, 300.0, -300.0]


def pair(form):
    name, options = CALLS[form]
    return tuple(functools.partial(getattr(m, name), **options) for m in (F, native))


@each
@pytest.mark.parametrize("shape", [(), (0,), (1,), (4, 0, 3), (3, 17), (2, 3, 9, 5), (70001,)])
def test_values(device, dtype, form, shape):
    ours, theirs = pair(form)
    for name, x in layouts((torch.randn(shape, device=device) * 3).to(dtype)):
        compare_with_native(ours, theirs, (x.detach().requires_grad_(),))
        if x.numel() > 0:  # native gives an empty view strides of its own
            assert ours(x).stride() == theirs(x).stride(), name


@each
def test_special_values(device, dtype, form):
    """Far from 0, at it, and where gradients vanish; in each part of a vector."""
    ours, theirs = pair(form)
    if form == "gelu":
        theirs = gelu_of_infinity
    for offset in range(17):
        x = torch.ones(offset + 40, device=device, dtype=dtype)
        x[offset : offset + len(SPECIAL)] = torch.tensor(SPECIAL, device=device).to(dtype)
        compare_with_native(ours, theirs, (x.requires_grad_(),))
    nan = torch.tensor([float("nan"), 1.0], device=device, dtype=dtype, requires_grad=True)
    ours(nan).sum().backward()
    assert nan.grad.isnan().tolist() == [True, False]


@each
def test_small_values_keep_their_digits(device, form):
    """An error relative to the value, not to the largest one."""
    ours, theirs = pair(form)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.logspace(-4, 0, 400, device=device).to(dtype)
        x = torch.cat((x, -x))
        exact = theirs(x.double())
        error = ((ours(x).double() - exact) / exact).abs().max()
        of_native = ((theirs(x).double() - exact) / exact).abs().max()
        assert error <= 1.5 * of_native + torch.finfo(dtype).eps


@each
def test_every_offset(device, dtype, form):
    """The place in a vector changes no bit."""
    ours, _ = pair(form)
    base = torch.randn(300, device=device).to(dtype)
    whole = ours(base)
    for offset in range(32):
        assert_same(ours(base[offset : offset + 200]), whole[offset : offset + 200])


@each
def test_gradients(device, form):
    ours, _ = pair(form)
    x = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(ours, (x,))
    dy = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    kept = ours(x).detach() if form in ("sigmoid", "tanh") else x.detach()
    gradcheck(lambda g, k: ops.activation_backward(g, k, form), (dy, kept.requires_grad_()))


@each
def test_func_transforms(device, form):
    ours, theirs = pair(form)
    x = torch.randn(4, 5, device=device, dtype=torch.float64)
    assert_transforms_agree(ours, theirs, x)


@each
def test_memory_is_freed(device, form):
    assert_no_leak(pair(form)[0], torch.randn(6, device=device, requires_grad=True))


@each
def test_opcheck(device, form):
    x = torch.randn(3, 4, 5, device=device)
    for _, view in layouts(x):
        opcheck(ops.activation.default, (view.requires_grad_(), form))
        dy = torch.randn_like(view).requires_grad_()
        opcheck(ops.activation_backward.default, (dy, view.detach().sigmoid(), form))


@each
def test_what_is_kept(device, form):
    """One tensor, the argument or the result: nothing of its own."""
    kept = []
    x = torch.randn(4, 8, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = pair(form)[0](x)
    (tensor,) = kept
    assert tensor.data_ptr() == (y if form in ("sigmoid", "tanh") else x).data_ptr()


def test_types_of_native_only(device):
    """Integers become floating numbers, as native's; complex numbers stay."""
    for values in (torch.arange(5, device=device), torch.ones(3, dtype=torch.bool, device=device)):
        assert_same(F.sigmoid(values), torch.sigmoid(values))
        assert_same(F.tanh(values), torch.tanh(values))
    z = torch.randn(4, device=device, dtype=torch.complex64, requires_grad=True)
    torch.testing.assert_close(F.tanh(z), torch.tanh(z))
    F.tanh(z).abs().sum().backward()
    assert z.grad is not None


def test_in_place(device):
    x = torch.randn(6, device=device)
    expected = native.silu(x)
    assert F.silu(x, inplace=True) is x
    assert_same(x, expected)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        F.silu(torch.ones(2, device=device, requires_grad=True), True)


@each
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, form, dynamic):
    ours, _ = pair(form)

    def step(x):
        return ours(x - 0.5) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 3, device=device, requires_grad=True)
        expected, actual = step(x), compiled(x)
        torch.testing.assert_close(actual, expected)
        dx, expected_dx = (torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected))
        torch.testing.assert_close(dx, expected_dx)


@pytest.mark.gpu
@each
def test_replays(form):
    x = torch.randn(1000, device="cuda")
    assert_replays(lambda: (ops.activation(x, form), ops.activation_backward(x, x, form)))


def test_layers(device):
    layers = nn.Sequential(nn.GELU("tanh"), nn.SiLU(), nn.Sigmoid(), nn.Tanh()).to(device)
    x = torch.randn(3, 4, device=device)
    expected = layers(x)
    report = warpwright.swap(layers)
    assert {type(layer).__module__ for layer in layers} == {"warpwright.nn"}
    assert len([entry for entry in report.entries if entry.swapped]) == 4
    torch.testing.assert_close(layers(x), expected)
    assert repr(layers[0]) == "warpwright.GELU(approximate='tanh')"
    warpwright.unswap(layers)
    assert [type(layer) for layer in layers] == [nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh]


def test_patch(device):
    x = torch.randn(5, device=device)
    expected = [native.gelu(x), native.silu(x), torch.sigmoid(x), x.tanh()]
    with warpwright.patch():
        found = [native.gelu(x), native.silu(x), torch.sigmoid(x), x.tanh()]
        written = torch.empty_like(x)
        assert torch.sigmoid(x, out=written) is written  # native's: no function of ours has it
    torch.testing.assert_close(found, expected)
    assert_same(written, expected[2])


def test_bad_input(device):
    x = torch.randn(3, device=device)
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        F.gelu(x, approximate="erf")
    with pytest.raises(TypeError):
        F.gelu(x, approximate=1)
    with pytest.raises(TypeError):
        F.sigmoid(None)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        F.gelu(torch.arange(3, device=device))
    with pytest.raises(RuntimeError, match=r"activation: expected gelu, .* or tanh, got relu"):
        ops.activation(x, "relu")
    with pytest.raises(NotImplementedError, match=r"input: expected a real floating.* got Int"):
        ops.activation(x.int(), "gelu")
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape .*3.* got .*4"):
        ops.activation_backward(torch.ones(4, device=device), x, "gelu")
    with pytest.raises(RuntimeError, match=r"grad_output: expected Float, got Double"):
        ops.activation_backward(x.double(), x, "gelu")


def test_explain():
    x = torch.empty(1000)
    assert "vectorised loops" in str(warpwright.explain("gelu", x))
    text = str(warpwright.explain("tanh", x, device="cuda"))
    assert text.count("16-byte accesses") == 2
