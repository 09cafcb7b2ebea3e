"""Attention over parts of the keys, merged: each part's backward gets the merged out and lse, as in ring
attention. Its probabilities are those of the larger softmax, and the parts' gradients add up."""

from itertools import pairwise

import pytest
import torch

import warpwright  # the ops
from warpwright.testing import ERROR_FACTOR

native = torch.nn.functional.scaled_dot_product_attention
ops = torch.ops.warpwright
WANTED = [True, True, True, True]


def merge(outs, lses, dtype):
    """The outputs and log-sum-exps of parts as one softmax's; rows hidden in every part are 0."""
    lses = torch.stack(lses)
    lse = lses.logsumexp(0)
    shares = (lses - lse).exp().nan_to_num(0.0)
    out = sum(o.to(s.dtype) * s.unsqueeze(-1) for o, s in zip(outs, shares, strict=True))
    return out.to(dtype), lse


def part_of(mask, cut):
    return mask if mask is None or mask.shape[-1] == 1 else mask[..., cut]


def in_parts(q, k, v, mask, grad_out, cuts):
    """(out, gradients by query, key, value and, of a floating-point mask, mask)."""
    operands = [(k[:, :, cut], v[:, :, cut], part_of(mask, cut)) for cut in cuts]
    outs, lses, states = zip(
        *(ops.attention(q, *part, 0.0, False, None) for part in operands), strict=True
    )
    out, lse = merge(outs, lses, q.dtype)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    grads = [
        ops.attention_backward(grad_out, q, *part, out, lse, states[0], 0.0, False, None, WANTED)
        for part in operands
    ]
    dq, dk, dv, dmask = zip(*grads, strict=True)
    dq = sum(d.to(wide) for d in dq)
    results = [dq, torch.cat(dk, 2), torch.cat(dv, 2)]
    if dmask[0] is not None:
        results.append(torch.cat(dmask, 3))
    return out, results


def whole(function, q, k, v, mask, grad_out, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.detach().to(dtype).requires_grad_()
        leaves.append(mask)
    out = function(*leaves[:3], mask, enable_gqa=True)
    return out, torch.autograd.grad(out, leaves, grad_out.to(dtype))


def assert_as_exact_as_native(q, k, v, mask, cuts):
    grad_out = torch.randn(q.shape, device=q.device).to(q.dtype)
    ours = in_parts(q, k, v, mask, grad_out, cuts)
    theirs = whole(native, q, k, v, mask, grad_out, q.dtype)
    exact = whole(native, q, k, v, mask, grad_out, torch.float64)
    eps = torch.finfo(q.dtype).eps * (256 if q.dtype == torch.float64 else 1)
    names = ("out", "query", "key", "value", "mask")
    columns = [(out, *gradients) for out, gradients in (ours, theirs, exact)]
    for name, x, y, e in zip(names, *columns, strict=False):  # a mask of booleans has no gradient
        error, native_error = ((t.double() - e).norm() / e.norm() for t in (x, y))
        assert error <= ERROR_FACTOR * native_error + eps, (name, float(error), float(native_error))


def make(device, dtype, S_q, S_k, H=4, H_kv=2, D=32):
    sizes = ((2, H, S_q, D), (2, H_kv, S_k, D), (2, H_kv, S_k, D))
    return [torch.randn(size, device=device).to(dtype) for size in sizes]


# Parts of one and of several tiles of 512 keys, uneven, and a part of one key.
CUTS = {
    "three": (384, [0, 128, 256, 384]),
    "uneven": (200, [0, 7, 199, 200]),
    "tiles": (1500, [0, 700, 1500]),
}


@pytest.mark.parametrize("name", CUTS)
def test_parts(device, dtype, name):
    S_k, ends = CUTS[name]
    cuts = [slice(a, b) for a, b in pairwise(ends)]
    assert_as_exact_as_native(*make(device, dtype, 150, S_k), None, cuts)


@pytest.mark.parametrize("shift", [0, 4, 8, 12, 16, 40])
def test_parts_of_any_share(device, dtype, shift):
    """From half of the softmax to less than the rounding of lse."""
    q, k, v = make(device, dtype, 70, 180)
    mask = torch.zeros(1, 1, 1, 180, device=device, dtype=dtype)
    mask[..., 90:] = -shift
    mask = mask.expand(2, 4, 70, 180).contiguous()
    assert_as_exact_as_native(q, k, v, mask, [slice(0, 90), slice(90, 180)])


def test_rows_hidden_in_a_part(device, dtype):
    q, k, v = make(device, dtype, 70, 180)
    mask = torch.rand(2, 4, 70, 180, device=device) < 0.7
    mask[:, :, :20, :90] = False
    mask[:, :, 10:30, 90:] = False  # ten rows see nothing
    assert_as_exact_as_native(q, k, v, mask, [slice(0, 90), slice(90, 180)])


def test_own_lse_of_large_scores(device, dtype):
    """Rounding of a large lse is divided out where the keys are the whole row."""
    q, k, v = make(device, dtype, 70, 180)
    assert_as_exact_as_native(q * 8, k * 8, v, None, [slice(0, 180)])


def test_merge_is_the_whole(device):
    q, k, v = make(device, torch.float64, 20, 30)
    parts = [
        ops.attention(q, k[:, :, c], v[:, :, c], None, 0.0, False, None)[:2]
        for c in (slice(0, 10), slice(10, 30))
    ]
    out, lse = merge(*zip(*parts, strict=True), torch.float64)
    expected = ops.attention(q, k, v, None, 0.0, False, None)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    torch.testing.assert_close(
        out, warpwright.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    )
