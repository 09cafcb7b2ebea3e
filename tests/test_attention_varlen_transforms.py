"""attention_varlen works under autograd, torch.func, compilation, autocast and patch()."""

import pytest
import torch
from attention_varlen_cases import Packed, raw
from common import gradcheck, opcheck
from torch.nn import functional as native
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import warpwright
import warpwright.functional as F
from warpwright import _native
from warpwright.testing import assert_same

ops = torch.ops.warpwright
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
INF = float("inf")


# ---- derivatives ----


def double(queries, keys, heads, size, device):
    return Packed(queries, keys, heads, size, dtype=F64, device=device, gap=(1, 0))


@pytest.mark.parametrize(
    "options", [{"is_causal": True}, {"window_size": (2, 1), "softcap": 1.5}, {"scale": -0.4}]
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_derivatives(device, options, return_lse):
    packed = double([3, 0, 4], [2, 2, 5], (2, 1), (3, 2), device)

    def function(*operands):
        results = packed.ours(*operands, return_lse=return_lse, **options)
        if return_lse:
            out, lse = results
            return out, lse.masked_fill(lse == -INF, 0.0)
        return results

    gradcheck(function, packed.operands)


def test_second_derivatives_without_a_sequence(device):
    packed = double([], [], (2, 1), (3, 2), device)
    out = packed.ours(*packed.operands, is_causal=True)
    grads = torch.autograd.grad(out.square().sum(), packed.operands, create_graph=True)
    again = torch.autograd.grad(sum(g.square().sum() for g in grads), packed.operands)
    assert not any(g.any() for g in again)


def test_torch_func(device):
    packed = double([3, 4], [3, 4], (2, 2), (3, 3), device)
    operands = [t.detach() for t in packed.operands]

    def loss(*args):
        return packed.ours(*args, is_causal=True).cos().sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*operands)
    expected = torch.autograd.grad(loss(*packed.operands), packed.operands)
    assert_same(list(found), list(expected))
    hessian = torch.func.hessian(loss)(*operands)
    exact = torch.func.hessian(
        lambda q: packed.theirs(q, *operands[1:], is_causal=True)[0].cos().sum()
    )
    torch.testing.assert_close(hessian, exact(operands[0]))


def test_vmap(device):
    packed = double([3, 4], [3, 4], (2, 2), (3, 3), device)
    several = [torch.stack([t, t.cos()]) for t in packed.operands]

    def call(*args):
        return packed.ours(*args, is_causal=True)

    alone = [call(*(t[i] for t in several)) for i in range(2)]
    assert_same(torch.vmap(call)(*several), torch.stack(alone))


# ---- transforms ----


def test_opcheck(device):
    args = raw(device)
    opcheck(ops.attention_varlen.default, (*args, True, 0.3, 4, None, 2.0))
    out, lse = (t.detach() for t in ops.attention_varlen(*args))
    rest = args[5], args[6], True, None, None, None, 0.0, [True, False, True]
    call = (out.cos(), *args[:5], out, lse, *rest)
    # Differentiated by the formula of the whole function, which a subset of gradients is not.
    opcheck(
        ops.attention_varlen_backward.default,
        (*(t.detach() if torch.is_tensor(t) else t for t in call), lse.cos()),
    )


def test_compiles(device):
    def step(query, key, value, ends_q, ends_k, longest_q, longest_k):
        out, lse = F.attention_varlen(
            query * 2, key, value, ends_q, ends_k, longest_q, longest_k,
            is_causal=True, enable_gqa=True, return_lse=True,
        )  # fmt: skip
        return out.sum() + lse.masked_fill(lse == -INF, 0.0).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in (([4, 5], [6, 3]), ([3, 20], [7, 20])):
        packed = Packed(*lengths, (4, 2), (8, 8), device=device)
        args = *packed.operands, *packed.ends, *packed.longest
        results = [
            (y, *torch.autograd.grad(y, packed.operands)) for y in (compiled(*args), step(*args))
        ]
        assert_same(*map(list, results))


def test_meta():
    args = [t.to("meta") if torch.is_tensor(t) else t for t in raw()]
    out, lse = ops.attention_varlen(*args)
    assert out.shape == (9, 4, 8)
    assert out.dtype == F32
    assert out.is_contiguous()
    assert lse.shape == (4, 9)
    assert lse.dtype == F64


def test_autocast(device):
    packed = Packed([4, 5], [6, 3], (4, 2), (8, 8), device=device)
    with torch.autocast(device, dtype=BF16):
        found, lse = packed.ours(*packed.operands, return_lse=True)
    assert found.dtype == BF16
    assert lse.dtype == F32
    assert_same(found, packed.ours(*(t.to(BF16) for t in packed.operands)))


def test_native_form(device, dtype):
    """What runs where no kernel of ours can, and in exported programs."""
    packed = Packed([3, 0, 17], [9, 4, 5], (4, 2), dtype=dtype, device=device, gap=(1, 2))
    args = *(t.detach() for t in packed.operands), *packed.ends, *packed.longest
    tolerance = {F64: 1e-12, F32: 1e-5}.get(dtype, 2e-2)
    for options in ((False, None, None, None, 0.0), (True, 0.3, 4, None, 2.0)):
        found, expected = (
            _native.attention_varlen(*args, *options),
            ops.attention_varlen(*args, *options),
        )
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- native's function ----


@pytest.fixture
def routed(monkeypatch):
    """One entry per call of F.attention_varlen."""
    seen, function = [], F.attention_varlen

    def counted(*args, **kwargs):
        seen.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(F, "attention_varlen", counted)
    return seen


def test_patch_routes_varlen_attn(routed, device):
    packed = Packed([4, 0, 5], [4, 0, 5], (4, 2), (8, 8), dtype=BF16, device=device)
    args = *packed.operands, *packed.ends, *packed.longest
    for window, options in (
        ((-1, -1), {}),
        ((-1, 0), {"is_causal": True}),
        ((2, 0), {"window_size": (2, 0)}),
    ):
        with warpwright.patch():
            out, lse = varlen_attn(*args, window_size=window, return_aux=AuxRequest(lse=True))
            alone = varlen_attn(*args, window_size=window)
        assert len(routed) == 2
        expected = packed.ours(*packed.operands, return_lse=True, **options)
        routed.clear()
        assert_same([out, lse], list(expected))
        assert_same(alone, out)
        grads = [
            torch.autograd.grad(y, packed.operands, out.detach().cos()) for y in (out, expected[0])
        ]
        assert_same(*map(list, grads))
    with warpwright.patch(ops={"relu"}):
        if device == "cuda":
            varlen_attn(*args)
    assert not routed


def test_patch_routes_jagged_tensors(routed, device):
    """Of scaled_dot_product_attention."""
    parts = [torch.randn(n, 4, 8, device=device) for n in (5, 2, 7)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    q = nested.transpose(1, 2)
    for options in ({}, {"is_causal": True}, {"scale": 0.3}):
        with warpwright.patch():
            out = native.scaled_dot_product_attention(q, q, q, **options)
        assert len(routed) == 1
        routed.clear()
        assert out.shape == q.shape
        (grad,) = torch.autograd.grad(out.values().cos().sum(), nested)
        leaves = [t.detach().requires_grad_() for t in parts]
        expected = [
            native.scaled_dot_product_attention(*[t.transpose(0, 1)] * 3, **options).transpose(0, 1)
            for t in leaves
        ]
        found = out.transpose(1, 2).unbind()
        torch.testing.assert_close(list(found), expected, rtol=1e-5, atol=1e-5)
        exact = torch.autograd.grad(torch.cat(expected).cos().sum(), leaves)
        torch.testing.assert_close(list(grad.unbind()), list(exact), rtol=1e-4, atol=1e-5)


def explained(dtype=BF16, tokens=16384, heads=(16, 16), size=128, sequences=8, **options):
    def empty(*shape, kind=dtype):
        return torch.empty(shape, dtype=kind, device="meta")

    ends = empty(sequences + 1, kind=torch.int32)
    kv = empty(tokens, heads[1], size)
    return warpwright.explain(
        "attention_varlen", empty(tokens, heads[0], size), kv, kv, ends, ends, 8192, 8192,
        enable_gqa=True, device="h200", **options,
    )  # fmt: skip


def test_explain():
    assert "each tile is within one sequence" in explained()
    assert "at most" in explained()
    assert "tiles of 128 queries" in explained()
    assert "tiles of 192 queries" in explained(size=64)
    assert "tiles of 128 queries" in explained(size=64, sequences=200)
    assert "of 64 keys" in explained(size=256)
    assert "keep their precision" in explained(F32)
    assert "TMA cannot address the rows" in explained(size=36)
