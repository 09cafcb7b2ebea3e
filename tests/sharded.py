"""Compares a function of DTensors with the same function of whole tensors, on every rank."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


def parse(word):
    """ "S1" is Shard(1), "R" Replicate(); "S0/S1" is one per dimension of the mesh."""
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if w == "R" else Shard(int(w[1:])) for w in word.split("/")]


def device_type():
    """Where the tensors of this rank's world lie."""
    return "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"


def seeded(seed):
    """A generator for the world's device: the same numbers on every rank."""
    return torch.Generator(device_type()).manual_seed(seed)


def make_mesh(*shape):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type(), shape or (torch.distributed.get_world_size(),))


def whole(tensor):
    """The values of all ranks."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def inputs(shapes, placements, mesh, dtype=torch.float32, seed=0, frozen=()):
    """(whole leaves, DTensors of them); a shape that is a tensor is an operand without gradient."""
    from torch.distributed.tensor import distribute_tensor

    generator = seeded(seed)
    alone, sharded = [], []
    for i, (shape, word) in enumerate(zip(shapes, placements.split(), strict=True)):
        given = isinstance(shape, torch.Tensor)
        value = shape if given else torch.randn(shape, generator=generator).to(dtype)
        needs = value.is_floating_point() and i not in frozen and not given
        alone.append(value.clone().requires_grad_(needs))
        piece = distribute_tensor(value.clone(), mesh, parse(word)) if word != "-" else value
        sharded.append(piece.detach().requires_grad_(needs))
    return alone, sharded


def nodes(result):
    """Names of the autograd nodes behind `result`."""
    left, names = [result.grad_fn], set()
    while left:
        node = left.pop()
        if node is not None and node not in names:
            names.add(node)
            left += [following for following, _ in node.next_functions]
    return {node.name() for node in names}


class Collectives(TorchDispatchMode):
    """Counts those of plain tensors. CommDebugMode would hand each layer a tensor of its own."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.count += name.startswith("_c10d_functional::") and "wait" not in name
        return function(*args, **(kwargs or {}))


def compare(
    rank, function, shapes, placements, options=None, mesh=(), frozen=(), dtype=torch.float32,
    rtol=1e-5, atol=1e-5,
):  # fmt: skip
    """Values and gradients of ``function(*tensors, **options)``; returns the calls' collectives."""
    from torch.distributed.tensor.debug import CommDebugMode

    options = options or {}
    alone, sharded = inputs(shapes, placements, make_mesh(*mesh), dtype, frozen=frozen)
    expected = function(*alone, **options)
    with CommDebugMode() as counted:
        result = function(*sharded, **options)
    assert any("Warpwright" in name for name in nodes(result)), "native ran"
    torch.testing.assert_close(whole(result), expected, rtol=rtol, atol=atol)
    grad = torch.randn(expected.shape, generator=seeded(1)).to(expected)
    leaves = [i for i, t in enumerate(alone) if t.requires_grad]
    expected = torch.autograd.grad(expected, [alone[i] for i in leaves], grad)
    from torch.distributed.tensor import DTensor, Replicate

    grad = DTensor.from_local(grad, result.device_mesh, [Replicate()] * result.device_mesh.ndim)
    with CommDebugMode() as counted_backward:
        found = torch.autograd.grad(result, [sharded[i] for i in leaves], grad)
    for i, mine, theirs in zip(leaves, found, expected, strict=True):
        torch.testing.assert_close(
            whole(mine), theirs, rtol=rtol, atol=atol, msg=lambda m, i=i: f"argument {i}: {m}"
        )
    counts = [counted.get_comm_counts(), counted_backward.get_comm_counts()]
    return tree_map(int, [{str(k): v for k, v in c.items()} for c in counts])


def compare_inference(rank, function, tensors, placements):
    """Values of ``function(*tensors)`` with DTensors, for a function without a derivative."""
    from torch.distributed.tensor import distribute_tensor

    mesh = make_mesh()
    expected = function(*tensors)
    sharded = [
        distribute_tensor(t.clone(), mesh, parse(word))
        for t, word in zip(tensors, placements.split(), strict=True)
    ]
    torch.testing.assert_close(whole(function(*sharded)), expected)
