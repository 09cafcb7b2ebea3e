"""attention_varlen gives what a loop over the sequences with native's attention gives, and refuses bad ends."""

import pytest
import torch
from attention_varlen_cases import Packed, good, raw

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
INF = float("inf")


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


# ---- errors ----


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
