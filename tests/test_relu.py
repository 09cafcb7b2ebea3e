import copy

import pytest
import torch
from common import assert_no_leak, assert_transforms_agree, gradcheck, layouts, opcheck

import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, -1e-40, 1.0, -1.0]


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (4, 0, 3), (3, 17), (2, 3, 9, 5), (70001,)])
def test_values(device, dtype, shape):
    for name, x in layouts(torch.randn(shape, device=device).to(dtype)):
        assert_same(F.relu(x), torch.relu(x), name)
        compare_with_native(F.relu, torch.nn.functional.relu, (x.requires_grad_(),))


@pytest.mark.parametrize("integer", INTEGERS, ids=str)
def test_integers(device, integer):
    x = torch.randint(-100 if integer.is_signed else 0, 100, (1000,), device=device).to(integer)
    assert_same(F.relu(x), torch.relu(x))


def test_special_values(device, dtype):
    # Every position class of a vector: head, body, tail.
    for offset in range(17):
        x = torch.ones(offset + 40, device=device, dtype=dtype)
        x[offset : offset + len(SPECIAL)] = torch.tensor(SPECIAL, device=device).to(dtype)
        native_x = x.clone().requires_grad_()
        our_x = x.clone().requires_grad_()
        native, ours = torch.relu(native_x), F.relu(our_x)
        assert_same(ours, native)
        native.sum().backward()
        ours.sum().backward()
        assert_same(our_x.grad, native_x.grad)


def test_every_offset(device, dtype):
    base = torch.randn(300, device=device).to(dtype)
    for offset in range(32):
        x = base[offset : offset + 200]
        assert_same(F.relu(x), torch.relu(x), f"offset {offset}")
        y = base.clone()
        assert F.relu_(y[offset : offset + 200]).data_ptr() == y[offset:].data_ptr()
        assert_same(y[offset : offset + 200], torch.relu(x))
        assert torch.equal(y[:offset], base[:offset])
        assert torch.equal(y[offset + 200 :], base[offset + 200 :])


def test_strides(device):
    x = torch.randn(4, 6, 8, 10, device=device)
    for view in (x, x.transpose(0, 3), x[:, ::2], x[:1].expand(4, -1, -1, -1), x[..., 3]):
        assert F.relu(view).stride() == torch.relu(view).stride()


def test_gradients(device):
    x = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(F.relu, (x,))
    gradcheck(lambda t: F.relu_(t.clone()), (x,))


def test_inplace_autograd(device):
    leaf = torch.randn(6, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        F.relu_(leaf)
    y = leaf * 2
    saved = y * y  # saves y, which the in-place op then changes
    F.relu_(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    view = (leaf * 1).view(2, 3)[0]
    F.relu_(view)
    (grad,) = torch.autograd.grad(view.sum(), leaf)
    assert torch.equal(grad, torch.cat([(leaf[:3] > 0).float(), torch.zeros(3, device=device)]))


def test_memory_is_freed(device):
    x = torch.randn(6, device=device, requires_grad=True)
    assert_no_leak(F.relu, x)
    assert_no_leak(lambda t: F.relu_(t * 1), x)


def test_func_transforms(device):
    x = torch.randn(4, 5, device=device, dtype=torch.float64)
    assert_transforms_agree(F.relu, torch.relu, x)


def test_opcheck(device):
    x = torch.randn(3, 4, 5, device=device, requires_grad=True)
    ops = torch.ops.warpwright
    for name, view in layouts(x.detach()):
        del name
        opcheck(ops.relu.default, (view.requires_grad_(),))
        opcheck(ops.relu_backward.default, (torch.randn_like(view).requires_grad_(), view))
    opcheck(ops.relu_.default, (x.detach().clone(),))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x):
        return F.relu_(F.relu(x - 0.5) * 2 - 1)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 3, device=device, requires_grad=True)
        expected, actual = step(x), compiled(x)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0]
        )


def test_autocast_keeps_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert F.relu(torch.randn(3, device=device)).dtype == torch.float32


def test_bad_input(device):
    with pytest.raises(RuntimeError, match="Boolean inputs not supported for relu"):
        F.relu(torch.ones(3, dtype=torch.bool, device=device))
    with pytest.raises(NotImplementedError, match=r"relu: input: expected .* got"):
        F.relu(torch.ones(3, dtype=torch.complex64, device=device))
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape .*3.* got .*4"):
        torch.ops.warpwright.relu_backward(
            torch.ones(4, device=device), torch.ones(3, device=device)
        )


def test_deepcopy_of_output(device):
    y = F.relu(torch.randn(3, device=device))
    assert_same(copy.deepcopy(y), y)
