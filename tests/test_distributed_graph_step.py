"""graph_step under DDP and FSDP2: trains as the plain loop does. With gloo the steps run eagerly."""

import contextlib
import copy

import pytest
import torch
from conftest import NCCL
from sharded import device_type, make_mesh, seeded, whole
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import warpwright
from warpwright import optim
from warpwright.distributed import side_stream
from warpwright.graphs import CaptureError


def small_net():
    torch.manual_seed(3)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    model = nn.Sequential(first, last)
    warpwright.swap(model, fuse=True)
    return model


def spread(model, form):
    if form == "ddp":
        with side_stream(torch.device(device_type())):
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = make_mesh()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def batches(rank, count):
    generator = seeded(10 + rank)
    for _ in range(count):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        yield images, torch.randint(0, 5, (4,), generator=generator)


def values(model):
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: whole(x.detach()).clone() for name, x in named}


def differing(a, b):
    return [name for name, x in a.items() if not torch.equal(x, b[name])]


def optimizer_of(model):
    """With a learning rate on the device, as a graph has it: then the bits are the same."""
    return optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2), max_norm=1.0, capturable=device_type() == "cuda"
    )


def train(rank, form, autocast):
    """Five steps of both loops, in batches of each rank's own."""
    plain = small_net()
    captured = copy.deepcopy(plain)
    plain, captured = spread(plain, form), spread(captured, form)
    first, second = optimizer_of(plain), optimizer_of(captured)
    example = next(batches(rank, 1))
    start = values(captured)
    step = warpwright.graph_step(captured, F.cross_entropy, second, example, autocast=autocast)
    assert step.captured == (device_type() == "cuda")
    assert not differing(start, values(captured))  # the warm-up is undone
    for images, labels in batches(rank, 5):
        first.zero_grad()
        with torch.autocast(
            device_type(), autocast, enabled=autocast is not None, cache_enabled=False
        ):
            loss = F.cross_entropy(plain(images), labels)
        loss.backward()
        first.step()
        torch.testing.assert_close(step(images, labels), loss.detach(), rtol=0, atol=0)
    expected, got = values(plain), values(captured)
    assert not differing(expected, got)
    assert differing(start, got)
    torch.testing.assert_close(second.grad_norm, first.grad_norm, rtol=0, atol=0)
    return {name: got[name].cpu() for name, _ in captured.named_parameters()}


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_trains_as_the_loop(worlds, form, autocast):
    first, second = worlds(2).run(train, form, autocast)
    assert not differing(first, second)


def accumulate(rank):
    """Three batches per step: the ranks exchange gradients once, as with no_sync()."""
    plain = small_net()
    captured = copy.deepcopy(plain)
    plain, captured = spread(plain, "ddp"), spread(captured, "ddp")
    first, second = optimizer_of(plain), optimizer_of(captured)
    example = next(batches(rank, 1))
    step = warpwright.graph_step(captured, F.cross_entropy, second, example, accumulate=3)
    for i, (images, labels) in enumerate(batches(rank, 6)):
        if i % 3 == 0:
            first.zero_grad()
        with plain.no_sync() if i % 3 < 2 else contextlib.nullcontext():
            loss = F.cross_entropy(plain(images), labels)
            (loss / 3).backward()
        if i % 3 == 2:
            first.step()
        torch.testing.assert_close(step(images, labels), loss.detach(), rtol=0, atol=0)
    assert not differing(values(plain), values(captured))


def test_gradients_of_several_batches(worlds):
    worlds(2).run(accumulate)


def refused(rank):
    model = DistributedDataParallel(small_net())
    with pytest.raises(CaptureError, match=r"DistributedDataParallel was made on the default str"):
        warpwright.graph_step(model, F.cross_entropy, optimizer_of(model), next(batches(rank, 1)))


@pytest.mark.parametrize("worlds", [NCCL], indirect=True)
def test_ddp_of_the_default_stream_is_refused(worlds):
    worlds(2).run(refused)
