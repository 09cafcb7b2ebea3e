"""Packed sequences, their attention one by one with native's, and the arguments of a good call."""

import itertools

import torch
from torch.nn import functional as native

import warpwright.functional as F

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


def good(device="cpu"):
    packed = Packed([4, 5], [6, 3], (4, 2), (8, 8), device=device)
    names = "query", "key", "value", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    values = *(t.detach() for t in packed.operands), *packed.ends, *packed.longest
    return dict(zip(names, values, strict=True)) | {"enable_gqa": True}


def raw(device="cpu"):
    call = good(device)
    call.pop("enable_gqa")
    return [
        t.requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t
        for t in call.values()
    ]
