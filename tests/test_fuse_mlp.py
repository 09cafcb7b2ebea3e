"""swap(fuse=True) on linear → activation → linear: one node where nothing watches the parts."""

import copy
import pickle

import pytest
import torch
from torch import nn

from warpwright import swap, unswap
from warpwright.testing import assert_as_good_as_native, assert_same

NODE = "WarpwrightMlpBackward"


class Mlp(nn.Module):
    def __init__(self, *between, act=None, p=0.0):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(12, 20), act or nn.GELU(), nn.Linear(20, 8)
        self.between = nn.Sequential(*between) if between else nn.Identity()
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down(self.drop(self.between(self.act(self.up(x)))))


class Plain(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(12, 20), act or nn.GELU(), nn.Linear(20, 8)
        self.last = nn.Dropout(0.5)

    def forward(self, x):
        return self.last(self.down(self.act(self.up(x))))


def sequential(p=0.0):
    layers = nn.Linear(12, 20), nn.GELU(), nn.Dropout(p), nn.Linear(20, 8), nn.Dropout(p)
    return nn.Sequential(*layers)


def nodes(y):
    """Names of the nodes of a graph."""
    found, todo = [], [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.append(node)
            todo += [following for following, _ in node.next_functions]
    return [node.name() for node in found]


def is_one_node(model, x):
    return NODE in nodes(model(x))


def rows(device="cpu"):
    return torch.randn(5, 12, device=device)


@pytest.mark.parametrize(
    "act", [nn.GELU(), nn.GELU(approximate="tanh"), nn.SiLU(), nn.ReLU()], ids=repr
)
@pytest.mark.parametrize("kind", [Mlp, Plain])
def test_one_node(kind, act, device):
    torch.manual_seed(0)
    model = kind(act=act).to(device).eval()
    native, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = rows(device)
    report = swap(model, fuse=True, check=x)
    assert [f.chain for f in report.fusions if not f.reason] == ["up → act"]
    assert is_one_node(model, x)
    found = []
    for layer, value in ((model, x), (native, x), (exact, x.double())):
        y = layer(value)
        found.append([y, *torch.autograd.grad(y.square().sum(), [*layer.parameters()])])
    for mine, theirs, truth in zip(*found, strict=True):
        assert_as_good_as_native(mine, theirs, truth)
    fused = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_one_node(other, x)
        assert_same(other(x), fused)
    unswap(model)
    assert_same(model(x), native(x))


def test_a_sequential_and_what_stands_between():
    x = rows()
    for model in (sequential(), Mlp()):
        swap(model, fuse=True)
        assert is_one_node(model, x)
    for model in (sequential(0.1), Mlp(nn.Tanh()), Mlp(p=0.1)):
        swap(model, fuse=True)
        assert not is_one_node(model, x)
        assert "WarpwrightLinearActivationBackward" in nodes(model(x))


def test_a_change_runs_the_layers():
    x = rows()
    for change in (
        lambda m: setattr(m.drop, "p", 0.5),
        lambda m: m.down.register_forward_hook(lambda *_: None),
        lambda m: m.drop.register_forward_hook(lambda *_: None),
        lambda m: setattr(m, "down", nn.Sequential(m.down)),
        lambda m: setattr(m, "drop", nn.Tanh()),
        lambda m: m.act.register_full_backward_hook(lambda *_: None),
    ):
        model = Mlp()
        swap(model, fuse=True)
        assert is_one_node(model, x)
        change(model)
        assert not is_one_node(model, x)


def test_hooks_on_the_second_layer_are_seen():
    model, seen = Mlp(), []
    model.down.register_forward_hook(lambda layer, args, y: seen.append(y.shape))
    swap(model, fuse=True)
    assert not is_one_node(model, rows())
    assert seen


def test_a_second_reader_of_the_hidden_layer():
    class Both(Plain):
        def forward(self, x):
            h = self.act(self.up(x))
            return self.down(h), h

    model = Both()
    x = rows()
    swap(model, fuse=True)
    y, h = model(x)
    assert NODE not in nodes(y)
    assert h.shape == (5, 20)


def test_a_chain_of_three():
    """The second layer begins a chain of its own, which keeps its activation in the product."""
    model = nn.Sequential(
        nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 8)
    )
    x = rows()
    expected = copy.deepcopy(model)(x)
    swap(model, fuse=True)
    names = nodes(model(x))
    assert names.count(NODE) == 1
    assert names.count("WarpwrightLinearActivationBackward") == 1
    torch.testing.assert_close(model(x), expected)


def test_a_frozen_or_excluded_layer():
    x = rows()
    model = Mlp()
    swap(model, fuse=True, exclude=["down"])
    assert not is_one_node(model, x)
    model = Mlp()
    model.up.requires_grad_(False)
    swap(model, fuse=True)
    assert not is_one_node(model, x)  # nothing before the second product needs a gradient
    assert is_one_node(model, x.requires_grad_())


def test_compiled_without_a_break():
    model = Mlp()
    x = rows()
    expected = model(x)
    swap(model, fuse=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert model.down.weight.grad is not None
