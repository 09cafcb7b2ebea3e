"""torch.vmap over attention of packed sequences and over a cache: the results of a loop, in one call."""

import warnings

import pytest
import torch
from batching import check, loop, operands, randn
from torch.func import grad, vmap

import warpwright
import warpwright.functional as F

pytestmark = pytest.mark.usefixtures("no_fallback")


def ends(device, numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


# ---- packed sequences ----

# Ends of each sample: with rows of no sequence, with empty sequences, and without both.
ENDS = [[0, 3, 3, 7], [1, 4, 6, 6], [2, 2, 5, 7]]
KEY_ENDS = [[0, 4, 5, 9], [0, 2, 2, 8], [3, 5, 9, 9]]


def packed_options(**options):
    return {"max_seqlen_q": 7, "max_seqlen_k": 9, **options}


@pytest.mark.parametrize("of_ends", [(None, None), (0, 0), (None, 0), (1, None)])
@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, 1), (None, 2, None)])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "softcap": 2.0}, {"window_size": (2, 1)}], ids=str
)
def test_attention_varlen(device, one_call, of_ends, dims, options):
    """Two query heads per key head."""
    of_queries, of_keys = ends(device, ENDS), ends(device, KEY_ENDS)
    of_queries = of_queries[1] if of_ends[0] is None else of_queries.movedim(0, of_ends[0])
    of_keys = of_keys[2] if of_ends[1] is None else of_keys.movedim(0, of_ends[1])

    def function(q, k, v, of_queries, of_keys):
        out, lse = F.attention_varlen(
            *(q, k, v, of_queries, of_keys),
            **packed_options(enable_gqa=True, return_lse=True, **options),
        )
        return torch.cat((out.flatten(), lse.masked_fill(lse.isneginf(), 0).flatten()))

    qkv = operands(device, dims, (7, 4, 6), (9, 2, 6), (9, 2, 3))
    with warnings.catch_warnings():
        # With batched ends, in second derivatives: PyTorch's own rule expands the arguments.
        warnings.filterwarnings("ignore", r"torch.searchsorted\(\): .* tensor is non-contiguous")
        check(function, (*dims, *of_ends), *qkv, of_queries, of_keys)


def test_rows_of_no_sequence(device, one_call):
    """As in a loop they get no output, lse of -inf and no gradient, whatever they hold."""
    q, k, v = randn(device, 3, 7, 2, 4), randn(device, 3, 9, 2, 4), randn(device, 3, 9, 2, 4)
    of_queries, of_keys = ends(device, ENDS), ends(device, KEY_ENDS)
    q[1, 0] = q[2, :2] = k[2, :3] = v[1, 8] = float("nan")

    def function(*args):
        return F.attention_varlen(*args, **packed_options(return_lse=True))

    args, dims = (q, k, v, of_queries, of_keys), (0,) * 5
    torch.testing.assert_close(vmap(function)(*args), loop(function, dims, *args))

    def gradients(*args):
        return grad(lambda *a: function(*a)[0].sum(), (0, 1, 2))(*args)

    torch.testing.assert_close(vmap(gradients)(*args), loop(gradients, dims, *args))


@pytest.mark.parametrize(
    ("sample", "bad"), [(0, [0, 3, 3, 8]), (1, [-1, 3, 3, 7]), (2, [0, 6, 6, 7]), (0, [0, 3, 2, 7])]
)
def test_attention_varlen_checks_each_samples_ends(device, sample, bad):
    """Ends past a sample's rows do not reach the next sample's; no sequence has more than 5 rows."""
    numbers = [[0, 3, 3, 7], [1, 4, 6, 6], [2, 2, 5, 7]]
    numbers[sample] = bad
    q = randn(device, 3, 7, 2, 4)

    def run():
        function = lambda q, e: F.attention_varlen(q, q, q, e, e, 5, 5)  # noqa: E731
        return vmap(function)(q, ends(device, numbers))

    if device == "cpu":
        with pytest.raises(IndexError):
            run()
    else:
        assert run().isnan().all()
        with pytest.raises(IndexError):
            warpwright.check_errors()


# ---- attention over a cache ----

LENGTHS = [[3, 5], [0, 6], [6, 1]]
TABLES = [[[0, 1], [2, 3]], [[3, 2], [1, 0]], [[1, 1], [0, 2]]]


@pytest.mark.parametrize("of_query", [None, 0, 3])
@pytest.mark.parametrize("of_cache", [(None, None), (0, 0), (None, 1), (2, None)])
@pytest.mark.parametrize("of_lengths", [None, 0])
@pytest.mark.parametrize("of_table", ["none", None, 0])
def test_attention_with_kv_cache(device, one_call, of_query, of_cache, of_lengths, of_table):
    dims = (of_query, *of_cache, of_lengths)
    paged = of_table != "none"
    pages = (4, 3) if paged else (2, 6)
    shapes = (2, 2, 4, 8), (*pages, 2, 8), (*pages, 2, 8)
    args = [*operands(device, dims[:3], *shapes), ends(device, LENGTHS)]
    if of_lengths is None:
        args[3] = args[3][0]
    if paged:
        args.append(ends(device, TABLES if of_table == 0 else TABLES[1]))
        dims = (*dims, of_table)
    if all(d is None for d in dims):
        return

    def function(q, k, v, lengths, table=None):
        return F.attention_with_kv_cache(
            q, k, v, cache_seqlens=lengths, block_table=table, is_causal=True
        )

    torch.testing.assert_close(vmap(function, dims)(*args), loop(function, dims, *args))


def test_a_page_of_another_sample(device):
    """An entry past a sample's pages does not reach the next sample's."""
    cache, query = randn(device, 2, 3, 4, 1, 8), randn(device, 2, 1, 1, 1, 8)
    lengths, table = ends(device, [[2], [2]]), ends(device, [[[3]], [[2]]])

    def function(q, c, lengths, table):
        return F.attention_with_kv_cache(q, c, c, cache_seqlens=lengths, block_table=table)

    if device == "cpu":
        with pytest.raises(IndexError):
            vmap(function)(query, cache, lengths, table)
    else:
        found = vmap(function)(query, cache, lengths, table)
        assert found.isnan().flatten(1).all(1).tolist() == [True, False]
        with pytest.raises(IndexError):
            warpwright.check_errors()


@pytest.mark.parametrize(
    ("query", "cache"),
    [((2, 1, 3, 8), (2, 4, 2, 8)), ((2, 1, 8), (2, 4, 2, 8)), ((2, 1, 2, 8), (3, 4, 2, 8))],
)
def test_attention_with_kv_cache_errors(device, query, cache):
    q, k = randn(device, 3, *query), randn(device, *cache)
    lengths = ends(device, [1, 1])
    with pytest.raises(RuntimeError, match=r"attention_with_kv_cache: (query|k_cache): expected"):
        vmap(lambda q: F.attention_with_kv_cache(q, k, k, cache_seqlens=lengths))(q)
