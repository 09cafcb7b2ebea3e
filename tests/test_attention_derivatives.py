"""Attention has derivatives of every order, and keeps them under torch.func, compilation and autocast."""

import pytest
import torch
from attention_cases import make, native, ours, qkv, seeded
from common import gradcheck, opcheck, subsets

import warpwright.functional as F
from warpwright.testing import assert_same

SMALL = {"B": 1, "H": 2, "S_q": 3, "S_k": 4, "D": 2, "D_v": 3}


@pytest.mark.parametrize("needs", subsets(4), ids=lambda n: "".join("01"[b] for b in n))
def test_gradients_of_every_subset(device, needs):
    inputs = [*qkv(device, torch.float64, **SMALL), make(device, torch.float64, 2, 1, 4)]
    for tensor, need in zip(inputs, needs, strict=True):
        tensor.requires_grad_(need)
    gradcheck(ours, tuple(inputs))


VARIANTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": -0.7},
    "dropout": {"dropout_p": 0.4},
    "dropout_causal": {"dropout_p": 0.4, "is_causal": True},
}


@pytest.mark.parametrize("kwargs", VARIANTS.values(), ids=VARIANTS.keys())
def test_gradients(device, kwargs):
    function = seeded(3, lambda *args: ours(*args, **kwargs))
    gradcheck(function, qkv(device, torch.float64, **SMALL))


@pytest.mark.parametrize("shape", [(3, 4), (1, 1), (2, 3, 1), (1, 1, 3, 4)])
def test_gradients_of_mask(device, shape):
    mask = make(device, torch.float64, *shape)
    gradcheck(ours, (*qkv(device, torch.float64, **SMALL), mask))


def test_gradients_with_hidden_rows(device):
    mask = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], device=device) > 0
    gradcheck(lambda *args: ours(*args, mask), qkv(device, torch.float64, **SMALL))


def test_gradients_of_grouped_heads(device):
    inputs = qkv(device, torch.float64, 1, 4, 3, 2, 2, H_kv=2)
    gradcheck(lambda *args: ours(*args, enable_gqa=True), inputs)
    gradcheck(ours, (make(device, torch.float64, 2, 3, 2), *inputs[1:]), forward_ad=False)


def test_second_order_against_native(device):
    """In blocks of rows (S_q past one block) the second derivative is native's math path's."""
    q, k, v = qkv(device, torch.float64, 2, 8, 700, 900, 4, H_kv=4)
    mask = make(device, torch.float64, 8, 700, 1)
    inputs = (q, k, v, mask)

    def second(function):
        out = function(*inputs)
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), inputs)

    def reference(q, k, v, mask):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        return ((q @ k.mT) / 2 + mask).softmax(-1) @ v

    torch.testing.assert_close(
        second(lambda *args: ours(*args, enable_gqa=True)), second(reference), rtol=1e-8, atol=1e-9
    )


def test_third_derivative(device):
    def third(function):
        torch.manual_seed(0)
        inputs = [make(device, torch.float64, 1, 1, 3, 2) for _ in range(3)]
        value = function(*inputs).pow(3).sum()
        for _ in range(3):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            value = sum(g.pow(2).sum() for g in grads)
        return grads

    def reference(q, k, v):
        return ((q @ k.mT) / 2**0.5).softmax(-1) @ v

    torch.testing.assert_close(third(ours), third(reference))


def test_func_transforms(device):
    q, k, v = (t.detach() for t in qkv(device, torch.float64, 2, 2, 3, 4, 2))

    def reference(q, k, v):
        return ((q @ k.mT) / 2**0.5).softmax(-1) @ v

    def loss(f):
        return lambda *args: f(*args).sin().sum()

    def tree(f, *args):
        return torch.utils._pytree.tree_leaves(f(*args))

    for transform in (
        lambda f: torch.func.grad(loss(f), argnums=(0, 1, 2)),
        lambda f: torch.func.grad(
            lambda *a: sum(g.sin().sum() for g in torch.func.grad(loss(f), argnums=(0, 1, 2))(*a))
        ),
        lambda f: torch.func.jacrev(f, argnums=(0, 2)),
        lambda f: torch.func.jacfwd(f, argnums=(0, 1, 2)),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.vmap(f, in_dims=(0, None, 0)),
        lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(1, 2))),
        lambda f: torch.func.hessian(loss(f), argnums=(0, 1)),
        lambda f: lambda *a: torch.func.jvp(f, a, tuple(t.cos() for t in a)),
        lambda f: lambda *a: torch.func.vjp(f, *a)[1](torch.ones_like(q)),
    ):
        actual, expected = tree(transform(ours), q, k, v), tree(transform(reference), q, k, v)
        torch.testing.assert_close(actual, expected)


def test_forward_ad_with_mask_and_dropout(device):
    q, k, v = (t.detach() for t in qkv(device, torch.float64, 2, 2, 30, 40, 4))
    mask = torch.randn(30, 40, device=device, dtype=torch.float64)
    tangents = tuple(torch.randn_like(t) for t in (q, k, v, mask))
    torch.manual_seed(5)
    *_, philox_state = torch.ops.warpwright.attention(q, k, v, mask[None, None], 0.3, False, None)
    factors = torch.ops.warpwright.attention_dropout_factors(
        philox_state, torch.float64, 0.3, 2, 2, 0, 30, 40
    )

    def reference(q, k, v, mask):
        return (((q @ k.mT) / 2 + mask).softmax(-1) * factors) @ v

    function = seeded(5, lambda *args: ours(*args, dropout_p=0.3))
    torch.testing.assert_close(
        torch.func.jvp(function, (q, k, v, mask), tangents),
        torch.func.jvp(reference, (q, k, v, mask), tangents),
    )


def test_opcheck(device):
    ops = torch.ops.warpwright
    q, k, v = qkv(device, torch.float32, 2, 4, 5, 7, H_kv=2)
    mask = make(device, torch.float32, 1, 4, 5, 1)
    opcheck(ops.scaled_dot_product_attention.default, (q, k, v, mask), {"enable_gqa": True})
    opcheck(ops.scaled_dot_product_attention.default, (q[0, 0], k[0], v[1, 0]))
    bshd = torch.randn(2, 5, 4, 8, device=device).transpose(1, 2).requires_grad_()
    opcheck(ops.attention.default, (bshd, k, v, mask, 0.0, False, None))
    opcheck(ops.attention.default, (bshd.mT.contiguous().mT, k, v, None, 0.0, True, 0.5))
    detached = [t.detach() for t in (bshd, k, v, mask)]
    out, lse, state = ops.attention(*detached, 0.0, True, None)
    for output_mask in ([True] * 4, [False, True, False, False]):
        args = (bshd, k, v, mask, out, lse, state, 0.0, True, None, output_mask)
        opcheck(ops.attention_backward.default, (torch.randn_like(out).requires_grad_(), *args))
    _, _, state = ops.attention(*detached, 0.5, True, None)
    opcheck(ops.attention_dropout_factors.default, (state, torch.float32, 0.5, 2, 4, 0, 5, 7))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(q, k, v, mask):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.scaled_dot_product_attention(out, k, v, mask, enable_gqa=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for S in (8, 13):
        q, k, v = qkv(device, torch.float32, 2, 4, S, S, 8, H_kv=2)
        inputs = (q, k, v, make(device, torch.float32, S, S))
        expected, actual = step(*inputs), compiled(*inputs)
        assert_same(actual, expected)
        assert_same(
            torch.autograd.grad(actual.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
        )


def test_autocast(device):
    q, k, v = qkv(device, torch.float32)
    mask = torch.randn(5, 7, device=device)
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast(device, dtype=low):
            out = ours(q, k, v, mask)
            assert out.dtype == low == native(q, k, v, mask).dtype
            assert ours(q, k.to(low), v).dtype == low
            assert ours(q.double(), k.double(), v.double()).dtype == torch.float64
        (grad,) = torch.autograd.grad(out.sum(), q)
        assert grad.dtype == torch.float32
        assert_same(out, ours(q.to(low), k.to(low), v.to(low), mask.to(low)))
