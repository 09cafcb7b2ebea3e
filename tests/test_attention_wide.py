"""The backward on sm_90a for head dimensions above 128: one warpgroup sums dv, the other dk."""

import pytest
import torch
from attention_cases import compare, ours, qkv
from common import assert_repeats, assert_replays, subsets

from warpwright import explain

HALVES = [torch.bfloat16, torch.float16]

# Whole blocks; one query or key; ends within a block; more queries than keys and fewer, where the
# causal rule hides keys from all queries; head dimensions below their tile, also different ones.
SHAPES = {
    "blocks": (2, 4, 4, 256, 256, 256, 256),
    "one_query": (2, 3, 3, 1, 100, 256, 256),
    "one_key": (2, 3, 3, 100, 1, 256, 256),
    "odd": (1, 6, 6, 333, 333, 256, 256),
    "grouped": (2, 8, 2, 200, 190, 192, 192),
    "one_kv_head": (1, 7, 1, 130, 260, 256, 256),
    "long_queries": (1, 4, 4, 700, 130, 256, 256),
    "long_keys": (1, 4, 4, 130, 700, 256, 256),
    "wide_values": (1, 4, 2, 300, 200, 64, 256),
    "wide_keys": (1, 4, 2, 300, 200, 192, 128),
    "narrowest": (1, 4, 4, 150, 150, 136, 8),
}


def of_shape(name, dtype=torch.bfloat16):
    B, H, H_kv, S_q, S_k, D, D_v = SHAPES[name]
    return qkv("cuda", dtype, B, H, S_q, S_k, D, D_v, H_kv=H_kv)


def test_explain():
    def backward(x, **kwargs):
        text = explain("scaled_dot_product_attention", x, x, x, device="cuda", **kwargs)
        return next(line for line in text.splitlines() if "backward" in line)

    wide = torch.empty(2, 4, 300, 192, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(300, 300, dtype=torch.bool, device="meta")
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": mask}):
        line = backward(wide, **kwargs)
        assert "sm_90a, head dimensions padded to 256" in line
        assert "each warpgroup" in line
    assert "portable" in backward(wide, dropout_p=0.1)
    assert "portable" in backward(wide[..., :-4])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, is_causal, dtype):
    compare(of_shape(name, dtype), is_causal=is_causal, enable_gqa=True)


# Per query and key, per key, per query; shared by heads, batches or neither.
MASKS = [(333, 333), (2, 1, 333, 333), (2, 6, 333, 333), (2, 1, 1, 333), (6, 333, 333)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bool", "bias", "float32", "blocks"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(shape, kind):
    q, k, v = qkv("cuda", torch.bfloat16, 2, 6, 333, 333, 256, H_kv=3)
    noise = torch.randn(shape, device="cuda")
    if kind == "bool":
        mask = noise > 0
    elif kind == "blocks":  # whole tiles are hidden, and all rows of some
        mask = torch.repeat_interleave(noise[..., ::100] > 0, 100, -1)[..., : shape[-1]]
    else:
        mask = noise.to(torch.float32 if kind == "float32" else q.dtype)
    compare((q, k, v, mask), enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("needs", subsets(3), ids=lambda n: "".join("01"[b] for b in n))
def test_some_gradients(needs):
    inputs = [x.detach().requires_grad_(n) for x, n in zip(of_shape("grouped"), needs, strict=True)]
    compare(inputs, is_causal=True, enable_gqa=True)


@pytest.mark.gpu
def test_strides():
    """Heads between the rows, as a projection's output has them."""
    q, k, v = (
        torch.randn(2, 300, heads, 256, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (8, 2, 2)
    )
    compare((q, k, v), is_causal=True, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [-120.0, 120.0])
def test_large_logits(offset):
    """The probabilities of keys and queries past the ends would overflow."""
    q, k, v = of_shape("odd")
    q.data[..., 0] = 16.0
    k.data[..., 0] = offset
    compare((q, k, v))


@pytest.mark.gpu
def test_infinite_key_that_nobody_sees():
    q, k, v = qkv("cuda", torch.bfloat16, 1, 2, 70, 100, 256)
    k.data[:, :, 90, 3] = float("inf")
    grads = torch.autograd.grad(ours(q, k, v, is_causal=True).square().sum(), (q, k, v))
    for grad in grads[1:]:  # that of q has 0 times infinity, in native, too
        assert grad.isfinite().all()
        assert not grad[:, :, 70:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_repeats_are_equal(is_causal, masked):
    q, k, v = qkv("cuda", torch.bfloat16, 3, 24, 700, 600, 256, H_kv=8)
    mask = torch.rand(700, 600, device="cuda") > 0.5 if masked else None
    cotangent = torch.randn(3, 24, 700, 256, device="cuda", dtype=torch.bfloat16)

    def gradients():
        out = ours(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
        return torch.autograd.grad(out, (q, k, v), cotangent)

    assert_repeats(gradients, 50)


@pytest.mark.gpu
def test_cuda_graph():
    inputs = [x.detach() for x in of_shape("grouped")]
    cotangent = torch.randn_like(inputs[0])

    def step():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = ours(*leaves, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, leaves, cotangent)

    assert_replays(step)
