"""The gradient of a float mask: every way to broadcast it, layouts, features, and how it is split."""

import math

import pytest
import torch
from attention_cases import compare, make, native, ours, qkv

from warpwright import explain
from warpwright._ops import ops
from warpwright.testing import assert_same, compare_with_native

HALVES = [torch.bfloat16, torch.float16]
B, H, S_Q, S_K = 2, 4, 300, 333
# Which of the batches, heads and queries the mask has.
EXTENTS = [(b, h, q) for b in (1, B) for h in (1, H) for q in (1, S_Q)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("extents", EXTENTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_broadcast(device, dtype, extents, is_causal):
    inputs = qkv(device, dtype, B, H, S_Q, S_K, 64, H_kv=2)
    mask = make(device, dtype, *extents, S_K)
    if is_causal:  # native refuses both
        hidden = torch.ones(S_Q, S_K, dtype=torch.bool, device=device).triu(1)

        def reference(q, k, v, m):
            return native(q, k, v, m.masked_fill(hidden, -math.inf), enable_gqa=True)

        def function(q, k, v, m):
            out = ops.attention(q, k, v, m, 0.0, True, None)[0]
            return out.clone(memory_format=torch.contiguous_format)

        compare_with_native(function, reference, (*inputs, mask), factor=3)
    else:
        compare((*inputs, mask), enable_gqa=True)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("d", "d_v"), [(8, 8), (40, 128), (96, 96), (128, 64), (256, 256)])
def test_head_dimensions(device, dtype, d, d_v):
    inputs = qkv(device, dtype, 2, 2, 130, 129, d, d_v)
    compare((*inputs, make(device, dtype, 1, 2, 130, 129)))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["float32", "transposed", "part", "expanded", "hidden"])
def test_masks(device, dtype, kind):
    q, k, v = qkv(device, dtype, 2, 4, 200, 136, 64)
    type_of_mask = torch.float32 if kind == "float32" and device == "cuda" else dtype
    leaf = make(device, type_of_mask, *((136, 200) if kind == "transposed" else (201, 140)))

    def mask(m):
        m = m.mT if kind == "transposed" else m[1:, 3:139]
        if kind == "expanded":
            return m.expand(2, 4, -1, -1)
        if kind == "hidden":  # the first row, and single elements
            hidden = torch.ones_like(m, dtype=torch.bool)
            hidden[1:] = torch.arange(136, device=device) % 7 == 3
            return m.masked_fill(hidden, -math.inf)
        return m

    if type_of_mask == dtype:
        functions = [
            lambda q, k, v, m, f=f: f(q, k, v, mask(m)).contiguous() for f in (ours, native)
        ]
        return compare_with_native(*functions, (q, k, v, leaf), factor=3)
    # Native takes float32 masks of 16-bit operands in no kernel of its own.
    out = ours(q, k, v, mask(leaf))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, leaf)]
    expected = native(*wide[:3], mask(wide[3]))
    grad_out = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, leaf, grad_out)
    (reference,) = torch.autograd.grad(expected, wide[3], grad_out.double())
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), reference, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("S_q", "mask"),
    [(128, (1, 1, 128, 128)), (100, (1, 1, 1, 200)), (70, (1, 3, 70, 70)), (1, (1, 300))],
)
def test_few_tiles_of_many_steps(device, dtype, S_q, mask):
    """The steps of a tile are divided among CTAs."""
    inputs = qkv(device, dtype, 8, 3, S_q, mask[-1], 16)
    compare((*inputs, make(device, dtype, *mask)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("extents", [(1, 3, 300), (2, 3, 300), (1, 1, 1)])
def test_dropout(dtype, extents):
    shapes = (2, 3, 300, 64), (2, 3, 333, 64), (2, 3, 333, 64), (*extents, 333)
    inputs = [make("cuda", dtype, *shape) for shape in shapes]
    torch.manual_seed(7)
    state = ops.attention(*inputs, 0.2, False, None)[2]

    def function(q, k, v, mask):
        torch.manual_seed(7)
        return ops.attention(q, k, v, mask, 0.2, False, None)[0].contiguous()

    def reference(q, k, v, mask):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        factors = ops.attention_dropout_factors(state, wide, 0.2, 2, 3, 0, 300, 333).to(q.dtype)
        return ((q @ k.mT / 8 + mask).softmax(-1) * factors) @ v

    compare_with_native(function, reference, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("extents", [(1, 8, 1000), (1, 1, 1000), (4, 8, 1000), (1, 1, 1)])
def test_repeats_alone_and_with_others(extents):
    """Same bits, whichever other gradients are wanted; more units than SMs, and fewer."""
    operands = (
        *qkv("cuda", torch.bfloat16, 4, 8, 1000, 1000, 64),
        make("cuda", torch.bfloat16, *extents, 1000),
    )
    q, k, v, mask = (x.detach() for x in operands)
    out, lse, state = ops.attention(q, k, v, mask, 0.0, False, None)
    grad_out = torch.randn_like(out)

    def run(*wanted):
        return ops.attention_backward(
            grad_out, q, k, v, mask, out, lse, state, 0.0, False, None, [*wanted]
        )[3]

    first = run(True, True, True, True)
    for _ in range(10):
        assert_same(run(True, True, True, True), first)
    assert_same(run(False, False, False, True), first)
    assert_same(run(True, False, False, True), first)


@pytest.mark.gpu
def test_gradient_through_the_log_sum_exp():
    q, k, v = qkv("cuda", torch.bfloat16, 2, 2, 200, 200, 64)
    mask = make("cuda", torch.bfloat16, 1, 2, 200, 200)
    out, lse = ours(q, k, v, mask, return_lse=True)
    c = torch.randn_like(lse)
    (actual,) = torch.autograd.grad((lse * c).sum() + out.sum(), mask)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v, mask)]
    scores = wide[0] @ wide[1].mT / 8 + wide[3]
    total = (scores.logsumexp(-1) * c).sum() + (scores.softmax(-1) @ wide[2]).sum()
    (expected,) = torch.autograd.grad(total, wide[3])
    torch.testing.assert_close(actual.double(), expected, rtol=0.02, atol=5e-3)


def test_explain():
    def text(q, mask):
        return explain("scaled_dot_product_attention", q, q, q, attn_mask=mask, device="h200")

    q = torch.empty(32, 8, 512, 64, dtype=torch.bfloat16, device="meta")
    bias = torch.empty(1, 8, 512, 512, dtype=torch.bfloat16, device="meta")
    assert "gradient in" not in text(q, bias)
    bias.requires_grad_()
    # 8 heads of 4 x 4 tiles, which sum over the batches.
    assert "the mask's gradient in 128 tiles of 32 steps," in text(q, bias)
    # 16 tiles, of which each sums 256 heads; 8 parts fill 128 of 132 SMs.
    assert "the mask's gradient in 16 tiles of 256 steps in 8 parts," in text(q, bias[:, :1])
    wide = torch.empty(2, 2, 64, 64, device="meta")
    assert "gradient of attn_mask  FMA" in text(wide, torch.empty_like(wide, requires_grad=True))
