"""Attention's dropout: the definition of its random stream (csrc/common/philox.h), the same on the CPU, on the
portable path and on sm_90a."""

import math

import numpy as np
import pytest
import torch

from warpwright.testing import compare_with_native

ops = torch.ops.warpwright


def philox4x32(key, counter, rounds=7):
    """Arrays of uint64 with 32-bit values; four words of the counter and two of the key."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, np.uint64) for x in counter]
    k = [np.uint64(x) for x in key]
    for _ in range(rounds):
        p = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        high = [x >> np.uint64(32) for x in p]
        c = [high[1] ^ c[1] ^ k[0], p[1] & low, high[0] ^ c[3] ^ k[1], p[0] & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def in_effect(p):
    """The probability of dropping, as the 16-bit random numbers can express it."""
    return min(max(round(p * 65536), 1), 65535) / 65536


def kept(seed, offset, p, BH, rows, cols):
    """Which probabilities are kept, by the definition in words: (BH, rows, cols)."""
    bh, row, col = np.meshgrid(*(np.arange(n) for n in (BH, rows, cols)), indexing="ij")
    seed, offset = (x & 0xFFFFFFFFFFFFFFFF for x in (seed, offset))
    key = (seed & 0xFFFFFFFF) ^ 0x61747465, (seed >> 32) ^ (offset >> 32)
    counter = col // 16 * 4 + col % 8 // 2, row // 16 * 8 + row % 8, bh, offset & 0xFFFFFFFF
    words = np.stack(np.broadcast_arrays(*philox4x32(key, counter)))
    word = np.take_along_axis(words, (col % 16 // 8 * 2 + row % 16 // 8)[None], 0)[0]
    number = word >> (16 * (col % 2)).astype(np.uint64) & np.uint64(0xFFFF)
    return torch.from_numpy(number >= 65536 * in_effect(p))


def test_philox_against_known_answers():
    """Of Random123's file kat_vectors."""
    zero = philox4x32((0, 0), (0, 0, 0, 0))
    assert [int(x) for x in zero] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert [int(x) for x in philox4x32(pi[1], pi[0])] == [
        *(0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)
    ]


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.999999])
def test_factors_follow_the_definition(device, p):
    seed, offset = 0x1234567890ABCDEF, 0x300000007
    state = torch.tensor([seed, offset], device=device)
    for dtype in (torch.float32, torch.float64):
        factors = ops.attention_dropout_factors(state, dtype, p, 2, 3, 0, 70, 90)
        expected = kept(seed, offset, p, 6, 70, 90).reshape(2, 3, 70, 90)
        assert torch.equal(factors.cpu() != 0, expected)
        scale = torch.tensor(1 / (1 - in_effect(p)), dtype=dtype, device=device)
        assert ((factors == 0) | (factors == scale)).all()


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("features", ["plain", "causal", "mask", "gqa"])
@pytest.mark.parametrize("S", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_path_keeps_the_same(monkeypatch, device, dtype, S, features, p):
    """With q = 0 and v = identity, out is the factors / visible keys. With dout = identity, dv is
    their transpose, summed over the heads that share a key."""
    H, H_kv = (6, 2) if features == "gqa" else (3, 3)
    q = torch.zeros(2, H, S, S, device=device, dtype=dtype)
    eye = torch.eye(S, device=device, dtype=dtype)
    k = torch.zeros(2, H_kv, S, S, device=device, dtype=dtype)
    v = eye.repeat(2, H_kv, 1, 1)
    mask = None
    if features == "mask":
        mask = torch.rand(2, 1, S, S, device=device) < 0.7
    args = q, k, v, mask, p, features == "causal", None

    def run():
        torch.manual_seed(3)
        out, lse, state = ops.attention(*args)
        dv = ops.attention_backward(
            eye.repeat(2, H, 1, 1), q, k, v, mask, out, lse, state, *args[4:], [True] * 4
        )[2]
        return out, dv, state

    out, dv, state = run()
    seed, offset = state.tolist()
    keep = kept(seed, offset, p, 2 * H, S, S).reshape(2, H, S, S).to(device)
    if features == "causal":
        keep &= torch.ones_like(keep).tril()
    if mask is not None:
        keep &= mask
    assert torch.equal(out != 0, keep)
    by_key = keep.mT.unflatten(1, (H_kv, H // H_kv)).any(2)
    assert torch.equal(dv != 0, by_key)
    monkeypatch.setenv("WARPWRIGHT_PATH", "portable")
    for ours, theirs in zip(run(), (out, dv, state), strict=True):
        assert torch.equal(ours != 0, theirs != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("features", ["plain", "causal", "bool", "bias", "gqa_causal"])
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (40, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_errors_with_dropout(dtype, d, d_v, features):
    """Out and all gradients against the plain formula with the factors that the call drew, beside
    that formula in the operands' type."""
    H, H_kv = (6, 2) if features.startswith("gqa") else (3, 3)
    shapes = (2, H, 300, d), (2, H_kv, 333, d), (2, H_kv, 333, d_v)
    inputs = [torch.randn(s, device="cuda").to(dtype).requires_grad_() for s in shapes]
    mask = bias = None
    if features == "bool":
        mask = torch.rand(2, 1, 300, 333, device="cuda") < 0.5
        bias = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
    if features == "bias":
        mask = bias = torch.randn(1, H, 300, 333, device="cuda").to(dtype)
    causal = features.endswith("causal")
    torch.manual_seed(7)
    state = ops.attention(*inputs, mask, 0.2, causal, None)[2]

    def ours(q, k, v):
        torch.manual_seed(7)
        return ops.attention(q, k, v, mask, 0.2, causal, None)[0].contiguous()

    def native(q, k, v):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        factors = ops.attention_dropout_factors(state, wide, 0.2, 2, H, 0, 300, 333).to(q.dtype)
        k, v = (t.repeat_interleave(H // H_kv, 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(d)
        if bias is not None:
            scores = scores + bias.to(q.dtype)
        if causal:
            hidden = torch.ones(300, 333, dtype=torch.bool, device="cuda").triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return (scores.softmax(-1) * factors) @ v

    compare_with_native(ours, native, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_repeats_are_bit_equal(d):
    q, k, v, g = (torch.randn(2, 8, 1000, d, device="cuda").bfloat16() for _ in range(4))

    def run():
        torch.manual_seed(11)
        out, lse, state = ops.attention(q, k, v, None, 0.1, True, None)
        grads = ops.attention_backward(
            g, q, k, v, None, out, lse, state, 0.1, True, None, [True, True, True, False]
        )
        return out, lse, *grads[:3]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
