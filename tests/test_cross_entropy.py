"""cross_entropy gives native's loss and gradient for every shape, layout, label and special value."""

import itertools
import warnings

import pytest
import torch
from common import captured, layouts
from losses import REDUCTIONS, labels_for, weights_for

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, assert_same, compare_with_native

native = torch.nn.functional.cross_entropy
NAN, INF = float("nan"), float("inf")

SHAPES = [
    (10,),  # one unbatched row
    (1, 1),
    (3, 1),
    (64, 10),  # shorter than two vectors, not a multiple of one
    (7, 33),
    (40, 1000),  # enough rows that no lucky rounding of native decides
    (12, 5003),  # odd: rows start at every alignment
    (2, 3, 5),
    (2, 21, 7, 9),  # segmentation
    (3, 6, 2, 2, 3),
    (2, 5, 1, 1),  # pixels that are also rows
    (0, 4),
    (3, 4, 0),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_labels(device, dtype, shape, reduction):
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    target = labels_for(shape, device)
    weight = weights_for(shape, device, dtype)
    # Native's own smoothing of long rows is a poor oracle: inf in float16, 20 ulps off in float64.
    smoothings = (0.0,) if max(shape) >= 1000 else (0.0, 0.1)
    for smoothing, w in itertools.product(smoothings, (None, weight)):
        kwargs = {"weight": w, "reduction": reduction, "label_smoothing": smoothing}
        compare_with_native(F.cross_entropy, native, (x.clone().requires_grad_(), target), kwargs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probabilities(device, dtype, shape, reduction):
    x = (torch.randn(shape, device=device) * 3).to(dtype).requires_grad_()
    dim = 1 if len(shape) > 1 else 0
    target = torch.randn(shape, device=device).softmax(dim).to(dtype).requires_grad_()
    weight = weights_for(shape, device, dtype)
    for smoothing, w in itertools.product((0.0, 0.1), (None, weight)):
        kwargs = {"weight": w, "reduction": reduction, "label_smoothing": smoothing}
        compare_with_native(F.cross_entropy, native, (x, target), kwargs)


@pytest.mark.parametrize("shape", [(6, 11), (2, 5, 3, 4), (2, 4, 6), (17, 40)], ids=str)
def test_layouts(device, dtype, shape):
    """Every layout gives the contiguous result; dense ones keep their order in the gradient."""
    base = torch.randn(shape, device=device).to(dtype)
    labels = labels_for(shape, device)
    soft = torch.randn(shape, device=device).softmax(1).to(dtype)
    for (name, x), (soft_name, q) in itertools.product(layouts(base), layouts(soft)):
        x = x.detach().requires_grad_()
        q = q.detach().requires_grad_()
        for target, what in ((labels, name), (q, f"{name} x {soft_name}")):
            leaves = [x] if target is labels else [x, q]
            ours = F.cross_entropy(x, target)
            reference = base.clone().requires_grad_()
            target_reference = target.detach().clone(memory_format=torch.contiguous_format)
            target_reference.requires_grad_(target is q)
            theirs = F.cross_entropy(reference, target_reference)
            torch.testing.assert_close(ours, theirs, msg=lambda m, what=what: f"{what}: {m}")
            grads = torch.autograd.grad(ours, leaves)
            expected = torch.autograd.grad(
                theirs, [reference] if target is labels else [reference, target_reference]
            )
            for a, b in zip(grads, expected, strict=True):
                torch.testing.assert_close(a, b, msg=lambda m, what=what: f"{what}: {m}")
            if name == "channels_last":
                assert grads[0].stride() == x.stride()


def test_row_stride_and_overlap(device):
    wide = torch.randn(9, 64, device=device)
    labels = torch.randint(20, (9,), device=device)
    for x in (wide[:, 3:23], wide[:, :20], wide[:1, :20].expand(9, 20), wide[:, :40:2]):
        assert x.shape == (9, 20)
        compare_with_native(F.cross_entropy, native, (x.detach().requires_grad_(), labels))


def test_strided_labels(device):
    x = torch.randn(6, 5, 4, 3, device=device)
    labels = torch.randint(5, (6, 3, 4), device=device).transpose(1, 2)
    compare_with_native(F.cross_entropy, native, (x, labels), {"reduction": "none"})


@pytest.mark.parametrize("ignore", [-100, 255, 2, -1])
def test_ignore_index(device, ignore):
    x = torch.randn(40, 7, device=device, requires_grad=True)
    target = labels_for((40, 7), device, ignore)
    weight = weights_for((40, 7), device, torch.float32)
    for reduction, smoothing, w in itertools.product(REDUCTIONS, (0.0, 0.3), (None, weight)):
        kwargs = {
            "ignore_index": ignore,
            "reduction": reduction,
            "label_smoothing": smoothing,
            "weight": w,
        }
        compare_with_native(F.cross_entropy, native, (x, target), kwargs)


def test_all_ignored(device):
    x = torch.randn(3, 4, device=device, requires_grad=True)
    target = torch.full((3,), -100, device=device)
    for reduction in REDUCTIONS:
        ours = F.cross_entropy(x, target, reduction=reduction)
        assert_same(ours, native(x, target, reduction=reduction))
        (grad,) = torch.autograd.grad(ours.sum(), x)
        assert torch.equal(grad, torch.zeros_like(grad))
    assert F.cross_entropy(x, target).isnan()
    assert F.cross_entropy(x, target, reduction="sum") == 0


def test_byte_labels(device):
    x = torch.randn(5, 6, device=device, requires_grad=True)
    target = torch.tensor([0, 255, 5, 3, 1], dtype=torch.uint8, device=device)
    kwargs = {"ignore_index": 255, "label_smoothing": 0.1}
    assert_same(F.cross_entropy(x, target, **kwargs), F.cross_entropy(x, target.long(), **kwargs))
    (grad,) = torch.autograd.grad(F.cross_entropy(x, target, **kwargs), x)
    (expected,) = torch.autograd.grad(F.cross_entropy(x, target.long(), **kwargs), x)
    assert_same(grad, expected)


@pytest.mark.parametrize("kind", ["labels", "smoothed", "probabilities"])
def test_special_values(device, kind, dtype):
    """-inf, +inf and NaN logits at the label and at other classes, in the rows and the pixels kernels."""
    special = [-INF, INF, NAN, 0.0, 1e30, -1e30]
    if kind != "smoothed" and dtype in (torch.float32, torch.float64):
        special.append(3.4e38)  # native overflows in its unscaled sum over the classes
    rows = []
    for a, b in itertools.product(special, special):
        rows.append([a, b, 0.5, -1.0, 2.0])
    rows += [[-INF] * 5, [INF] * 5, [NAN] * 5, [0.0] * 5]
    x = torch.tensor(rows, device=device).to(dtype)
    target = torch.arange(len(rows), device=device) % 3
    if kind == "probabilities":
        target = (torch.nn.functional.one_hot(target, 5).float() * 0.9 + 0.02).to(dtype)
    smoothing = 0.1 if kind == "smoothed" else 0.0
    for view in (x, x.t().contiguous().t()):
        kwargs = {"reduction": "none", "label_smoothing": smoothing}
        compare_with_native(F.cross_entropy, native, (view.requires_grad_(), target), kwargs)


def test_nan_stays_in_its_row(device):
    x = torch.randn(6, 40, device=device)
    x[2, 7] = NAN
    x.requires_grad_()
    target = torch.randint(40, (6,), device=device)
    loss = F.cross_entropy(x, target, reduction="none")
    (grad,) = torch.autograd.grad(loss.sum(), x)
    clean = torch.arange(6, device=device) != 2
    assert loss[2].isnan()
    assert loss[clean].isfinite().all()
    assert grad[2].isnan().all()
    assert grad[clean].isfinite().all()


@pytest.mark.parametrize("offset", [2.0**24, -(2.0**20), 1e8])
def test_common_offset(device, offset):
    """log(sum) - (z_y - max): a large common offset of all logits must not eat the loss."""
    x = torch.randint(-8, 8, (32, 50), device=device).float() * 2
    target = torch.randint(50, (32,), device=device)
    soft = torch.nn.functional.one_hot(target, 50).float()
    shifted = (x.double() + offset).float()
    for t, smoothing in ((target, 0.0), (target, 0.2), (soft, 0.0)):
        kwargs = {"reduction": "none", "label_smoothing": smoothing}
        compare_with_native(F.cross_entropy, native, (shifted.clone().requires_grad_(), t), kwargs)


def test_confident_rows(device):
    """A loss far below one ulp of lse is still right."""
    target = torch.arange(8, device=device)
    x = torch.full((8, 16), -12.0, device=device)
    x[target, target] = 0.0
    for view in (x, x.t().contiguous().t()):
        loss = F.cross_entropy(view, target, reduction="none")
        exact = native(view.double(), target, reduction="none")
        torch.testing.assert_close(loss.double(), exact, rtol=2e-2, atol=0)
        soft = torch.nn.functional.one_hot(target, 16).float()
        loss = F.cross_entropy(view, soft, reduction="none")
        torch.testing.assert_close(loss.double(), exact, rtol=2e-2, atol=0)


@pytest.mark.parametrize("shape", [(4000, 9), (500, 1000), (2, 21, 60, 70)], ids=str)
def test_gradient_of_confident_labels(device, shape):
    """p - 1 of a nearly certain label cancels: only the sum's rounding is left."""
    x = torch.randn(shape, device=device) * 4
    target = x.argmax(1)

    def label_gradients(loss, logits):
        z = logits.detach().requires_grad_()
        loss(z, target, reduction="sum").backward()
        return z.grad.double().gather(1, target.unsqueeze(1))

    exact = label_gradients(native, x.double())
    ours = (label_gradients(F.cross_entropy, x) - exact).abs().mean()
    theirs = (label_gradients(native, x) - exact).abs().mean()
    assert ours <= 1.1 * theirs


def test_large_mean(device):
    """Many rows: the sum does not drift."""
    x = torch.randn(70000, 3, device=device)
    target = torch.randint(3, (70000,), device=device)
    assert_as_good_as_native(
        F.cross_entropy(x, target), native(x, target), native(x.double(), target)
    )


def test_repeatable(device):
    x = torch.randn(3000, 37, device=device)
    target = torch.randint(37, (3000,), device=device)
    expected = F.cross_entropy(x, target)
    for _ in range(3):
        assert_same(F.cross_entropy(x, target), expected)


def test_legacy_arguments(device):
    x = torch.randn(4, 5, device=device)
    target = torch.randint(5, (4,), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size_average, reduce in itertools.product((None, False, True), repeat=2):
            ours = F.cross_entropy(x, target, None, size_average, -100, reduce)
            theirs = native(x, target, None, size_average, -100, reduce)
            torch.testing.assert_close(ours, theirs)
    with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
        F.cross_entropy(x, target, size_average=False)


# Enough rows for persistent blocks: a part of a warp per row, a warp, and rows in several stages;
# whole vectors, and rows that start anywhere.
PERSISTENT_SHAPES = [(101400, 200), (101400, 201), (25400, 1000), (25400, 1001), (3301, 9001)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_shapes_reach_persistent_blocks(dtype):
    for rows, classes in PERSISTENT_SHAPES:
        x = torch.empty(rows, classes, dtype=dtype, device="meta")
        target = torch.empty(rows, dtype=torch.int64, device="meta")
        text = warpwright.explain("cross_entropy", x, target, device="cuda")
        both = (
            2 if classes * x.element_size() <= 32768 else 1
        )  # backward: up to eight stages per row
        assert text.count("persistent") == both, text


@pytest.mark.gpu
@pytest.mark.parametrize("shape", PERSISTENT_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_many_rows(dtype, shape):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    target = labels_for(shape, "cuda").clamp(max=shape[1] - 2)
    weight = weights_for(shape, "cuda", dtype)
    for z, reduction, weighted in itertools.product((x, x[1:, 1:]), REDUCTIONS, (False, True)):
        rows, classes = z.shape
        kwargs = {"weight": weight[:classes] if weighted else None, "reduction": reduction}
        # A reduced loss that needs a gradient writes it in the forward.
        z = z.detach().requires_grad_(reduction == "none")
        compare_with_native(F.cross_entropy, native, (z, target[:rows]), kwargs)

    # What native has not, and rows that are not finite: against float64's, another kernel.
    x[5, 3], x[7, -1], x[9, 0] = NAN, -INF, INF
    for smoothing in (0.0, 0.1):
        options = {"label_smoothing": smoothing, "z_loss": 1e-3, "return_lse": True}
        exact = x.double().requires_grad_()
        ours = F.cross_entropy(x.requires_grad_(), target, reduction="none", **options)
        expected = F.cross_entropy(exact, target, reduction="none", **options)
        ours += torch.autograd.grad(ours[0].sum(), x)
        expected += torch.autograd.grad(expected[0].sum(), exact)
        for a, b in zip(ours, expected, strict=True):
            rtol = 2 * torch.finfo(a.dtype).eps if a.dtype == dtype != torch.float32 else 1e-5
            torch.testing.assert_close(a, b.to(a.dtype), rtol=rtol, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
def test_graph_capture_cuda():
    """Captured and replayed on new data, a bad label included."""
    x = torch.randn(64, 1000, device="cuda", requires_grad=True)
    target = torch.randint(1000, (64,), device="cuda")

    def step():
        loss = F.cross_entropy(x, target, label_smoothing=0.1)
        return loss, *torch.autograd.grad(loss, x)

    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            x.normal_()
        target.random_(1000)
        graph.replay()
        assert_same(results, step())
    target[3] = 1000
    graph.replay()
    with pytest.raises(IndexError, match=r"Target 1000 .*row 3 "):
        warpwright.check_errors()


@pytest.mark.gpu
def test_beyond_2_31_elements_cuda():
    rows, classes = 20000, 120001
    x = torch.zeros(rows, classes, device="cuda", dtype=torch.bfloat16)
    target = torch.full((rows,), classes - 1, device="cuda")
    x[-1, -1] = 8
    x.requires_grad_()
    loss = F.cross_entropy(x, target, reduction="none")
    (grad,) = torch.autograd.grad(loss[-1], x)
    expected = native(x[-1:].detach().float(), target[-1:])
    torch.testing.assert_close(loss[-1].float(), expected, rtol=1e-2, atol=0)
    assert grad[-1, -1] < 0
    assert torch.count_nonzero(grad[:-1]) == 0
