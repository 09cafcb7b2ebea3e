"""Attention: dense, of packed sequences, and over a cache."""

import itertools

import torch

import warpwright.functional as F

from .common import DEVICE, rand


def attention_cases():
    for d, d_v, masked in itertools.product((8, 33, 64, 128, 200), (None, 40), ("no", "yes")):
        v = d if d_v is None else d_v
        args = (rand(2, 2, 67, d), rand(2, 2, 131, d), rand(2, 2, 131, v))
        if masked == "no":
            yield f"d{d}-{v}", F.scaled_dot_product_attention, args, {}
            yield f"d{d}-{v}-causal", F.scaled_dot_product_attention, args, {"is_causal": True}
            extras = {"window_size": (20, 9), "softcap": 2.0}
            yield f"d{d}-{v}-window", F.scaled_dot_product_attention, args, extras
        else:
            yield f"d{d}-{v}-mask", F.scaled_dot_product_attention, (*args, rand(67, 131)), {}
            visible = rand(67, 131) > 0
            yield f"d{d}-{v}-visible", F.scaled_dot_product_attention, (*args, visible), {}
            yield f"d{d}-{v}-mask-of-keys", F.scaled_dot_product_attention, (*args, rand(131)), {}
    grouped = (rand(1, 6, 33, 16), rand(1, 2, 65, 16), rand(1, 2, 65, 16))
    yield "gqa", F.scaled_dot_product_attention, grouped, {"enable_gqa": True}
    if DEVICE == "cuda":  # enough heads for the fused backward of sm_90a
        many = rand(1, 22, 768, 128)
        yield "fused", F.scaled_dot_product_attention, (many, many.flip(1), many.flip(2)), {}


def packed(query, key, value, cu_q, cu_k, **options):
    longest = [int(ends.diff().max()) for ends in (cu_q, cu_k)]
    out, lse = F.attention_varlen(
        query, key, value, cu_q, cu_k, *longest, enable_gqa=True, return_lse=True, **options
    )
    return torch.cat([out.flatten(), lse.masked_fill(lse.isinf(), 0.0).flatten()])


def packed_cases():
    """Each head tile; tiles of 192 queries, empty sequences, tokens of none, a window."""
    ends = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    short = ends(2, 72, 72, 200, 333), ends(0, 90, 95, 95, 300)
    long = ends(0, 1500, 2600), ends(0, 1500, 2600)
    for columns in (64, 128, 256, 36):
        for name, (cu_q, cu_k) in (("short", short), ("long", long)):
            if name == "long" and columns != 64:
                continue
            operands = (
                rand(int(cu_q[-1]) + 3, 4, columns),
                *(rand(int(cu_k[-1]) + 3, 2, columns) for _ in range(2)),
            )
            for options in ({"is_causal": True}, {"window_size": (40, 9), "softcap": 3.0}):
                case = f"{columns}-{name}-{next(iter(options))}"
                yield case, packed, (*operands, cu_q, cu_k), options


def decoding_cases():
    """Each head tile and row count of both kernels; splits, pages, an append, an empty sequence."""
    for columns in (64, 128, 256, 320, 36):
        for tokens, heads in ((1, 2), (3, 16)):
            for page in (None, 5, 16):
                lengths = torch.tensor([0, 700, 33], dtype=torch.int32)
                shape = (3, 704) if page is None else (3 * -(-704 // page), page)
                table = None
                if page is not None:
                    table = torch.randperm(shape[0]).int().view(3, -1)
                operands = (
                    *(rand(*shape, 2, columns) for _ in range(2)),
                    *(rand(3, tokens, 2, columns) for _ in range(2)),
                )
                yield (
                    f"{columns}-{tokens}x{heads}-{page or 'whole'}",
                    decoded,
                    (rand(3, tokens, heads, columns), *operands, lengths, table),
                    {"is_causal": tokens > 1},
                )


@torch.no_grad()
def decoded(query, k_cache, v_cache, k, v, lengths, table, is_causal):
    cache = k_cache.clone(), v_cache.clone()
    output = F.attention_with_kv_cache(
        query, *cache, k, v, cache_seqlens=lengths, block_table=table, is_causal=is_causal
    )
    return torch.cat([x.flatten() for x in (output, *cache)])
