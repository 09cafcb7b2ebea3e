"""embedding adds up its weight's gradient exactly and in one order, and has derivatives of higher orders."""

import pytest
import torch
import torch.nn.functional as native
from common import assert_replays, gradcheck
from embedding_cases import INDEX_TYPES, draw, pairs, weights_gradient
from torch.autograd import forward_ad

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same

ops = torch.ops.warpwright


@pytest.mark.gpu
@pytest.mark.parametrize("index", INDEX_TYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1_000_001, 8), (1_000_000, 5), (12_345_678, 1)], ids=str)
def test_sorted_positions(dtype, sizes, index):
    """Large tables, whose positions are grouped by a sort. Integers are exact."""
    rows, columns = sizes
    count = 60_000
    indices = torch.randint(rows, (count,), device="cuda", dtype=index)
    indices[: count // 3] = rows - 1
    indices[-100:] = 7
    indices[5:50] = 0
    cotangent = torch.randint(-2, 3, (count, columns), device="cuda").to(dtype)
    before = indices.clone()
    for padding, by_freq in ((-1, False), (7, False), (rows - 1, False), (0, True)):
        found = ops.embedding_backward(cotangent, indices, rows, padding, by_freq)
        exact = torch.ops.aten.embedding_dense_backward(
            cotangent.double(), indices, rows, padding, by_freq
        )
        if by_freq:  # the quotient is rounded twice
            torch.testing.assert_close(found, exact.to(dtype))
        else:
            assert_same(found, exact.to(dtype))
        assert_same(ops.embedding_backward(cotangent, indices, rows, padding, by_freq), found)
    assert_same(indices, before)
    indices[1234] = rows
    found = ops.embedding_backward(cotangent, indices, rows, -1, False)
    with pytest.raises(IndexError, match=f"index out of range.*{rows} .*position 1234"):
        warpwright.check_errors()
    cotangent[1234] = 0
    indices[1234] = 0
    assert_same(found, ops.embedding_backward(cotangent, indices, rows, -1, False))


@pytest.mark.gpu
def test_sorted_positions_in_a_graph():
    indices = torch.randint(1_000_000, (60_000,), device="cuda")
    cotangent = torch.randn(60_000, 8, device="cuda")
    assert_replays(lambda: (ops.embedding_backward(cotangent, indices, 1_000_000, 5, False),))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 63, 64, 65, 96, 511, 512, 513, 1100, 9000])
def test_rows_of_many_positions(device, dtype, count):
    """Parts of 16 positions, and trees of one, two and three levels. Integers are exact."""
    for columns in (24, 5):
        indices, weight = draw(device, (40, columns), (count + 70,), dtype, hot=count)
        cotangent = torch.randint(-2, 3, (count + 70, columns), device=device).to(dtype)
        found = weights_gradient(F.embedding, indices, weight, cotangent)
        exact = weights_gradient(native.embedding, indices, weight.double(), cotangent.double())
        assert_same(found, exact.to(dtype))


def test_frequencies(device, dtype):
    """Divided by the number of positions, padding apart."""
    for padding in (None, 2):
        indices, weight = draw(device, (6, 20), (300,), dtype, hot=100)
        cotangent = torch.randn(300, 20, device=device).to(dtype)
        options = {"padding_idx": padding, "scale_grad_by_freq": True}
        found = weights_gradient(F.embedding, indices, weight, cotangent, **options)
        wide = weight.detach().double().requires_grad_()
        exact = weights_gradient(native.embedding, indices, wide, cotangent.double(), **options)
        error = (found.double() - exact).abs().max()
        assert error <= 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_derivatives(device):
    indices, weight = draw(device, (6, 3), (2, 5), torch.float64)
    gradcheck(lambda w: F.embedding(indices, w), (weight,))
    # The forward-mode derivative of a padding row is not zero, as native's: no position has it here.
    gradcheck(lambda w: F.embedding(indices % 2, w, 2), (weight,))


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("by_freq", [False, True])
def test_derivatives_of_the_backward(device, padding, by_freq):
    """Frequencies too, whose second derivative native leaves out (2.11)."""
    indices, _ = draw(device, (6, 3), (2, 5))
    dy = torch.randn(2, 5, 3, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda g: ops.embedding_backward(g, indices, 6, padding, by_freq), (dy,))


def test_second_derivative_as_native(device):
    indices, weight = draw(device, (6, 3), (9,), torch.float64)
    found = []
    for function in (F.embedding, native.embedding):
        torch.manual_seed(1)
        dy = torch.randn(9, 3, device=device, dtype=torch.float64, requires_grad=True)
        y = function(indices, weight, 2)
        (grad,) = torch.autograd.grad(y, weight, dy, create_graph=True)
        found.append(torch.autograd.grad(grad.sin().sum(), dy)[0])
    torch.testing.assert_close(*found)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        both = pairs(padding_idx=2)
        moved = [forward_ad.unpack_dual(f(indices, dual)).tangent for f in both]
    assert_same(*moved)


def test_func_transforms(device):
    indices, weight = draw(device, (6, 3), (9,), torch.float64)
    weight = weight.detach()
    for transform in (
        lambda f: torch.func.grad(lambda w: f(indices, w).sin().sum()),
        lambda f: torch.func.jacrev(lambda w: f(indices, w)),
        lambda f: torch.func.jacfwd(lambda w: f(indices, w)),
        lambda f: torch.func.hessian(lambda w: f(indices, w).sin().sum()),
    ):
        torch.testing.assert_close(
            transform(F.embedding)(weight), transform(native.embedding)(weight)
        )


@pytest.mark.parametrize("rows", [(3000, 24), (40, 1032)])
def test_repeats_are_equal(device, dtype, rows):
    indices, weight = draw(device, rows, (5000,), dtype, hot=3000)
    cotangent = torch.randn(5000, rows[1], device=device).to(dtype)
    first = weights_gradient(F.embedding, indices, weight, cotangent)
    for _ in range(10 if device == "cuda" else 2):
        assert_same(weights_gradient(F.embedding, indices, weight, cotangent), first)


def test_threads_do_not_change_the_gradient(dtype):
    indices, weight = draw("cpu", (500, 40), (3000,), dtype, hot=900)
    cotangent = torch.randn(3000, 40).to(dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(weights_gradient(F.embedding, indices, weight, cotangent))
    finally:
        torch.set_num_threads(before)
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.gpu
def test_cuda_graph():
    indices, weight = draw("cuda", (300, 72), (4000,), hot=3000)
    cotangent = torch.randn(4000, 72, device="cuda")

    def step():
        y = F.embedding(indices, weight)
        return y, ops.embedding_backward(cotangent, indices, 300, 5, False)

    with torch.no_grad():
        assert_replays(step)
