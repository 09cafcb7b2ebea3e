"""The backward of one kernel, whose additions to dq have planned turns."""

import pytest
import torch
from attention_cases import compare, ours, qkv
from common import assert_repeats, assert_replays, header_program, subsets

from warpwright import explain
from warpwright.testing import assert_same

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Checks plans of random shapes: a program of the plan's header alone."""
    return header_program("attention_schedule", tmp_path_factory.mktemp("attention"))


def test_turns(plans):
    """Every addition has a turn of its own, in the order of the plan, so that no wait is circular."""
    assert plans(300, 1) > 0


@pytest.mark.slow
def test_turns_of_many_shapes(plans):
    assert plans(5000, 2) > 0


def backward_of(q, k, **kwargs):
    """What explain() says of the backward on a GPU with 132 SMs."""
    text = explain("scaled_dot_product_attention", q, k, k, device="cuda", **kwargs)
    return {line.split("  ")[1]: line for line in text.splitlines()[1:]}


def empty(B, H, S, D, dtype=torch.bfloat16):
    return torch.empty(B, H, S, D, dtype=dtype, device="meta")


def test_explain():
    long = empty(4, 16, 4096, 128)
    lines = backward_of(long, long)
    assert "all gradients in one kernel, 4 gangs of 32 CTAs" in lines["backward"]
    # fp32 sums of dq, and an int per 64 queries.
    sums, turns = 4 * 16 * 4096 * 128 * 4, 4 * 16 * 4096 // 64 * 4
    assert f"{sums} bytes for sums of dq, {turns} for turns" in lines["backward workspace"]
    assert f"{sums + turns + 2 * 4 * 16 * 4096 * 4} bytes of workspace" in lines["backward"]
    assert "gangs" in backward_of(long, empty(4, 4, 4096, 128), enable_gqa=True)["backward"]
    assert "gangs" in backward_of(long, long, is_causal=True)["backward"]
    # Short or few heads, wide heads, masks and dropout have a kernel for dq.
    for x, kwargs in (
        (empty(64, 16, 256, 128), {}),
        (empty(1, 8, 1024, 128), {}),
        (empty(4, 16, 4096, 256), {}),
        (long, {"attn_mask": torch.empty(4096, 4096, dtype=torch.bool, device="meta")}),
        (long, {"dropout_p": 0.1}),
    ):
        lines = backward_of(x, x, **kwargs)
        assert "gangs" not in lines["backward"]
        assert "backward workspace" not in lines


# Whole blocks; queries and keys that end within a block; more queries than keys and fewer, where
# the causal rule hides keys from all queries; a head dimension below its tile.
SHAPES = {
    "blocks": (1, 16, 16, 2048, 2048, 128, 128),
    "grouped": (1, 44, 22, 1536, 1536, 64, 64),
    "odd": (1, 22, 22, 1500, 1500, 128, 128),
    "long_queries": (1, 33, 33, 1700, 900, 64, 64),
    "long_keys": (1, 22, 22, 1500, 2200, 128, 128),
    "narrow": (1, 22, 22, 1500, 1500, 104, 72),
    "narrowest": (1, 12, 12, 2700, 2700, 40, 64),
}


def of_shape(name, dtype=torch.bfloat16):
    B, H, H_kv, S_q, S_k, D, D_v = SHAPES[name]
    return qkv("cuda", dtype, B, H, S_q, S_k, D, D_v, H_kv=H_kv)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_take_it(name):
    B, H, H_kv, S_q, S_k, D, _ = SHAPES[name]
    for is_causal in (False, True):
        lines = backward_of(
            empty(B, H, S_q, D), empty(B, H_kv, S_k, D), is_causal=is_causal, enable_gqa=True
        )
        assert "gangs" in lines["backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, is_causal, dtype):
    compare(of_shape(name, dtype), is_causal=is_causal, enable_gqa=True)


@pytest.mark.gpu
def test_strides():
    """Heads between the rows, as a projection's output has them."""
    q, k, v = (
        torch.randn(2, 2048, heads, 128, device="cuda", dtype=torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for heads in (16, 8, 8)
    )
    compare((q, k, v), is_causal=True, enable_gqa=True)


@pytest.mark.gpu
@pytest.mark.parametrize("needs", subsets(3), ids=lambda n: "".join("01"[b] for b in n))
def test_some_gradients(needs):
    inputs = [x.detach().requires_grad_(n) for x, n in zip(of_shape("grouped"), needs, strict=True)]
    compare(inputs, is_causal=True, enable_gqa=True)


def gradients(inputs, cotangent, is_causal):
    out = ours(*inputs, is_causal=is_causal, enable_gqa=True)
    return torch.autograd.grad(out, inputs, cotangent)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["grouped", "odd"])
def test_repeats_are_equal(name, is_causal):
    inputs = of_shape(name)
    cotangent = torch.randn_like(ours(*inputs, enable_gqa=True))
    assert_repeats(lambda: gradients(inputs, cotangent, is_causal), 100)


@pytest.mark.gpu
def test_two_streams():
    """CTAs that wait for each other need their whole grid resident: two grids must not share SMs."""
    inputs = [of_shape("blocks") for _ in range(2)]
    cotangents = [torch.randn_like(q) for q, _, _ in inputs]
    first = [gradients(x, g, True) for x, g in zip(inputs, cotangents, strict=True)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(10):
        results = []
        for stream, x, g in zip(streams, inputs, cotangents, strict=True):
            with torch.cuda.stream(stream):
                results.append(gradients(x, g, True))
        torch.cuda.synchronize()
        for found, expected in zip(results, first, strict=True):
            assert_same(found, expected)


@pytest.mark.gpu
def test_cuda_graph():
    inputs = [x.detach() for x in of_shape("grouped")]
    cotangent = torch.randn_like(inputs[0])

    def step():
        return gradients([x.detach().requires_grad_() for x in inputs], cotangent, True)

    assert_replays(step)
