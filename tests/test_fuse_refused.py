"""swap(fuse=True): every way in which a chain must not become one op, or must not stay one."""

import copy

import pytest
import torch
from fusion import Block, fused, left, with_forward
from torch import nn
from torch.nn import functional as native
from torch.utils.checkpoint import checkpoint

from warpwright import swap, unswap
from warpwright.swap.trace import NotTraceable, trace

# ---- what is left, and why ----


def two_consumers(self, x):
    x = self.bn(self.conv(x))
    return self.relu(x) + x


def dropout_between(self, x):
    return self.relu(native.dropout(self.bn(self.conv(x)), 0.5, False))


def writes_into_skip(self, x):
    x = self.conv(x)
    skip = x * 2
    skip += self.bn(x)
    return self.relu(skip)


def scaled(self, x):
    x = self.conv(x)
    return self.relu(torch.add(self.bn(x), x, alpha=2))


def in_place_between(self, x):
    x = self.conv(x)
    y = self.bn(x)
    x.mul_(2)
    return self.relu(y + x)


def two_patterns(self, x):
    x = self.conv(x)
    return self.relu(self.bn(x) + x) + self.relu(self.bn(x))


def pooled(self, x):
    return self.pool(self.relu(self.conv(x)))


def writes_into_the_input(self, x):
    return self.pool(self.relu(x))


def writes_into_what_is_read_again(self, x):
    x = self.conv(x)
    return self.pool(self.relu(x)) + self.pool(x)


def hooked():
    model = Block()
    model.relu.register_forward_hook(lambda module, args, output: None)
    return model


def pool_with_indices():
    model = with_forward(lambda self, x: self.pool(self.relu(self.conv(x)))[0])
    model.pool.return_indices = True
    return model


def dilated_pool():
    model = with_forward(pooled)
    model.pool.dilation = (2, 1)
    return model


def hooked_norm():
    model = Block()
    model.relu.inplace = False
    model.bn.register_full_backward_hook(lambda module, gi, go: None)
    return model


class MyNorm(nn.BatchNorm2d):
    pass


def subclass():
    model = Block()
    model.bn = MyNorm(4)
    return model


def parametrized():
    model = Block()
    nn.utils.parametrize.register_parametrization(model.bn, "weight", nn.Identity())
    return model


def replaced_forward():
    model = Block()
    model.forward = lambda x: model.relu(model.bn(model.conv(x)))
    return model


def replaced_relu():
    model = Block()
    model.relu.forward = torch.tanh
    return model


def own_pickle():
    model = Block()
    model.__class__ = type("Block", (Block,), {"__reduce__": lambda self: (Block, ())})
    return model


@pytest.mark.parametrize(
    ("make", "chain", "reason"),
    [
        (lambda: with_forward(two_consumers), "bn → relu", "the result of bn has 2 consumers"),
        (lambda: with_forward(dropout_between), "bn → relu", "dropout stands between"),
        (lambda: with_forward(writes_into_skip), "bn → add → relu", "the addition writes into mul"),
        (lambda: with_forward(scaled), "bn → add → relu", "the addition has further arguments"),
        (lambda: with_forward(in_place_between), "bn → add → relu", "mul_ works in place in"),
        (lambda: with_forward(two_patterns), "bn → relu", "bn is already a BatchNormAddReLU2d"),
        (pool_with_indices, "relu → pool", "pool returns indices"),
        (dilated_pool, "relu → pool", "pool has dilated windows"),
        (lambda: with_forward(writes_into_the_input), "relu → pool", "relu works in place, others"),
        (lambda: with_forward(writes_into_what_is_read_again), "relu → pool", "relu works in pla"),
        (hooked, "bn → relu", "a hook on relu"),
        (hooked_norm, "bn → relu", "a hook on bn"),
        (subclass, "bn → relu", "bn: a subclass of nn.BatchNorm2d"),
        (parametrized, "bn → relu", "bn: parametrized"),
        (replaced_relu, "bn → relu", "relu: its forward is replaced on the instance"),
        (replaced_forward, "", "its forward is replaced on the instance"),
        (own_pickle, "", "it pickles itself in its own way"),
    ],
)
def test_near_misses(device, make, chain, reason):
    model = make().to(device)
    x = torch.randn(2, 3, 8, 8, device=device)
    expected = model(x.clone())  # in training: the running statistics do not count
    report = swap(model, fuse=True)
    ((_, found, why),) = left(report)
    assert found == chain
    assert why.startswith(reason)
    assert reason[:20] in str(report)
    torch.testing.assert_close(model(x.clone()), expected)


def test_ops_and_filter(model):
    report = swap(model, fuse=True, ops={"batch_norm"})
    assert {why for _, _, why in left(report)} == {
        "relu: relu is not in ops",
        "2: relu is not in ops",
    }
    report = swap(model, fuse=True, filter_fn=lambda module, name: name != "4.bn2")
    assert left(report) == [("4", "bn2 → add → relu", "bn2: filter_fn said no")]
    assert len(fused(report)) == 6


def stores(self, x):
    self.last = x
    return self.relu(self.bn(self.conv(x)))


def keeps(self, x):
    self.kept.append(x)
    return self.relu(self.bn(self.conv(x)))


def branches(self, x):
    return self.relu(self.bn(self.conv(x))) if x.sum() > 0 else x


def asks_for_kind(self, x):
    return self.relu(self.bn(self.conv(x[0] if isinstance(x, tuple) else x)))


def throws_dice(self, x):
    return self.relu(self.bn(self.conv(x))) if torch.rand(()) < 2 else x


def recomputes(self, x):
    return checkpoint(lambda x: self.relu(self.bn(self.conv(x))), x, use_reentrant=False)


def without_gradient(self, x):
    with torch.no_grad():
        return self.relu(self.bn(self.conv(x)))


def under_autocast(self, x):
    with torch.autocast(x.device.type, torch.bfloat16, enabled=False):
        return self.relu(self.bn(self.conv(x)))


def many(self, *x):
    return self.relu(self.bn(self.conv(x[0])))


def makes_a_tensor(self, x):
    return self.relu(self.bn(self.conv(x))) * torch.arange(6)


def asks_another(self, x):
    return self.relu(self.bn(self.conv(x))) if self.bn.training else x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


def own_gradient(self, x):
    return Double.apply(self.relu(self.bn(self.conv(x))))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (stores, "stores sets an attribute"),
        (keeps, "its forward keeps what it computes"),
        (branches, "its forward can't be traced: TraceError"),
        (asks_for_kind, "asks_for_kind asks for isinstance"),
        (throws_dice, "its forward calls rand on what is not its input"),
        (recomputes, "its forward checkpoints its activations"),
        (without_gradient, "its forward switches gradients"),
        (torch.no_grad()(Block.forward), "its forward switches gradients"),
        (under_autocast, "its forward switches autocast"),
        (many, r"its forward takes \*x"),
        (makes_a_tensor, "its forward calls arange"),
        (asks_another, "asks_another asks for another module's training"),
        (own_gradient, "its forward calls an autograd.Function"),
    ],
)
def test_forwards_that_a_trace_would_freeze(forward, reason):
    model = with_forward(forward)
    with pytest.raises(NotTraceable, match=reason):
        trace(model)
    report = swap(model, fuse=True)
    assert not fused(report)
    assert report.swapped
    assert model.kept == []
    assert type(model).__mro__[1] is Block


# ---- what a fused forward was made from may change: then the original runs ----


def hook_the_relu(model):
    model.relu.register_forward_hook(lambda module, args, output: -output)


def another_activation(model):
    model.relu = nn.Tanh()


def a_hook_on_the_norm(model):
    model.bn.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def native_norm(model):
    unswap(model.bn)


def parametrize_the_norm(model):
    class Half(nn.Module):
        def forward(self, weight):
            return weight / 2

    nn.utils.parametrize.register_parametrization(model.bn, "weight", Half())


@pytest.mark.parametrize(
    "change",
    [hook_the_relu, another_activation, a_hook_on_the_norm, native_norm, parametrize_the_norm],
)
def test_changed_layers_run_one_by_one(device, change, calls):
    model, x = Block().to(device), torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    change(model)
    change(twin)
    torch.testing.assert_close(model(x), twin(x))
    assert "batch_norm_relu" not in calls


def test_changed_attributes_and_arguments(device, calls):
    def forward(self, x, scale=None):
        x = self.bn(self.conv(x))
        x = x if self.training else x * self.rate
        return self.relu(x if scale is None else x * scale)

    model, x = with_forward(forward).to(device), torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    assert fused(swap(model, fuse=True))

    def same(*args, **kwargs):
        torch.testing.assert_close(model(*args, **kwargs), twin(*args, **kwargs))
        was_fused = "batch_norm_relu" in calls
        calls.clear()
        return was_fused

    assert same(x)
    assert same(x=x)
    assert not same(x, 3.0)
    assert not same(x, scale=x.new_ones(()))
    model.eval(), twin.eval()
    assert not same(x)
    model.train(), twin.train()
    assert same(x)


def test_changed_sequence(device, calls):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(device)
    x = torch.randn(2, 3, 8, 8, device=device)
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    torch.testing.assert_close(model(x), twin(x))
    assert calls == ["batch_norm_relu"]
    torch.testing.assert_close(model[:2](x), twin[:2](x))
    y = twin[0](x)
    torch.testing.assert_close(model[1](y), twin[1](y))  # one by one they are what they were
    torch.testing.assert_close(model[1:](y), twin[1:](y))
    for network in (model, twin):
        network.append(nn.Flatten())
    torch.testing.assert_close(model(x), twin(x))
    assert calls.count("batch_norm_relu") == 1


def test_changed_list_of_layers(device, calls):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Stack().to(device), torch.randn(2, 3, 4, 4, device=device)
    assert fused(swap(model, fuse=True)) == [("", "layers.0 → layers.1", "BatchNormReLU2d")]
    model(x)
    assert calls == ["batch_norm_relu", "batch_norm"]
    model.layers.append(nn.ReLU())
    assert (model(x) >= 0).all()
    assert calls.count("batch_norm_relu") == 1


def test_other_callers_get_plain_layers(model, images):
    twin = copy.deepcopy(model)
    swap(model, fuse=True)
    torch.testing.assert_close(model[4].bn2(model[0](images)), twin[4].bn2(twin[0](images)))
