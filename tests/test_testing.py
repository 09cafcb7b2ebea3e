"""The error rule itself: what it must let pass, and what it must not."""

import pytest
import torch

from warpwright.testing import DRAWS, compare_with_native


class Chain(torch.autograd.Function):
    """The sum of a vector's elements in the order given: one chain of float32 roundings."""

    @staticmethod
    def forward(ctx, x, order):
        ctx.save_for_backward(x)
        total = torch.zeros((), dtype=x.dtype)
        for value in x[order]:
            total = total + value
        return total

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.expand(x.shape), None


FORWARD, BACKWARD = torch.arange(16), torch.arange(16).flip(0)


def forward(x):
    return Chain.apply(x, FORWARD)


def backward(x):
    return Chain.apply(x, BACKWARD)


def vector(seed):
    return torch.randn(16, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def test_another_order_passes():
    # Of 200 inputs some exceed the bound, where the other order is lucky; their neighbours do not.
    calls = 0

    def counted(x):
        nonlocal calls
        calls += 1
        return backward(x)

    for seed in range(200):
        compare_with_native(counted, forward, [vector(seed)])
    assert 200 < calls < 200 + 20 * DRAWS


@pytest.mark.parametrize("error", [3e-7, 1e-5])
def test_a_coarser_sum_fails(error):
    def coarser(x):
        return forward(x) * (1 + error)

    failures = []
    for seed in range(20):
        try:
            compare_with_native(coarser, forward, [vector(seed)])
        except AssertionError as failure:
            failures.append(str(failure))
    assert len(failures) >= (8 if error < 1e-6 else 20)
    assert all(f"mean of {DRAWS} inputs" in failure for failure in failures)


def test_inputs_stay_as_they_were():
    base = torch.randn(40)
    overlapping = base.as_strided((4, 8), (5, 1)).requires_grad_()
    before = base.clone()
    with pytest.raises(AssertionError, match="output"):
        compare_with_native(lambda x: x * 1.01, lambda x: x * 1.0, [overlapping])
    assert torch.equal(base, before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: x / (x != 0), "NaN or inf elsewhere"),
        (lambda x: x.double(), "dtype"),
        (lambda x: x[:3], "shape"),
    ],
)
def test_what_is_no_rounding_fails_at_once(wrong, message):
    calls = 0

    def counted(x):
        nonlocal calls
        calls += 1
        return wrong(x)

    with pytest.raises(AssertionError, match=message):
        compare_with_native(counted, lambda x: x * 1.0, [torch.tensor([0.0, 1.0, 2.0, 3.0])])
    assert calls == 1
