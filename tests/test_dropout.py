"""dropout: which elements are dropped, how often, and that the backward drops the same."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as native
from common import assert_no_leak, gradcheck, layouts, opcheck
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same

ops = torch.ops.warpwright


def philox(key, counter, rounds=7):
    """Philox4x32 of Salmon et al., SC 2011, written from the paper."""
    for _ in range(rounds):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = (
            second >> 32 ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        )
        key = (key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF
    return counter


def expected_factors(state, count, p):
    """By the text of csrc/ops/dropout/dropout.h, in Python's integers."""
    seed, offset = (value & (1 << 64) - 1 for value in state.tolist())
    low = 0xFFFFFFFF
    key = (seed & low ^ 0x64726F70, seed >> 32 ^ offset >> 32)
    kept = []
    for i in range(count):
        word = philox(key, (i // 8 & low, i // 8 >> 32, 0, offset & low))[i % 8 // 2]
        kept.append((word >> 16 * (i % 2) & 0xFFFF) >= round(p * 65536))
    scale = 1 / (1 - round(p * 65536) / 65536)
    return torch.tensor(kept).double() * scale


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 1025])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.99, 1e-6])
def test_elements(device, dtype, count, p):
    x = torch.randn(count, device=device).to(dtype)
    y, state = ops.dropout(x, max(p, 2**-16))
    factors = expected_factors(state.cpu(), count, max(p, 2**-16)).to(device)
    exact = (x.double() * factors).to(dtype)
    torch.testing.assert_close(y, exact, rtol=torch.finfo(dtype).eps, atol=0)
    assert_same(y == 0, exact == 0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate(device, p):
    x = torch.ones(1 << 20, device=device)
    torch.manual_seed(3)
    y = F.dropout(x, p)
    deviation = (y == 0).double().mean().item() - p
    assert abs(deviation) < 5 * math.sqrt(p * (1 - p) / x.numel())
    assert not torch.equal(F.dropout(x, p), y)
    torch.manual_seed(3)
    assert_same(F.dropout(x, p), y)
    assert y.unique().numel() == 2


def test_every_offset_and_layout(device, dtype):
    """The numbers belong to positions in row-major order, whatever the addresses are."""
    state = ops.dropout(torch.ones(1, device=device), 0.5)[1]
    base = torch.randn(300, device=device).to(dtype)
    factors = ops.dropout_backward(torch.ones(200, device=device, dtype=dtype), state, 0.5)
    for offset in range(32):
        x = base[offset : offset + 200]
        assert_same(ops.dropout_backward(x, state, 0.5), x * factors)
    for name, x in layouts(torch.randn(4, 6, 8, 5, device=device).to(dtype)):
        y = ops.dropout_backward(x, state, 0.5)
        assert_same(y.contiguous(), ops.dropout_backward(x.contiguous(), state, 0.5), name)
        assert y.stride() == native.dropout(x, 0.5).stride(), name


def test_backward_drops_the_same(device, dtype):
    for _, x in layouts(torch.rand(6, 7, 4, device=device).to(dtype) + 1):
        x = x.detach().requires_grad_()
        y = F.dropout(x, 0.4)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y).contiguous())
        assert_same(dx == 0, y == 0)
        torch.testing.assert_close(dx * x, y)


def test_gradients(device):
    state = ops.dropout(torch.ones(1, device=device), 0.3)[1]
    x = torch.randn(3, 5, device=device, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda t: ops.dropout_backward(t, state, 0.3), (x,))

    def seeded(t):
        torch.manual_seed(1)
        return F.dropout(t, 0.3)

    gradcheck(seeded, (x,))


def test_what_is_kept(device):
    """The state of the generator, and no mask."""
    kept = []
    x = torch.randn(64, 64, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        F.dropout(x, 0.1)
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.int64, 2)]
    assert_no_leak(lambda t: F.dropout(t, 0.1), x)


def test_nothing_random(device):
    x = torch.randn(5, device=device)
    before = torch.get_rng_state()
    assert F.dropout(x, 0.5, False) is x
    assert_same(F.dropout(x, 0.0), x)
    assert not F.dropout(x, 1.0).any()
    state = torch.tensor([3, 4], device=device)
    assert not torch.ops.warpwright.dropout_backward(x, state, 1.0).any()
    assert_same(torch.ops.warpwright.dropout_backward(x, state, 0.0), x)
    assert F.dropout(x[:0], 0.5).numel() == 0
    assert torch.equal(torch.get_rng_state(), before) or device == "cpu"


def test_in_place(device):
    x = torch.rand(1000, device=device) + 1
    y = x.clone()
    assert F.dropout(y, 0.5, inplace=True) is y
    assert 300 < int((y == 0).sum()) < 700
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        F.dropout(leaf, 0.5, inplace=True)
    z = leaf * 1
    F.dropout(z, 0.5, inplace=True)
    z.sum().backward()
    assert_same(leaf.grad == 0, z == 0)


def test_vmap(device):
    x = torch.ones(4, 1000, device=device)
    f = lambda t: F.dropout(t, 0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(f)(x)
    same = torch.vmap(f, randomness="same")(x)
    assert all(torch.equal(row, same[0]) for row in same)
    different = torch.vmap(f, randomness="different")(x)
    assert not torch.equal(different[0], different[1])
    for randomness in ("same", "different"):
        gradient = torch.func.grad_and_value(lambda t: (f(t) * t.detach()).sum(), has_aux=False)
        dx, _ = torch.vmap(gradient, randomness=randomness)(x)
        assert_same(dx.unique(), torch.tensor([0.0, 2.0], device=device))


def test_batched_cotangents(device):
    """vmap over a backward whose forward knew no batch: each cotangent meets the same zeros."""
    x = torch.rand(50, device=device, requires_grad=True)
    y = F.dropout(x, 0.5)
    cotangents = torch.randn(3, 50, device=device)
    (found,) = torch.autograd.grad(y, x, cotangents, retain_graph=True, is_grads_batched=True)
    for i in range(3):
        (expected,) = torch.autograd.grad(y, x, cotangents[i], retain_graph=True)
        assert_same(found[i], expected)


def test_opcheck(device):
    x = torch.randn(3, 4, 5, device=device)
    state = ops.dropout(x, 0.5)[1]
    for _, view in layouts(x):
        opcheck(ops.dropout_backward.default, (view.requires_grad_(), state, 0.5))


def test_compile_takes_natives(device):
    step = torch.compile(lambda t: F.dropout(t, 0.5) + 1, fullgraph=True, backend="aot_eager")
    y = step(torch.ones(1000, device=device))
    assert set(y.unique().tolist()) == {1.0, 3.0}


@pytest.mark.gpu
def test_a_graph_draws_anew_at_each_replay():
    x = torch.ones(4096, device="cuda", requires_grad=True)
    F.dropout(x, 0.5).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    x.grad = None
    with torch.cuda.graph(graph):
        y = F.dropout(x, 0.5)
        (dx,) = torch.autograd.grad(y.sum(), x)
    seen = []
    for _ in range(3):
        graph.replay()
        assert_same(dx == 0, y == 0)
        seen.append(y.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


@pytest.mark.gpu
def test_cpu_and_gpu_agree(dtype):
    state = ops.dropout(torch.ones(1), 0.5)[1]
    x = torch.randn(5000).to(dtype)
    on_gpu = ops.dropout_backward(x.cuda(), state.cuda(), 0.3)
    assert_same(on_gpu.cpu(), ops.dropout_backward(x, state, 0.3))


def test_layer(device):
    layer = warpwright.nn.Dropout(0.5).to(device)
    x = torch.ones(1000, device=device)
    assert set(layer(x).unique().tolist()) == {0.0, 2.0}
    assert layer.eval()(x) is x
    model = nn.Sequential(nn.Dropout(0.5))
    warpwright.swap(model)
    assert type(model[0]) is nn.Dropout


def test_bad_input(device):
    x = torch.randn(3, device=device)
    for p in (-0.1, 1.5):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
            F.dropout(x, p)
        with pytest.raises(RuntimeError, match="p: expected 0 to 1, got"):
            ops.dropout(x, p)
    with pytest.raises(TypeError):
        F.dropout(x, 0.5, 1)
    with pytest.raises(TypeError):
        F.dropout(x, "0.5")
    with pytest.raises(NotImplementedError, match="input: expected a real floating"):
        ops.dropout(x.int(), 0.5)
    state = ops.dropout(x, 0.5)[1]
    with pytest.raises(RuntimeError, match="philox_state: expected shape"):
        ops.dropout_backward(x, state[:1], 0.5)
    with pytest.raises(RuntimeError, match="philox_state: expected Long"):
        ops.dropout_backward(x, state.int(), 0.5)
    with pytest.raises(RuntimeError, match="philox_state: expected a contiguous"):
        ops.dropout_backward(x, torch.zeros(4, dtype=torch.int64, device=device)[::2], 0.5)
    for place in ([0, 1], [-1], [0, 0, 8], [0, *(1, 2) * 5]):
        with pytest.raises(ValueError, match="place: expected the first number and up to 4 pairs"):
            ops.dropout(x, 0.5, place)
    with pytest.raises(ValueError, match="place: expected numbers up to"):
        ops.dropout_backward(x, state, 0.5, [2**62])
    with pytest.raises(RuntimeError, match="integer out of range"):
        ops.dropout(x, 0.5, [0, 1, 2**62])


# The whole tensor's shape, then the first element and the shape of a shard.
SHARDS = [
    ((4, 96), (0, 0), (4, 96)),
    ((4, 96), (2, 0), (2, 96)),
    ((4, 96), (0, 32), (4, 48)),
    ((4, 96), (1, 33), (2, 50)),
    ((3, 5, 7), (0, 2, 0), (3, 3, 7)),
    ((3, 6, 40), (1, 2, 8), (2, 3, 24)),
    ((2, 3, 4, 5, 6), (0, 1, 1, 1, 1), (2, 2, 3, 3, 5)),
]


@pytest.mark.parametrize(("shape", "start", "sizes"), SHARDS, ids=str)
def test_a_shard_has_its_part_of_the_mask(device, dtype, shape, start, sizes):
    state = ops.dropout(torch.ones(1, device=device), 0.5)[1]
    whole = ops.dropout_backward(torch.ones(shape, device=device, dtype=dtype), state, 0.5)
    part = whole[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))]
    pitches = torch.empty(shape, device="meta").stride()
    runs = torch.empty(sizes, device="meta").stride()
    levels = zip(runs[:-1], pitches[:-1], strict=True)
    place = [sum(a * p for a, p in zip(start, pitches, strict=True)), *itertools.chain(*levels)]
    # Off 16 bytes, too: a vector is then no whole draw.
    for offset in (0, 1):
        ones = torch.ones(part.numel() + 1, device=device, dtype=dtype)[offset:][: part.numel()]
        ours = ops.dropout_backward(ones.view(sizes), state, 0.5, place)
        assert_same(ours, part.contiguous())


def test_explain():
    text = str(warpwright.explain("dropout", torch.empty(1000), device="cuda"))
    assert "draws the numbers again" in text
