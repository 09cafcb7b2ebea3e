"""linear_cross_entropy has the chain's gradients of every order, and stores no tensor of the logits' size."""

import pytest
import torch
from common import assert_no_leak, gradcheck, subsets
from linear_cross_entropy_cases import assert_near, chain, operands
from losses import REDUCTIONS
from torch.profiler import ProfilerActivity, profile

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, compare_with_native

# ---- gradients ----


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_subsets_of_gradients(device, reduction, needs):
    x, weight, target, bias = operands(20, 8, 11, device)
    leaves = [t.detach().requires_grad_(n) for t, n in zip((x, weight, bias), needs, strict=True)]
    args = leaves[0], leaves[1], target, leaves[2]
    compare_with_native(
        F.linear_cross_entropy, chain, args, {"reduction": reduction, "chunk_rows": 6}
    )


def test_fewer_gradients_than_the_forward_computed(device):
    x, weight, target, bias = operands(20, 8, 11, device)
    every = torch.autograd.grad(F.linear_cross_entropy(x, weight, target, bias), (x, weight, bias))
    for i, leaf in enumerate((x, weight, bias)):
        (one,) = torch.autograd.grad(F.linear_cross_entropy(x, weight, target, bias), leaf)
        assert torch.equal(one, every[i])


@pytest.mark.parametrize("factor", [1.0, 3.0, -0.1])
def test_factor_and_repeated_backward(device, dtype, factor):
    """The gradients in store are multiplied once: by the backward that uses them up, or by none."""
    x, weight, target, bias = operands(20, 16, 11, device, dtype)
    leaves = (x, weight, bias)
    expected = torch.autograd.grad(chain(x, weight, target, bias) * factor, leaves)
    loss = F.linear_cross_entropy(x, weight, target, bias, chunk_rows=6) * factor
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    last = torch.autograd.grad(loss, leaves)
    for a, b, c, d, e in zip(first, kept, second, last, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        assert torch.equal(a, d)
        assert_near(a, e)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_the_gradient_becomes_grad_without_a_copy(device):
    """AccumulateGrad takes the tensor itself: a copy would be another gradient's memory."""
    x, weight, target, bias = operands(20, 16, 11, device)
    seen = []
    weight.register_hook(lambda g: seen.append(g.data_ptr()))
    F.linear_cross_entropy(x, weight, target, bias).backward()
    assert weight.grad.data_ptr() == seen[0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_float16_gradients_do_not_vanish(device, reduction):
    """A mean's gradients lie far below float16's range until the loss scale reaches them."""
    x, weight, target, bias = operands(512, 16, 1000, device, torch.float16)
    with torch.no_grad():
        weight.mul_(0.01)
    scale = 65536.0 if reduction == "mean" else 16.0
    for chunk in (None, 100):
        kwargs = {"reduction": reduction, "chunk_rows": chunk}
        compare_with_native(
            lambda *a, **k: F.linear_cross_entropy(*a, **k).float() * scale,
            lambda *a, **k: chain(*a, **k).float() * scale,
            (x, weight, target, bias),
            kwargs,
        )


def test_bfloat16_sums_are_rounded_once(device):
    """Hundreds of chunks of one row each: a sum in bfloat16 would stand still."""
    x, weight, target, bias = operands(600, 8, 5, device, torch.bfloat16)
    args = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    grads = torch.autograd.grad(
        F.linear_cross_entropy(x, weight, target, bias, chunk_rows=1), (weight, bias)
    )
    theirs = torch.autograd.grad(chain(x, weight, target, bias), (weight, bias))
    exact = torch.autograd.grad(chain(args[0], args[1], target, args[2]), args[1:])
    for a, b, e in zip(grads, theirs, exact, strict=True):
        assert_as_good_as_native(a, b, e)


@pytest.mark.gpu
def test_sums_of_four_chunks_in_bfloat16():
    """Where a float32 sum of the weight's gradient would take more than a quarter of the logits."""
    x, weight, target, bias = operands(4096, 64, 131072, "cuda", torch.bfloat16)
    text = warpwright.explain("linear_cross_entropy", x, weight, target)
    assert "four chunks" in text
    compare_with_native(F.linear_cross_entropy, chain, (x, weight, target, bias))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradcheck(device, reduction, needs):
    x, weight, target, bias = operands(5, 3, 4, device, torch.float64)
    leaves = [t.detach().requires_grad_(n) for t, n in zip((x, weight, bias), needs, strict=True)]

    def function(x, weight, bias):
        return F.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, label_smoothing=0.1, chunk_rows=2
        )

    gradcheck(function, leaves)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_probabilities(device, reduction):
    x, weight, _, bias = operands(3, 3, 4, device, torch.float64)
    target = torch.rand(3, 4, device=device, dtype=torch.float64, requires_grad=True)

    def function(x, weight, bias, target):
        return F.linear_cross_entropy(
            x, weight, target, bias, reduction=reduction, label_smoothing=0.2, chunk_rows=2
        )

    gradcheck(function, (x, weight, bias, target))


def test_second_derivatives(device):
    x, weight, target, bias = operands(20, 8, 11, device)

    def hessian_row(function):
        loss = function(x, weight, target, bias, chunk_rows=6)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), (x, weight, bias))

    torch.testing.assert_close(hessian_row(F.linear_cross_entropy), hessian_row(chain))


def test_functorch(device):
    x, weight, target, bias = operands(10, 6, 7, device)
    args = x.detach(), weight.detach(), bias.detach()

    def transformed(function):
        def loss(x, weight, bias):
            return function(x, weight, target, bias, chunk_rows=4)

        v = tuple(torch.ones_like(a) for a in args)
        yield torch.func.grad(loss, (0, 1, 2))(*args)
        yield torch.func.jvp(loss, args, v)
        yield torch.func.hessian(loss)(*args)
        yield torch.func.grad(lambda *a: torch.func.grad(loss)(*a).square().sum())(*args)
        stacked = torch.stack([args[0], 2 * args[0]])
        yield torch.func.vmap(torch.func.grad(loss), (0, None, None))(stacked, *args[1:])

    for a, b in zip(transformed(F.linear_cross_entropy), transformed(chain), strict=True):
        torch.testing.assert_close(a, b)


def test_saved_tensor_hooks_and_checkpoint(device):
    x, weight, target, bias = operands(20, 8, 11, device)
    leaves = (x, weight, bias)
    expected = torch.autograd.grad(F.linear_cross_entropy(x, weight, target, bias), leaves)
    with torch.autograd.graph.save_on_cpu():
        loss = F.linear_cross_entropy(x, weight, target, bias)
    for a, b in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert torch.equal(a, b)
    loss = torch.utils.checkpoint.checkpoint(
        F.linear_cross_entropy, x, weight, target, bias, use_reentrant=False
    )
    for a, b in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        assert torch.equal(a, b)


def test_deterministic(device, dtype):
    args = operands(300, 64, 333, device, dtype)
    leaves = (args[0], args[1], args[3])
    results = []
    for _ in range(3):
        loss = F.linear_cross_entropy(*args, chunk_rows=128)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


def test_results_are_freed(device):
    x, weight, target, bias = operands(20, 8, 11, device)
    assert_no_leak(lambda *a: F.linear_cross_entropy(a[0], a[1], target, a[2]), x, weight, bias)


# ---- memory ----


def largest_allocation(function):
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    return max(e.nbytes() for e in events)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_tensor_of_the_logits_size(reduction):
    rows, features, classes, chunk = 512, 8, 2048, 32
    args = operands(rows, features, classes, "cpu")

    def step(function):
        loss = function(*args, reduction=reduction, chunk_rows=chunk)
        torch.autograd.grad(loss.sum(), (args[0], args[1], args[3]))

    logits = rows * classes * 4
    assert largest_allocation(lambda: step(chain)) >= logits
    # A chunk's logits, and nothing larger.
    assert largest_allocation(lambda: step(F.linear_cross_entropy)) <= logits * chunk // rows


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "features", "classes", "bound"),
    [(8192, 4096, 128256, 1.6), (16384, 768, 50257, 0.4)],
    ids=["llama", "gpt2"],
)
def test_peak_memory(rows, features, classes, bound):
    x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) * 0.02
    weight.requires_grad_()
    target = torch.randint(classes, (rows,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    F.linear_cross_entropy(x, weight, target).backward()
    assert torch.cuda.max_memory_allocated() - before <= bound * 2**30
