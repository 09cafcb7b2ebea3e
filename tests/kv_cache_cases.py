"""A cache of keys and values in pages, native's attention on its tokens, and the arguments of a good call."""

import torch

from warpwright import _native

F32 = torch.float32


class Cache:
    """A cache with random tokens. Pages are shuffled; what no token needs is NaN, or no page."""

    def __init__(self, lengths, heads, size, page, *, dtype=F32, device="cpu", room=0):
        tokens = max([*lengths, 1]) + room
        batch, self.page = len(lengths), page
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        shape = (batch, tokens, heads, size)
        if page is not None:
            pages = -(-tokens // page)
            shape = (batch * pages + 3, page, heads, size)
            order = torch.randperm(shape[0], device=device)[: batch * pages]
            self.table = order.view(batch, pages).int()
            used = -(-(self.lengths + room) // page)
            unused = torch.arange(pages, device=device) >= used[:, None]
            self.table[unused] = -5
        else:
            self.table = None
        self.k, self.v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))

    def poison(self):
        """NaN in every slot without a token."""
        for cache in (self.k, self.v):
            kept = cache.clone()
            cache.fill_(float("nan"))
            for b, length in enumerate(self.lengths.tolist()):
                for j in range(length):
                    page = b if self.page is None else int(self.table[b, j // self.page])
                    place = j if self.page is None else j % self.page
                    cache[page, place] = kept[page, place]

    def options(self):
        return {"cache_seqlens": self.lengths, "block_table": self.table}


def expected(query, cache, *, appended=0, is_causal=False, scale=None):
    """Native's, on the tokens alone."""
    tensors = [torch.nan_to_num(t) for t in (cache.k, cache.v)]
    return _native.attention_with_kv_cache(
        query, *tensors, cache.lengths, cache.table, appended, is_causal, scale
    )


def tokens(batch, count, heads, size, dtype=F32, device="cpu"):
    return torch.randn(batch, count, heads, size, device=device).to(dtype)


def good(device="cpu"):
    cache = Cache([9, 4], 2, 16, 4, device=device, room=1)
    k, v = (tokens(2, 1, 2, 16, device=device) for _ in range(2))
    query = tokens(2, 1, 4, 16, device=device)
    return {"query": query, "k_cache": cache.k, "v_cache": cache.v, "k": k, "v": v} | (
        cache.options()
    )
