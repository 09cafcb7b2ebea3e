"""attention_with_kv_cache gives what native's attention gives on the gathered pages."""

import itertools

import pytest
import torch
from common import layouts, opcheck
from kv_cache_cases import Cache, expected, good, tokens

import warpwright
import warpwright.functional as F
from warpwright import _native
from warpwright.testing import assert_same, compare_with_native

ops = torch.ops.warpwright


def compare(query, cache, **options):
    def theirs(q, k, v):
        return _native.attention_with_kv_cache(
            q, k, v, cache.lengths, cache.table, 0, **{"is_causal": False, "scale": None} | options
        )

    def ours(q, k, v):
        return F.attention_with_kv_cache(q, k, v, **cache.options(), **options)

    compare_with_native(ours, theirs, (query, cache.k, cache.v))


# lengths, query tokens, heads, key heads, head size, page
CASES = [
    ([5], 1, 1, 1, 8, None),
    ([0, 3, 17], 1, 4, 4, 16, None),
    ([300, 1, 77], 1, 8, 2, 64, 16),
    ([64, 65, 63, 0], 2, 6, 2, 40, 16),
    ([129, 1030], 1, 16, 2, 128, 64),
    ([700, 20], 4, 16, 2, 128, 7),
    ([90, 33], 16, 5, 1, 96, 32),
    ([40], 3, 4, 2, 256, 1),
    ([40, 41], 2, 6, 3, 36, 5),
    ([30, 9], 1, 2, 1, 320, 16),
    ([12], 2, 2, 2, 1, 4),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(device, dtype, case, is_causal):
    lengths, count, heads, kv_heads, size, page = case
    cache = Cache(lengths, kv_heads, size, page, dtype=dtype, device=device)
    query = tokens(len(lengths), count, heads, size, dtype, device)
    compare(query, cache, is_causal=is_causal)
    cache.poison()
    found = F.attention_with_kv_cache(
        query, cache.k, cache.v, **cache.options(), is_causal=is_causal
    )
    assert found.isfinite().all()
    assert found.is_contiguous()
    wanted = expected(query, cache, is_causal=is_causal)
    tolerance = 30 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [0.25, 0.0, -0.7, 3, 40])
def test_scale(device, dtype, scale):
    """40: without the largest score taken off, exponentials would overflow."""
    cache = Cache([50, 7], 2, 64, 16, dtype=dtype, device=device)
    compare(tokens(2, 2, 4, 64, dtype, device), cache, scale=scale)


def test_layouts(device, dtype):
    """Strides of the query, and caches that are views: of one allocation, or offset."""
    cache = Cache([50, 23], 2, 64, 16, dtype=dtype, device=device)
    query = tokens(2, 3, 4, 64, dtype, device)
    plain = F.attention_with_kv_cache(query, cache.k, cache.v, **cache.options())
    near = 4 * torch.finfo(dtype).eps
    for name, q in layouts(query):
        found = F.attention_with_kv_cache(q, cache.k, cache.v, **cache.options())
        torch.testing.assert_close(found, plain, rtol=near, atol=near, msg=name)
    by_head = query.transpose(1, 2).contiguous().transpose(1, 2)
    both = torch.stack((cache.k, cache.v), 1)  # (pages, 2, page size, heads, head size)
    k, v = both.unbind(1)
    assert_same(F.attention_with_kv_cache(by_head, k, v, **cache.options()), plain)
    by_head = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (cache.k, cache.v)]
    assert_same(F.attention_with_kv_cache(query, *by_head, **cache.options()), plain)
    for name, k in layouts(cache.k):
        if k.stride(-1) != 1:
            with pytest.raises(RuntimeError, match="k_cache: expected adjacent elements"):
                F.attention_with_kv_cache(query, k, cache.v, **cache.options())
            continue
        found = F.attention_with_kv_cache(query, k, cache.v, **cache.options())
        torch.testing.assert_close(found, plain, rtol=near, atol=near, msg=name)
    table = cache.table.t().contiguous().t()
    lengths = torch.stack((cache.lengths, cache.lengths), 1)[:, 0]
    found = F.attention_with_kv_cache(
        query, cache.k, cache.v, cache_seqlens=lengths, block_table=table
    )
    assert_same(found, plain)


def test_pages_do_not_matter(device, dtype):
    """Pages of any size and order, or none, give the same bits."""
    cache = Cache([600, 33, 240], 2, 64, None, dtype=dtype, device=device)
    query = tokens(3, 2, 8, 64, dtype, device)
    plain = F.attention_with_kv_cache(query, cache.k, cache.v, **cache.options())
    for page in (1, 8, 24, 600):
        order = torch.randperm(3 * 600 // page, device=device)
        paged = [torch.empty_like(t).view(-1, page, 2, 64) for t in (cache.k, cache.v)]
        for to, source in zip(paged, (cache.k, cache.v), strict=True):
            to[order] = source.reshape(to.shape)
        table = order.view(3, -1).int()
        found = F.attention_with_kv_cache(
            query, *paged, cache_seqlens=cache.lengths, block_table=table
        )
        assert_same(found, plain)


@pytest.mark.parametrize("page", [None, 4, 16])
@pytest.mark.parametrize("count", [1, 5])
def test_append(device, dtype, page, count):
    cache = Cache([30, 0, 15], 2, 24, page, dtype=dtype, device=device, room=count)
    k, v = (tokens(3, count, 2, 24, dtype, device) for _ in range(2))
    query = tokens(3, count, 6, 24, dtype, device)
    wanted = [cache.k.clone(), cache.v.clone()]
    _native.kv_cache_append_(*wanted, k, v, cache.lengths, cache.table)
    versions = cache.k._version, cache.v._version
    lengths = cache.lengths.clone()
    found = F.attention_with_kv_cache(
        query, cache.k, cache.v, k, v, **cache.options(), is_causal=True
    )
    assert_same([cache.k, cache.v], wanted)
    assert_same(cache.lengths, lengths)
    assert (cache.k._version, cache.v._version) == tuple(n + 1 for n in versions)
    cache.lengths += count
    again = F.attention_with_kv_cache(query, cache.k, cache.v, **cache.options(), is_causal=True)
    assert_same(found, again)
    strided = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (k, v)]
    cache.lengths -= count
    ops.kv_cache_append_(*(t.zero_() for t in (cache.k, cache.v)), *strided, **cache.options())
    written = [torch.zeros_like(t) for t in wanted]
    _native.kv_cache_append_(*written, k, v, cache.lengths, cache.table)
    assert_same([cache.k, cache.v], written)


def test_decoding_is_one_causal_attention(device):
    """Token by token, or a few at a time, the cache gives what one causal call gives."""
    total, heads, kv_heads, size = 21, 4, 2, 32
    q = tokens(2, total, heads, size, device=device)
    k, v = (tokens(2, total, kv_heads, size, device=device) for _ in range(2))
    whole = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    for step in (1, 4, 21):
        cache = Cache([total, total], kv_heads, size, 8, device=device)
        cache.lengths.zero_()
        outputs = []
        for at in range(0, total, step):
            part = slice(at, min(at + step, total))
            outputs.append(
                F.attention_with_kv_cache(
                    *(q[:, part], cache.k, cache.v, k[:, part], v[:, part]),
                    **cache.options(),
                    is_causal=True,
                )
            )
            cache.lengths += outputs[-1].shape[1]
        torch.testing.assert_close(torch.cat(outputs, 1), whole)


def test_non_finite_values(device, dtype):
    """NaN and infinite scores reach their own head alone, as in native's softmax."""
    cache = Cache([40, 40], 2, 64, 8, dtype=dtype, device=device)
    query = tokens(2, 1, 4, 64, dtype, device)
    plain = F.attention_with_kv_cache(query, cache.k, cache.v, **cache.options())
    cache.k[int(cache.table[0, 1]), 3, 1, 0] = float("nan")
    found = F.attention_with_kv_cache(query, cache.k, cache.v, **cache.options())
    assert found[0, :, 2:].isnan().all()
    assert_same([found[0, :, :2], found[1]], [plain[0, :, :2], plain[1]])


def test_empty(device):
    for shape, length in (((0, 1, 2, 8), []), ((2, 0, 2, 8), [3, 3]), ((2, 1, 0, 8), [3, 3])):
        cache = Cache(length, 1, 8, None, device=device)
        cache.k, cache.v = (t[: shape[0]] for t in (cache.k, cache.v))
        result = F.attention_with_kv_cache(
            torch.randn(shape, device=device), cache.k, cache.v, cache_seqlens=cache.lengths
        )
        assert result.shape == shape
    query, lengths = torch.randn(2, 1, 4, 8, device=device), torch.zeros(2, device=device).int()
    no_tokens = torch.empty(2, 0, 2, 8, device=device)
    found = F.attention_with_kv_cache(query, no_tokens, no_tokens, cache_seqlens=lengths)
    assert_same(found, torch.zeros_like(query))
    no_pages = torch.empty(0, 16, 2, 8, device=device)
    for width in (0, 2):
        table = torch.zeros(2, width, device=device).int()
        found = F.attention_with_kv_cache(
            query, no_pages, no_pages, cache_seqlens=lengths, block_table=table
        )
        assert_same(found, torch.zeros_like(query))


# ---- transforms ----


def test_opcheck(device):
    call = good(device)
    cache = call["k_cache"], call["v_cache"]
    seen = call["cache_seqlens"], call["block_table"]
    opcheck(ops.attention_with_kv_cache.default, (call["query"], *cache, *seen, 1, True, 0.3))
    contiguous = torch.randn(2, 12, 2, 16, device=device)
    lengths = call["cache_seqlens"]
    opcheck(ops.attention_with_kv_cache.default, (call["query"], contiguous, contiguous, lengths))
    opcheck(ops.kv_cache_append_.default, (*cache, call["k"], call["v"], *seen))


def test_compiles(device):
    """The append is a mutation that functionalization keeps."""

    def step(query, k_cache, v_cache, k, v, lengths, table):
        y = F.attention_with_kv_cache(
            query * 2, k_cache, v_cache, k + 1, v, cache_seqlens=lengths, block_table=table
        )
        return y + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    names = "query", "k_cache", "v_cache", "k", "v", "cache_seqlens", "block_table"
    for _ in range(2):
        call = [good(device)[name] for name in names]
        copies = [t.clone() for t in call]
        assert_same(compiled(*call), step(*copies))
        assert_same(call, copies)


def test_vmap_refuses_the_append(device):
    call = good(device)
    several = torch.stack((call["query"], call["query"] * 2))
    fixed = call | {"k": None, "v": None}
    fixed.pop("query")
    found = torch.vmap(lambda q: F.attention_with_kv_cache(q, **fixed))(several)
    alone = [F.attention_with_kv_cache(q, **fixed) for q in several]
    assert_same(found, torch.stack(alone))
    with pytest.raises(RuntimeError, match="kv_cache_append_"):
        torch.vmap(lambda k: F.attention_with_kv_cache(**call | {"k": k, "v": k}))(
            torch.stack((call["k"], call["k"]))
        )


def test_forward_ad_raises(device):
    call = good(device) | {"k": None, "v": None}
    query = call.pop("query")
    with pytest.raises(RuntimeError, match="not differentiable wrt query"):
        torch.func.jvp(lambda q: F.attention_with_kv_cache(q, **call), (query,), (query,))


def explained(
    dtype=torch.bfloat16, batch=32, tokens=1, page=16, pages=512, size=128, appends=False
):
    def empty(*shape, kind=dtype):
        return torch.empty(shape, dtype=kind, device="meta")

    cache = empty(batch * pages, page, 8, size)
    new = empty(batch, tokens, 8, size) if appends else None
    return warpwright.explain(
        "attention_with_kv_cache",
        empty(batch, tokens, 64, size),
        cache,
        cache,
        new,
        new,
        cache_seqlens=empty(batch, kind=torch.int32),
        block_table=empty(batch, pages, kind=torch.int32),
        device="h200",
    )


def test_explain():
    """The path by type, size and strides; splits by shapes alone."""
    assert "mma.sync" in explained()
    assert "padded to 64" in explained(size=40)
    assert "not all rows begin at a 16-byte boundary" in explained(size=36)
    assert "fits no tile" in explained(size=264)
    assert "keep their precision" in explained(torch.float32)
    assert "one CTA per sequence" in explained(pages=1, batch=1)
    assert "one CTA per sequence" in explained()  # 256 CTAs, and 264 run at once
    assert "at most 33 CTAs" in explained(batch=1, pages=8192, page=64)
    assert "merge" in explained(batch=1)
    assert "append" not in explained()
    assert "one launch, 16 bytes per access: every head" in explained(appends=True)
    assert "one launch, 2 bytes per access: not every head" in explained(appends=True, size=36)


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_repeats_are_equal(kind):
    cache = Cache([8000, 17, 3000, 513], 2, 128, 16, dtype=kind, device="cuda")
    query = tokens(4, 2, 16, 128, kind, "cuda")
    first = F.attention_with_kv_cache(query, cache.k, cache.v, **cache.options(), is_causal=True)
    other = torch.randn(2048, 2048, device="cuda")
    for _ in range(50):
        other = other @ other
        found = F.attention_with_kv_cache(
            query, cache.k, cache.v, **cache.options(), is_causal=True
        )
        assert_same(found, first)


@pytest.mark.gpu
def test_graph_capture():
    """One graph decodes several tokens: lengths, table and tokens change between replays."""
    cache = Cache([100, 3], 2, 64, 16, dtype=torch.bfloat16, device="cuda", room=8)
    query = tokens(2, 1, 8, 64, torch.bfloat16, "cuda")
    k, v = (tokens(2, 1, 2, 64, torch.bfloat16, "cuda") for _ in range(2))

    def step():
        return F.attention_with_kv_cache(query, cache.k, cache.v, k, v, **cache.options())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(8):
        for tensor in (query, k, v):
            tensor.normal_()
        graph.replay()
        assert_same(captured, step())
        cache.lengths += 1


@pytest.mark.gpu
@pytest.mark.parametrize("shape", list(itertools.product([1, 2, 9], [1, 4, 7], [64, 96, 128, 256])))
def test_many_shapes(shape):
    """Rows that fill no tile, splits that are empty, lengths next to a split's end."""
    count, group, size = shape
    lengths = [0, 1, 15, 16, 255, 256, 257, 2049, 5000]
    for kind in (torch.bfloat16, torch.float16):
        cache = Cache(lengths, 2, size, 48, dtype=kind, device="cuda")
        query = tokens(len(lengths), count, 2 * group, size, kind, "cuda")
        for is_causal in (False, True):
            compare(query, cache, is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.gpu_memory(14)
def test_offsets_past_32_bits():
    """A page beyond element 2^32."""
    pages, page, heads, size = 8300, 1024, 4, 128
    k = torch.empty(pages, page, heads, size, dtype=torch.bfloat16, device="cuda")
    k[-1].normal_()
    table = torch.tensor([[pages - 1]], device="cuda").int()
    query = tokens(1, 1, 8, size, torch.bfloat16, "cuda")
    lengths = torch.tensor([page], device="cuda").int()
    found = F.attention_with_kv_cache(query, k, k, cache_seqlens=lengths, block_table=table)
    near = F.attention_with_kv_cache(query, k[-1:], k[-1:], cache_seqlens=lengths)
    assert_same(found, near)
