"""Cross entropy whose rows count for nothing: where NaN and zeros stand, in every order.

Native's CPU and CUDA kernels differ: on CUDA the mean of a single unbatched label that is ignored
is 0 (without label smoothing), elsewhere 0 / 0.
"""

import pytest
import torch

import warpwright.functional as F

native = torch.nn.functional

SHAPES = [
    (5,),
    (1,),
    (3, 5),
    (3, 1),
    (0, 5),
    (2, 5, 3),
    (2, 5, 2, 2),
    (2, 1, 2, 2),
    (2, 5, 2, 1, 2),
]
IGNORED = ["all", "some", "none"]
WEIGHTS = [None, "positive", "zero"]


def inputs(shape, ignored, weights, dtype, device):
    """Logits, labels, class weights."""
    classes = shape[0] if len(shape) == 1 else shape[1]
    rows = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.randint(classes, rows, device=device)
    if ignored == "all":
        target.fill_(-100)
    elif ignored == "some":
        target.view(-1)[::2] = -100
    weight = None
    if weights is not None:
        weight = torch.rand(classes, device=device) + 0.5
        weight = (weight if weights == "positive" else weight * 0).to(dtype)
    x = torch.randn(shape, device=device, dtype=torch.float64).to(dtype).requires_grad_()
    return x, target, weight


def derivatives(loss, x, upstream):
    """The loss, its gradient, that one's gradients by logits and by what came in, and a tangent."""
    generator = torch.Generator().manual_seed(1)
    y = loss(x)
    dy = torch.full_like(y, upstream, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, dy, create_graph=True)
    v = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    second = torch.autograd.grad((dx * v).sum(), (x, dy), create_graph=True, allow_unused=True)
    _, tangent = torch.func.jvp(loss, (x.detach(),), (v,))
    return [y, dx, *second, tangent]


def compare(ours, theirs, what):
    for name, a, b in zip(("loss", "dx", "ddx", "ddy", "tangent"), ours, theirs, strict=True):
        assert (a is None) == (b is None), (what, name)
        if a is None:
            continue
        assert torch.equal(a.isnan(), b.isnan()), (what, name, a, b)
        tolerance = 1e-9 if a.dtype == torch.float64 else 0.05
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_nan_stands_where_native_has_it(device, dtype, ignored, weights):
    for shape in SHAPES:
        x, target, weight = inputs(shape, ignored, weights, dtype, device)
        for reduction in ("mean", "sum", "none"):
            for smoothing in (0.0, 0.1):
                kwargs = {"reduction": reduction, "label_smoothing": smoothing, "weight": weight}
                found = [
                    derivatives(lambda z, f=f: f(z, target, **kwargs), x, 0.5)  # noqa: B023
                    for f in (F.cross_entropy, native.cross_entropy)
                ]
                compare(*found, (shape, reduction, smoothing))


@pytest.mark.parametrize("ignored", IGNORED)
def test_backward_without_graph(device, dtype, ignored):
    """The gradient that a forward leaves to its node."""
    for shape in SHAPES:
        x, target, weight = inputs(shape, ignored, "positive", dtype, device)
        for smoothing in (0.0, 0.1):
            grads = []
            for f in (F.cross_entropy, native.cross_entropy):
                loss = f(x, target, weight, label_smoothing=smoothing)
                grads.append(torch.autograd.grad(loss, x))
            compare(*[[None, *g, None, None, None] for g in grads], (shape, smoothing))


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_factor_that_is_not_finite(device, dtype, factor, reduction):
    """An overflow further on leaves the gradients of ignored rows at zero."""
    x, target, weight = inputs((6, 5), "some", "positive", dtype, device)
    ignored = target == -100
    assert ignored.any()
    assert not ignored.all()
    for smoothing in (0.0, 0.1):
        for f in (F.cross_entropy, native.cross_entropy):
            loss = f(x, target, weight, reduction=reduction, label_smoothing=smoothing)
            (gradient,) = torch.autograd.grad(loss * factor, x)
            assert not gradient[ignored].any(), (f, smoothing)
            assert not gradient[~ignored].isfinite().any(), (f, smoothing)


def test_third_derivative_of_ignored_rows(device):
    """A mean divides by 0; the gradients by the logits are zeros all the same."""
    x, target, _ = inputs((3, 5), "all", None, torch.float64, device)
    found = []
    for f in (F.cross_entropy, native.cross_entropy):
        dx = x
        total = f(x, target)
        for _ in range(3):
            (dx,) = torch.autograd.grad(total, x, create_graph=True)
            total = dx.sum()
        found.append(dx)
    assert torch.equal(*found)
    assert not found[0].any()


@pytest.mark.parametrize("ignored", ["all", "none"])
@pytest.mark.parametrize("rows", [(), (3,), (2, 3)])
def test_linear_cross_entropy(device, ignored, rows):
    """As the loss of the linear layer, unbatched too."""
    x = torch.randn(*rows, 4, device=device, requires_grad=True)
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    target = torch.full(rows, -100 if ignored == "all" else 2, device=device)
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "sum", "none"):
            kwargs = {"label_smoothing": smoothing, "reduction": reduction}
            found = []
            for fused in (False, True):
                if fused:
                    loss = F.linear_cross_entropy(x, weight, target, **kwargs)
                else:
                    z = native.linear(x, weight)
                    z = z if rows == () else z.flatten(0, -2)
                    labels = target if rows == () else target.flatten()
                    loss = native.cross_entropy(z, labels, **kwargs)
                grads = torch.autograd.grad(loss.sum(), (x, weight))
                found.append((loss.flatten(), *grads))
            torch.testing.assert_close(*found, equal_nan=True)
