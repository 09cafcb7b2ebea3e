"""cross_entropy has native's derivatives of every order, and keeps them compiled and under autocast."""

import itertools

import pytest
import torch
from common import gradcheck, layouts, opcheck, subsets
from losses import REDUCTIONS, labels_for, weights_for

import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, to_double

native = torch.nn.functional.cross_entropy

GRAD_CASES = [
    ((4, 5), None, 0.0),
    ((4, 5), None, 0.2),
    ((5,), None, 0.1),
    ((2, 3, 2, 2), "weight", 0.0),
    ((3, 4, 2), "weight", 0.3),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("shape", "weighted", "smoothing"), GRAD_CASES)
def test_gradients_labels(device, shape, weighted, smoothing, reduction):
    x = torch.randn(shape, device=device, dtype=torch.float64, requires_grad=True)
    target = labels_for(shape, device)
    weight = weights_for(shape, device, torch.float64) if weighted else None
    gradcheck(
        lambda t: F.cross_entropy(
            t, target, weight, reduction=reduction, label_smoothing=smoothing
        ),
        (x,),
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("subset", subsets(3), ids=str)
def test_gradients_probabilities(device, subset, reduction):
    """Every subset of (logits, probabilities, weight) that wants a gradient."""
    for shape, smoothing in (((3, 4), 0.0), ((2, 3, 2), 0.2)):
        dim = 1
        x = torch.randn(shape, device=device, dtype=torch.float64)
        q = torch.randn(shape, device=device, dtype=torch.float64).softmax(dim)
        w = weights_for(shape, device, torch.float64)
        tensors = [t.requires_grad_(flag) for t, flag in zip((x, q, w), subset, strict=True)]
        gradcheck(
            lambda a, b, c, s=smoothing: F.cross_entropy(
                a, b, c, reduction=reduction, label_smoothing=s
            ),
            tensors,
        )


def test_third_derivative(device):
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100, 3], device=device)
    q = torch.randn(3, 4, device=device, dtype=torch.float64).softmax(1)

    def derivative(function, t, order):
        value = function(x, t, label_smoothing=0.1)
        for _ in range(order):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.pow(3).sum()
        return value

    for t in (target, q):
        for order in (1, 2, 3):
            torch.testing.assert_close(
                derivative(F.cross_entropy, t, order), derivative(native, t, order)
            )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("soft", [False, True])
def test_func_transforms(device, soft):
    x = torch.randn(3, 4, 5, device=device, dtype=torch.float64)
    target = (
        torch.randn(4, 5, device=device, dtype=torch.float64).softmax(1)
        if soft
        else torch.tensor([0, 4, -100, 2], device=device)
    )
    for transform in (
        lambda f: torch.func.grad(f),
        lambda f: torch.func.grad(lambda t: torch.func.grad(f)(t).pow(2).sum()),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.hessian(f),
        lambda f: lambda t: torch.func.jvp(f, (t,), (t.sin(),)),
        lambda f: lambda t: torch.func.vjp(f, t)[1](f(t)),
    ):
        actual = transform(lambda t: F.cross_entropy(t, target, label_smoothing=0.1))(x[0])
        expected = transform(lambda t: native(t, target, label_smoothing=0.1))(x[0])
        torch.testing.assert_close(actual, expected)
    for transform in (torch.func.grad, torch.func.jacfwd, lambda f: f):
        actual = torch.func.vmap(transform(lambda t: F.cross_entropy(t, target)))(x)
        expected = torch.func.vmap(transform(lambda t: native(t, target)))(x)
        torch.testing.assert_close(actual, expected)
    if soft:
        jacobian = torch.func.jacfwd(F.cross_entropy, argnums=(0, 1))(x[0], target)
        torch.testing.assert_close(
            jacobian, torch.func.jacfwd(native, argnums=(0, 1))(x[0], target)
        )


def test_opcheck(device):
    ops = torch.ops.warpwright
    for shape in ((4, 5), (5,), (2, 3, 4, 2)):
        for name, x in layouts(torch.randn(shape, device=device)):
            if name not in ("contiguous", "channels_last"):
                continue
            x = x.detach().requires_grad_()
            labels = labels_for(shape, device)
            soft = torch.rand(shape, device=device, requires_grad=True)
            weight = weights_for(shape, device, torch.float32)
            for target, reduction, smoothing in (
                (labels, 1, 0.0),
                (labels, 0, 0.1),
                (soft, 2, 0.1),
            ):
                tail = (reduction, -100, smoothing)
                opcheck(ops.cross_entropy.default, (x, target, weight, *tail))
                forward = (x, target, weight, *tail, torch.float32)
                opcheck(ops.cross_entropy_forward.default, forward)
                loss, stats, total = ops.cross_entropy_forward(*forward)
                saved = (x, target, weight, stats, total, *tail)
                dloss = torch.randn_like(loss).detach().requires_grad_()
                is_soft = target is soft
                opcheck(ops.cross_entropy_backward.default, (dloss, *saved, [True, is_soft]))
                v = torch.randn(shape, device=device)
                u = torch.randn(shape, device=device) if is_soft else None
                opcheck(
                    ops.cross_entropy_double_backward.default,
                    (v, u, dloss, *saved, [True, True, is_soft]),
                )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x, labels, soft):
        return F.cross_entropy(x * 2, labels, label_smoothing=0.1) + F.cross_entropy(x, soft)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 6, device=device, requires_grad=True)
        labels = torch.randint(6, (n,), device=device)
        soft = torch.randn(n, 6, device=device).softmax(1)
        expected, actual = step(x, labels, soft), compiled(x, labels, soft)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(torch.autograd.grad(actual, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    """16-bit logits are read as they are; loss and arithmetic are float32.

    Native's loss is float32 too, but on CUDA of log-probabilities rounded to 16 bits: the exact
    result decides, not native's.
    """
    x = torch.randn(20, 30, device=device)
    labels = torch.randint(30, (20,), device=device)
    soft = torch.randn(20, 30, device=device).softmax(1)
    weight = torch.rand(30, device=device)

    def run(function, logits, target, w, smoothing):
        loss = function(logits, target, w, label_smoothing=smoothing)
        return loss, *torch.autograd.grad(loss, logits)

    for logits, target, w, smoothing in itertools.product(
        (x, x.to(low), x.double()), (labels, soft, soft.to(low)), (None, weight), (0.0, 0.1)
    ):
        if w is not None and logits.dtype == torch.float64:
            w = w.double()
        args = (logits.clone().requires_grad_(), target, w, smoothing)
        with torch.autocast(device, dtype=low):
            ours, theirs = run(F.cross_entropy, *args), run(native, *args)
        exact = run(native, *to_double(args))
        for what, *values in zip(("loss", "gradient"), ours, theirs, exact, strict=True):
            assert_as_good_as_native(*values, what)
        if logits.dtype == low:  # nothing but the gradient is rounded to 16 bits
            torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=0)


def test_mixed_probabilities(device):
    """Outside autocast probabilities promote with the logits."""
    x = torch.randn(6, 9, device=device)
    q = torch.randn(6, 9, device=device).softmax(1)
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for a, b in itertools.product(types, types):
        logits, target = x.to(a).requires_grad_(), q.to(b).requires_grad_()
        ours, theirs = F.cross_entropy(logits, target), native(logits, target)
        assert ours.dtype == theirs.dtype, (a, b)
        exact = native(logits.double(), target.double())
        assert_as_good_as_native(ours, theirs, exact)
        for grad, leaf in zip(
            torch.autograd.grad(ours, (logits, target)), (logits, target), strict=True
        ):
            assert grad.dtype == leaf.dtype
