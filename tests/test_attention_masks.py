"""Dense masks by the pattern that they hold: hidden and visible blocks, single elements, biases.

The kernels of sm_90a sort a mask into cells of 64 queries and 32 keys. Each pattern here is a case of
that sorting, in every form in which a mask may come."""

import pytest
import torch
from attention_cases import compare, make, ours, qkv

from warpwright import explain
from warpwright.testing import assert_same

HALVES = [torch.bfloat16, torch.float16]
INF = float("inf")


def grid(S_q, S_k, device):
    return torch.arange(S_q, device=device)[:, None], torch.arange(S_k, device=device)


def causal(S_q, S_k, device):
    i, j = grid(S_q, S_k, device)
    return j <= i


def window(S_q, S_k, device):
    i, j = grid(S_q, S_k, device)
    return (j <= i) & (j > i - 100)


def blocks(S_q, S_k, device):
    """Hidden, visible and mixed cells side by side."""
    i, j = grid(S_q, S_k, device)
    number = i // 64 + j // 32
    return (number % 3 == 0) | ((number % 3 == 1) & ((i * 7 + j * 3) % 5 != 0))


def hidden_tiles(S_q, S_k, device):
    """Whole tiles of queries and of keys without anything visible."""
    i, j = grid(S_q, S_k, device)
    return (i // 128 % 2 == 0) & (j // 128 % 2 == 0)


def one_visible(S_q, S_k, device):
    """One element of a tile, in its last row and column of cells."""
    i, j = grid(S_q, S_k, device)
    return (i % 192 == 70) & (j % 128 == 100)


def some_rows(S_q, S_k, device):
    i, j = grid(S_q, S_k, device)
    return (i % 3 != 0) & ((i + j) % 2 == 0)


def one_hidden(S_q, S_k, device):
    i, j = grid(S_q, S_k, device)
    return (i != S_q // 2) | (j != S_k - 1)


PATTERNS = [causal, window, blocks, hidden_tiles, one_visible, some_rows, one_hidden]
SHAPES = [
    # B, H, H_kv, S_q, S_k, D
    (1, 2, 2, 200, 333, 64),
    (2, 4, 2, 260, 256, 128),
    (1, 2, 1, 130, 300, 256),
    (1, 1, 1, 2100, 230, 40),  # one_visible shows two keys: with one, dq is exactly zero
]


def inputs(device, dtype, shape):
    B, H, H_kv, S_q, S_k, D = shape
    return qkv(device, dtype, B, H, S_q, S_k, D, H_kv=H_kv)


def as_float(visible, dtype):
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, -INF)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("pattern", [causal, blocks, hidden_tiles])
@pytest.mark.parametrize("is_bool", [True, False])
def test_more_tiles_than_ctas(D, pattern, is_bool):
    """Persistent kernels take several tiles per CTA, some of which see nothing."""
    tensors = qkv("cuda", torch.bfloat16, 2, 24, 700, 400, D, H_kv=8)
    visible = pattern(700, 400, "cuda")
    mask = visible if is_bool else as_float(visible, torch.bfloat16)
    compare((*tensors, mask), enable_gqa=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(device, dtype, shape, pattern):
    if device == "cpu":  # one path for every shape
        shape = (1, 1, 1, 140, 150, 16)
    q, k, v = inputs(device, dtype, shape)
    visible = pattern(*shape[3:5], device)
    compare((q, k, v, visible), enable_gqa=True)
    compare((q, k, v, as_float(visible, dtype)), enable_gqa=True)
    bias = torch.randn(visible.shape, device=device).masked_fill(~visible, -INF)
    compare((q, k, v, bias), enable_gqa=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("extents", [(1, 1, 0, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 1, 0)])
def test_broadcast(device, dtype, extents):
    """Padding (B, 1, 1, S_k), a mask for each head, for each batch, for each query.

    A mask that broadcasts over the keys takes another path than one that is stored for each key.
    """
    D = 16 if device == "cpu" else 64
    q, k, v = inputs(device, dtype, (2, 4, 2, 200, 333, D))
    full = (2, 4, 200, 333)
    size = [n if e else 1 for n, e in zip(full, extents, strict=True)]
    visible = torch.rand(size, device=device) < 0.6
    bias = torch.randn(size, device=device).to(dtype)
    for mask in (visible, bias):
        compare((q, k, v, mask), enable_gqa=True)
        same = ours(q, k, v, mask.expand(full), enable_gqa=True)
        other = mask.expand(full).contiguous() if extents[3] else mask
        assert_same(ours(q, k, v, other, enable_gqa=True), same)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["bool", "element", "float32"])
def test_layouts(device, dtype, kind):
    """Transposed, misaligned and padded masks give the bits of a contiguous one."""
    q, k, v = inputs(device, dtype, (1, 2, 2, 200, 333, 64))
    base = torch.randn(210, 350, device=device)
    base = {"bool": base < 0.5, "element": base.to(dtype), "float32": base}[kind]
    for mask in (
        base[:200, :333],
        base[3:203, 1:334],
        base[:200, 2:335],
        base[:, :200].T.contiguous().T[:200].repeat(1, 2)[:, :333],
        base.T.contiguous().T[:200, :333],
        base.flip(0)[:200, :333],
    ):
        grad_out = torch.randn_like(q)
        results = []
        for one in (mask, mask.clone(memory_format=torch.contiguous_format)):
            out = ours(q, k, v, one)
            results.append((out, *torch.autograd.grad(out, (q, k, v), grad_out)))
        assert_same(*results)


@pytest.mark.parametrize("dtype", HALVES)
def test_with_the_causal_rule(device, dtype):
    q, k, v = inputs(device, dtype, (1, 2, 2, 300, 300, 64))
    visible = blocks(300, 300, device)
    both = visible & causal(300, 300, device)
    out = ours(q, k, v, visible, is_causal=True)
    torch.testing.assert_close(out, ours(q, k, v, both))
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    expected = torch.autograd.grad(ours(q, k, v, both), (q, k, v), torch.ones_like(out))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_everything_hidden(device, dtype, D):
    """Zeros: output and gradients."""
    q, k, v = inputs(device, dtype, (1, 2, 2, 200, 300, D))
    visible = torch.zeros(200, 300, dtype=torch.bool, device=device)
    for mask in (visible, as_float(visible, dtype), as_float(visible, torch.float32)):
        out = ours(q, k, v, mask)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert all((t == 0).all() for t in (out, *grads))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(200, 333), (4, 200, 333), (1, 333), (2, 1, 200, 333)])
def test_gradient_of_a_bias(device, dtype, shape):
    q, k, v = inputs(device, dtype, (2, 4, 2, 200, 333, 64))
    compare((q, k, v, make(device, dtype, *shape)), enable_gqa=True)


@pytest.mark.parametrize("dtype", HALVES)
def test_repeats_are_equal(device, dtype):
    q, k, v = inputs(device, dtype, (2, 4, 2, 300, 500, 64))
    visible = blocks(300, 500, device)

    def run():
        out = ours(q, k, v, visible, enable_gqa=True)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    first = run()
    for _ in range(5):
        assert_same(run(), first)


def lines(q, mask):
    text = explain("scaled_dot_product_attention", q, q, q, attn_mask=mask, device="cuda")
    return dict(line.split(maxsplit=1) for line in text.splitlines()[1:])


def test_explain():
    q = torch.empty(2, 4, 256, 64, dtype=torch.bfloat16)
    mask = torch.ones(256, 256, dtype=torch.bool)
    found = lines(q, mask)
    assert "blocks that the mask hides are skipped" in found["forward"]
    assert "blocks that the mask hides are skipped" in found["backward"]
    # One byte per element read; per cell of 64 x 32 a byte for its class, and a bit per element.
    cells = 256 * 256 // (64 * 32)
    assert f"{256 * 256} bytes read once, {256 * 256 // 8 + cells} bytes written" in found["mask"]
    # Broadcast dimensions are read once.
    for same in (mask[None, None].expand(2, 4, -1, -1), mask.expand(4, -1, -1)):
        assert lines(q, same)["mask"] == found["mask"]
    assert f"{2 * 256 * 256} bytes read" in lines(q, mask.expand(2, 1, -1, -1).contiguous())["mask"]
    assert f"{2 * 256} bytes read" in lines(q, torch.ones(2, 1, 1, 256, dtype=torch.bool))["mask"]
    assert f"{4 * 256 * 256} bytes read" in lines(q, mask.float())["mask"]
    # A bias as large as the scores is not read a second time.
    assert "not classified" in lines(q, torch.ones(2, 4, 256, 256, dtype=torch.bfloat16))["mask"]
    rows = lines(q, torch.ones(256, 1, dtype=torch.bool))
    assert "broadcasts over the keys" in rows["forward"]
    assert "mask" not in rows
