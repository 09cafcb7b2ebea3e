"""rotary_embedding against transformers' formula: values, layouts, derivatives, errors."""

import pickle

import pytest
import torch
from common import assert_no_leak, opcheck

import warpwright
import warpwright.functional as F
from warpwright import nn
from warpwright._native import rotary_embedding as single_ops
from warpwright.testing import assert_same, compare_with_native

op = torch.ops.warpwright.rotary_embedding.default
both = pytest.mark.parametrize("interleaved", [False, True])


def turned(x, interleaved):
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def native(x, cos, sin, interleaved):
    """As in the models of transformers; the tables have one head."""
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    return torch.cat([rotated * cos + turned(rotated, interleaved) * sin, rest], -1)


def forms(interleaved):
    """Ours and native, with one flat result."""

    def theirs(q, k, cos, sin):
        tables = cos[:, None], sin[:, None]
        return torch.cat([native(x, *tables, interleaved).to(x.dtype).flatten() for x in (q, k)])

    def ours(q, k, cos, sin):
        rotated = F.rotary_embedding(q, k, cos, sin, interleaved=interleaved)
        return torch.cat([x.flatten() for x in rotated])

    return ours, theirs


def projected(device, dtype, batch, tokens, heads, width):
    """Views of a projection's output, (batch, tokens, heads, width)."""
    x = torch.randn(batch, tokens, heads, width, device=device).to(dtype)
    return x.transpose(1, 2)


@both
@pytest.mark.parametrize("columns", [(16, 16), (64, 32), (10, 4), (5, 4), (3, 0)])
def test_values(device, dtype, columns, interleaved):
    width, size = columns
    for batch in (1, 2):
        tables = torch.randn(2, batch, 7, size, device=device).to(dtype)
        q, k = (projected(device, dtype, 2, 7, heads, width).requires_grad_() for heads in (4, 2))
        compare_with_native(*forms(interleaved), (q, k, *tables))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_float32_tables(device, dtype, interleaved):
    """A 16-bit query keeps its dtype; native's result is its promotion, rounded."""
    q, k = (projected(device, dtype, 2, 9, heads, 64).requires_grad_() for heads in (3, 1))
    tables = torch.randn(2, 1, 9, 32, device=device)
    compare_with_native(*forms(interleaved), (q, k, *tables))
    assert F.rotary_embedding(q, k, *tables)[0].dtype == dtype


def test_integers_are_exact(device, dtype):
    q, k = (torch.randint(-8, 8, (2, n, 5, 32), device=device).to(dtype) for n in (3, 5))
    tables = torch.randint(-3, 4, (2, 2, 5, 32), device=device).to(dtype)
    for interleaved in (False, True):
        ours, theirs = forms(interleaved)
        assert torch.equal(ours(q, k, *tables), theirs(q, k, *tables))


def test_heads_counts(device, dtype):
    """Blocks of heads cross from the query into the key; either may be empty."""
    tables = torch.randn(2, 1, 5, 32, device=device).to(dtype)
    for heads in ((1, 1), (3, 2), (2, 3), (7, 1), (4, 0), (0, 3), (0, 0)):
        q, k = (projected(device, dtype, 2, 5, n, 32) for n in heads)
        for x, rotated in zip((q, k), F.rotary_embedding(q, k, *tables), strict=True):
            alone, _ = F.rotary_embedding(x.contiguous(), x[:, :0], *tables)
            assert_same(rotated.contiguous(), alone, str(heads))


def test_layouts(device, dtype):
    """Any strides, the same bits; dense inputs keep their strides, so no copy follows."""
    dense = torch.randn(2, 3, 6, 32, device=device).to(dtype)
    wide = torch.randn(2, 6, 3, 80, device=device).to(dtype)
    tables = torch.randn(2, 2, 6, 32, device=device).to(dtype)
    shapes = {
        "dense": dense,
        "projection": projected(device, dtype, 2, 6, 3, 32),
        "packed": wide[..., 16:48].transpose(1, 2),
        "off by one": wide[..., 17:49].transpose(1, 2),
        "columns apart": wide[..., ::2][..., :32].transpose(1, 2),
        "transposed": dense.transpose(-1, -2).contiguous().transpose(-1, -2),
        "expanded": dense[:, :1].expand(-1, 3, -1, -1),
        "one batch": dense[:1].expand(2, -1, -1, -1),
        "negative tokens": dense.flip(2),
    }
    for name, q in shapes.items():
        expected = F.rotary_embedding(q.contiguous(), dense, *tables)
        actual = F.rotary_embedding(q, dense, *tables)
        for mine, other in zip(actual, expected, strict=True):
            assert_same(mine.contiguous(), other.contiguous(), name)
        if name in ("dense", "projection", "transposed"):
            assert actual[0].stride() == q.stride(), name
        assert_same(F.rotary_embedding(dense, q, *tables)[1].contiguous(), expected[0].contiguous())
    for cos in (tables[0].transpose(0, 1).contiguous().transpose(0, 1), tables[0][:1]):
        sin = tables[1][: cos.shape[0]]
        assert_same(
            F.rotary_embedding(dense, dense, cos, sin)[0],
            F.rotary_embedding(dense, dense, *(t.contiguous().clone() for t in (cos, sin)))[0],
        )


def test_tables_without_a_batch(device):
    q, k = torch.randn(2, 2, 3, 5, 8, device=device)
    cos, sin = torch.randn(2, 5, 8, device=device)
    for mine, expected in zip(
        F.rotary_embedding(q, k, cos, sin),
        F.rotary_embedding(q, k, cos[None], sin[None]),
        strict=True,
    ):
        assert_same(mine, expected)


@both
def test_gradients(device, interleaved):
    def make(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64)

    q, k = make(2, 2, 2, 5).requires_grad_(), make(2, 1, 2, 5).requires_grad_()
    cos, sin = make(2, 2, 2, 4)

    def run(q, k):
        return F.rotary_embedding(q, k, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(run, (q, k), check_forward_ad=True, nondet_tol=0.0)
    assert torch.autograd.gradgradcheck(run, (q, k), nondet_tol=0.0)
    for wanted in ((True, False), (False, True)):
        inputs = [x.detach().requires_grad_(w) for x, w in zip((q, k), wanted, strict=True)]
        assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)


def test_opcheck(device):
    q, k = (torch.randn(2, n, 3, 6, device=device, requires_grad=True) for n in (2, 1))
    tables = torch.randn(2, 1, 3, 4, device=device)
    opcheck(op, (q, k, *tables))
    opcheck(op, (q.transpose(1, 2), q.transpose(1, 2), *tables[:, :, :2], True, True))


def test_a_result_that_is_not_used(device):
    """Its gradient is undefined; the other's costs half."""
    q, k = (torch.randn(2, n, 5, 8, device=device, requires_grad=True) for n in (3, 1))
    tables = torch.randn(2, 1, 5, 8, device=device)
    rotated = F.rotary_embedding(q, k, *tables)
    for i in (0, 1):
        dy = torch.randn_like(rotated[i])
        found = torch.autograd.grad(rotated[i], (q, k), dy, retain_graph=True, allow_unused=True)
        assert found[1 - i] is None
        expected = op(dy, dy, *tables, False, True)[0]
        assert_same(found[i], expected)


@both
def test_tables_have_gradients_by_single_ops(device, interleaved):
    make = lambda *s: torch.randn(s, device=device, dtype=torch.float64, requires_grad=True)  # noqa: E731
    inputs = make(1, 2, 3, 6), make(1, 1, 3, 6), make(1, 3, 4), make(1, 3, 4)

    def run(*a):
        return F.rotary_embedding(*a, interleaved=interleaved)

    assert torch.autograd.gradcheck(run, inputs)
    for mine, other in zip(run(*inputs), single_ops(*inputs, interleaved), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'cos'"):
        op(*inputs)


def test_func_transforms(device):
    q = torch.randn(2, 3, 4, 6, device=device, dtype=torch.float64)
    tables = torch.randn(2, 1, 4, 6, device=device, dtype=torch.float64)
    ours = lambda x: torch.cat(F.rotary_embedding(x, x[:, :1], *tables), 1)  # noqa: E731
    theirs = lambda x: torch.cat(single_ops(x, x[:, :1], *tables), 1)  # noqa: E731
    for transform in (
        lambda f: torch.func.grad(lambda t: f(t).sin().sum()),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.vmap(lambda t: f(t[None])),
        lambda f: torch.func.hessian(lambda t: f(t).pow(3).sum()),
    ):
        torch.testing.assert_close(transform(ours)(q), transform(theirs)(q))


def test_keeps_only_the_tables(device):
    q = torch.randn(1, 2, 5, 8, device=device, requires_grad=True)
    cos, sin = torch.randn(2, 1, 5, 8, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.rotary_embedding(q, q, cos, sin)
    assert [t.data_ptr() for t in saved] == [cos.data_ptr(), sin.data_ptr()]
    assert_no_leak(lambda x: torch.cat(F.rotary_embedding(x, x, cos, sin)), q)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(q, k, cos, sin):
        return torch.cat([x.sin() for x in F.rotary_embedding(q, k, cos, sin)], 1)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (8, 13):
        q = torch.randn(2, 4, tokens, 8, device=device, requires_grad=True)
        k = torch.randn(2, 2, tokens, 8, device=device)
        tables = torch.randn(2, 1, tokens, 8, device=device)
        results = [f(q, k, *tables) for f in (compiled, step)]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), q)[0] for y in results))


def test_autocast_keeps_dtypes(device):
    q = torch.randn(1, 2, 5, 8, device=device)
    tables = torch.randn(2, 1, 5, 8, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert F.rotary_embedding(q, q, *tables)[0].dtype == torch.float32
        assert F.rotary_embedding(q.bfloat16(), q.bfloat16(), *tables)[0].dtype == torch.bfloat16


def test_repeats_are_equal(device):
    q = projected(device, torch.bfloat16, 2, 300, 6, 64).requires_grad_()
    tables = torch.randn(2, 1, 300, 64, device=device)
    runs = []
    for _ in range(3):
        rotated = F.rotary_embedding(q, q.detach()[:, :2], *tables)
        runs.append((*rotated, *torch.autograd.grad(rotated[0].float().square().sum(), q)))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


@both
def test_layer(device, interleaved):
    layer = nn.RotaryEmbedding(8, 20, 100.0, interleaved=interleaved).to(device)
    q, k = (torch.randn(2, n, 6, 12, device=device, dtype=torch.float64) for n in (3, 1))
    angles = torch.arange(6)[:, None] * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    pairs = torch.polar(torch.ones_like(angles), angles).to(device, torch.complex128)

    def as_complex(x):
        halves = (x[..., 0:8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
        return torch.complex(*halves)

    for x, rotated in zip((q, k), layer(q, k), strict=True):
        torch.testing.assert_close(as_complex(rotated), as_complex(x) * pairs, rtol=1e-5, atol=1e-5)
        assert_same(rotated[..., 8:], x[..., 8:])
    positions = torch.tensor([[3, 4, 5, 0, 1, 2]] * 2, device=device)
    moved = layer(q, k, positions)[0]
    torch.testing.assert_close(moved[:, :, 3:], layer(q[:, :, 3:], k[:, :, 3:])[0])
    half = copy_of(layer)
    assert not half.state_dict()
    assert half(q.bfloat16(), k.bfloat16())[0].dtype == torch.bfloat16
    assert repr(half).startswith("warpwright.RotaryEmbedding(8, 20, base=100.0")
    with pytest.raises(RuntimeError, match="query: expected at most 20 tokens, got 21"):
        layer(q.new_zeros(1, 1, 21, 8), k)
    with pytest.raises(ValueError, match="size: expected an even number, got 3"):
        nn.RotaryEmbedding(3, 4)


def copy_of(layer):
    return pickle.loads(pickle.dumps(layer))


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
        (
            (q.bfloat16(), q.bfloat16(), cos.half(), cos),
            "cos: expected BFloat16 or Float, got Half",
        ),
        ((q, q, cos, cos.cpu() if q.is_cuda else cos.to("meta")), "sin: expected"),
    ):
        with pytest.raises(RuntimeError, match=f"rotary_embedding: {text}"):
            F.rotary_embedding(*arguments)
    with pytest.raises(NotImplementedError, match="query: expected a real floating-point tensor"):
        F.rotary_embedding(q.long(), q.long(), cos, cos)
    with pytest.raises(TypeError, match="argument 'cos' must be Tensor, not int"):
        F.rotary_embedding(q, q, 1, cos)
    with pytest.raises(TypeError, match="argument 'interleaved' must be bool, not int"):
        F.rotary_embedding(q, q, cos, cos, interleaved=1)


def test_explain():
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q = torch.empty(2, 5, 4, 64, **meta).transpose(1, 2)
    table = torch.empty(5, 64, **meta)
    explain = lambda *a: warpwright.explain("rotary_embedding", *a, device="cuda")  # noqa: E731
    assert "16-byte accesses, 2 heads per thread" in explain(q, q, table, table)
    assert "multiple of 16 bytes" in explain(q, q, *[table[:, :24].contiguous()] * 2)
    assert "16-byte boundary" in explain(q, q, *[torch.empty(5, 65, **meta)[:, :64]] * 2)
