"""linear_cross_entropy's z_loss, softcap, return_lse and return_argmax, against the formula."""

import itertools

import pytest
import torch
from common import gradcheck, opcheck, subsets
from losses import EXTRAS, formula

import warpwright.functional as F
import warpwright.nn as ours
from warpwright import _native
from warpwright.testing import assert_same

REDUCTIONS = ["none", "mean", "sum"]


def operands(rows, features, classes, device, dtype=torch.float32):
    """(input, weight, labels, bias); every third label but the first is ignored."""
    x = (torch.randn(rows, features, device=device) * 2).to(dtype)
    weight = (torch.randn(classes, features, device=device) / features**0.5).to(dtype)
    bias = (torch.randn(classes, device=device) * 0.3).to(dtype)
    target = torch.randint(classes, (rows,), device=device)
    target[1::3] = -100
    return x.requires_grad_(), weight.requires_grad_(), target, bias.requires_grad_()


def chain(x, weight, target, bias, class_weight=None, **options):
    return formula(torch.nn.functional.linear(x, weight, bias), target, class_weight, **options)


@pytest.mark.parametrize(("z_loss", "softcap"), EXTRAS)
@pytest.mark.parametrize("shape", [(20, 16, 9), (130, 72, 1031)], ids=str)
def test_against_formula(device, dtype, shape, z_loss, softcap):
    """Loss, lse and what both give as gradients, in one chunk and in several."""
    rows, _, classes = shape
    x, weight, labels, bias = operands(*shape, device, dtype)
    soft = torch.randn(rows, classes, device=device).softmax(1).to(dtype)
    class_weight = (torch.rand(classes, device=device) + 0.5).to(dtype)
    leaves = (x, weight, bias)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    tolerance = {2: 3e-2, 4: 3e-5, 8: 1e-10}[x.element_size()]
    extras = {"z_loss": z_loss, "softcap": softcap}
    for target, w, reduction, smoothing in itertools.product(
        (labels, soft), (None, class_weight), REDUCTIONS, (0.0, 0.1)
    ):
        options = {"reduction": reduction, "label_smoothing": smoothing, "class_weight": w}
        loss, lse = F.linear_cross_entropy(
            x, weight, target, bias, **options, **extras, return_lse=True, chunk_rows=rows // 2 - 1
        )
        expected, expected_lse = chain(
            exact[0],
            exact[1],
            target.double() if target is soft else target,
            exact[2],
            None if w is None else w.double(),
            reduction=reduction,
            smoothing=smoothing,
            **extras,
        )
        assert loss.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        near = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(loss.double(), expected, **near)
        torch.testing.assert_close(lse.double(), expected_lse, **near)
        for factor in (0.0, 0.1):  # lse is asked for in vain, and differentiated
            pairs = (loss, lse, leaves), (expected, expected_lse, exact)
            ours, theirs = (
                torch.autograd.grad(
                    a.double().sum() + (factor * b.double().sum() if factor else 0),
                    inputs,
                    retain_graph=True,
                )
                for a, b, inputs in pairs
            )
            for a, b in zip(ours, theirs, strict=True):
                assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


def test_lse_alone(device, dtype):
    x, weight, target, bias = operands(20, 16, 9, device, dtype)
    for reduction in REDUCTIONS:
        _, lse = F.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, return_lse=True, chunk_rows=6
        )
        gradients = torch.autograd.grad(lse.sum(), (x, weight, bias))
        logits = torch.nn.functional.linear(x, weight, bias).float()
        expected = torch.autograd.grad(logits.logsumexp(1).sum(), (x, weight, bias))
        for a, b in zip(gradients, expected, strict=True):
            tolerance = 4 * torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
            assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


@pytest.mark.parametrize("leading", [(), (6,), (2, 3)], ids=str)
def test_shapes_and_argmax(device, leading):
    _, weight, _, bias = operands(1, 12, 9, device)
    x = torch.randn(*leading, 12, device=device, requires_grad=True)
    labels = torch.randint(9, leading, device=device)
    soft = torch.randn(*leading, 9, device=device).softmax(-1)
    expected = torch.nn.functional.linear(x, weight, bias).argmax(-1)
    for target, softcap in itertools.product((labels, soft), (0.0, 2.0)):
        options = {"softcap": softcap, "return_argmax": True, "chunk_rows": 4}
        loss, argmax = F.linear_cross_entropy(x, weight, target, bias, **options)
        assert loss.shape == ()
        assert argmax.dtype == torch.int64
        assert torch.equal(argmax, expected)
        loss, lse, argmax = F.linear_cross_entropy(
            x, weight, target, bias, reduction="none", return_lse=True, **options
        )
        assert loss.shape == lse.shape == argmax.shape == leading


def test_defaults_are_the_plain_op(device, dtype):
    args = operands(20, 16, 9, device, dtype)
    leaves = (args[0], args[1], args[3])
    for reduction in REDUCTIONS:
        plain = F.linear_cross_entropy(*args, reduction=reduction, chunk_rows=6)
        loss, _ = F.linear_cross_entropy(
            *args, reduction=reduction, chunk_rows=6, return_argmax=True
        )
        assert_same(
            [loss, *torch.autograd.grad(loss.sum(), leaves)],
            [plain, *torch.autograd.grad(plain.sum(), leaves)],
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("z_loss", "softcap"), EXTRAS)
@pytest.mark.parametrize("soft", [False, True])
def test_gradcheck(device, soft, z_loss, softcap, reduction):
    """Of the loss and of lse, first and second order, forward and backward."""
    x, weight, target, bias = operands(5, 3, 4, device, torch.float64)
    if soft:
        target = torch.rand(5, 4, device=device, dtype=torch.float64)

    def function(x, weight, bias):
        return F.linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            reduction=reduction,
            label_smoothing=0.1,
            z_loss=z_loss,
            softcap=softcap,
            return_lse=True,
            chunk_rows=2,
        )

    gradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_subsets_of_gradients(device, needs):
    x, weight, target, bias = operands(20, 8, 11, device, torch.float64)
    leaves = [t.detach().requires_grad_(n) for t, n in zip((x, weight, bias), needs, strict=True)]
    wanted = [t for t in leaves if t.requires_grad]
    extras = {"z_loss": 0.1, "softcap": 3.0}
    loss, lse = F.linear_cross_entropy(
        leaves[0], leaves[1], target, leaves[2], **extras, return_lse=True, chunk_rows=6
    )
    expected, expected_lse = chain(leaves[0], leaves[1], target, leaves[2], **extras)
    for a, b in ((loss, expected), (loss + lse.sum(), expected + expected_lse.sum())):
        torch.testing.assert_close(
            torch.autograd.grad(a, wanted, retain_graph=True),
            torch.autograd.grad(b, wanted, retain_graph=True),
        )


def test_all_ignored(device):
    x, weight, target, bias = operands(6, 4, 5, device)
    target = torch.full_like(target, -100)
    for reduction in REDUCTIONS:
        loss, lse = F.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, z_loss=0.1, return_lse=True
        )
        assert loss.isnan().all() if reduction == "mean" else not loss.any()
        assert lse.isfinite().all()
        assert not any(g.any() for g in torch.autograd.grad(loss.sum(), (x, weight, bias)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x, weight, target, bias):
        loss, lse, argmax = F.linear_cross_entropy(
            x,
            weight,
            target,
            bias,
            z_loss=0.1,
            softcap=3.0,
            return_lse=True,
            return_argmax=True,
            chunk_rows=4,
        )
        return loss + 0.1 * lse.sum(), argmax

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (10, 7):
        args = operands(rows, 6, 9, device)
        results = []
        for function in (step, compiled):
            loss, argmax = function(*args)
            results.append((argmax, loss, *torch.autograd.grad(loss, (args[0], args[1], args[3]))))
        torch.testing.assert_close(*results)


def test_func_transforms(device):
    x, weight, target, bias = operands(6, 4, 5, device, torch.float64)
    args = x.detach(), weight.detach(), bias.detach()

    def transformed(function):
        def total(x, weight, bias):
            loss, lse = function(x, weight, target, bias, z_loss=0.1, softcap=3.0)
            return loss + 0.1 * lse.sum()

        yield torch.func.grad(total, (0, 1, 2))(*args)
        yield torch.func.jvp(total, args, tuple(torch.ones_like(a) for a in args))
        yield torch.func.hessian(total)(*args)

    def ours(*args, **options):
        return F.linear_cross_entropy(*args, **options, return_lse=True, chunk_rows=4)

    for a, b in zip(transformed(ours), transformed(chain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    args = operands(40, 16, 12, device)
    with torch.autocast(device, low):
        loss, lse, argmax = F.linear_cross_entropy(
            *args, z_loss=0.1, softcap=3.0, return_lse=True, return_argmax=True
        )
    assert loss.dtype == lse.dtype == torch.float32
    expected, expected_lse = chain(*args, z_loss=0.1, softcap=3.0)
    torch.testing.assert_close(loss, expected, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=3e-2, atol=3e-2)
    assert argmax.shape == (40,)


def test_opcheck(device):
    x, weight, target, bias = operands(6, 4, 5, device)
    op = torch.ops.warpwright.linear_cross_entropy_extras.default
    for reduction in (0, 1):
        args = (x, weight, target, bias, None, reduction, -100, 0.0, 4, 0.1, 3.0, True, True)
        opcheck(op, args)


def test_fallback(device):
    """What a GPU without kernels gets."""
    x, weight, target, bias = operands(6, 4, 5, device)
    for reduction, w in itertools.product((0, 1, 2), (None, torch.rand(5, device=device))):
        args = (x, weight, target, bias, w, reduction, -100, 0.1, 4, 0.1, 3.0, True, True)
        ours = torch.ops.warpwright.linear_cross_entropy_extras(*args)
        for a, b in zip(ours, _native.linear_cross_entropy_extras(*args), strict=True):
            torch.testing.assert_close(a, b)


def test_module(device):
    x, _, target, _ = operands(6, 4, 5, device)
    extras = {"z_loss": 0.1, "softcap": 3.0, "return_lse": True, "return_argmax": True}
    module = ours.LinearCrossEntropy(4, 5, chunk_rows=4, **extras).to(device)
    expected = F.linear_cross_entropy(x, module.weight, target, module.bias, **extras)
    for a, b in zip(module(x, target), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_errors(device):
    x, weight, target, bias = operands(6, 4, 5, device)
    for name in ("z_loss", "softcap"):
        for bad in (-1.0, float("nan")):
            with pytest.raises(ValueError, match=f"{name}: expected a number of at least 0, got"):
                F.linear_cross_entropy(x, weight, target, bias, **{name: bad})
