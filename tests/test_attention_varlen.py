"""attention_varlen against a loop over the sequences with native's attention."""

import itertools

import pytest
import torch
from common import gradcheck, opcheck
from torch.nn import functional as native
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import warpwright
import warpwright.functional as F
from warpwright import _native
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
INF = float("inf")


class Packed:
    """Random queries, keys and values of sequences, with tokens of none before and after them."""

    def __init__(
        self, queries, keys, heads=(2, 2), size=(16, 16), *, dtype=F32, device="cpu", gap=(0, 0)
    ):
        self.lengths = [*zip(queries, keys, strict=True)]
        self.gap = gap

        def operand(lengths, count, width):
            shape = (sum(lengths) + sum(gap), count, width)
            return torch.randn(shape, device=device).to(dtype).requires_grad_()

        self.query = operand(queries, heads[0], size[0])
        self.key, self.value = (operand(keys, heads[1], width) for width in size)
        self.ends = [
            torch.tensor([gap[0], *(gap[0] + n for n in itertools.accumulate(lengths))])
            .int()
            .to(device)
            for lengths in (queries, keys)
        ]
        self.longest = max([0, *queries]), max([0, *keys])
        self.operands = self.query, self.key, self.value

    def ours(self, query, key, value, **options):
        return F.attention_varlen(
            query, key, value, *self.ends, *self.longest, enable_gqa=True, **options
        )

    def theirs(self, query, key, value, **options):
        """One call of native per sequence; with `return_lse` (tokens, heads) sums in the formula."""
        outputs, sums = [], []
        before, after = self.gap
        queries, keys = zip(*self.lengths, strict=True) if self.lengths else ((), ())
        parts = [
            t.split([before, *lengths, after])[1:-1]
            for t, lengths in ((query, queries), (key, keys), (value, keys))
        ]
        for of_sequence in zip(*parts, strict=True):
            q, k, v = (t.transpose(0, 1) for t in of_sequence)
            out, lse = one_sequence(q, k, v, **options)
            outputs.append(out.transpose(0, 1))
            sums.append(lse)
        before, after = (query.new_zeros(n, query.shape[1], value.shape[2]) for n in self.gap)
        # The tokens of no sequence have a gradient, which is zero.
        zero = 0 * sum(t.sum() for t in (query, key, value))
        out = torch.cat([before, *outputs, after]) + zero.to(query.dtype)
        hidden = [query.new_full((query.shape[1], n), -INF) for n in self.gap]
        return out, torch.cat([hidden[0], *sums, hidden[1]], 1)


def seen_by(queries, keys, is_causal, window_size, device):
    """(queries, keys): the rule, element by element. The last query is at the last key."""
    left, right = window_size or (-1, -1)
    ahead = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None]
    ahead = ahead - (keys - queries)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if is_causal:
        seen &= ahead <= 0
    if right >= 0:
        seen &= ahead <= right
    if left >= 0:
        seen &= ahead >= -left
    return seen


def one_sequence(q, k, v, *, is_causal=False, window_size=None, softcap=None, scale=None):
    group = q.shape[0] // max(k.shape[0], 1)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    seen = seen_by(q.shape[1], k.shape[1], is_causal, window_size, q.device)
    factor = q.shape[2] ** -0.5 if scale is None else scale
    scores = factor * (q @ k.mT)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -INF)
    hidden = ~seen.any(-1)
    lse = scores.masked_fill(hidden[:, None], 0).logsumexp(-1) if k.shape[1] else scores.sum(-1)
    lse = lse.masked_fill(hidden, -INF)
    if softcap:
        weights = scores.masked_fill(hidden[:, None], 0).softmax(-1)
        return weights.masked_fill(hidden[:, None], 0) @ v, lse
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:2], v.shape[2]), lse
    out = native.scaled_dot_product_attention(q, k, v, seen, scale=scale)
    return out.masked_fill(hidden[:, None], 0), lse


def compare(packed, factor=1.5, **options):
    def theirs(*operands):
        return packed.theirs(*operands, **options)[0]

    def ours(*operands):
        return packed.ours(*operands, **options)

    compare_with_native(ours, theirs, packed.operands, factor=factor)


SHAPES = [  # queries, keys, (heads, key heads), (E, E_v)
    ([5], [5], (1, 1), (8, 8)),
    ([3, 0, 17, 1], [3, 0, 17, 1], (2, 2), (16, 16)),
    ([64, 65, 1, 130], [64, 65, 1, 130], (4, 2), (64, 64)),
    ([7, 33, 0, 20, 5], [20, 9, 4, 0, 5], (2, 1), (24, 40)),
    ([200, 64, 0, 130, 77], [90, 300, 50, 0, 77], (4, 2), (128, 128)),
    ([70, 140], [70, 140], (2, 1), (256, 256)),
    ([70, 14], [7, 140], (1, 1), (264, 8)),
]
OPTIONS = [
    {},
    {"is_causal": True},
    {"window_size": (9, 4)},
    {"window_size": (-1, 3), "scale": 0.3},
    {"window_size": (20, -1), "is_causal": True},
]


@pytest.mark.parametrize("shape", SHAPES, ids=[str(i) for i in range(len(SHAPES))])
@pytest.mark.parametrize("options", OPTIONS, ids=[str(i) for i in range(len(OPTIONS))])
def test_values(device, dtype, shape, options):
    compare(Packed(*shape, dtype=dtype, device=device, gap=(2, 3)), factor=2, **options)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window_size": (11, 5)}])
def test_softcap(device, dtype, options):
    packed = Packed([30, 70, 1], [60, 40, 9], (4, 2), (64, 64), dtype=dtype, device=device)
    compare(packed, factor=3, softcap=2.5, **options)


def test_many_sequences(device):
    """On a GPU more than a block of the kernel that lists the tiles has threads."""
    count = 1500 if device == "cuda" else 60
    queries = [(37 * i) % 11 for i in range(count)]
    keys = [(53 * i) % 13 for i in range(count)]
    for kind in (F64, BF16):
        packed = Packed(queries, keys, (1, 1), (8, 8), dtype=kind, device=device)
        compare(packed, factor=2, is_causal=True)


def test_no_sequences(device, dtype):
    """No sequence, none with a token, no token at all."""
    for queries, keys, gap in (([], [], (3, 0)), ([0, 0], [0, 0], (0, 2)), ([0], [0], (0, 0))):
        compare(Packed(queries, keys, dtype=dtype, device=device, gap=gap), is_causal=True)
    compare(Packed([4, 0], [0, 3], dtype=dtype, device=device))


def test_equal_lengths_are_a_batch(device, dtype):
    """The same bits as scaled_dot_product_attention of a batch on the CPU; close on a GPU."""
    packed = Packed([24] * 3, [24] * 3, (4, 2), (64, 64), dtype=dtype, device=device)
    found = packed.ours(*packed.operands, is_causal=True)
    q, k, v = (t.unflatten(0, (3, 24)).transpose(1, 2) for t in packed.operands)
    batch = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    batch = batch.transpose(1, 2).flatten(0, 1)
    if device == "cpu":
        assert torch.equal(found, batch)
    grads = [torch.autograd.grad(y, packed.operands, batch.detach().cos()) for y in (found, batch)]
    exact = dtype in (F32, F64)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, batch, **tolerance)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize(
    "strides", ["heads first", "a slice of the heads", "columns", "misaligned"]
)
def test_layouts(device, dtype, strides):
    packed = Packed([9, 40], [9, 40], dtype=dtype, device=device)

    def laid_out(t):
        if strides == "heads first":
            return t.transpose(0, 1).contiguous().transpose(0, 1)
        if strides == "a slice of the heads":
            return torch.cat([t, t], 1)[:, : t.shape[1]]
        if strides == "columns":
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat([t.flatten()[:1], t.flatten()])[1:].view_as(t)

    result = packed.ours(*(laid_out(t.detach()) for t in packed.operands), is_causal=True)
    expected = packed.ours(*packed.operands, is_causal=True).detach()
    if strides == "misaligned" and device == "cuda" and dtype.itemsize == 2:
        # TMA cannot read such rows: another kernel takes the call.
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(result, expected, rtol=2 * step, atol=2 * step)
    else:
        assert_same(result, expected)
    assert result.is_contiguous()


def test_other_tokens_do_not_matter(device, dtype):
    """NaN and infinities of one sequence, or of no sequence, are in no other's results."""
    packed = Packed(
        [70, 40, 33], [70, 40, 33], (2, 1), (64, 64), dtype=dtype, device=device, gap=(4, 4)
    )
    kept = torch.ones(packed.query.shape[0], dtype=torch.bool, device=device)
    kept[74:114] = kept[:4] = kept[-4:] = False

    def results(operands, cotangent):
        leaves = [t.detach().requires_grad_() for t in operands]
        out = packed.ours(*leaves, is_causal=True)
        return [t[kept] for t in (out, *torch.autograd.grad(out, leaves, cotangent))]

    cotangent = torch.randn_like(packed.query)
    clean = results(packed.operands, cotangent)
    spoiled = [t.detach().clone() for t in packed.operands]
    for t in (*spoiled, cotangent):
        t[~kept] = float("nan")
    spoiled[2][80] = INF
    spoiled[1][81] = -INF
    assert_same(results(spoiled, cotangent), clean)


def test_tokens_of_no_sequence(device, dtype):
    packed = Packed([5, 3], [4, 6], dtype=dtype, device=device, gap=(2, 3))
    out, lse = packed.ours(*packed.operands, return_lse=True)
    grads = torch.autograd.grad(out, packed.operands, torch.ones_like(out))
    for t in (out, *grads):
        assert not t[:2].any()
        assert not t[-3:].any()
        assert t[2:-3].any()
    assert (lse[:, :2] == -INF).all()
    assert (lse[:, -3:] == -INF).all()


# ---- the log-sum-exp ----


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window_size": (4, 2), "softcap": 3.0}]
)
def test_lse(device, dtype, options):
    packed = Packed(
        [40, 0, 70], [66, 5, 30], (4, 2), (64, 64), dtype=dtype, device=device, gap=(1, 2)
    )
    out, lse = packed.ours(*packed.operands, return_lse=True, **options)
    wide = [t.detach().double().requires_grad_() for t in packed.operands]
    exact_out, exact = packed.theirs(*wide, **options)
    assert lse.dtype == (F64 if dtype == F64 else F32)
    assert lse.shape == exact.shape
    tolerance = {F64: 1e-12, F32: 1e-5}.get(dtype, 1e-2)
    torch.testing.assert_close(lse.double(), exact, rtol=tolerance, atol=tolerance)
    # Of the log-sum-exp alone, and of both results.
    seen = exact != -INF
    for weight in (0.0, 1.0):
        cotangents = torch.randn_like(exact_out) * weight, torch.randn_like(exact) * seen
        found = torch.autograd.grad(
            (out, lse), packed.operands, tuple(c.to(t.dtype) for c, t in zip(cotangents, (out, lse), strict=True)),
            retain_graph=True,
        )  # fmt: skip
        visible = exact.masked_fill(~seen, 0.0)
        expected = torch.autograd.grad(
            (exact_out, visible), wide, cotangents, retain_graph=True, allow_unused=True
        )
        for a, b in zip(found, expected, strict=True):
            limit = {F64: 1e-11, F32: 1e-4}.get(dtype, 0.05)
            b = torch.zeros_like(a, dtype=F64) if b is None else b
            torch.testing.assert_close(a.double(), b, rtol=limit, atol=limit * 2)


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


# ---- errors ----


def good(device="cpu"):
    packed = Packed([4, 5], [6, 3], (4, 2), (8, 8), device=device)
    names = "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    values = *(t.detach() for t in packed.operands), *packed.ends, *packed.longest
    return dict(zip(names, values, strict=True)) | {"enable_gqa": True}


ERRORS = [
    ({"query": lambda t: t[0]}, RuntimeError, r"query: expected \(tokens, heads, head size\)"),
    ({"query": lambda t: t[..., :4]}, RuntimeError, "key: expected head size 4"),
    ({"query": lambda t: t[:, :3]}, RuntimeError, "query: expected a multiple of key's 2 heads"),
    ({"query": lambda t: t.double()}, RuntimeError, "key: expected Double"),
    ({"query": lambda t: t.int()}, NotImplementedError, "query: expected Float"),
    ({"query": lambda t: None}, TypeError, "'query' must be Tensor"),
    ({"key": lambda t: t[:-1]}, RuntimeError, "value: expected 8 tokens and 2 heads"),
    ({"value": lambda t: t[:, :1]}, RuntimeError, "value: expected 9 tokens and 2 heads"),
    ({"value": lambda t: t.half()}, RuntimeError, "value: expected Float"),
    ({"cu_seqlens_q": lambda t: t.long()}, RuntimeError, "cu_seqlens_q: expected Int"),
    ({"cu_seqlens_q": lambda t: t[:-1]}, RuntimeError, "cu_seqlens_k: expected 2 numbers"),
    ({"cu_seqlens_k": lambda t: t[:0]}, RuntimeError, "cu_seqlens_k: expected the ends"),
    ({"cu_seqlens_k": lambda t: t[None]}, RuntimeError, "cu_seqlens_k: expected the ends"),
    ({"max_seqlen_q": lambda n: -1}, RuntimeError, "max_seqlen_q, max_seqlen_k: expected at least"),
    ({"max_seqlen_k": lambda n: 1.5}, TypeError, "'max_seqlen_k' must be int"),
    (
        {"enable_gqa": lambda t: False},
        RuntimeError,
        "key: expected 4 heads as query, or enable_gqa",
    ),
    ({"is_causal": lambda t: 1}, TypeError, "'is_causal' must be bool"),
    ({"return_lse": lambda t: "x"}, TypeError, "'return_lse' must be bool"),
    ({"scale": lambda t: "x"}, TypeError, "'scale' must be float"),
    ({"softcap": lambda t: -1.0}, RuntimeError, "softcap: expected a positive"),
    ({"window_size": lambda t: (1,)}, ValueError, "expected window_size to be a pair"),
    ({"window_size": lambda t: (-2, 0)}, ValueError, "at least 0, or -1"),
]


@pytest.mark.parametrize(
    ("changes", "kind", "message"), ERRORS, ids=[str(i) for i in range(len(ERRORS))]
)
def test_errors(device, changes, kind, message):
    call = good(device)
    spoiled = call | {name: change(call.get(name)) for name, change in changes.items()}
    with pytest.raises(kind, match=message):
        F.attention_varlen(**spoiled)


BAD_ENDS = [
    ("cu_seqlens_q", 0, -1),
    ("cu_seqlens_q", 1, 10),
    ("cu_seqlens_q", 2, 10),
    ("cu_seqlens_q", 1, -(2**31)),
    ("cu_seqlens_k", 1, 7),  # longer than max_seqlen_k
    ("cu_seqlens_k", 2, 2**31 - 1),
]


@pytest.mark.parametrize(("name", "place", "value"), BAD_ENDS)
def test_bad_ends(device, name, place, value):
    """On the CPU an error; on a GPU NaN everywhere, and check_errors() raises."""
    args = [t.detach() if torch.is_tensor(t) else t for t in raw(device)]
    results = ops.attention_varlen(*args)
    args[3 if name == "cu_seqlens_q" else 4][place] = value
    rest = *args[5:], False, None, None, None, 0.0, [True] * 3
    calls = (
        lambda: ops.attention_varlen(*args),
        lambda: ops.attention_varlen_backward(results[0], *args[:5], *results, *rest),
    )
    for call in calls:
        if device == "cpu":
            with pytest.raises(IndexError, match=name):
                call()
        else:
            assert all(t.isnan().all() for t in call())
            with pytest.raises(IndexError, match=name):
                warpwright.check_errors()


def raw(device="cpu"):
    call = good(device)
    call.pop("enable_gqa")
    return [
        t.requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t
        for t in call.values()
    ]


def test_raw_backward_checks(device):
    args = raw(device)
    out, lse = ops.attention_varlen(*args)
    out, lse = out.detach(), lse.detach()
    args = [t.detach() if torch.is_tensor(t) else t for t in args]
    rest = [args[5], args[6], False, None, None, None, 0.0, [True] * 3]
    good_call = [out, *args[:5], out, lse, *rest]
    ops.attention_varlen_backward(*good_call)
    for index, name, change in (
        (0, "grad_out", lambda t: t[:-1]),
        (6, "out", lambda t: t.double()),
        (7, "lse", lambda t: t[:, :-1]),
        (7, "lse", lambda t: t.float()),
    ):
        spoiled = list(good_call)
        spoiled[index] = change(spoiled[index])
        with pytest.raises(RuntimeError, match=f"attention_varlen_backward: {name}: expected"):
            ops.attention_varlen_backward(*spoiled)
    with pytest.raises(RuntimeError, match="grad_lse: expected"):
        ops.attention_varlen_backward(*good_call, lse[:1])


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


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BF16, F32])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_repeats_are_equal(kind, size):
    """Also beside a busy stream, and whatever order CTAs take the tiles in."""
    lengths = [800, 17, 0, 1300, 513, 1, 129] if kind == BF16 else [200, 0, 130]
    packed = Packed(lengths, lengths, (4, 2), (size, size), dtype=kind, device="cuda")
    cotangent = torch.randn_like(packed.query)

    def results():
        out = packed.ours(*packed.operands, is_causal=True)
        return [out, *torch.autograd.grad(out, packed.operands, cotangent)]

    first, other = results(), torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(30):
        with torch.cuda.stream(side):
            other = other @ other
        assert_same(results(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BF16, F32])
def test_graph_with_other_lengths(kind):
    packed = Packed([60, 300, 140], [60, 300, 140], (4, 2), (64, 64), dtype=kind, device="cuda")

    def step():
        out = packed.ours(*packed.operands, is_causal=True)
        return [out, *torch.autograd.grad(out, packed.operands, out.detach())]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for ends in ([0, 60, 360, 500], [0, 0, 250, 500], [100, 101, 101, 400]):
        for t in packed.ends:
            t.copy_(torch.tensor(ends))
        graph.replay()
        assert_same(found, step())
    warpwright.check_errors()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("options", OPTIONS, ids=[str(i) for i in range(len(OPTIONS))])
def test_long_sequences(size, heads, options):
    """More tiles than CTAs, and tiles of 192 queries."""
    lengths = [2500, 64, 0, 1700, 3000, 333]
    packed = Packed(lengths, lengths[::-1], heads, (size, size), dtype=BF16, device="cuda")
    compare(packed, factor=2, **options)


@pytest.mark.gpu
def test_offsets_past_32_bits():
    """The last rows are behind 2^32 bytes."""
    tokens = (1 << 31) // (64 * 64) + 4096
    whole = torch.zeros(tokens, 64, 64, dtype=BF16, device="cuda")
    whole[-300:].normal_()
    ends = torch.tensor([0, 1, tokens - 300, tokens - 300, tokens]).int().cuda()
    ends[1:3] = tokens - 300
    found = F.attention_varlen(
        whole, whole, whole, ends, ends, tokens, tokens, window_size=(128, 0)
    )
    last = whole[-300:]
    few = torch.tensor([0, 300]).int().cuda()
    expected = F.attention_varlen(last, last, last, few, few, 300, 300, window_size=(128, 0))
    assert_same(found[-300:], expected)
