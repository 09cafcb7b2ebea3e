"""Attention's dropout draws anew on every call and replay, repeats from a seed, and drops what it is asked to."""

import pytest
import torch
from attention_cases import ours, qkv, seeded
from common import captured

from warpwright.testing import assert_same


def test_dropout_replay(device, dtype):
    q, k, v = qkv(device, dtype, 2, 3, 70, 90, 16)

    def run(seed):
        out = seeded(seed, ours)(q, k, v, dropout_p=0.3)
        return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

    assert_same(run(1), run(1))
    assert not torch.equal(run(1)[0], run(2)[0])
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    first = ours(q, k, v, dropout_p=0.3)
    assert not torch.equal(first, ours(q, k, v, dropout_p=0.3))
    (torch.cuda.set_rng_state if device == "cuda" else torch.set_rng_state)(state)
    assert torch.equal(first, ours(q, k, v, dropout_p=0.3))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_statistics(device, dtype, p):
    """With v = identity the output is the dropped probabilities themselves."""
    S = 128
    q = torch.zeros(4, 8, S, S, device=device, dtype=dtype)
    eye = torch.eye(S, device=device).to(dtype).expand(4, 8, S, S)
    factors = ours(q, q, eye, dropout_p=p).double() * S
    keep = factors != 0
    n = keep.numel()
    tolerance = 5 * (p * (1 - p) / n) ** 0.5
    assert abs(keep.double().mean() - (1 - p)) < tolerance
    torch.testing.assert_close(
        factors[keep], torch.full_like(factors[keep], 1 / (1 - p)), rtol=1e-2, atol=0
    )
    # Neither rows, columns, neighbours in a draw's square nor heads are correlated.
    for a, b in (
        (keep[:, :, 1:], keep[:, :, :-1]),
        (keep[..., 1:], keep[..., :-1]),
        (keep[:, :, 8:], keep[:, :, :-8]),
        (keep[..., 8:], keep[..., :-8]),
        (keep[:, 1:], keep[:, :-1]),
        (keep[1:], keep[:-1]),
    ):
        covariance = (a.double() * b.double()).mean() - a.double().mean() * b.double().mean()
        assert abs(covariance) < 6 * p * (1 - p) / a.numel() ** 0.5


def test_dropout_against_factors(device):
    """Out and gradients against the plain formula with the factors that the call drew."""
    q, k, v = qkv(device, torch.float64, 2, 3, 70, 90, 16)
    ops = torch.ops.warpwright
    out, lse, state = ops.attention(q, k, v, None, 0.3, True, None)
    factors = ops.attention_dropout_factors(state, torch.float64, 0.3, 2, 3, 0, 70, 90)
    for begin, rows in ((0, 16), (5, 40), (69, 1)):
        block = ops.attention_dropout_factors(state, torch.float64, 0.3, 2, 3, begin, rows, 90)
        assert torch.equal(block, factors[:, :, begin : begin + rows])
    scores = (q @ k.mT) / 4
    scores = scores.masked_fill(torch.ones(70, 90, device=device).triu(1).bool(), float("-inf"))
    expected = (scores.softmax(-1) * factors) @ v
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    g = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(expected, (q, k, v), g)
    )


def test_dropout_extremes(device, dtype):
    q, k, v = qkv(device, dtype, 1, 2, 20, 30, 16)
    out = ours(q, k, v, dropout_p=1.0)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))
    assert_same(ours(q, k, v, dropout_p=0.0), ours(q, k, v))


def test_compile_with_dropout(device):
    q, k, v = qkv(device, torch.float32, 2, 4, 20, 20, 8)
    compiled = torch.compile(
        lambda *args: ours(*args, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )

    def run(function):
        out = seeded(7, function)(q, k, v)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    assert_same(run(compiled), run(lambda *args: ours(*args, dropout_p=0.5)))


@pytest.mark.gpu
def test_cuda_graph_with_dropout():
    q, k, v = (t.detach() for t in qkv("cuda", torch.bfloat16, 2, 4, 200, 200, 64))

    def step():
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = ours(*leaves, dropout_p=0.2)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    graph, results = captured(step)
    graph.replay()
    first = [t.clone() for t in results]
    graph.replay()
    assert not torch.equal(first[0], results[0])  # every replay draws anew
    for seed in (1, 1):
        torch.cuda.manual_seed(seed)
        graph.replay()
        again = [t.clone() for t in results]
    torch.cuda.manual_seed(1)
    graph.replay()
    assert_same(list(results), again)
