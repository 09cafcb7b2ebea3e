"""SyncBatchNorm, DDP, sharded optimizers and checkpoints: as one process; and ranks that fail."""

import copy
import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from processes import GROUP_TIMEOUT
from sharded import make_mesh, seeded, whole
from torch import nn

import warpwright.distributed
from warpwright import optim

# ---- SyncBatchNorm ----


def parts(x, sizes, rank):
    return x.split(list(sizes))[rank]


def statistics(rank, sizes, dtype, options):
    """Three steps on uneven parts of a batch, next to native's in float64 on the whole one."""
    mine = nn.SyncBatchNorm(5, **options)
    assert warpwright.swap(mine).entries[0].swapped
    mine = mine.to(dtype)
    if mine.affine:
        nn.init.uniform_(mine.weight, -1, 2)
    exact = nn.BatchNorm2d(5, **options)
    exact.load_state_dict(mine.state_dict())
    exact = exact.double()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]

    def check(a, b):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)

    for _ in range(3):
        x = (torch.randn(sum(sizes), 5, 3, 4) * 3 + 100).to(dtype)
        grad = torch.randn(x.shape).to(dtype)
        exact_x = x.to(torch.float64, copy=True).requires_grad_()
        own = parts(x, sizes, rank).clone().requires_grad_()
        mine.zero_grad(), exact.zero_grad()
        out, expected = mine(own), exact(exact_x)
        expected.backward(grad.double())
        out.backward(parts(grad, sizes, rank))
        check(out, parts(expected, sizes, rank))
        check(own.grad, parts(exact_x.grad, sizes, rank))
        for a, b in zip(mine.parameters(), exact.parameters(), strict=True):
            total = a.grad.double()
            dist.all_reduce(total)
            check(total, b.grad)
        for a, b in zip(mine.buffers(), exact.buffers(), strict=True):
            check(a, b)
    mine.eval(), exact.eval()
    check(mine(x), exact(x.double()))


@pytest.mark.parametrize(
    ("sizes", "dtype", "options"),
    [
        ((3, 4), torch.float32, {}),
        ((7, 0), torch.float32, {}),
        ((3, 4), torch.float64, {"affine": False}),
        ((3, 4), torch.float32, {"momentum": None}),
        ((3, 4), torch.float32, {"track_running_stats": False}),
        ((3, 4), torch.bfloat16, {}),
    ],
)
def test_sync_batch_norm(worlds, sizes, dtype, options):
    worlds(2).run(statistics, sizes, dtype, options)


def collectives(rank):
    """One per direction, of 2 C + 1 and 2 C numbers; none in evaluation."""
    from torch.distributed.tensor.debug import CommDebugMode

    layer = warpwright.nn.SyncBatchNorm(5)
    x = torch.randn(3, 5, 2, requires_grad=True)
    with CommDebugMode() as forward:
        out = layer(x)
    with CommDebugMode() as backward:
        out.sum().backward()
    assert forward.get_total_counts() == backward.get_total_counts() == 1
    with CommDebugMode() as counted:
        layer.eval()(x)
    assert counted.get_total_counts() == 0
    x = x.detach().requires_grad_()  # CommDebugMode has left hooks on x
    (grad,) = torch.autograd.grad(layer.train()(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    with pytest.raises(ValueError, match="non-zero"):
        layer(torch.randn(3, 0, 2))


def test_sync_batch_norm_collectives(worlds):
    worlds(2).run(collectives)


def test_sync_batch_norm_alone():
    """Without ranks it is batch norm; swap and unswap keep the layer."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
    native = copy.deepcopy(model)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    warpwright.swap(model, fuse=True)
    assert type(model[1]) is warpwright.nn.SyncBatchNorm
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(model(x), native(x))
    warpwright.unswap(model)
    assert type(model[1]) is nn.SyncBatchNorm
    warpwright.swap(native)
    assert type(nn.SyncBatchNorm.convert_sync_batchnorm(native)[1]) is nn.SyncBatchNorm


# ---- DDP ----


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(nn.Linear(54, 12), nn.ReLU(), nn.Linear(12, 4))

    def forward(self, x):
        return self.head(self.features(x).flatten(1))


def ddp(rank, fuse, sync):
    """Three steps on half the batch each, as one process on all of it."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    alone = Net()
    model = copy.deepcopy(alone)
    if not sync:  # statistics of each half would differ
        alone.features[1].eval(), model.features[1].eval()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if sync:  # afterwards: DDP refuses SyncBatchNorm on CPUs
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    warpwright.swap(model, fuse=fuse)
    mine = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x, target = torch.randn(8, 3, 6, 6), torch.randint(4, (8,))
        mine.zero_grad(), theirs.zero_grad()
        warpwright.functional.cross_entropy(
            parallel(x.chunk(2)[rank]), target.chunk(2)[rank]
        ).backward()
        nn.functional.cross_entropy(alone(x), target).backward()
        mine.step(), theirs.step()
    # A gradient is a view of its bucket: all share one storage.
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("sync", [False, True])
def test_ddp(worlds, fuse, sync):
    worlds(2).run(ddp, fuse, sync)


# ---- sharded optimizers and checkpoints ----


def sharded_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 7, bias=False), nn.Linear(7, 1))


def train(model, optimizer, rank, steps, start=0):
    ranks = dist.get_world_size() if dist.is_initialized() and rank is not None else 1
    for step in range(start, start + steps):
        x = torch.randn(12, 6, generator=seeded(step))
        own = x if rank is None else x.chunk(ranks)[rank]
        optimizer.zero_grad()
        model(own).square().mean().backward()
        optimizer.step()


def make_sharded(name, **options):
    from torch.distributed.fsdp import fully_shard

    model = sharded_model()
    warpwright.swap(model)
    fully_shard(model, mesh=make_mesh())
    return model, getattr(optim, name)(model.parameters(), lr=0.05, **options)


def state_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": state}


def save(rank, folder, name, options):
    import torch.distributed.checkpoint as checkpoint

    model, optimizer = make_sharded(name, **options)
    train(model, optimizer, rank, 3)
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)


def load(rank, folder, name, options):
    """Training goes on as in one process that never stopped."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = make_sharded(name, **options)
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    train(model, optimizer, rank, 3, start=3)
    alone = sharded_model()
    single = getattr(optim, name)(alone.parameters(), lr=0.05, **options)
    train(alone, single, None, 6)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(a), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {"max_norm": 0.5}), ("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True})],
)
def test_checkpoint_in_another_world(worlds, tmp_path, name, options):
    """Saved by two ranks, loaded by three, or by one where there are two GPUs."""
    worlds(2).run(save, str(tmp_path), name, options)
    worlds(3 if worlds.backend == "gloo" else 1).run(load, str(tmp_path), name, options)


def clipped(rank):
    """max_norm sums one number over the ranks; its norm is that of native's clip_grad_norm_."""
    norms = []
    for max_norm in (None, 0.01):
        model, optimizer = make_sharded("AdamW", max_norm=max_norm)
        model(torch.randn(4, 6, generator=seeded(rank))).sum().backward()
        if max_norm is None:
            norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            optimizer.step()
        sizes = [call.args[0].numel() for call in reduced.call_args_list]
        assert sizes == ([] if max_norm is None else [1])
    norms.append(optimizer.grad_norm.float())
    torch.testing.assert_close(*norms)


def test_clipping(worlds):
    worlds(2).run(clipped)


# ---- ranks that fail ----


def fails(rank, how):
    dist.barrier()
    try:
        with warpwright.distributed.guard():
            if rank == 1 and how == "raises":
                raise ValueError("a bad batch")
            if rank == 1 and how == "dies":
                os._exit(7)
            dist.all_reduce(torch.ones(3))
    except ValueError:
        os._exit(8)  # as an uncaught exception ends a program


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [("raises", 8, "rank 1 raised ValueError: a bad batch"), ("dies", 7, "rank 1 died: no sign")],
)
def test_a_rank_that_fails_is_named(worlds, how, code, message):
    ranks = 3 if worlds.backend == "gloo" else 2
    worlds(ranks).run(_ready)
    before = time.monotonic()
    outcomes = worlds(ranks).outcomes(fails, how)
    assert time.monotonic() - before < GROUP_TIMEOUT
    assert outcomes[1].exit_code == code
    for outcome in (outcomes[0], *outcomes[2:]):
        assert outcome.error is not None, outcome
        assert f"RankFailed: {message}" in outcome.error


def _ready(rank):
    """Starts the processes outside of the measured time."""


def goes_on(rank):
    """Two blocks; rank 0 leaves the first early."""
    for block in range(2):
        with warpwright.distributed.guard():
            if rank != 0:
                dist.all_reduce(torch.ones(3)) if block else time.sleep(0.1)
            elif block:
                dist.all_reduce(torch.ones(3))
    return True


def test_guard_without_failure(worlds):
    assert worlds(2).run(goes_on) == [True, True]
