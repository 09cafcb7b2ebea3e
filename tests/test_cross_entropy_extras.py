"""Cross entropy's own keyword arguments, which native lacks, each against its formula in float64."""

import copy
import itertools
import pickle

import pytest
import torch
from common import gradcheck, opcheck
from losses import EXTRAS, formula

import warpwright.functional as F
import warpwright.nn
from warpwright import _native
from warpwright.testing import assert_same

native = torch.nn.functional.cross_entropy
REDUCTIONS = ["none", "mean", "sum"]


def labels_for(shape, device):
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
    labels[1::3] = -100
    return labels


@pytest.mark.parametrize(("z_loss", "softcap"), EXTRAS)
@pytest.mark.parametrize("shape", [(12, 7), (5, 1031), (2, 9, 3, 4), (40, 5)], ids=str)
def test_against_formula(device, dtype, shape, z_loss, softcap):
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    labels = labels_for(shape, device)
    soft = torch.randn(shape, device=device).softmax(1).to(dtype)
    weight = (torch.rand(shape[1], device=device) + 0.5).to(dtype)
    tolerance = {2: 2e-2, 4: 2e-5, 8: 1e-10}[x.element_size()]
    for target, w, reduction, smoothing in itertools.product(
        (labels, soft), (None, weight), REDUCTIONS, (0.0, 0.1)
    ):
        leaf, exact = x.clone().requires_grad_(), x.double().clone().requires_grad_()
        ours, lse = F.cross_entropy(
            leaf,
            target,
            w,
            reduction=reduction,
            label_smoothing=smoothing,
            z_loss=z_loss,
            softcap=softcap,
            return_lse=True,
        )
        reference, lse_reference = formula(
            exact,
            target.double() if target is soft else target,
            None if w is None else w.double(),
            reduction,
            smoothing,
            z_loss,
            softcap,
        )
        assert ours.dtype == dtype
        assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(ours.double(), reference, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), lse_reference, rtol=1e-5, atol=1e-5)
        for loss, x_, lse_ in ((ours, leaf, lse), (reference, exact, lse_reference)):
            (loss.double().sum() + 0.1 * lse_.double().sum()).backward()
            assert x_.grad is not None
        scale = exact.grad.abs().max().item()
        torch.testing.assert_close(
            leaf.grad.double(), exact.grad, rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("z_loss", "softcap"), EXTRAS[1:])
@pytest.mark.parametrize("soft", [False, True])
def test_gradients(device, soft, z_loss, softcap, reduction):
    """gradcheck and gradgradcheck, of the loss and of lse."""
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100, 3], device=device)
    if soft:
        target = torch.randn(3, 4, device=device, dtype=torch.float64).softmax(1).requires_grad_()
    weight = torch.rand(4, device=device, dtype=torch.float64) + 0.5

    def function(z, *q):
        options = {"reduction": reduction, "label_smoothing": 0.1, "return_lse": True}
        t = q[0] if q else target
        loss, lse = F.cross_entropy(z, t, weight, z_loss=z_loss, softcap=softcap, **options)
        return loss, lse

    gradcheck(function, (x, target) if soft else (x,))


def test_third_derivative(device):
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, -100, 3], device=device)
    results = []
    for function in (
        lambda z: F.cross_entropy(z, target, z_loss=0.1, softcap=2.0),
        lambda z: formula(z, target, z_loss=0.1, softcap=2.0)[0],
    ):
        value = function(x)
        for _ in range(3):
            (grad,) = torch.autograd.grad(value, x, create_graph=True)
            value = grad.pow(3).sum()
        results.append(value)
    torch.testing.assert_close(*results)


def test_func_transforms(device):
    x = torch.randn(3, 4, device=device, dtype=torch.float64)
    target = torch.tensor([1, -100, 3], device=device)

    def ours(z):
        loss, lse = F.cross_entropy(z, target, z_loss=0.1, softcap=2.0, return_lse=True)
        return loss + lse.pow(2).sum()

    def theirs(z):
        loss, lse = formula(z, target, z_loss=0.1, softcap=2.0)
        return loss + lse.pow(2).sum()

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))


@pytest.mark.parametrize("shape", [(7,), (6, 5), (2, 5, 3, 4)], ids=str)
def test_argmax(device, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    target = torch.zeros(shape[:1] + shape[2:] if len(shape) > 1 else (), dtype=torch.int64)
    target = target.to(device)
    loss, argmax = F.cross_entropy(x, target, return_argmax=True)
    assert_same(loss, F.cross_entropy(x, target))
    assert argmax.dtype == torch.int64
    assert not argmax.requires_grad
    assert_same(argmax, x.argmax(min(1, x.dim() - 1)))
    results = F.cross_entropy(x, target, return_lse=True, return_argmax=True)
    assert [r.shape for r in results] == [(), target.shape, target.shape]


def test_defaults_are_native_calls(device):
    """With every extra at its default the op is the one without them, and so is the result."""
    x = torch.randn(6, 5, device=device)
    target = labels_for((6, 5), device)
    plain = torch.ops.warpwright.cross_entropy(x, target)
    extras = torch.ops.warpwright.cross_entropy_extras(x, target)
    assert extras[1] is None
    assert extras[2] is None
    assert_same(F.cross_entropy(x, target), plain)
    assert_same(extras[0], plain)
    for bad in ({"z_loss": -1.0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match="expected a number of at least 0, got -1"):
            F.cross_entropy(x, target, **bad)


def test_ignored_and_empty(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    target = torch.full((3,), -100, device=device)
    loss, lse = F.cross_entropy(x, target, z_loss=0.1, return_lse=True)
    assert loss.isnan()
    torch.testing.assert_close(lse, x.logsumexp(1))
    total = F.cross_entropy(x, target, z_loss=0.1, reduction="sum")
    assert total == 0
    (grad,) = torch.autograd.grad(total, x)
    assert torch.count_nonzero(grad) == 0
    empty = torch.randn(0, 4, device=device)
    loss, lse, argmax = F.cross_entropy(
        empty, target[:0], z_loss=0.1, softcap=1.0, return_lse=True, return_argmax=True
    )
    assert loss.isnan()
    assert lse.shape == argmax.shape == (0,)


def test_a_swapped_loss_has_the_defaults(device):
    """It has no attributes of its own for what native's class does not know."""
    swapped, made = torch.nn.CrossEntropyLoss(), warpwright.nn.CrossEntropyLoss()
    warpwright.swap(swapped)
    assert type(swapped) is type(made)
    own = vars(made).keys() - vars(swapped).keys()
    assert {"z_loss", "softcap", "return_lse", "return_argmax", "inplace_backward"} <= own
    for name in own:
        assert getattr(swapped, name) == getattr(made, name), name
    x = torch.randn(6, 5, device=device, requires_grad=True)
    logits = x * 1
    before = logits.detach().clone()
    swapped(logits, torch.arange(6, device=device) % 5).backward()
    assert_same(logits.detach(), before)


# ---- inplace_backward ----


@pytest.mark.parametrize("shape", [(6, 5), (5, 1031), (2, 5, 3, 4)], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_inplace_backward(device, dtype, shape, reduction):
    """The same gradient, in the logits' memory."""
    x = torch.randn(shape, device=device).to(dtype).requires_grad_()
    target = labels_for(shape, device)
    for smoothing, channels_last in itertools.product((0.0, 0.1), (False, True)):
        layout = torch.contiguous_format
        if channels_last and len(shape) == 4:
            layout = torch.channels_last
        options = {"reduction": reduction, "label_smoothing": smoothing}
        grads = []
        for inplace in (False, True):
            z = (x * 1).contiguous(memory_format=layout)
            caught = []
            z.register_hook(lambda g, caught=caught: caught.append(g))
            loss = F.cross_entropy(z, target, inplace_backward=inplace, **options)
            (loss * 2).sum().backward()
            assert (caught[0].data_ptr() == z.data_ptr()) == inplace
            grads.append(caught[0].clone())
        # A reduced loss's forward has rounded its gradient before the factor comes.
        torch.testing.assert_close(*grads, rtol={2: 2**-7}.get(x.element_size(), 1e-5), atol=1e-7)


def test_inplace_backward_is_seen(device):
    """Another op that saved the logits raises; without such an op nothing does."""
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = labels_for((6, 5), device)
    z = x * 1
    saved = z.exp()  # saves its output, not z
    (F.cross_entropy(z, target, inplace_backward=True) + saved.mean()).backward()
    z = x * 1
    other = z.square().mean()
    loss = F.cross_entropy(z, target, inplace_backward=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_inplace_backward_leaves_alone(device):
    """A leaf, a kept graph, expanded logits, probabilities: the logits stay."""
    x = torch.randn(6, 5, device=device, requires_grad=True)
    target = labels_for((6, 5), device)
    soft = x.detach().softmax(1)
    wide = torch.randn(1, 5, device=device, requires_grad=True)

    def check(z, t, **kwargs):
        before = z.detach().clone()
        F.cross_entropy(z, t, inplace_backward=True).backward(**kwargs)
        assert_same(z.detach(), before)

    check(x, target)
    check(x * 1, target, retain_graph=True)
    check(x * 1, target, create_graph=True)
    check((wide * 1).expand(6, 5), target)
    check(x * 1, soft)


# ---- module, compile, registrations, and GPUs without a kernel ----


def test_module(device):
    x = torch.randn(6, 5, device=device)
    target = labels_for((6, 5), device)
    module = warpwright.nn.CrossEntropyLoss(z_loss=0.1, softcap=2.0, return_lse=True)
    expected = F.cross_entropy(x, target, z_loss=0.1, softcap=2.0, return_lse=True)
    for m in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        for a, b in zip(m(x, target), expected, strict=True):
            assert_same(a, b)
    assert isinstance(warpwright.nn.CrossEntropyLoss()(x, target), torch.Tensor)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(x, target):
        loss, lse, argmax = F.cross_entropy(
            x * 2, target, z_loss=0.1, softcap=2.0, return_lse=True, return_argmax=True
        )
        inplace = F.cross_entropy(x * 3, target, inplace_backward=True)
        return loss + lse.sum() + inplace, argmax

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (8, 13):
        x = torch.randn(n, 6, device=device, requires_grad=True)
        target = labels_for((n, 6), device)
        (expected, index), (actual, index_compiled) = step(x, target), compiled(x, target)
        torch.testing.assert_close(actual, expected)
        assert_same(index_compiled, index)
        torch.testing.assert_close(torch.autograd.grad(actual, x), torch.autograd.grad(expected, x))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(device, low):
    x = torch.randn(20, 30, device=device).to(low)
    target = labels_for((20, 30), device)
    with torch.autocast(device, dtype=low):
        loss, lse = F.cross_entropy(x, target, z_loss=0.1, softcap=2.0, return_lse=True)
    assert loss.dtype == lse.dtype == torch.float32
    expected, lse_expected = formula(x.double(), target, z_loss=0.1, softcap=2.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(lse.double(), lse_expected, rtol=1e-5, atol=0)


def test_opcheck(device):
    x = torch.randn(4, 5, device=device, requires_grad=True)
    target = labels_for((4, 5), device)
    args = (x, target, None, 1, -100, 0.1, 0.1, 2.0, True, True, False)
    opcheck(torch.ops.warpwright.cross_entropy_extras.default, args)


def test_fallback(device):
    """What runs on a GPU without kernels says the same."""
    x = torch.randn(4, 5, 3, device=device)
    weight = torch.rand(5, device=device)
    for target, reduction in itertools.product(
        (labels_for((4, 5, 3), device), x.softmax(1)), (0, 1, 2)
    ):
        args = (x, target, weight, reduction, -100, 0.1, 0.1, 2.0, True, True, False)
        ours = torch.ops.warpwright.cross_entropy_extras(*args)
        for a, b in zip(ours, _native.cross_entropy_extras(*args), strict=True):
            torch.testing.assert_close(a, b)
