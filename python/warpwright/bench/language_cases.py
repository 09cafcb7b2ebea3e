"""Cases of the layers of language models: norms of rows, gated products, rotary embeddings, scans, decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _native, _work
from .._quantized_layers import QuantizedLinear
from .cases import BF16, FP32, ROWS, Case, Inputs, _randn


def _gated(op: str, rows: int, cols: int, dtype: torch.dtype, packed: bool = False) -> Case:
    """swiglu or geglu (the tanh form) of two tensors, or of the halves of one."""
    e = rows * cols * dtype.itemsize

    def make(device: str) -> Inputs:
        if packed:
            return {"x": _randn((rows, 2 * cols), dtype, device)}
        return {name: _randn((rows, cols), dtype, device) for name in ("x", "up")}

    options = {} if op == "swiglu" else {"approximate": "tanh"}
    activation = "silu" if op == "swiglu" else "gelu"

    def native(F: Any, i: Inputs) -> Tensor:
        gate, up = i["x"].chunk(2, -1) if packed else (i["x"], i["up"])
        result: Tensor = getattr(F, activation)(gate, **options) * up
        return result

    return Case(
        op,
        f"{rows}x{cols}" + (" packed" if packed else ""),
        dtype,
        ROWS,
        make,
        lambda F, i: getattr(F, op)(*i.values(), **options),
        _work.traffic(e, 3, 5).of("bytes"),
        native=native,
    )


def _rotary(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    rotated: int | None = None,
    interleaved: bool = False,
    tables: torch.dtype | None = None,
) -> Case:
    """(batch, tokens, heads of query, heads of key, columns), as views of two projections."""
    batch, tokens, of_query, of_key, columns = shape
    size = columns if rotated is None else rotated
    e = batch * tokens * (of_query + of_key) * columns * dtype.itemsize
    name = f"{batch}x{tokens}x{of_query}+{of_key}x{columns}"
    name += f" rotated {size}" if size != columns else ""
    name += " interleaved" if interleaved else ""
    name += " float32 tables" if tables == FP32 else ""

    def make(device: str) -> Inputs:
        def heads(count: int) -> Tensor:
            x = _randn((batch, tokens, count, columns), dtype, device).detach().transpose(1, 2)
            return x.requires_grad_()

        steps = 10000.0 ** (-torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(tokens, device=device), steps)[None]
        angles = angles.repeat_interleave(2, 2) if interleaved else angles.repeat(1, 1, 2)
        of_tables = {
            "cos": angles.cos().to(tables or dtype),
            "sin": angles.sin().to(tables or dtype),
        }
        return {"query": heads(of_query), "key": heads(of_key), **of_tables}

    return Case(
        "rotary_embedding",
        name,
        dtype,
        ROWS,
        make,
        lambda F, i: F.rotary_embedding(*i.values(), interleaved=interleaved),
        _work.traffic(e, 2, 2).of("bytes"),
        native=lambda F, i: _native.rotary_embedding(**i, interleaved=interleaved),
    )


def _cumsum(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Case:
    e = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "cumsum",
        "x".join(map(str, shape)) + f" dim {dim}",
        dtype,
        ROWS,
        lambda device: {"x": _randn(shape, dtype, device)},
        lambda F, i: F.cumsum(i["x"], dim),
        _work.traffic(e, 2, 2).of("bytes"),
        native=lambda F, i: torch.cumsum(i["x"], dim),
    )


def _softmax(
    op: str,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    result: torch.dtype | None = None,
) -> Case:
    """softmax or log_softmax; a float32 result of 16 bits as under autocast."""
    n = torch.Size(shape).numel()
    x, y = n * dtype.itemsize, n * (result or dtype).itemsize
    name = "x".join(map(str, shape)) + f" dim {dim}" + (" to float32" if result else "")
    return Case(
        op,
        name,
        dtype,
        ROWS,
        lambda device: {"x": _randn(shape, dtype, device)},
        lambda F, i: getattr(F, op)(i["x"], dim, dtype=result),
        {"fwd": float(x + y), "bwd": float(2 * y + x)},
    )


def _embedding(
    vocabulary: int, columns: int, shape: tuple[int, ...], dtype: torch.dtype, text: bool = False
) -> Case:
    """Tokens of equal chance, or as in text: the k-th most frequent has a chance of about 1 / k."""
    name = f"{vocabulary}x{columns} {'x'.join(map(str, shape))} tokens" + (
        " of text" if text else ""
    )

    def make(device: str) -> Inputs:
        drawn = torch.rand(shape, device=device, dtype=torch.float64)
        ranks = (vocabulary + 1.0) ** drawn - 1 if text else drawn * vocabulary
        tokens = ranks.long().clamp(max=vocabulary - 1)
        return {"tokens": tokens, "weight": _randn((vocabulary, columns), dtype, device)}

    count = torch.Size(shape).numel()
    return Case(
        "embedding",
        name,
        dtype,
        ROWS,
        make,
        lambda F, i: F.embedding(i["tokens"], i["weight"]),
        _work.embedding(count, columns, vocabulary, dtype.itemsize).of("bytes"),
    )


def _plain_scan(op: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Case:
    """cumprod of factors near 1, or logcumsumexp."""
    e = torch.Size(shape).numel() * dtype.itemsize

    def make(device: str) -> Inputs:
        x = torch.randn(shape, device=device)
        return {"x": (x if op == "logcumsumexp" else (0.01 * x).exp()).to(dtype).requires_grad_()}

    return Case(
        op,
        "x".join(map(str, shape)) + f" dim {dim}",
        dtype,
        ROWS,
        make,
        lambda F, i: getattr(F, op)(i["x"], dim),
        _work.traffic(e, 2, 4).of("bytes"),
        native=lambda F, i: getattr(torch, op)(i["x"], dim),
    )


def _reduction(
    op: str, shape: tuple[int, ...], dim: int | tuple[int, ...], dtype: torch.dtype
) -> Case:
    e = torch.Size(shape).numel() * dtype.itemsize
    moved = _work.traffic(e, 1, 1 if op == "mean" else 2).of("bytes")
    if op == "sum":  # its gradient is a view: no kernel runs
        del moved["bwd"]
    return Case(
        op,
        "x".join(map(str, shape)) + " dim " + str(dim).replace(" ", ""),
        dtype,
        ROWS,
        lambda device: {"x": _randn(shape, dtype, device)},
        lambda F, i: getattr(F, op)(i["x"], dim),
        moved,
        native=lambda F, i: getattr(torch, op)(i["x"], dim),
    )


def _linear_scan(shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> Case:
    """Gates between 0.9 and 1."""
    e = torch.Size(shape).numel() * dtype.itemsize

    def make(device: str) -> Inputs:
        gate = (0.9 + 0.1 * torch.rand(shape, device=device)).to(dtype).requires_grad_()
        return {"gate": gate, "x": _randn(shape, dtype, device)}

    return Case(
        "linear_scan",
        "x".join(map(str, shape)) + f" dim {dim}",
        dtype,
        ROWS,
        make,
        lambda F, i: F.linear_scan(i["gate"], i["x"], dim=dim),
        _work.traffic(e, 3, 5).of("bytes"),
        native=lambda F, i: doubling_scan(i["gate"], i["x"], dim),
    )


def _linear_quantized(rows: int, k: int, n: int, bits: int, dtype: torch.dtype) -> Case:
    """A frozen weight, int4 in groups of 128 or int8 per channel; native's is in `dtype`.

    Scales are powers of two, so that both weights are the same numbers.
    """
    e = dtype.itemsize
    groups = k // 128 if bits == 4 else 1
    codes = n * k * bits / 8 + n * groups * e
    moved = {"fwd": codes + (k + n) * rows * e, "bwd": codes + (k + n) * rows * e}

    def make(device: str) -> Inputs:
        codes = torch.randint(256, (n, k * bits // 8), device=device, dtype=torch.uint8)
        scales = torch.full((n, groups), 0.5**bits, device=device, dtype=dtype)
        if bits == 8:
            codes, scales = codes.view(torch.int8), scales[:, 0].contiguous()
        layer = QuantizedLinear.from_codes(codes, scales)
        return {"x": _randn((rows, k), dtype, device), "layer": layer, "weight": layer.weight}

    return Case(
        "linear_quantized",
        f"{rows}x{k}x{n} int{bits}",
        dtype,
        ROWS,
        make,
        lambda F, i: i["layer"](i["x"]),
        moved,
        {"fwd": 2.0 * rows * k * n, "bwd": 2.0 * rows * k * n},
        native=lambda F, i: F.linear(i["x"], i["weight"]),
    )


def doubling_scan(gate: Tensor, x: Tensor, dim: int) -> Tensor:
    """The recurrence in native calls: log2(steps) passes, each over twice as many steps."""
    steps, distance = x.shape[dim], 1
    while distance < steps:
        left, right = steps - distance, (distance, steps - distance)
        head, tail = x.narrow(dim, 0, distance), x.narrow(dim, *right)
        sums = tail + gate.narrow(dim, *right) * x.narrow(dim, 0, left)
        products = gate.narrow(dim, *right) * gate.narrow(dim, 0, left)
        x = torch.cat((head, sums), dim)
        gate = torch.cat((gate.narrow(dim, 0, distance), products), dim)
        distance *= 2
    return x


def _row_norm(op: str, rows: int, cols: int, dtype: torch.dtype) -> Case:
    """layer_norm or rms_norm, weights in the input's type as in a model that was cast."""
    e = rows * cols * dtype.itemsize
    vectors = ("weight", "bias") if op == "layer_norm" else ("weight",)

    def make(device: str) -> Inputs:
        factors = {name: _randn((cols,), dtype, device).requires_grad_() for name in vectors}
        return {"x": _randn((rows, cols), dtype, device), **factors}

    def call(F: Any, i: Inputs) -> Tensor:
        return getattr(F, op)(i["x"], (cols,), *(i[name] for name in vectors))

    work = _work.traffic(e, 2, 3)
    return Case(op, f"{rows}x{cols}", dtype, ROWS, make, call, work.of("bytes"))


def _narrowed_norm(op: str, rows: int, cols: int) -> Case:
    """A float32 norm whose result is bfloat16, as under autocast. Native casts it."""
    n = rows * cols
    vectors = ("weight", "bias") if op == "layer_norm" else ("weight",)

    def make(device: str) -> Inputs:
        factors = {name: _randn((cols,), FP32, device).requires_grad_() for name in vectors}
        return {"x": _randn((rows, cols), FP32, device), **factors}

    def call(F: Any, i: Inputs) -> Tensor:
        return getattr(F, op)(i["x"], (cols,), *(i[name] for name in vectors), dtype=BF16)

    def native(F: Any, i: Inputs) -> Tensor:
        y = getattr(F, op)(i["x"], (cols,), *(i[name] for name in vectors))
        return _narrowed(y, BF16)

    moved = {"fwd": 6.0 * n, "bwd": 10.0 * n}
    return Case(op, f"{rows}x{cols} to bf16", FP32, ROWS, make, call, moved, native=native)


def _narrowed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 result in ``dtype``; float64 is the exact result."""
    return y if y.dtype == torch.float64 else y.to(dtype)


def _add_norm(op: str, rows: int, cols: int, branch: torch.dtype) -> Case:
    """An addition, a norm and the next addition of a residual stream, in float32.

    With a 16-bit ``branch`` the norm is 16-bit too. The last addition makes one result of both.
    """
    n, narrow = rows * cols, branch.itemsize
    vectors = ("weight", "bias") if op == "add_layer_norm" else ("weight",)

    def make(device: str) -> Inputs:
        factors = {name: _randn((cols,), FP32, device).requires_grad_() for name in vectors}
        rows_of = {"x": _randn((rows, cols), branch, device)}
        return {**rows_of, "residual": _randn((rows, cols), FP32, device), **factors}

    def call(F: Any, i: Inputs) -> Tensor:
        factors = (i[name] for name in vectors)
        total, y = getattr(F, op)(i["x"], i["residual"], (cols,), *factors, dtype=branch)
        result: Tensor = total + y
        return result

    def native(F: Any, i: Inputs) -> Tensor:
        total = i["residual"] + i["x"]
        norm = getattr(F, op.removeprefix("add_"))
        y = norm(total, (cols,), *(i[name] for name in vectors))
        return total + _narrowed(y, branch)

    cast = 4.0 + narrow if narrow < 4 else 0.0
    moved = {"fwd": n * (16.0 + 3 * narrow), "bwd": n * (12.0 + narrow + cast + narrow % 4)}
    case = f"{rows}x{cols}" + ("" if narrow == 4 else " and bf16")
    return Case(op, case, FP32, ROWS, make, call, moved, native=native)


def _packed(
    lengths: tuple[int, ...],
    heads: tuple[int, int],
    columns: int,
    dtype: torch.dtype,
    causal: bool = True,
) -> Case:
    """Sequences of these lengths in a row; `heads` of query and key."""
    tokens, rows = sum(lengths), max(lengths)

    def make(device: str) -> Inputs:
        ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        return {
            "query": _randn((tokens, heads[0], columns), dtype, device),
            "key": _randn((tokens, heads[1], columns), dtype, device),
            "value": _randn((tokens, heads[1], columns), dtype, device),
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": rows,
            "max_seqlen_k": rows,
        }

    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    flops = 4.0 * heads[0] * columns * pairs
    moved = 2 * tokens * (heads[0] + heads[1]) * columns * dtype.itemsize

    def first(i: Inputs) -> Inputs:
        n = lengths[0]
        ends = torch.tensor([0, n], device=i["query"].device).int()
        cut = {name: i[name][:n] for name in ("query", "key", "value")}
        return cut | {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": n,
            "max_seqlen_k": n,
        }

    def native(F: Any, i: Inputs) -> Tensor:
        if i["query"].is_cuda and i["query"].dtype.itemsize == 2:  # not the exact result's float64
            from torch.nn.attention.varlen import varlen_attn

            window = (-1, 0) if causal else (-1, -1)
            result: Any = varlen_attn(*i.values(), window_size=window)  # type: ignore[arg-type]
            return result  # type: ignore[no-any-return]
        return _native.attention_varlen(**i, is_causal=causal)[0]

    return Case(
        "attention_varlen",
        f"{len(lengths)} of {min(lengths)}-{rows} {heads[0]}/{heads[1]}x{columns}"
        + (" causal" if causal else ""),
        dtype,
        ROWS,
        make,
        lambda F, i: F.attention_varlen(**i, is_causal=causal, enable_gqa=True),
        {"fwd": moved, "bwd": 2 * moved},
        {"fwd": flops, "bwd": 2.5 * flops},
        sample=first,
        native=native,
    )


def _decode(
    shape: tuple[int, int, int, int, int],
    page: int | None,
    dtype: torch.dtype,
    query_tokens: int = 1,
) -> Case:
    """(sequences, cached tokens, heads of query, heads of key, columns), the pages in random order.

    The bytes are those of the cached keys and values. Native gathers the pages first.
    """
    batch, tokens, heads, kv_heads, columns = shape
    pages = batch * (1 if page is None else -(-tokens // page))
    cache = (pages, tokens if page is None else page, kv_heads, columns)

    def make(device: str) -> Inputs:
        order = torch.randperm(pages, device=device).int().view(batch, -1)
        return {
            "query": _randn((batch, query_tokens, heads, columns), dtype, device).detach(),
            "k_cache": torch.randn(cache, device=device, dtype=dtype),
            "v_cache": torch.randn(cache, device=device, dtype=dtype),
            "cache_seqlens": torch.full((batch,), tokens, device=device, dtype=torch.int32),
            "block_table": None if page is None else order,
        }

    def first_sequence(i: Inputs) -> Inputs:
        own = i["block_table"][0].long() if page is not None else torch.zeros(1).long()
        own = own.to(i["k_cache"].device)
        return {
            "query": i["query"][:1],
            "k_cache": i["k_cache"][own],
            "v_cache": i["v_cache"][own],
            "cache_seqlens": i["cache_seqlens"][:1],
            "block_table": None if page is None else torch.arange(len(own)).to(own)[None].int(),
        }

    return Case(
        "attention_with_kv_cache",
        f"{batch}x{tokens}x{heads}/{kv_heads}x{columns}"
        + (f" pages of {page}" if page is not None else "")
        + (f" {query_tokens} tokens" if query_tokens > 1 else ""),
        dtype,
        ROWS,
        make,
        lambda F, i: F.attention_with_kv_cache(**i, is_causal=query_tokens > 1),
        {"fwd": 2 * batch * tokens * kv_heads * columns * dtype.itemsize},
        {"fwd": 4.0 * batch * query_tokens * heads * columns * tokens},
        sample=first_sequence,
        native=lambda F, i: _native.attention_with_kv_cache(**i, is_causal=query_tokens > 1),
    )


# GPT-2's and Llama 3's tables, GPT-2's positions.
EMBEDDINGS = [
    *(
        _embedding(50257, 768, (16, 1024), dtype, text)
        for dtype in (BF16, FP32)
        for text in (False, True)
    ),
    *(_embedding(128256, 4096, (8192,), dtype) for dtype in (BF16, FP32)),
    _embedding(128256, 4096, (8192,), BF16, True),
    _embedding(1024, 768, (1024,), BF16),
    _embedding(1_000_000, 64, (65536,), BF16),
]
SMALL_EMBEDDINGS = [_embedding(5000, 64, (8, 128), FP32)]
