"""The cost model of attention over a shared sequence: its arithmetic, and the bytes that are really sent."""

import os

import pytest
import torch
import torch.distributed as dist

import warpwright
from warpwright.distributed.sequence import (
    INFINIBAND,
    NVLINK,
    Shape,
    explain,
    ring_attention,
    shard,
)
from warpwright.distributed.sequence import ring as ring_module
from warpwright.distributed.sequence import ulysses as ulysses_module
from warpwright.distributed.sequence.attention import _link
from warpwright.distributed.sequence.cost import (
    Cost,
    _overlapped,
    choose_heads_at_once,
    choose_method,
    ring_cost,
    ulysses_cost,
)

LONG = Shape(1, 32, 8, 65536, 128, True)


def test_flops():
    """One GPU: 4 S^2 D per head, half of it under the causal rule, and 2.5 times backward."""
    assert LONG.forward_flops == 32 * 4 * 65536**2 * 128 / 2
    for cost in (ring_cost(LONG, 1, NVLINK), ulysses_cost(LONG, 1, NVLINK)):
        assert [c.flops for c in cost] == [LONG.forward_flops, LONG.backward_flops]
        assert [c.sent for c in cost] == [0, 0]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_ranks_share_the_flops(ranks, causal):
    shape = Shape(1, 32, 8, 65536, 128, causal)
    for layout in ("zigzag", "striped"):
        for one, other in zip(
            ring_cost(shape, ranks, NVLINK, layout), ulysses_cost(shape, ranks, NVLINK), strict=True
        ):
            assert one.flops == other.flops
            assert one.flops * ranks in (shape.forward_flops, shape.backward_flops)


def test_the_busiest_rank_of_the_contiguous_layout():
    """It computes n - 1/2 of n blocks; the mean is n / 2."""
    forward, _ = ring_cost(LONG, 4, NVLINK, "contiguous")
    assert forward.flops == pytest.approx(LONG.forward_flops / 4 * 3.5 / 2)


@pytest.mark.parametrize(
    ("compute", "transfer", "returned", "end", "idle"),
    [
        ([5.0], [0.0], [0.0], 5, 0),
        ([5, 5], [0, 3], [0, 0], 10, 0),  # hidden
        ([5, 5], [0, 8], [0, 0], 13, 3),  # 3 of 8 are not
        ([5, 5], [0, 3], [0, 4], 14, 4),  # nothing hides what the last step returns
        ([5, 5, 5], [0, 3, 3], [0, 1, 1], 16, 1),
        ([1, 1, 1], [0, 4, 4], [0, 0, 0], 9, 6),  # the link is never idle
    ],
)
def test_overlap(compute, transfer, returned, end, idle):
    assert _overlapped(compute, transfer, returned) == (end, idle)


def sent_bytes(rank, shape, method, layout):
    """Bytes of each direction that this rank hands to the backend."""
    q, k, v = (
        shard(torch.randn(shape.batch, h, shape.tokens, shape.head_dim), 2, layout=layout)
        for h in (shape.heads, shape.key_heads, shape.key_heads)
    )
    ring_attention(q, k, v, is_causal=True, layout=layout, method=method)  # agreed from here on
    counted = [0]
    send, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def counting(asked):
        counted[0] += sum(p.tensor.nbytes for p in asked if p.op is dist.isend)
        return send(asked)

    def counting_all(received, message, group):
        n = dist.get_world_size()
        counted[0] += message.nbytes * (n - 1) // n
        return all_to_all(received, message, group=group)

    ring_module.dist.batch_isend_irecv = counting
    ulysses_module.dist.all_to_all_single = counting_all
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, is_causal=True, layout=layout, method=method)
    forward, counted[0] = counted[0], 0
    out.sum().backward()
    ring_module.dist.batch_isend_irecv, ulysses_module.dist.all_to_all_single = send, all_to_all
    return forward, counted[0]


@pytest.mark.parametrize(
    ("method", "layout"), [("ring", "zigzag"), ("ring", "contiguous"), ("ulysses", "zigzag")]
)
def test_bytes_sent(gloo_worlds, method, layout):
    """Predicted for the busiest rank, and no rank sends more."""
    shape = Shape(2, 8, 4, 48, 16, True, element=4)
    for ranks in (2, 4):
        counts = gloo_worlds(ranks).run(sent_bytes, shape, method, layout)
        predict = ring_cost if method == "ring" else ulysses_cost
        options = (layout,) if method == "ring" else ()
        predicted = [cost.sent for cost in predict(shape, ranks, NVLINK, *options)]
        assert [max(direction) for direction in zip(*counts, strict=True)] == predicted


def test_choice():
    """The ring for few ranks, Ulysses for more and across hosts, and always something possible."""
    assert choose_method(LONG, 2) == "ring"
    assert choose_method(LONG, 8) == "ulysses"
    assert choose_method(LONG, 16) == "ring"
    wide = Shape(1, 32, 32, 65536, 128, True)
    assert choose_method(wide, 16, INFINIBAND) == "ulysses"


def links(rank):
    """Of all four ranks, of neighbours and of every other rank, with two ranks per host."""
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 2])]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    names = [_link(group).name for group in groups[: 3 if rank == 0 else 1]]  # rank 0 is in all
    del os.environ["LOCAL_WORLD_SIZE"]
    return names


def test_links(gloo_worlds):
    names = [INFINIBAND.name, NVLINK.name, INFINIBAND.name]
    assert gloo_worlds(4).run(links)[0] == names


def largest_message(rank, shape, heads_at_once):
    """Bytes of the largest message of both directions."""
    largest = [0]
    send = dist.batch_isend_irecv

    def measuring(asked):
        largest[0] = max(largest[0], *(p.tensor.nbytes for p in asked))
        return send(asked)

    heads = (shape.heads, shape.key_heads, shape.key_heads)
    sizes = [(shape.batch, h, shape.tokens // 2, shape.head_dim) for h in heads]
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    ring_module.dist.batch_isend_irecv = measuring
    options = {"is_causal": True, "method": "ring", "heads_at_once": heads_at_once}
    ring_attention(*leaves, **options).sum().backward()
    ring_module.dist.batch_isend_irecv = send
    return largest[0]


def test_buffers_fall_with_heads_at_once(gloo_worlds):
    """A message holds the keys, or the values, of as many heads as travel together."""
    shape = Shape(2, 8, 4, 48, 16, True, element=4)
    for at_once in (1, 2, 4):
        for largest in gloo_worlds(2).run(largest_message, shape, at_once):
            assert largest == 4 * shape.elements(at_once, ranks=2)


def test_heads_at_once():
    assert choose_heads_at_once(1, 32, 32, 32768) == 4  # 128 tiles of half a block per head
    assert choose_heads_at_once(1, 32, 8, 32768) == 1
    assert choose_heads_at_once(1, 6, 6, 64) == 6
    assert choose_heads_at_once(8, 32, 8, 65536) == 1


def test_explain():
    text = explain(LONG, 4)
    assert "attention over 65536 tokens on 4 ranks (H200, NVLink), causal, zigzag" in text
    assert "ring    forward " in text
    assert "is better" in text
    text = explain(LONG, 64, INFINIBAND)
    assert (
        "ulysses is not possible: 64 ranks do not divide the 8 key heads; at most 8 ranks" in text
    )
    q, k = (torch.empty(1, h, 16384, 128, dtype=torch.bfloat16, device="meta") for h in (32, 8))
    assert warpwright.explain("ring_attention", q, k, k, ranks=4, is_causal=True) == explain(
        LONG, 4
    )
    with pytest.raises(ValueError, match="link: expected one of nvlink, infiniband; got 'wire'"):
        warpwright.explain("ring_attention", q, k, k, ranks=4, link="wire")


def test_costs_are_positive():
    for ranks in (1, 2, 64, 1024):
        for cost in ring_cost(Shape(1, 32, 8, 1 << 20, 128, True), ranks, INFINIBAND):
            assert isinstance(cost, Cost)
            assert 0 <= cost.exposed < cost.seconds
