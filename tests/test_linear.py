"""linear gives native's values, derivatives and errors for every shape, layout and type."""

import pytest
import torch
from common import gradcheck, layouts, opcheck, subsets
from linear_cases import SHAPES, assert_func_transforms_agree, operands, step

import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

native = torch.nn.functional.linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(device, dtype, shape, bias):
    compare_with_native(F.linear, native, operands(device, dtype, *shape, bias=bias))


@pytest.mark.parametrize("shape", [((2, 0), 3, 4), ((3,), 0, 4), ((3,), 4, 0), ((0,), 0, 0)])
def test_empty(device, dtype, shape):
    for bias in (True, False):
        compare_with_native(F.linear, native, operands(device, dtype, *shape, bias=bias))


@pytest.mark.parametrize("shape", [((2, 3), 4, 5), ((65,), 33, 67), ((72,), 200, 136)], ids=str)
def test_integers_are_exact(device, dtype, shape):
    inputs = operands(device, dtype, *shape, integers=True)
    assert_same(step(F.linear, inputs), step(native, inputs))


def test_same_bits_every_time(device, dtype):
    inputs = operands(device, dtype, (96,), 1000, 40)
    assert_same(step(F.linear, inputs), step(F.linear, inputs))


@pytest.mark.parametrize("sizes", [(24, 40, 16), (9, 13, 7)])
def test_layouts(device, dtype, sizes):
    m, k, n = sizes
    x, weight, bias = operands(device, dtype, (m,), k, n)
    for _, x_view in layouts(x.detach()):
        for _, weight_view in layouts(weight.detach()):
            inputs = [t.detach().requires_grad_() for t in (x_view, weight_view, bias)]
            compare_with_native(F.linear, native, inputs)


def test_strided_batches(device, dtype):
    _, weight, bias = operands(device, dtype, (), 6, 5)
    base = torch.randn(4, 6, 3, 6, device=device).to(dtype)
    for x in (
        base.transpose(0, 2),
        base.permute(0, 2, 3, 1),
        base[:, ::2],
        base[:1].expand(3, -1, -1, -1),
        base[0, 0, 0].expand(7, 6),
        base[..., 0].transpose(1, 2),
    ):
        compare_with_native(F.linear, native, (x.detach().requires_grad_(), weight, bias))


def test_expanded_cotangent(device, dtype):
    # sum().backward() hands over a gradient of stride 0 everywhere.
    inputs = operands(device, dtype, (5, 3), 8, 4, integers=True)
    ours = torch.autograd.grad(F.linear(*inputs).sum(), inputs)
    assert_same(ours, torch.autograd.grad(native(*inputs).sum(), inputs))


def test_column_major_cotangent(device, dtype):
    inputs = operands(device, dtype, (24,), 16, 40, integers=True)
    cotangent = torch.randint(-2, 3, (40, 24), device=device).to(dtype).t()
    ours = torch.autograd.grad(F.linear(*inputs), inputs, cotangent)
    assert_same(ours, torch.autograd.grad(native(*inputs), inputs, cotangent))


@pytest.mark.parametrize("bias_shape", [(), (1,), (2, 3), (2, 1), (1, 3)])
def test_bias_that_broadcasts(device, bias_shape):
    x = torch.randn(2, 4, device=device, requires_grad=True)
    weight = torch.randn(3, 4, device=device, requires_grad=True)
    bias = torch.randn(bias_shape, device=device, requires_grad=True)
    compare_with_native(F.linear, native, (x, weight, bias))
    with torch.inference_mode():
        torch.testing.assert_close(F.linear(x, weight, bias), native(x, weight, bias))


def test_vector_of_weights(device):
    weight = torch.randn(4, device=device, requires_grad=True)
    for batch in ((), (2,), (2, 3)):
        compare_with_native(
            F.linear, native, (torch.randn(*batch, 4, device=device, requires_grad=True), weight)
        )


@pytest.mark.parametrize("other", [torch.int32, torch.uint8, torch.complex64], ids=str)
def test_native_types(device, other):
    if device == "cuda" and not other.is_complex:
        with pytest.raises(NotImplementedError, match="not implemented"):
            F.linear(torch.ones(2, 3, device=device).to(other), torch.ones(4, 3).to(device, other))
        return
    inputs = [torch.randint(0, 4, s, device=device).to(other) for s in ((2, 3), (5, 3), (5,))]
    if other.is_complex:
        inputs = [(t + 1j * t.flip(0)).requires_grad_() for t in inputs]
        for ours, theirs in zip(step(F.linear, inputs), step(native, inputs), strict=True):
            assert torch.equal(ours, theirs)
    assert torch.equal(F.linear(*inputs), native(*inputs))


def test_special_values(device, dtype):
    x = torch.randn(20, 40, device=device).to(dtype)
    x[3, 5], x[4, 6], x[17, 39] = float("nan"), float("inf"), float("-inf")
    weight = torch.randn(24, 40, device=device).to(dtype)
    compare_with_native(F.linear, native, (x.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradients(device, needs):
    inputs = [
        torch.randn(s, device=device, dtype=torch.float64, requires_grad=need)
        for s, need in zip([(2, 3, 4), (5, 4), (5,)], needs, strict=True)
    ]
    gradcheck(F.linear, inputs)
    if not needs[2]:
        gradcheck(lambda x, w: F.linear(x, w), inputs[:2])


def test_gradients_of_complex_input(device):
    inputs = [
        torch.randn(s, device=device, dtype=torch.complex128, requires_grad=True)
        for s in ((3, 4), (2, 4), (2,))
    ]
    assert torch.autograd.gradcheck(F.linear, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(F.linear, inputs)


def test_only_needed_operands_are_kept(device):
    x = torch.randn(4, 3, device=device, requires_grad=True)
    weight = torch.randn(2, 3, device=device)
    output = F.linear(x, weight)  # keeps weight, but not x
    with torch.no_grad():
        x.zero_()
    output.sum().backward()
    assert_same(x.grad, weight.sum(0).expand(4, 3).contiguous())


def test_func_transforms(device):
    assert_func_transforms_agree(device, F.linear, native)


def test_opcheck(device):
    ops = torch.ops.warpwright
    x, w, b = operands(device, torch.float32, (2, 3), 4, 5)
    dy = torch.randn(2, 3, 5, device=device, requires_grad=True)
    opcheck(ops.linear.default, (x, w, b))
    opcheck(ops.linear.default, (x, w))
    opcheck(ops.linear.default, (x[0, 0], w.detach(), b))
    opcheck(ops.linear.default, (x, w[0]))
    opcheck(ops.linear.default, (x, w, b[0]))
    opcheck(ops.linear.default, (x.transpose(0, 1), w.detach().t().contiguous().t(), b))
    for mask in subsets(3):
        opcheck(ops.linear_backward.default, (dy, x, w, mask))
    opcheck(ops.linear_backward.default, (dy, None, w, (True, False, True)))
    opcheck(ops.linear_backward.default, (dy, x, None, (False, True, False)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def run(x, w, b):
        return F.linear(torch.relu(F.linear(x, w, b)), w.t())

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for m in (8, 13):
        inputs = operands(device, torch.float32, (m,), 6, 5)
        expected, actual = run(*inputs), compiled(*inputs)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
        )


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    inputs = operands(device, torch.float32, (6,), 8, 4, integers=True)
    with torch.autocast(device, dtype=low):
        ours, theirs = F.linear(*inputs), native(*inputs)
        assert F.linear(inputs[0].double(), inputs[1].double()).dtype == torch.float64
    assert ours.dtype == low
    assert_same(ours, theirs)
    assert_same(torch.autograd.grad(ours.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs))


@pytest.mark.gpu
def test_tf32_follows_the_backend_setting():
    inputs = operands("cuda", torch.float32, (256,), 512, 256)
    exact = native(*[t.detach().double() for t in inputs])
    strict = (F.linear(*inputs).double() - exact).abs().max()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        compare_with_native(F.linear, native, inputs)
        rounded = (F.linear(*inputs).double() - exact).abs().max()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert rounded > 50 * strict


def test_bad_input(device):
    def t(*shape, **kwargs):
        return torch.ones(shape, device=device, **kwargs)

    cases = [
        (r"at least 1D, but they are 0D and 2D", (t(), t(3, 4))),
        (r"at least 1D, but they are 2D and 0D", (t(2, 4), t())),
        (r"weight: .*<= 2 dimensions.*3D", (t(2, 4), t(2, 3, 4))),
        (r"input: expected 4 features, got 5: mat1 and mat2 .*\(2x5 and 4x3\)", (t(2, 5), t(3, 4))),
        (r"expanded size of the tensor \(3\) must match", (t(2, 4), t(3, 4), t(4))),
        (r"weight: .*same dtype.*Double and Float", (t(2, 4, dtype=torch.float64), t(3, 4))),
        (r"bias: .*same dtype", (t(2, 4), t(3, 4), t(3, dtype=torch.float64))),
        (r"weight: Expected all tensors to be on the same device", (t(2, 4), t(3, 4).to("meta"))),
    ]
    for message, inputs in cases:
        with pytest.raises(RuntimeError, match=message):
            F.linear(*inputs)
    ops = torch.ops.warpwright
    with pytest.raises(RuntimeError, match=r"linear_backward: weight: expected a matrix"):
        ops.linear_backward(t(2, 3), None, None, (True, False, False))
    with pytest.raises(RuntimeError, match=r"linear_backward: input: expected leading sizes"):
        ops.linear_backward(t(2, 3), t(4, 5), None, (False, True, False))


def test_requires_grad_of_output(device):
    x, w, b = (t.detach() for t in operands(device, torch.float32, (2,), 3, 4))
    assert not F.linear(x, w, b).requires_grad
    assert F.linear(x, w, b.requires_grad_()).requires_grad
    with torch.no_grad():
        assert not F.linear(x, w, b).requires_grad
