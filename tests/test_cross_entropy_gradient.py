"""Cross entropy whose forward writes the gradient, also with arguments that native lacks."""

import itertools
import re

import pytest
import torch
from common import layouts, opcheck

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, assert_same

native = torch.nn.functional.cross_entropy
INF = float("inf")

# On CUDA the forward writes the gradient from 16 MiB of logits on; the ops are asked directly below.
SHAPES = [(5,), (64, 10), (7, 33), (40, 1000), (12, 5003), (2, 21, 7, 9), (3, 1), (0, 4), (3, 4, 0)]
# One for each way in which the kernels share a row out: lanes of a warp, a block, a cluster, none.
WIDE_SHAPES = [(5, 1031), (9, 9001), (3, 33001), (2, 50257), (2, 128256), (2, 300007)]
# Enough rows for the ring: with groups of warps, and clusters of 2 to 8 blocks.
RING_SHAPES = [
    (6403, 3001),
    (1603, 9001),
    (801, 25003),
    (801, 50257),
    (271, 128256),
    (203, 151669),
]
# Enough rows for the stream: 4 to 32 lanes a row in 16 bits, 8 and 32 in float32; one that is short
# of rows for it in 16 bits.
STREAM_SHAPES = [(101401, 201), (51001, 401), (26003, 1001), (12801, 2001), (13001, 1000)]


def over(shapes):
    """Ring and stream are a GPU's; on the CPU their shapes would run no other code."""
    many = RING_SHAPES + STREAM_SHAPES
    on_gpu = [pytest.param("cuda", s, marks=pytest.mark.gpu) for s in shapes + many]
    return pytest.mark.parametrize(
        ("device", "shape"), [*(("cpu", s) for s in shapes), *on_gpu], ids=str
    )


def test_the_shapes_reach_every_ring():
    for dtype in (torch.bfloat16, torch.float32):
        found = set()
        for rows, classes in RING_SHAPES:
            x = torch.empty(rows, classes, dtype=dtype, device="meta")
            target = torch.empty(rows, dtype=torch.int64, device="meta")
            text = warpwright.explain("cross_entropy", x, target, device="cuda")
            found.update(
                re.findall(r"groups of \d+ threads, each with its own row, in (\d) blocks", text)
            )
        assert found == {"1", "2", "4", "8"}, dtype


@pytest.mark.parametrize(
    ("dtype", "lanes"),
    [(torch.bfloat16, {"4", "8", "16", "32"}), (torch.float32, {"8", "16", "32"})],
)
def test_the_shapes_reach_persistent_blocks(dtype, lanes):
    found = set()
    for rows, classes in STREAM_SHAPES:
        x = torch.empty(rows, classes, dtype=dtype, device="meta")
        target = torch.empty(rows, dtype=torch.int64, device="meta")
        text = warpwright.explain("cross_entropy", x, target, device="cuda")
        line = next(line for line in text.splitlines() if "forward with grad_input" in line)
        found.update(
            re.findall(r"(\d+) threads of 1 blocks per row.*one row after the other", line)
        )
    assert found == lanes


def labels_for(shape, device, ignore=-100):
    classes = shape[1] if len(shape) > 1 else shape[0]
    labels = torch.randint(classes, (shape[0], *shape[2:]) if len(shape) > 1 else (), device=device)
    if labels.dim():
        labels[1::5] = ignore
    return labels


def forward_gradient(x, target, weight=None, reduction=1, smoothing=0.0, z_loss=0.0, dtype=None):
    return torch.ops.warpwright.cross_entropy_forward_gradient(
        x, target, weight, reduction, -100, smoothing, dtype or x.dtype, z_loss
    )


@over(SHAPES + WIDE_SHAPES)
def test_as_forward_and_backward(device, dtype, shape):
    """The one op against the two that it stands for, on every layout."""
    if max(shape) > 2000 and dtype == torch.float16 and device == "cpu":
        return  # the same code as bfloat16
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    target = labels_for(shape, device)
    classes = shape[1] if len(shape) > 1 else shape[0]
    weight = (torch.rand(classes, device=device) + 0.5).to(dtype)
    ops = torch.ops.warpwright
    variants = itertools.product(layouts(x), (1, 2), (0.0, 0.1), (None, weight), (0.0, 1e-2))
    for (name, z), reduction, smoothing, w, z_loss in variants:
        if max(shape) > 2000 and (name not in ("contiguous", "offset1") or w is not None):
            continue
        options = (reduction, -100, smoothing)
        loss, stats, total = ops.cross_entropy_forward(z, target, w, *options, dtype, z_loss)
        one = torch.ones((), dtype=dtype, device=device)
        grad, _ = ops.cross_entropy_backward(
            one, z, target, w, stats, total, *options, [True, False], z_loss
        )
        ours = forward_gradient(z, target, w, reduction, smoothing, z_loss)
        what = f"{name} {reduction} {smoothing} {w is not None} {z_loss}"
        if device == "cpu":
            assert_same(ours, (loss, stats, total, grad))
        for a, b in zip(ours, (loss, stats, total, grad), strict=True):
            assert a.stride() == b.stride(), what
            # The order of a row's sum differs; a rounding to 16 bits may fall on the other side.
            info = torch.finfo(a.dtype)
            rtol = {2: info.eps, 4: 1e-5, 8: 1e-12}[a.element_size()]
            # A label's own element is p - 1. If p is near 1, only p's last bits remain of it.
            # float16's gradients are subnormal.
            cancelled = torch.finfo(torch.float32).eps * (
                1 if reduction == 2 else 1 / max(1, target.numel())
            )
            atol = max(1e-8, 2 * cancelled, info.smallest_normal * info.eps)
            torch.testing.assert_close(
                a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, w=what: f"{w}: {m}"
            )


@over(WIDE_SHAPES)
def test_wide_rows_as_good_as_native(device, dtype, shape):
    x = (torch.randn(shape, device=device) * 3).to(dtype)
    target = labels_for(shape, device)
    loss, _, _, grad = forward_gradient(x, target)

    def run(z):
        z = z.clone().requires_grad_()
        value = native(z, target)
        return value.detach(), *torch.autograd.grad(value, z)

    for ours, theirs, exact in zip((loss, grad), run(x), run(x.double()), strict=True):
        assert_as_good_as_native(ours, theirs, exact)


@pytest.mark.parametrize("kind", ["labels", "smoothed"])
def test_special_values(device, dtype, kind):
    """Rows of NaN, infinities, and ignored rows with them: as forward and backward say."""
    special = [-INF, INF, float("nan"), 0.0, 1e4, -1e4]
    rows = [[a, b, 0.5, -1.0, 2.0] for a, b in itertools.product(special, special)]
    rows += [[-INF] * 5, [INF] * 5, [0.0] * 5]
    x = torch.tensor(rows, device=device).to(dtype)
    target = torch.arange(len(rows), device=device) % 3
    smoothing = 0.1 if kind == "smoothed" else 0.0
    for ignored in (False, True):
        labels = torch.full_like(target, -100) if ignored else target
        options = (2, -100, smoothing)
        ops = torch.ops.warpwright
        loss, stats, total = ops.cross_entropy_forward(x, labels, None, *options, dtype)
        one = torch.ones((), dtype=dtype, device=device)
        grad, _ = ops.cross_entropy_backward(
            one, x, labels, None, stats, total, *options, [True, False]
        )
        ours = forward_gradient(x, labels, None, 2, smoothing)
        torch.testing.assert_close(ours[0], loss, equal_nan=True)
        torch.testing.assert_close(ours[3], grad, equal_nan=True)
        assert torch.equal(ours[3].isnan(), grad.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_special_values_in_a_stream(dtype):
    """Single logits and whole rows, valid, ignored, and of bad labels."""
    shape = STREAM_SHAPES[0]
    special = torch.tensor([-INF, INF, float("nan"), 0.0, -0.0, 6e4, -6e4], device="cuda").to(dtype)
    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    for step, columns in ((3, slice(7, 8)), (11, slice(None))):
        rows = x[::step, columns]
        rows.copy_(special[torch.arange(len(rows), device="cuda") % 7, None].expand_as(rows))
    target = labels_for(shape, "cuda")
    target[::1001] = shape[1]
    for reduction in (1, 2):
        options = (reduction, -100, 0.0)
        ops = torch.ops.warpwright
        forward = ops.cross_entropy_forward(x, target, None, *options, dtype)
        one = torch.ones((), dtype=dtype, device="cuda")
        grad, _ = ops.cross_entropy_backward(
            one, x, target, None, *forward[1:], *options, [True, False]
        )
        ours = forward_gradient(x, target, None, reduction)
        for a, b in zip(ours, (*forward, grad), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    with pytest.raises(IndexError):
        warpwright.check_errors()


def test_all_ignored(device):
    x = torch.randn(3, 4, device=device)
    target = torch.full((3,), -100, device=device)
    loss, _, total, grad = forward_gradient(x, target)
    assert loss.isnan()
    assert total == 0
    assert torch.count_nonzero(grad) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 7, 1024, 100003])
def test_scale(device, dtype, numel):
    ops = torch.ops.warpwright
    base = torch.randn(numel + 1, device=device).to(dtype)
    for gradient in (base[:numel], base[1:]):
        for factor_dtype in {dtype, torch.promote_types(dtype, torch.float32)}:
            for factor in (1.0, 0.5, -3.0, 0.0):
                scaled = gradient.clone() if gradient is base[:numel] else gradient
                expected = scaled.clone() * factor
                ops.cross_entropy_scale_(
                    scaled, torch.tensor(factor, dtype=factor_dtype, device=device)
                )
                assert torch.equal(scaled, expected)
                scaled.copy_(torch.randn(numel, device=device))
    with pytest.raises(RuntimeError, match="factor: expected one number"):
        ops.cross_entropy_scale_(base, base[:1].expand(2))
    with pytest.raises(RuntimeError, match="not differentiable"):
        ops.cross_entropy_scale_(base, torch.ones((), dtype=dtype, device=device).requires_grad_())


# ---- the saved gradient: given away once, and never wrong ----


@pytest.fixture
def case(device):
    """Logits big enough that a forward on `device` writes the gradient, labels, and that gradient."""
    shape = (4096, 1031) if device == "cuda" else (17, 31)
    x = torch.randn(shape, device=device, requires_grad=True)
    target = labels_for(shape, device)
    _, _, _, gradient = forward_gradient(x.detach(), target)
    return x, target, gradient


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of our ops that reach the kernels."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "warpwright":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def test_which_ops_run(case):
    x, target, _ = case
    with Calls() as calls:
        F.cross_entropy(x, target).backward()
    assert calls.names == ["cross_entropy_forward_gradient", "cross_entropy_scale_"]
    for run, expected in (
        (lambda: F.cross_entropy(x.detach(), target), ["cross_entropy_forward"]),
        (
            lambda: F.cross_entropy(x, target).backward(retain_graph=True),
            ["cross_entropy_forward_gradient", "cross_entropy_backward"],
        ),
        (
            lambda: F.cross_entropy(x, target, reduction="none").sum().backward(),
            ["cross_entropy_forward", "cross_entropy_backward"],
        ),
        (
            lambda: F.cross_entropy(x.half(), target).backward(),
            ["cross_entropy_forward", "cross_entropy_backward"],
        ),
        (
            lambda: F.cross_entropy(x, x.detach().softmax(1)).backward(),
            ["cross_entropy_forward", "cross_entropy_backward"],
        ),
    ):
        with Calls() as calls:
            run()
        assert calls.names == expected
    with torch.no_grad(), Calls() as calls:
        F.cross_entropy(x, target)
    assert calls.names == ["cross_entropy_forward"]


def test_given_away_once(case):
    """No copy on the way to .grad, and a second backward is refused as ever."""
    x, target, gradient = case
    loss = F.cross_entropy(x, target)
    loss.backward()
    assert_same(x.grad, gradient)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    assert_same(x.grad, gradient)


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0, -1.0, 0.0])
def test_incoming_gradient(case, factor):
    x, target, gradient = case
    (grad,) = torch.autograd.grad(F.cross_entropy(x, target) * factor, x)
    # As native's, the zeros of ignored rows keep their sign.
    assert_same(grad, torch.where(gradient == 0, gradient, gradient * factor))


def test_backward_twice(case):
    """retain_graph: each gradient is right, and none of them changes afterwards."""
    x, target, gradient = case
    loss = F.cross_entropy(x, target)
    first = torch.autograd.grad(loss, x, torch.tensor(2.0, device=x.device), retain_graph=True)[0]
    kept = first.clone()
    second = torch.autograd.grad(loss, x, retain_graph=True)[0]
    last = torch.autograd.grad(loss, x, torch.tensor(-3.0, device=x.device))[0]
    assert_same(first, kept)
    for actual, factor in ((first, 2.0), (second, 1.0), (last, -3.0)):
        torch.testing.assert_close(actual, gradient * factor, rtol=1e-5, atol=1e-9)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, x)


def test_node_called_by_hand(case):
    """Outside of a backward pass nothing says that this is the last one."""
    x, target, gradient = case
    node = F.cross_entropy(x, target).grad_fn
    one = torch.ones((), device=x.device)
    for factor in (1.0, 4.0, 1.0):
        grad = node(one * factor)
        grad = grad[0] if isinstance(grad, tuple) else grad
        torch.testing.assert_close(grad, gradient * factor, rtol=1e-5, atol=1e-9)


def test_accumulates(case):
    x, target, gradient = case
    for _ in range(3):
        F.cross_entropy(x, target).backward()
    torch.testing.assert_close(x.grad, gradient * 3)
    z = x * 1
    (F.cross_entropy(z, target) + F.cross_entropy(z, target, reduction="sum") + z.sum()).backward()
    assert x.grad.isfinite().all()


def test_two_losses_of_one_node(case):
    """Logits that others saved too are not touched."""
    x, target, _ = case
    z = x * 2
    before = z.detach().clone()
    (F.cross_entropy(z, target) + z.exp().mean()).backward()
    assert_same(z.detach(), before)


def test_create_graph(device):
    x = torch.randn(6, 5, device=device, dtype=torch.float64, requires_grad=True)
    target = labels_for((6, 5), device)
    results = []
    for function in (F.cross_entropy, native):
        (grad,) = torch.autograd.grad(function(x, target), x, create_graph=True)
        results.append((grad, *torch.autograd.grad(grad.pow(2).sum(), x)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_forward_over_reverse(device):
    """A tangent on the logits, or only on the incoming gradient."""
    fwd = torch.autograd.forward_ad
    x = torch.randn(6, 5, device=device, dtype=torch.float64)
    tangent = torch.randn_like(x)
    target = labels_for((6, 5), device)
    scale = torch.tensor(2.0, device=device, dtype=torch.float64)
    for on_input, on_scale in ((True, False), (False, True), (True, True)):
        results = []
        for function in (F.cross_entropy, native):
            with fwd.dual_level():
                leaf = x.clone().requires_grad_()
                z = fwd.make_dual(leaf, tangent) if on_input else leaf
                g = fwd.make_dual(scale, scale * 3) if on_scale else scale
                (grad,) = torch.autograd.grad(function(z, target), z, g)
                results.append(fwd.unpack_dual(grad))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_batched_backward(case):
    x, target, gradient = case
    scales = torch.tensor([1.0, 2.0], device=x.device)
    (grads,) = torch.autograd.grad(F.cross_entropy(x, target), x, scales, is_grads_batched=True)
    torch.testing.assert_close(grads[1], gradient * 2, rtol=1e-5, atol=1e-9)


def test_func_and_compile(device):
    x = torch.randn(8, 5, device=device)
    target = labels_for((8, 5), device)
    expected = torch.func.grad(lambda z: native(z, target))(x)
    torch.testing.assert_close(torch.func.grad(lambda z: F.cross_entropy(z, target))(x), expected)
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(
        lambda z: F.cross_entropy(z, target), fullgraph=True, backend="aot_eager"
    )
    (compiled(leaf) * 2).backward()
    torch.testing.assert_close(leaf.grad, expected * 2)


def test_checkpoint_and_saved_tensor_hooks(case):
    x, target, gradient = case
    checkpoint = torch.utils.checkpoint.checkpoint
    checkpoint(lambda z: F.cross_entropy(z * 1, target), x, use_reentrant=False).backward()
    assert_same(x.grad, gradient)
    x.grad = None
    with torch.autograd.graph.save_on_cpu():
        loss = F.cross_entropy(x, target) * 2
    loss.backward()
    assert_same(x.grad, gradient * 2)


def test_autocast(device):
    x = torch.randn(20, 30, device=device, requires_grad=True)
    target = labels_for((20, 30), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = F.cross_entropy(x.bfloat16(), target)
    assert loss.dtype == torch.float32
    (loss * 3).backward()
    expected = torch.autograd.grad(native(x.bfloat16().double(), target) * 3, x)[0]
    torch.testing.assert_close(x.grad, expected, rtol=2e-2, atol=1e-5)


def test_opcheck(device):
    ops = torch.ops.warpwright
    for shape in ((4, 5), (5,), (2, 3, 4, 2)):
        x = torch.randn(shape, device=device)
        labels = labels_for(shape, device)
        args = (labels, None, 1, -100, 0.1, torch.float32, 1e-3)
        for z in (x, x.clone().requires_grad_()):
            opcheck(ops.cross_entropy_forward_gradient.default, (z, *args))
        opcheck(ops.cross_entropy_scale_.default, (x.clone(), torch.tensor(2.0, device=device)))
        loss, stats, total = ops.cross_entropy_forward(x, *args)
        opcheck(ops.cross_entropy_lse.default, (x.clone().requires_grad_(), stats))
        opcheck(
            ops.cross_entropy_backward_.default,
            (torch.ones_like(loss), x.clone(), labels, None, stats, total, 1, -100, 0.1, 1e-3),
        )
