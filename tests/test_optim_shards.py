"""warpwright.optim on DTensors: FSDP2's parameters, with two processes on the CPU or on two GPUs."""

import copy
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import NCCL
from sharded import seeded
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from warpwright import optim

HERE = Path(__file__).resolve().parent
WORLD = 2
NAMES = ("SGD", "Adam", "AdamW")
OPTIONS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {"lr": 0.05}, "AdamW": {"lr": 0.05}}
# Those that run in both processes; each is a function of the mesh.
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def model():
    """Five rows are cut 3 + 2; the last layer has one row, so that a rank holds none of it."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 7, bias=False), nn.Linear(7, 1))


def sharded(mesh):
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module, mesh=mesh)
    return module


def train(module, optimizer, rank, steps=3, clip=None):
    """Each rank has its own half of the batch, as data parallel training does."""
    norms = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=seeded(step))
        x = x if rank is None else x[4 * rank : 4 * rank + 4]
        optimizer.zero_grad()
        module(x).square().mean().backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        norms.append(getattr(optimizer, "grad_norm", None))
    return [n for n in norms if n is not None]


def whole(tensors):
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


class Ops(TorchDispatchMode):
    """The names of the operators called inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@check
def like_native(mesh, rank):
    """As native on the same shards, and as one process on the whole batch."""
    from torch.distributed.tensor import DTensor

    for name in NAMES:
        runs = []
        for package in (optim, torch.optim):
            module = sharded(mesh)
            optimizer = getattr(package, name)(module.parameters(), **OPTIONS[name])
            train(module, optimizer, rank)
            runs.append((module, optimizer))
        alone = model()
        train(alone, getattr(torch.optim, name)(alone.parameters(), **OPTIONS[name]), None)
        (mine, ours), (native, theirs) = runs
        torch.testing.assert_close(whole(mine.parameters()), whole(native.parameters()))
        torch.testing.assert_close(whole(mine.parameters()), [*alone.parameters()])
        for p, q in zip(mine.parameters(), native.parameters(), strict=True):
            state, expected = ours.state[p], theirs.state[q]
            assert state.keys() == expected.keys()
            for key, value in state.items():
                assert type(value) is type(expected[key]), key
                if isinstance(value, DTensor):
                    assert value.placements == expected[key].placements == p.placements
                    assert value.shape == p.shape


@check
def one_launch(mesh, rank):
    """The local shards go to one op; nothing runs on a DTensor."""
    for name in NAMES:
        module = sharded(mesh)
        optimizer = getattr(optim, name)(module.parameters(), **OPTIONS[name])
        train(module, optimizer, rank, steps=2)
        versions = [p._version for p in module.parameters()]
        with Ops() as seen:
            optimizer.step()
        own = [n for n in seen.names if n.startswith("warpwright.")]
        assert len(own) == 1, own
        # Counting the steps is native's own on the host; no parameter goes through ATen.
        assert not [n for n in seen.names if "foreach" in n or "fused" in n], seen.names
        assert all(
            p._version > before for p, before in zip(module.parameters(), versions, strict=True)
        )


@check
def clipping(mesh, rank):
    """The norm is the whole gradient's, not that of this rank's shards."""
    for max_norm in (0.01, 100.0):
        module = sharded(mesh)
        optimizer = optim.AdamW(module.parameters(), lr=0.05, eps=0.1, max_norm=max_norm)
        norms = train(module, optimizer, rank)
        native = sharded(mesh)
        theirs = torch.optim.AdamW(native.parameters(), lr=0.05, eps=0.1)
        expected = train(native, theirs, rank, clip=max_norm)
        torch.testing.assert_close(norms, [n.double() for n in expected], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(whole(module.parameters()), whole(native.parameters()))


@check
def replicas_count_once(mesh, rank):
    """Plain tensors, replicas and shards of one optimizer: each element counts once."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    square = torch.distributed.device_mesh.init_device_mesh(mesh.device_type, (WORLD, 1))
    kinds = (None, (mesh, [Replicate()]), (mesh, [Shard(1)]), (square, [Replicate(), Shard(0)]))
    torch.manual_seed(0)
    values = [torch.randn(5, 4) for _ in kinds]
    grads = [torch.randn(5, 4) for _ in kinds]
    params = []
    for value, grad, kind in zip(values, grads, kinds, strict=True):
        p, g = (
            t.clone() if kind is None else distribute_tensor(t.clone(), *kind)
            for t in (value, grad)
        )
        p = nn.Parameter(p)
        p.grad = g
        params.append(p)
    optimizer = optim.SGD(params, lr=1.0, max_norm=0.5)
    optimizer.step()
    norm = torch.cat([g.flatten() for g in grads]).double().norm()
    torch.testing.assert_close(optimizer.grad_norm, norm, rtol=1e-6, atol=0.0)
    factor = 0.5 / (norm.item() + 1e-6)
    for p, value, grad in zip(whole(params), values, grads, strict=True):
        torch.testing.assert_close(p.detach(), value - factor * grad)


@check
def partial_gradients_are_natives(mesh, rank):
    """A gradient that still has to be summed over the ranks is no kernel's to take."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    p = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    grad = DTensor.from_local(torch.full((4,), float(rank + 1)), mesh, [Partial()])
    q = nn.Parameter(p.detach().clone())
    p.grad, q.grad = grad, grad.clone()
    optim.SGD([p], lr=0.5).step()
    torch.optim.SGD([q], lr=0.5).step()
    torch.testing.assert_close(p.full_tensor(), q.full_tensor())
    with pytest.raises(NotImplementedError, match="max_norm: expected dense gradients"):
        optim.SGD([p], lr=0.5, max_norm=1.0).step()


@check
def fp32_state(mesh, rank):
    """Masters and fp32 state of bf16 shards: as of the whole tensors."""
    from torch.distributed.tensor import DTensor

    module, alone = sharded(mesh).bfloat16(), model().bfloat16()
    options = {"lr": 0.05, "eps": 0.1, "master_weights": True, "zero_grad_in_step": True}
    mine = optim.AdamW(module.parameters(), **options)
    single = optim.AdamW(alone.parameters(), **options)
    for step in range(3):
        generator = seeded(step)
        for p, q in zip(module.parameters(), alone.parameters(), strict=True):
            q.grad = torch.randn(q.shape, generator=generator).bfloat16()
            p.grad = torch.distributed.tensor.distribute_tensor(
                q.grad.clone(), p.device_mesh, p.placements
            )
        mine.step(), single.step()
    for p, q in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)
        master = mine.state[p]["master_param"]
        assert isinstance(master, DTensor)
        assert torch.equal(master.full_tensor(), single.state[q]["master_param"])
        assert not p.grad.full_tensor().any()


@check
def checkpoints(mesh, rank):
    """A distributed state_dict, from ours to native and back; training goes on alike."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    for first, second in ((optim, torch.optim), (torch.optim, optim)):
        module = sharded(mesh)
        before = first.AdamW(module.parameters(), lr=0.05)
        train(module, before, rank)
        for full in (False, True):
            saved = get_optimizer_state_dict(
                module, before, options=StateDictOptions(full_state_dict=full)
            )
            saved = torch.load(_written(saved), weights_only=False)
            other = sharded(mesh)
            other.load_state_dict(copy.deepcopy(module.state_dict()))
            after = second.AdamW(other.parameters(), lr=0.05)
            set_optimizer_state_dict(
                other,
                after,
                saved,
                options=StateDictOptions(full_state_dict=full, broadcast_from_rank0=full),
            )
            reference = sharded(mesh)
            reference.load_state_dict(copy.deepcopy(module.state_dict()))
            same = first.AdamW(reference.parameters(), lr=0.05)
            same.load_state_dict(copy.deepcopy(before.state_dict()))
            train(other, after, rank, 2), train(reference, same, rank, 2)
            torch.testing.assert_close(whole(other.parameters()), whole(reference.parameters()))


def _written(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _main(rank, store, backend):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(torch.device("cuda", rank))
    torch.distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=WORLD
    )
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cuda" if backend == "nccl" else "cpu", (WORLD,)
    )
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        function(mesh, rank)
        print(f"passed: {name}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), *sys.argv[2:])


@pytest.fixture(scope="module", params=["gloo", NCCL])
def both_processes(tmp_path_factory, request):
    """What the two processes print, once for all tests."""
    store = tmp_path_factory.mktemp("store") / "store"
    environment = dict(os.environ)
    if request.param == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(store), request.param],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=HERE,
        )
        for rank in range(WORLD)
    ]
    try:
        return [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes(both_processes, name):
    for rank, output in enumerate(both_processes):
        assert f"passed: {name}\n" in output, f"rank {rank}:\n{output[-4000:]}"


def test_nothing_distributed_is_imported():
    """A step of plain parameters must not cost an import of the distributed package."""
    code = (
        "import sys, torch, warpwright.optim\n"
        "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
        "optimizer = warpwright.optim.AdamW([p], max_norm=1.0)\n"
        "loaded = set(sys.modules)\n"  # torch.optim's constructor imports much
        "optimizer.step()\n"
        "assert 'torch.distributed.tensor' in loaded or 'torch.distributed.tensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
