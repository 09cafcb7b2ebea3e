"""warpwright.distributed's ColwiseParallel and RowwiseParallel, where torch's differ or are not asked."""

import copy
import gc
import time
import weakref

import pytest
import torch
from sharded import make_mesh, nodes, seeded, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

import warpwright


def pair(swapped=True):
    """Two layers with one input, and a third behind them; and the same cut over all ranks."""
    torch.manual_seed(0)
    alone = nn.ModuleDict({"a": nn.Linear(8, 12), "b": nn.Linear(8, 12), "c": nn.Linear(12, 8)})
    model = copy.deepcopy(alone)
    if swapped:
        warpwright.swap(model)
    return alone, model


def cut(model, columns=None, rows=None):
    from torch.distributed.tensor.parallel import parallelize_module

    from warpwright.distributed import ColwiseParallel, RowwiseParallel

    by_columns, by_rows = ColwiseParallel(**columns or {}), RowwiseParallel(**rows or {})
    plan = {"a": by_columns, "b": by_columns, "c": by_rows}
    return parallelize_module(model, make_mesh(), plan)


def run(model, x):
    return model["c"](torch.tanh(model["a"](x)) * model["b"](x))


def given():
    return torch.randn(3, 12, 8, generator=seeded(1)).requires_grad_()


def check(out, leaf, model, alone, shard=None):
    """Output and gradients as the native model's on one rank; ``shard`` of the output: (dimension,
    rank, ranks)."""
    x = given()
    expected = run(alone, x)
    grad = torch.randn(expected.shape, generator=seeded(2))
    part = (lambda t: t) if shard is None else lambda t: t.chunk(shard[2], shard[0])[shard[1]]
    torch.testing.assert_close(out, part(expected))
    out.backward(part(grad))
    expected.backward(grad)
    torch.testing.assert_close(leaf.grad, x.grad if leaf.shape == x.shape else part(x.grad))
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


def with_bias(rank, swapped):
    alone, model = pair(swapped)
    cut(model)
    x = given()
    out = run(model, x)
    assert ("WarpwrightLinearBackward" in nodes(out)) == swapped
    check(out, x, model, alone)


@pytest.mark.parametrize("swapped", [True, False])
def test_bias(worlds, swapped):
    """Also for native layers: the style is not tied to the swap."""
    worlds(2).run(with_bias, swapped)


def over_tokens(rank, ranks, dim):
    """Gathers the tokens in front and cuts them behind; the row layer's bias has a whole gradient.

    The last dimension is that of the features: there the bias is cut, too.
    """
    from torch.distributed.tensor import Shard

    alone, model = pair()
    cut(model, {"input_layouts": Shard(dim)}, {"output_layouts": Shard(dim)})
    x = given().detach().chunk(ranks, dim)[rank].clone().requires_grad_()
    check(run(model, x), x, model, alone, (dim, rank, ranks))


@pytest.mark.parametrize(("ranks", "dim"), [(3, 0), (2, 1), (3, 1), (4, -2), (2, 2), (4, -1)])
def test_over_tokens(worlds, ranks, dim):
    worlds(ranks).run(over_tokens, ranks, dim)


def uneven(rank):
    """Tokens that the ranks do not divide come in unequal parts, as torch cuts them."""
    from torch.distributed.tensor import Shard

    alone, model = pair()
    cut(model, rows={"output_layouts": Shard(0)})
    x = given()
    check(run(model, x), x, model, alone, (0, rank, 2))


def test_uneven(worlds):
    worlds(2).run(uneven)


def second_derivative(rank):
    alone, model = pair()
    cut(model)
    found = []
    for m in (model, alone):
        x = given()
        (first,) = torch.autograd.grad(run(m, x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *m.parameters()]))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(whole(mine), theirs, rtol=1e-4, atol=1e-4)


def test_second_derivative(worlds):
    worlds(2).run(second_derivative)


def recomputed(rank, reentrant):
    alone, model = pair()
    cut(model)
    x = given()
    out = checkpoint(lambda t: run(model, t * 1.0), x, use_reentrant=reentrant)
    check(out, x, model, alone)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed(worlds, reentrant):
    worlds(2).run(recomputed, reentrant)


def inference(rank, mode):
    from torch.distributed.tensor import Shard

    for layout in (None, Shard(1)):
        alone, model = pair()
        cut(model, {"input_layouts": layout})
        with getattr(torch, mode)():
            x = given() * 1.0
            part = x if layout is None else x.chunk(2, 1)[rank].clone()
            torch.testing.assert_close(run(model, part), run(alone, x))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_inference(worlds, mode):
    worlds(2).run(inference, mode)


def lifetimes(rank):
    """Nothing keeps an input alive, a leaf or not, with a graph or without."""
    from torch.distributed.tensor import Shard

    for layout in (None, Shard(1)):
        model = cut(pair()[1], {"input_layouts": layout})
        for needs_gradient in (True, False):
            inputs = [torch.ones(3, 12, 8, requires_grad=needs_gradient)]
            inputs.append(inputs[0] * 2.0)
            outs = [run(model, x) for x in inputs]
            left = [weakref.ref(x) for x in inputs]
            del inputs, outs
            for _ in range(200):  # a thread of gloo lets go of its operands a little later
                gc.collect()
                if [x() for x in left] == [None, None]:
                    break
                time.sleep(0.02)
            assert [x() for x in left] == [None, None]


def test_lifetimes(worlds):
    worlds(2).run(lifetimes)


def steps(rank):
    """Forwards of one input with changes of it between them, the last in evaluation; a deep copy."""
    from torch.distributed.tensor import Shard

    for layout in (None, Shard(1)):
        alone, model = pair()
        cut(model, {"input_layouts": layout})
        x = given() * 1.0
        part = x if layout is None else x.chunk(2, 1)[rank].clone()
        for step in range(3):
            with torch.set_grad_enabled(step != 2):
                torch.testing.assert_close(run(model, part), run(alone, x))
            with torch.no_grad():
                x.mul_(2.0)
                if part is not x:
                    part.mul_(2.0)
    alone, model = pair()
    cut(model)
    copied = copy.deepcopy(model)
    out = run(copied, x)
    torch.testing.assert_close(out, run(alone, x))
    assert copied["a"].forward.__self__ is copied["a"]


def test_steps(worlds):
    worlds(2).run(steps)


def other_forms(rank):
    """What the style leaves to torch: a DTensor as the output, and an embedding."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    from warpwright.distributed import ColwiseParallel, RowwiseParallel

    alone, model = pair()
    cut(model, {"use_local_output": False})
    x = given()
    assert isinstance(model["a"](x), DTensor)
    check(run(model, x), x, model, alone)

    torch.manual_seed(0)
    table = nn.Embedding(6, 4)
    cut_table = copy.deepcopy(table)
    warpwright.swap(cut_table)
    indices = torch.tensor([[0, 5], [3, 3]])
    style = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(cut_table, make_mesh(), style)
    torch.testing.assert_close(cut_table(indices), table(indices))
    with pytest.raises(NotImplementedError, match=r"nn\.Linear"):
        parallelize_module(nn.ReLU(), make_mesh(), ColwiseParallel())


def test_other_forms(worlds):
    worlds(2).run(other_forms)
