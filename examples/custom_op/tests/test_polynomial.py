"""The op held to the rules that warpwright's own ops are held to."""

import pytest
import torch
from polynomial_op import polynomial
from torch.library import opcheck

from warpwright.testing import assert_same, compare_with_native

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def built_with_cuda():
    return torch._C._dispatch_has_kernel_for_dispatch_key("polynomial_op::polynomial", "CUDA")


needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and built_with_cuda()), reason="no GPU, or built without CUDA"
)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])


def native(x):
    return x.square() + x + 1


def inputs(device, dtype):
    """Layouts that users make: dense, transposed, strided, misaligned, empty, a scalar."""
    x = torch.randn(17, 40, dtype=dtype, device=device)
    yield x
    yield x.t()
    yield x[:, ::2]
    yield x.flatten()[1:]
    yield x[:0]
    yield x[0, 0]


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_exact_as_native(device, dtype):
    for x in inputs(device, dtype):
        compare_with_native(polynomial, native, [x.detach().requires_grad_()])


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_on_integers_and_of_two_runs(device, dtype):
    x = torch.arange(-7, 8, device=device).to(dtype)  # 7² + 7 + 1 = 57 is exact in bfloat16
    assert_same(polynomial(x), native(x))
    y = torch.randn(1000, dtype=dtype, device=device)
    assert_same(polynomial(y), polynomial(y))


@devices
def test_special_values(device):
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -0.0, 1e30], device=device)
    expected = torch.tensor([float("nan"), float("inf"), float("nan"), 1.0, float("inf")])
    assert_same(polynomial(x).cpu(), expected)


@devices
def test_derivatives(device):
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(polynomial, (x,), check_forward_ad=True, nondet_tol=0)
    assert torch.autograd.gradgradcheck(polynomial, (x,), check_fwd_over_rev=True, nondet_tol=0)


@devices
def test_second_derivative_of_a_cube(device):
    x = torch.tensor(3.0, dtype=torch.float64, device=device)
    cube = torch.func.grad(torch.func.grad(lambda t: polynomial(t) ** 3))
    by_hand = 6 * 13 * 7**2 + 3 * 13**2 * 2  # p = 13, p' = 7, p'' = 2: 6 p p'² + 3 p² p''
    assert cube(x) == by_hand


@devices
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls it once per sample
def test_gradient_per_sample(device):
    x = torch.randn(5, 3, device=device)
    per_sample = torch.func.vmap(torch.func.grad(lambda t: polynomial(t).sum()))(x)
    torch.testing.assert_close(per_sample, 2 * x + 1)


@devices
def test_registration(device):
    """Schema, autograd registration, fake tensors, and both ahead-of-time traces."""
    x = torch.randn(4, 5, device=device, requires_grad=True)
    opcheck(torch.ops.polynomial_op.polynomial, (x,))
    opcheck(torch.ops.polynomial_op.polynomial_backward, (torch.randn_like(x), x))


@devices
def test_compiles(device):
    def step(x):
        return torch.autograd.grad(polynomial(x).sum(), x)[0]

    compiled = torch.compile(step, backend="aot_eager")
    x = torch.randn(4, 5, device=device, requires_grad=True)
    assert_same(compiled(x), step(x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_other_types_are_refused(dtype):
    with pytest.raises(TypeError, match=r"polynomial: x: expected float32, .* or float16, got"):
        polynomial(torch.ones(2, dtype=dtype))


def test_malformed_calls_are_refused():
    backward = torch.ops.polynomial_op.polynomial_backward
    with pytest.raises(RuntimeError, match=r"dy: expected shape \[2, 3\], got \[3, 2\]"):
        backward(torch.ones(3, 2), torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="dy: expected Float, got Double"):
        backward(torch.ones(2, dtype=torch.float64), torch.ones(2))
