"""The operator of rotary embeddings against transformers' formula: values, derivatives, errors."""

import pytest
import torch
from common import opcheck

from warpwright.testing import compare_with_native

op = torch.ops.warpwright.rotary_embedding.default


def turned(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def native(x, cos, sin, interleaved):
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([rotated * cos + turned(rotated, interleaved) * sin, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [(16, 16), (64, 32), (10, 4), (5, 4)])
def test_values(device, dtype, columns, interleaved):
    width, size = columns

    def make(*shape):
        return torch.randn(shape, device=device).to(dtype)

    def theirs(q, k, c, s):
        return torch.cat([native(x, c, s, interleaved).flatten() for x in (q, k)])

    def ours(q, k, c, s):
        return torch.cat([x.flatten() for x in op(q, k, c, s, interleaved)])

    for batch in (1, 2):
        tables = make(2, batch, 7, size)
        q, k = (make(2, 7, heads, width).transpose(1, 2).requires_grad_() for heads in (4, 2))
        compare_with_native(ours, theirs, (q, k, *tables))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(device, interleaved):
    def make(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64)

    q, k = make(2, 3, 4, 6).requires_grad_(), make(2, 1, 4, 6).requires_grad_()
    cos, sin = make(2, 2, 4, 4)

    def run(q, k):
        return op(q, k, cos, sin, interleaved)

    assert torch.autograd.gradcheck(run, (q, k), check_forward_ad=True, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(run, (q, k), nondet_tol=0.0)
    opcheck(op, (q, k, cos, sin, interleaved))


def test_bad_input(device):
    q = torch.randn(2, 3, 4, 6, device=device)
    cos = torch.randn(2, 4, 4, device=device)
    for arguments, text in (
        ((q[0], q, cos, cos), "query: expected"),
        ((q, q[..., :2], cos, cos), "key: expected shape"),
        ((q, q.double(), cos, cos), "key: expected Float, got Double"),
        ((q, q, cos[:, :2], cos), "cos: expected shape"),
        ((q, q, cos[..., :3], cos), "cos: expected an even number of columns"),
        ((q, q, cos, cos[..., :2]), "sin: expected 4 columns, got 2"),
        ((q, q, cos.double(), cos), "cos: expected Float, got Double"),
    ):
        with pytest.raises(RuntimeError, match=f"rotary_embedding: {text}"):
            op(*arguments)
