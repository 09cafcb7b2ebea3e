"""Attention over a sequence that ranks share: values and gradients as one process gives them."""

import itertools
import os
import random
import re
import time

import pytest
import torch
import torch.distributed as dist
from conftest import NCCL
from sharded import device_type, make_mesh
from torch.distributed.tensor import DTensor, Shard

from warpwright.distributed import guard
from warpwright.distributed.sequence import positions, ring_attention, shard, transport, unshard
from warpwright.distributed.sequence import ring as ring_module
from warpwright.distributed.sequence.layouts import LAYOUTS, part, token_order
from warpwright.distributed.sequence.transport import KINDS
from warpwright.testing import compare_with_native

native = torch.nn.functional.scaled_dot_product_attention


def make(
    ranks, dtype=torch.float32, heads=4, key_heads=2, per_rank=20, width=(16, 16), device="cpu"
):
    """Query, key, value and the gradient of out, of the whole sequence."""
    tokens = ranks * per_rank
    sizes = [(heads, width[0]), (key_heads, width[0]), (key_heads, width[1]), (heads, width[1])]
    return [torch.randn(2, h, tokens, d, device=device).to(dtype) for h, d in sizes]


def run(rank, tensors, **options):
    """Out and gradients of the whole sequence, put together from the ranks."""
    layout = options.get("layout", "zigzag")
    q, k, v, grad_out = (shard(x, 2, layout=layout) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, **options)
    assert out.shape == grad_out.shape
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]
    return [unshard(x, 2, layout=layout) for x in results]


class OnRanks(torch.autograd.Function):
    """Attention on the processes of a world, as a function of this process."""

    @staticmethod
    def forward(ctx, q, k, v, world, options):
        ctx.save_for_backward(q, k, v)
        ctx.call = world, options
        unused = q.new_zeros(*q.shape[:3], v.shape[3])
        return world.run(run, [q, k, v, unused], **options)[0][0].to(q)

    @staticmethod
    def backward(ctx, grad_out):
        world, options = ctx.call
        (first, *others) = world.run(run, [*ctx.saved_tensors, grad_out], **options)
        for other in others:
            assert all(map(torch.equal, first, other))
        return *(x.to(grad_out) for x in first[1:]), None, None


def assert_as_good_as_one_process(world, tensors, options):
    """The suite's error rule, for out and gradients."""
    known = {name: options[name] for name in ("is_causal", "scale") if name in options}
    compare_with_native(
        lambda *operands: OnRanks.apply(*operands, world, options),
        lambda *operands: native(*operands, enable_gqa=True, **known).contiguous(),
        [x.requires_grad_() for x in tensors[:3]],
    )


CAUSAL = [("causal", layout) for layout in LAYOUTS]


@pytest.mark.parametrize(("rule", "layout"), [("full", "zigzag"), *CAUSAL])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_and_gradients(worlds, dtype, ranks, rule, layout):
    tensors = make(ranks, dtype, device=worlds.device)
    causal = rule == "causal"
    options = {"is_causal": causal, "layout": layout, "method": "ring"}
    assert_as_good_as_one_process(worlds(ranks), tensors, options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ulysses(worlds, dtype, ranks, layout):
    tensors = make(ranks, dtype, heads=8, key_heads=4, device=worlds.device)
    options = {"is_causal": True, "layout": layout, "method": "ulysses"}
    assert_as_good_as_one_process(worlds(ranks), tensors, options)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (4, 4), (6, 3)])
@pytest.mark.parametrize("method", ["ring", "auto"])
def test_heads(worlds, heads, method):
    tensors = make(3, heads=heads[0], key_heads=heads[1], per_rank=6, width=(8, 24))
    options = {"is_causal": True, "scale": 0.3}
    assert_as_good_as_one_process(worlds(3), tensors, {**options, "method": method})


def test_keys_of_another_length(worlds):
    """Full attention to a sequence of another length, as an encoder's."""
    q, _, _, grad_out = make(3, per_rank=6)
    _, k, v, _ = make(3, per_rank=10)
    tensors = [q, k, v, grad_out]
    assert_as_good_as_one_process(worlds(3), tensors, {"method": "ring"})


def test_one_token_per_rank(worlds):
    tensors = make(3, per_rank=1)
    for layout in ("striped", "contiguous"):
        options = {"is_causal": True, "layout": layout, "method": "ring"}
        assert_as_good_as_one_process(worlds(3), tensors, options)


def repeat(rank, tensors, settings):
    """One result per setting, and whether a second run gives the same bits."""
    results = []
    for options in settings:
        first, second = (run(rank, tensors, **options) for _ in range(2))
        results.append((first, all(map(torch.equal, first, second))))
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_same_bits(worlds, ranks):
    """Again and again, and with any number of heads at once."""
    tensors = make(ranks, torch.bfloat16, heads=8, key_heads=4)
    causal = {"is_causal": True, "method": "ring"}
    settings = [{**causal, "heads_at_once": h} for h in (1, 2, 4)]
    settings.append({**causal, "method": "ulysses"})
    for results in worlds(ranks).run(repeat, tensors, settings):
        assert all(same for _, same in results)
        (first, *others) = [result for result, _ in results[:3]]
        for other in others:
            assert all(map(torch.equal, first, other))


def strided(rank, tensors):
    """Operands and gradient as a model has them: (B, L, H, D) in memory."""
    q, k, v, grad_out = (shard(x, 2).transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, is_causal=True, method="ring")
    return [unshard(x, 2) for x in (out, *torch.autograd.grad(out, leaves, grad_out))]


def test_strided_operands(worlds):
    tensors = make(2)
    expected = worlds(2).run(run, tensors, is_causal=True, method="ring")
    for ours, theirs in zip(worlds(2).run(strided, tensors), expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def in_half_of_the_ranks(rank, tensors):
    """Ranks 0 and 2 share one sequence, ranks 1 and 3 another."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, (q, k, v) = groups[rank % 2], tensors[rank % 2][:3]
    q, k, v = (shard(x, 2, group) for x in (q, k, v))
    return unshard(ring_attention(q, k, v, group=group, is_causal=True), 2, group)


def test_groups(worlds):
    tensors = [make(2), make(2)]
    results = worlds(4).run(in_half_of_the_ranks, tensors)
    for rank, out in enumerate(results):
        q, k, v, _ = tensors[rank % 2]
        torch.testing.assert_close(out, native(q, k, v, is_causal=True, enable_gqa=True))


def autocast(rank, tensors):
    q, k, v = (shard(x, 2).requires_grad_() for x in tensors[:3])
    with torch.autocast(device_type(), torch.bfloat16):
        out = ring_attention(q, k, v, is_causal=True)
    out.sum().backward()
    return out.dtype, q.grad.dtype


def test_autocast(worlds):
    for dtypes in worlds(2).run(autocast, make(2)):
        assert dtypes == (torch.bfloat16, torch.float32)


# ---- layouts ----


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_parts_make_the_causal_mask(layout, ranks):
    """Over all pairs of ranks the parts are the causal mask, each element once."""
    length = 6
    order = token_order(ranks * length, ranks, layout)
    counts = torch.zeros(ranks * length, ranks * length, dtype=torch.int64)
    for rank, source in itertools.product(range(ranks), repeat=2):
        met = part(layout, True, rank, source, length)
        if met is None:
            continue
        rows, keys = order[rank][met.rows], order[source][met.keys]
        block = torch.ones(len(rows), len(keys), dtype=torch.int64)
        counts[rows[:, None], keys] += block.tril() if met.is_causal else block
    assert torch.equal(counts, torch.ones_like(counts).tril())


def cut_and_join(rank, x, layout):
    mine = shard(x, 1, layout=layout)
    assert torch.equal(mine, x[:, positions(x.shape[1], layout=layout)])
    return torch.equal(unshard(mine, 1, layout=layout), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shard_and_unshard(worlds, layout):
    assert all(worlds(3).run(cut_and_join, torch.arange(24).view(2, 12), layout))


# ---- schedule ----


def record(rank, tensors):
    """The order of transfers and of attention calls, in both directions."""
    events = []
    start, ops = ring_module._start, ring_module.ops

    def starting(ring, k, v, heads, step):
        events.append(("transfer", step))
        return start(ring, k, v, heads, step)

    class Recorded:
        def attention(self, *args):
            events.append(("compute", None))
            return ops.attention(*args)

        def attention_backward(self, *args):
            events.append(("compute", None))
            return ops.attention_backward(*args)

    ring_module._start, ring_module.ops = starting, Recorded()
    try:
        run(rank, tensors, is_causal=True, method="ring")
    finally:
        ring_module._start, ring_module.ops = start, ops
    return events


def test_keys_travel_while_blocks_compute(worlds):
    """The transfer for a step starts before the step before it computes."""
    once = [("transfer", 1), ("compute", None), ("transfer", 2), *[("compute", None)] * 2]
    for events in worlds(3).run(record, make(3)):
        assert events == once * 2


# ---- copies into other ranks' memory ----


class SharedSlots:
    """Stands in for `PeerMemory` on CPUs: a file per rank, mapped by all of them. A push writes at once,
    so a slot that is still in use shows as wrong values."""

    def __init__(self, folder, rank):
        self.folder, self.rank, self.device = folder, rank, torch.device("cpu")
        self.flag, self.slot_bytes, self.used = torch.zeros(1), 0, set()

    def grow(self, slot_bytes, group):
        self.slot_bytes = max(self.slot_bytes, slot_bytes)
        name, size = f"{self.folder}/{self.slot_bytes}.", 2 * len(KINDS) * self.slot_bytes
        with open(f"{name}{self.rank}", "ab") as file:
            file.truncate(size)
        dist.barrier(group)
        ranks = range(dist.get_world_size(group))
        self.memory = [
            torch.from_file(f"{name}{rank}", shared=True, size=size, dtype=torch.uint8)
            for rank in ranks
        ]

    def slot(self, rank, kind, turn, shapes):
        self.used.add((kind, turn % 2))
        begin = (2 * KINDS.index(kind) + turn % 2) * self.slot_bytes
        pair = []
        for shape, offset in ((shapes.k, 0), (shapes.v, shapes.v_offset)):
            size = torch.Size(shape).numel() * shapes.dtype.itemsize
            data = self.memory[rank][begin + offset :][:size]
            pair.append(data.view(shapes.dtype).view(shape))
        return tuple(pair)

    def push(self, sources, targets):
        time.sleep(random.random() * 2e-3)  # ranks drift apart
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return lambda: None


def by_copies(rank, tensors, folder, settings):
    """For each setting: results by messages, by copies, and again; and the slots that were used."""
    slots, choose = SharedSlots(folder, rank), transport.choose
    found = []
    for options in settings:
        expected = run(rank, tensors, **options)
        transport.choose = lambda group, device: transport.PeerCopies(group, slots)
        try:
            found.append((expected, *(run(rank, tensors, **options) for _ in range(3))))
        finally:
            transport.choose = choose
    return found, slots.used


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_give_the_bits_of_messages(gloo_worlds, tmp_path, ranks):
    """Every layout, with more transfers than slots."""
    tensors = make(ranks, heads=8, key_heads=4)
    settings = [
        {"is_causal": causal, "layout": layout, "method": "ring", "heads_at_once": 1}
        for causal in (True, False)
        for layout in LAYOUTS
    ]
    for found, used in gloo_worlds(ranks).run(by_copies, tensors, str(tmp_path), settings):
        assert used == {(kind, turn) for kind in KINDS for turn in (0, 1)}
        for expected, *others in found:
            assert all(all(map(torch.equal, expected, x)) for x in others)


# ---- errors ----


def message(rank, sizes, options):
    """What the call with this rank's sizes raises."""
    try:
        ring_attention(*(torch.randn(size) for size in sizes[rank]), **options)
    except ValueError as error:
        return str(error)
    return "no error"


GOOD = [(1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)]


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ([(4, 8, 16), *GOOD[1:]], {}, r"query: expected \(B, H, L, E\), got \(4, 8, 16\)"),
        ([(1, 4, 0, 16), *GOOD[1:]], {}, "query: expected at least one element"),
        ([GOOD[0], (1, 3, 8, 16), (1, 3, 8, 16)], {}, "key: expected .* heads that divides"),
        ([*GOOD[:2], (1, 2, 9, 16)], {}, r"value: expected \(\*\(1, 2, 8\), E_v\), got \(1, 2, 9"),
        ([GOOD[0], (1, 2, 6, 16), (1, 2, 6, 16)], {"is_causal": True}, "as many tokens as query"),
        ([(1, 4, 7, 16), *[(1, 2, 7, 16)] * 2], {"is_causal": True}, "an even number of tokens"),
        (GOOD, {"layout": "ring"}, "layout: expected one of contiguous, zigzag, striped; got 'r"),
        (GOOD, {"method": "flash"}, "method: expected one of auto, ring, ulysses; got 'flash'"),
        (GOOD, {"method": "ulysses"}, "but 3 ranks do not divide the 2 key heads"),
        (GOOD, {"heads_at_once": 3}, "heads_at_once: expected a divisor of the 2 key heads, got 3"),
    ],
)
def test_errors(worlds, sizes, options, says):
    for text in worlds(3).run(message, [sizes] * 3, options):
        assert re.search(says, text), text


def unusual(rank):
    """What dtypes and classes without a kernel raise."""
    said = []
    q = torch.randn(1, 2, 4, 8)
    mesh = make_mesh()
    for x in (q.long(), q.to_sparse(), DTensor.from_local(q, mesh, [Shard(2)])):
        with pytest.raises(TypeError) as error:
            ring_attention(x, x, x)
        said.append(str(error.value))
    with pytest.raises(TypeError) as error:
        ring_attention(q, q.double(), q)
    return [*said, str(error.value)]


def test_unusual_tensors(worlds):
    for said in worlds(2).run(unusual):
        assert said == [
            "query: no kernel for int64",
            "query: no kernel for the sparse_coo layout",
            "query: a DTensor, expected a plain tensor",
            "key: expected the dtype of query, torch.float32; got torch.float64",
        ]


def test_ranks_that_do_not_agree(worlds):
    longer = [(1, 4, 8, 16), (1, 2, 10, 16), (1, 2, 10, 16)]
    first, second = worlds(2).run(message, [GOOD, longer], {"method": "ring"})
    assert re.search(r"rank 0 has .*key \(1, 2, 8, 16\).* and rank 1 .*key \(1, 2, 10, 16\)", first)
    assert re.search(
        r"rank 1 has .*key \(1, 2, 10, 16\).* and rank 0 .*key \(1, 2, 8, 16\)", second
    )


def fail(rank, tensors, how):
    """Rank 1 leaves in the middle of a step, when the others already wait for its keys."""
    run(rank, tensors, method="ring")
    if rank == 1 and how == "dies":
        os._exit(5)
    if rank == 1:
        raise ValueError("a bad batch")
    run(rank, tensors, method="ring")


def test_a_rank_that_dies(worlds):
    """The others end with an error at once, long before the timeout."""
    world = worlds(3)
    world.run(run, make(3))
    start = time.monotonic()
    outcomes = world.outcomes(fail, make(3), "dies")
    assert time.monotonic() - start < 15
    assert outcomes[1].exit_code == 5
    assert all("RuntimeError" in outcomes[rank].error for rank in (0, 2))


def guarded(rank, tensors):
    with guard():
        fail(rank, tensors, "dies")


def test_the_rank_that_dies_is_named(worlds):
    outcomes = worlds(3).outcomes(guarded, make(3))
    for rank in (0, 2):
        assert re.search(r"RankFailed: rank 1 ", outcomes[rank].error), outcomes[rank]


# ---- GPUs ----


@pytest.mark.parametrize("worlds", [NCCL], indirect=True)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_gpus(worlds, dtype, layout, method):
    """Blocks of several tiles, as good as one GPU."""
    sizes = {"heads": 8, "key_heads": 4, "per_rank": 512, "width": (64, 64)}
    tensors = make(2, dtype, **sizes, device=worlds.device)
    options = {"is_causal": True, "layout": layout, "method": method}
    assert_as_good_as_one_process(worlds(2), tensors, options)
