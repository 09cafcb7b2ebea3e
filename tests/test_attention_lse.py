"""scaled_dot_product_attention with return_lse: values, derivatives, and where else it exists."""

import pytest
import torch
from attention_cases import qkv
from common import gradcheck

import warpwright.functional as F
from warpwright.testing import assert_same

INF = float("inf")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
TOLERANCE = {F64: 1e-11, F32: 1e-5}


def attend(*args, **kwargs):
    return F.scaled_dot_product_attention(*args, return_lse=True, **kwargs)


def formula(query, key, value, mask=None, *, is_causal=False, softcap=None, window_size=(-1, -1)):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(key.shape[2], device=query.device)
    ahead = ahead - torch.arange(query.shape[2], device=query.device)[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if is_causal:
        seen &= ahead <= 0
    if window_size[0] >= 0:
        seen &= ahead >= -window_size[0]
    if window_size[1] >= 0:
        seen &= ahead <= window_size[1]
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -INF)
    hidden = (scores == -INF).all(-1)
    safe = scores.masked_fill(hidden[..., None], 0.0)
    out = safe.softmax(-1).masked_fill(hidden[..., None], 0.0) @ value
    return out, safe.logsumexp(-1).masked_fill(hidden, -INF)


OPTIONS = [
    {},
    {"is_causal": True},
    {"window_size": (9, 3), "softcap": 2.0},
    {"mask": "bool"},
    {"mask": "float", "is_causal": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[str(i) for i in range(len(OPTIONS))])
@pytest.mark.parametrize("shape", [(2, 4, 70, 90, 64), (1, 2, 130, 40, 24), (1, 2, 70, 70, 256)])
def test_values_and_gradients(device, dtype, options, shape):
    q, k, v = qkv(device, dtype, *shape)
    options = dict(options)
    kind = options.pop("mask", None)
    mask = None
    if kind is not None:
        mask = torch.randn(shape[2], shape[3], device=device)
        mask = mask > -0.5 if kind == "bool" else mask.to(dtype)
    if kind == "bool":
        mask[3] = False  # a row that sees no key
    out, lse = attend(q, k, v, mask, **options)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wide_mask = mask.double() if kind == "float" else mask
    exact_out, exact = formula(*wide, wide_mask, **options)
    assert lse.dtype == (F64 if dtype == F64 else F32)
    assert lse.shape == q.shape[:-1]
    assert torch.equal(lse == -INF, exact == -INF)
    tolerance = TOLERANCE.get(dtype, 1e-2)
    torch.testing.assert_close(lse.double(), exact, rtol=tolerance, atol=tolerance)
    assert_same(out.detach(), F.scaled_dot_product_attention(q, k, v, mask, **options).detach())

    seen = exact != -INF
    cotangent = torch.randn_like(exact) * seen
    for weight in (0.0, 1.0):
        of_out = weight * torch.randn_like(exact_out)
        found = torch.autograd.grad(
            (out, lse), (q, k, v), (of_out.to(dtype), cotangent.to(lse.dtype)), retain_graph=True
        )
        expected = torch.autograd.grad(
            (exact_out, exact.masked_fill(~seen, 0.0)), wide, (of_out, cotangent), retain_graph=True
        )
        limit = {F64: 1e-9, F32: 1e-4}.get(dtype, 0.05)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=limit, atol=2 * limit)


def test_derivatives(device):
    q, k, v = qkv(device, F64, 1, 2, 4, 5, 3)
    mask = torch.randn(4, 5, device=device, dtype=F64, requires_grad=True)
    gradcheck(lambda *args: attend(*args, softcap=2.0), (q, k, v, mask))


def test_parts_of_the_keys_merge(device, dtype):
    """As a cache that is read in parts: weights by the log-sum-exp, through autograd."""
    q, k, v = qkv(device, dtype, 1, 2, 33, 80, 32)

    def merged():
        parts = [attend(q, *(t[:, :, at] for t in (k, v))) for at in (slice(0, 30), slice(30, 80))]
        sums = torch.stack([lse for _, lse in parts])
        weights = sums.softmax(0).unsqueeze(-1)
        return sum(w * out for w, (out, _) in zip(weights, parts, strict=True)).to(dtype)

    whole = F.scaled_dot_product_attention(q, k, v)
    limit = {F64: 1e-12, F32: 1e-5}.get(dtype, 0.03)
    results = [(y, *torch.autograd.grad(y, (q, k, v), whole.detach())) for y in (merged(), whole)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=limit, atol=limit)


def test_ranks_and_autocast(device):
    q = torch.randn(5, 8, device=device)
    out, lse = attend(q, q, q)
    assert out.shape == (5, 8)
    assert lse.shape == (5,)
    with torch.autocast(device, dtype=BF16):
        out, lse = attend(q, q, q)
    assert out.dtype == BF16
    assert lse.dtype == F32


def test_torch_func(device):
    q, k, v = (t.detach() for t in qkv(device, F64, 1, 2, 4, 5, 3))

    def ours(x):
        out, lse = attend(x, k, v, is_causal=True)
        return out.cos().sum() + lse.sin().sum()

    def exact(x):
        out, lse = formula(x, k, v, is_causal=True)
        return out.cos().sum() + lse.sin().sum()

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(q), transform(exact)(q))


def test_compiles(device):
    q, k, v = qkv(device, F32, 1, 2, 9, 9, 8)

    def step(q, k, v):
        out, lse = attend(q * 2, k, v, is_causal=True)
        return out.sum() + lse.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [(y, *torch.autograd.grad(y, (q, k, v))) for y in (compiled(q, k, v), step(q, k, v))]
    assert_same(*map(list, results))


def test_the_flag_is_checked():
    q = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="'return_lse' must be bool"):
        F.scaled_dot_product_attention(q, q, q, return_lse=1)
