"""linear_cross_entropy gives the loss and the errors of native's linear and cross_entropy, one after the other."""

import copy
import itertools

import pytest
import torch
from common import layouts, opcheck
from linear_cross_entropy_cases import assert_near, chain, class_weights, operands
from losses import REDUCTIONS
from native_suites import Errors
from native_suites import compare as compare_cases
from torch import nn

import warpwright
import warpwright.functional as F
import warpwright.nn as ours
from warpwright.testing import assert_as_good_as_native, compare_with_native, to_double

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chunk", [None, 1, 5, 16, 64])
def test_labels(device, dtype, reduction, chunk):
    """Chunks that divide the rows and that do not, single rows, and one chunk larger than all."""
    args = operands(48, 40, 67, device, dtype, 2.0)
    weighted = class_weights(67, device, dtype)
    for smoothing, w in itertools.product((0.0, 0.1), (None, weighted)):
        kwargs = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "class_weight": w,
            "chunk_rows": chunk,
        }
        compare_with_native(F.linear_cross_entropy, chain, args, kwargs)


def test_probabilities_of_another_type(device):
    x, weight, _, bias = operands(30, 24, 33, device, torch.float32)
    for other in (torch.float64, torch.bfloat16):
        target = torch.randn(30, 33, device=device).softmax(1).to(other)
        loss = F.linear_cross_entropy(x, weight, target, bias)
        expected = chain(x, weight, target, bias)
        assert loss.dtype == expected.dtype
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities(device, dtype, reduction):
    x, weight, _, bias = operands(30, 24, 33, device, dtype)
    target = torch.randn(30, 33, device=device).softmax(1).to(dtype)
    weighted = class_weights(33, device, dtype)
    errors = Errors()
    for smoothing, w, chunk in itertools.product((0.0, 0.1), (None, weighted), (None, 7)):
        kwargs = {
            "reduction": reduction,
            "label_smoothing": smoothing,
            "class_weight": w,
            "chunk_rows": chunk,
        }
        for q in (target, target.detach().requires_grad_()):
            args = (x, weight, q, bias)
            compare_cases(F.linear_cross_entropy, chain, args, kwargs, str(kwargs), errors)
    errors.check()


# The last one has rows that TMA takes only because they are padded.
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 8, 3), (3, 1, 5), (7, 5, 1), (129, 257, 515), (150, 72, 1001)]
)
def test_sizes(device, dtype, shape):
    args = operands(*shape, device, dtype)
    for reduction in REDUCTIONS:
        kwargs = {"reduction": reduction, "chunk_rows": 50}
        compare_with_native(F.linear_cross_entropy, chain, args, kwargs)
        compare_with_native(F.linear_cross_entropy, chain, args[:3], kwargs)


@pytest.mark.gpu
def test_large_chunk(dtype):
    """Rows enough for the ring of rows, which writes the gradient over the logits."""
    args = operands(1700, 24, 9001, "cuda", dtype)
    for reduction in ("none", "mean"):
        kwargs = {"reduction": reduction, "chunk_rows": 2048}
        compare_with_native(F.linear_cross_entropy, chain, args, kwargs)


@pytest.mark.parametrize("leading", [(), (6,), (2, 3), (2, 1, 4)], ids=str)
def test_leading_dimensions(device, leading):
    x, weight, _, bias = operands(1, 12, 9, device)
    x = torch.randn(*leading, 12, device=device, requires_grad=True)
    labels = torch.randint(9, leading, device=device)
    soft = torch.randn(*leading, 9, device=device).softmax(-1)
    for target, reduction in itertools.product((labels, soft), REDUCTIONS):
        loss = F.linear_cross_entropy(x, weight, target, bias, reduction=reduction)
        assert loss.shape == (leading if reduction == "none" else ())
        kwargs = {"reduction": reduction}
        compare_with_native(F.linear_cross_entropy, chain, (x, weight, target, bias), kwargs)


def test_layouts(device, dtype):
    x, weight, target, bias = operands(21, 16, 19, device, dtype)
    for (_, a), (_, b) in itertools.product(layouts(x.detach()), layouts(weight.detach())):
        leaves = a.detach().requires_grad_(), b.detach().requires_grad_(), bias
        results = []
        for function in (F.linear_cross_entropy, chain):
            loss = function(*leaves[:2], target, bias, chunk_rows=8)
            results.append((loss, *torch.autograd.grad(loss, leaves)))
        for a, b in zip(*results, strict=True):
            assert_near(a, b)
    three = torch.randn(3, 16, 7, device=device).to(dtype).transpose(1, 2)  # rows that do not fold
    args = three.detach().requires_grad_(), weight, target.view(3, 7), bias
    compare_with_native(F.linear_cross_entropy, chain, args, {"chunk_rows": 8})


@pytest.mark.parametrize("ignore", [-100, 255, 2, -1])
def test_ignore_index(device, ignore):
    x, weight, target, bias = operands(40, 12, 7, device)
    target = torch.where(target == -100, ignore, target)
    for reduction, smoothing in itertools.product(REDUCTIONS, (0.0, 0.3)):
        kwargs = {
            "ignore_index": ignore,
            "reduction": reduction,
            "label_smoothing": smoothing,
            "class_weight": class_weights(7, device, torch.float32),
            "chunk_rows": 16,
        }
        compare_with_native(F.linear_cross_entropy, chain, (x, weight, target, bias), kwargs)


def test_byte_labels(device):
    x, weight, target, bias = operands(40, 12, 7, device)
    byte = target.clamp(min=0).byte()
    assert torch.equal(
        F.linear_cross_entropy(x, weight, byte, bias, ignore_index=-100),
        F.linear_cross_entropy(x, weight, byte.long(), bias),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored_and_no_rows(device, dtype, reduction):
    """A mean of nothing is NaN with zero gradients; a sum of nothing is 0."""
    x, weight, _, bias = operands(5, 4, 3, device, dtype)
    ignored = torch.full((5,), -100, device=device)
    for chunk in (None, 2):
        kwargs = {"reduction": reduction, "chunk_rows": chunk}
        compare_with_native(F.linear_cross_entropy, chain, (x, weight, ignored, bias), kwargs)
        empty = x.detach()[:0].requires_grad_()
        args = empty, weight, ignored[:0], bias
        loss = F.linear_cross_entropy(*args, **kwargs)
        torch.testing.assert_close(loss, chain(*args, **kwargs), equal_nan=True)
        grads = torch.autograd.grad(loss.sum(), (empty, weight, bias))
        assert [g.shape for g in grads] == [empty.shape, weight.shape, bias.shape]
        assert not any(g.any() for g in grads)


def test_bad_labels(device):
    x, weight, target, bias = operands(12, 8, 5, device)
    target = target.clamp(min=0)
    target[7] = 5
    if device == "cpu":
        with pytest.raises(IndexError, match="Target 5 is out of bounds"):
            F.linear_cross_entropy(x, weight, target, bias, chunk_rows=4)
        return
    loss = F.linear_cross_entropy(x, weight, target, bias, reduction="none", chunk_rows=4)
    assert loss.isnan().tolist() == [i == 7 for i in range(12)]
    (dx,) = torch.autograd.grad(loss.sum(), x)
    assert dx.isnan().all(1).tolist() == [i == 7 for i in range(12)]
    with pytest.raises(IndexError):
        warpwright.check_errors()


def test_non_finite(device):
    x, weight, target, bias = operands(9, 4, 6, device)
    x = x.detach().clone()
    x[1, 2], x[4] = NAN, INF
    x.requires_grad_()
    for reduction in REDUCTIONS:
        kwargs = {"reduction": reduction, "chunk_rows": 4}
        loss, expected = (
            f(x, weight, target, bias, **kwargs) for f in (F.linear_cross_entropy, chain)
        )
        assert torch.equal(loss.isnan(), expected.isnan())


# ---- errors ----


def test_errors(device):
    x, weight, target, bias = operands(6, 4, 5, device)
    call = F.linear_cross_entropy
    with pytest.raises(RuntimeError, match="input: expected 4 features, got 3"):
        call(x[:, :3], weight, target)
    with pytest.raises(RuntimeError, match="matrix as weight"):
        call(x, weight[0], target)
    with pytest.raises(RuntimeError, match=r"bias: expected \(5\), got \[4\]"):
        call(x, weight, target, bias[:4])
    with pytest.raises(RuntimeError, match="weight: expected the same dtype as input"):
        call(x, weight.double(), target)
    with pytest.raises(RuntimeError, match="bias: expected the same dtype as input"):
        call(x, weight, target, bias.double())
    with pytest.raises(ValueError, match=r"target: expected labels of shape \[6\]"):
        call(x, weight, target[:4])
    with pytest.raises(ValueError, match=r"or probabilities of shape \[6, 5\]"):
        call(x, weight, torch.rand(6, 4, device=device))
    with pytest.raises(RuntimeError, match="expected scalar type Long"):
        call(x, weight, target.int())
    with pytest.raises(RuntimeError, match=r"class_weight: expected \(5\), got \[3\]"):
        call(x, weight, target, class_weight=torch.rand(3, device=device))
    with pytest.raises(RuntimeError, match="class_weight"):
        call(x, weight, target, class_weight=torch.rand(5, device=device).double())
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        call(x, weight, target, class_weight=torch.rand(5, device=device, requires_grad=True))
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        call(x, weight, target, reduction="max")
    with pytest.raises(RuntimeError, match="label_smoothing must be between"):
        call(x, weight, target, label_smoothing=1.5)
    for chunk in (0, -3):
        with pytest.raises(ValueError, match=f"chunk_rows: expected at least 1, got {chunk}"):
            call(x, weight, target, chunk_rows=chunk)
    with pytest.raises(NotImplementedError, match="not implemented for 'ComplexFloat'"):
        call(x.detach().to(torch.cfloat), weight.detach().to(torch.cfloat), target)


# ---- compile, autocast, module ----


def test_errors_of_the_operator(device):
    x, weight, target, bias = operands(6, 4, 5, device)
    options = (None, 0, -100, 0.0, 0, torch.float32)  # reduction "none"
    forward = torch.ops.warpwright.linear_cross_entropy_forward
    for place in range(3):
        mask = [i == place for i in range(3)]
        with pytest.raises(RuntimeError, match="output_mask: the gradients of reduction 'none'"):
            forward(x.detach(), weight.detach(), bias.detach(), target, *options, mask)
    soft = torch.randn(6, 5, device=device).softmax(1).requires_grad_()
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'target'"):
        forward(x, weight, bias, soft, *options, [False] * 3)


def test_opcheck(device):
    x, weight, target, bias = operands(6, 4, 5, device)
    op = torch.ops.warpwright.linear_cross_entropy.default
    for reduction in (0, 1, 2):
        opcheck(op, (x, weight, target, bias, None, reduction), {"chunk_rows": 4})
    half = [t.detach().half().requires_grad_() for t in (x, weight, bias)]
    opcheck(op, (half[0], half[1], target, half[2]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_compile(device, reduction, dynamic):
    def step(x, weight, target, bias):
        loss = F.linear_cross_entropy(x, weight, target, bias, reduction=reduction, chunk_rows=4)
        return loss * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (10, 7):
        args = operands(rows, 6, 9, device)
        leaves = (args[0], args[1], args[3])
        results = []
        for function in (step, compiled):
            loss = function(*args)
            results.append((loss, *torch.autograd.grad(loss.sum(), leaves)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    args = operands(40, 16, 12, device)
    leaves = (args[0], args[1], args[3])
    results = []
    for function in (F.linear_cross_entropy, chain):
        with torch.autocast(device, low):
            loss = function(*args)
            soft = function(args[0], args[1], torch.full((40, 12), 1 / 12, device=device))
        assert loss.dtype == soft.dtype == torch.float32
        results.append((loss, soft, *torch.autograd.grad(loss, leaves)))
    exact = chain(*to_double(args))
    exact = (
        exact,
        chain(*to_double((args[0], args[1], torch.full((40, 12), 1 / 12, device=device)))),
        *torch.autograd.grad(
            chain(*(doubles := to_double(args))), (doubles[0], doubles[1], doubles[3])
        ),
    )
    for a, b, e in zip(*results, exact, strict=True):
        assert_as_good_as_native(a, b, e)


def test_backward_inside_autocast(device):
    """What ran in float32 stays there when its backward meets autocast."""
    args = operands(40, 16, 12, device)
    leaves = (args[0], args[1], args[3])
    for reduction in REDUCTIONS:
        loss = F.linear_cross_entropy(*args, reduction=reduction)
        expected = torch.autograd.grad(loss.sum(), leaves, retain_graph=True)
        with torch.autocast(device, torch.bfloat16):
            grads = torch.autograd.grad(loss.sum(), leaves)
        for a, b in zip(grads, expected, strict=True):
            assert torch.equal(a, b)


def test_module(device):
    linear = nn.Linear(8, 11).to(device)
    module = ours.LinearCrossEntropy(8, 11, ignore_index=3, reduction="sum", chunk_rows=4)
    module = module.to(device)
    module.load_state_dict(linear.state_dict())
    x = torch.randn(2, 5, 8, device=device)
    target = torch.randint(11, (2, 5), device=device)
    expected = chain(x, linear.weight, target, linear.bias, ignore_index=3, reduction="sum")
    torch.testing.assert_close(module(x, target), expected)
    assert torch.equal(copy.deepcopy(module)(x, target), module(x, target))
    weighted = ours.LinearCrossEntropy(8, 11, bias=False, class_weight=torch.rand(11)).to(device)
    assert set(weighted.state_dict()) == {"weight", "class_weight"}
    weighted(x, target).backward()
    assert weighted.weight.grad is not None
    assert repr(weighted).startswith("warpwright.LinearCrossEntropy(")
