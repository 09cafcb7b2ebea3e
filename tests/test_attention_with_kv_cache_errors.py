"""attention_with_kv_cache refuses wrong arguments by name, and bad lengths and pages before it writes."""

import pytest
import torch
from kv_cache_cases import good

import warpwright
import warpwright.functional as F
from warpwright.testing import assert_same

ops = torch.ops.warpwright

ERRORS = [
    ({"query": lambda q: q[0]}, RuntimeError, "query: expected"),
    ({"query": lambda q: q[..., :8]}, RuntimeError, "(query|k_cache): expected"),
    ({"query": lambda q: q[:, :, :3]}, RuntimeError, "query: expected"),
    ({"query": lambda q: q.double()}, RuntimeError, "(query|k_cache): expected"),
    ({"query": lambda q: q.requires_grad_()}, RuntimeError, "not differentiable.*'query'"),
    ({"k_cache": lambda t: t.double()}, RuntimeError, "k_cache: expected"),
    ({"k_cache": lambda t: t[0]}, RuntimeError, "k_cache: expected"),
    ({"k_cache": lambda t: t.clone().requires_grad_()}, RuntimeError, "not diff.*'k_cache'"),
    ({"v_cache": lambda t: t[:, :2]}, RuntimeError, "v_cache: expected shape"),
    ({"v_cache": lambda t: t.half()}, RuntimeError, "v_cache: expected"),
    ({"cache_seqlens": lambda t: t[:1]}, RuntimeError, "cache_seqlens: expected shape"),
    ({"cache_seqlens": lambda t: t.long()}, RuntimeError, "cache_seqlens: expected Int"),
    ({"cache_seqlens": lambda t: 3}, TypeError, "'cache_seqlens' must be Tensor"),
    ({"block_table": lambda t: t[:1]}, RuntimeError, "block_table: expected shape"),
    ({"block_table": lambda t: t.long()}, RuntimeError, "block_table: expected Int"),
    ({"block_table": lambda t: "x"}, TypeError, "'block_table' must be Tensor"),
    ({"block_table": lambda t: None}, RuntimeError, "k_cache: expected 2 sequences"),
    ({"k": lambda t: t[:, :, :1], "v": lambda t: t[:, :, :1]}, RuntimeError, "k: expected 2 heads"),
    ({"v": lambda t: t[:, :0]}, RuntimeError, "v: expected shape"),
    ({"v": lambda t: None}, (RuntimeError, TypeError), "v"),
    ({"k": lambda t: t.clone().requires_grad_()}, RuntimeError, "not differentiable.*'k'"),
    ({"is_causal": lambda t: 1}, TypeError, "'is_causal' must be bool"),
    ({"scale": lambda t: "x"}, TypeError, "'scale' must be float"),
]


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize(("changes", "kind", "message"), ERRORS, ids=[str(i) for i in range(23)])
def test_errors(device, changes, kind, message, appends):
    """Each names the argument, and comes before anything is written."""
    call = good(device)
    if not appends:
        if {"k", "v"} & {*changes}:
            return
        call["k"] = call["v"] = None
    before = call["k_cache"].clone(), call["v_cache"].clone()
    spoiled = call | {name: change(call.get(name)) for name, change in changes.items()}
    with pytest.raises(kind, match=message):
        F.attention_with_kv_cache(**spoiled)
    assert_same([call["k_cache"], call["v_cache"]], list(before))


def test_other_errors():
    call = good()
    call["k"] = call["v"] = None
    for q, cache in ((call["query"].int(), call["k_cache"].int()),):
        with pytest.raises(NotImplementedError, match="floating-point"):
            F.attention_with_kv_cache(**call | {"query": q, "k_cache": cache, "v_cache": cache})
    wide = torch.zeros(2, 3, 1, 513)
    with pytest.raises(RuntimeError, match="head size from 1 to 512"):
        F.attention_with_kv_cache(wide, wide, wide, cache_seqlens=call["cache_seqlens"])
    huge = torch.zeros(1, 1, 1, 1).expand(1, 1 << 20, 1, 1)
    table = torch.zeros(1, 1).int().expand(1, 1 << 12)
    with pytest.raises(RuntimeError, match=r"at most 2\^31 - 1 tokens"):
        F.attention_with_kv_cache(
            wide[:1, :1, :, :1], huge, huge,
            cache_seqlens=call["cache_seqlens"][:1], block_table=table,
        )  # fmt: skip
    shared = torch.zeros(1, 1, 1, 1).expand(2, 4, 1, 1)
    one = torch.zeros(2, 1, 1, 1)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        ops.kv_cache_append_(shared, shared, one, one, call["cache_seqlens"] * 0)


BAD = [
    ("cache_seqlens", 1, -1, r"cache_seqlens: .*-1.*sequence 1"),
    ("cache_seqlens", 1, 12, r"cache_seqlens: .*12.*sequence 1"),
    ("block_table", (1, 0), -1, r"block_table: .*-1"),
    ("block_table", (1, 0), 99, r"block_table: .*99"),
    ("block_table", (1, 0), -(2**31), r"block_table: .*-2147483648"),
]


@pytest.mark.parametrize("appends", [True, False])
@pytest.mark.parametrize(("name", "place", "value", "message"), BAD)
def test_data_out_of_range(device, name, place, value, message, appends):
    """The CPU raises. The GPU gives NaN for that sequence, writes nothing for it, and reports."""
    call = good(device)
    wanted = F.attention_with_kv_cache(**call)
    if not appends:
        call["k"] = call["v"] = None
        call["cache_seqlens"] = call["cache_seqlens"] + 1
        value += name == "cache_seqlens" and value > 0
    plain = call[name].clone()
    call[name] = plain.clone()
    call[name][place] = value
    if device == "cpu":
        with pytest.raises(IndexError, match=message.replace("12", str(value))):
            F.attention_with_kv_cache(**call)
        return
    warpwright.check_errors()
    before = call["k_cache"].clone()
    found = F.attention_with_kv_cache(**call)
    assert found[1].isnan().all()
    assert_same(found[0], wanted[0])
    assert_same(call["k_cache"], before)  # sequence 0 had these values, sequence 1 keeps its own
    with pytest.raises(IndexError, match=message.replace("12", str(value))):
        warpwright.check_errors()
    with warpwright.strict(), pytest.raises(IndexError, match=name):
        F.attention_with_kv_cache(**call)
    call[name] = plain
    F.attention_with_kv_cache(**call)
    warpwright.check_errors()
