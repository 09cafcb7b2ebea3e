"""swap(fuse=True): chains of layers as one op, and every way in which they must not become one."""

import copy
import io
import json
import pickle

import pytest
import torch
from common import classes, gradients, small_resnet
from torch import nn
from torch.nn import functional as native
from torch.utils.checkpoint import checkpoint

import warpwright
from warpwright import SwapCheckError, _blocks, _patterns, swap, swapped, unswap
from warpwright._trace import NotTraceable, trace
from warpwright.testing import assert_same


class Block(nn.Module):
    """conv → BN → ReLU; the tests give it other forwards."""

    def __init__(self, forward=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.bn2 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.between = nn.Identity()
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.rate = 0.5
        self.kept = []
        if forward is not None:
            self.__class__ = type("Block", (Block,), {"forward": forward, "__module__": __name__})

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def with_forward(forward):
    return Block(forward)


@pytest.fixture
def model(device):
    return small_resnet().to(device)


@pytest.fixture
def images(device):
    return torch.randn(4, 3, 32, 32, device=device)


@pytest.fixture
def calls(monkeypatch):
    """The names of our functionals, in the order in which they were called."""
    names = []

    def counted(name):
        function = getattr(warpwright.functional, name)

        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(warpwright.functional, name, call)

    for name in ("relu", "batch_norm", "batch_norm_relu", "batch_norm_add_relu"):
        counted(name)
    return names


def fused(report):
    return [(f.block, f.chain, f.into) for f in report.fusions if not f.reason]


def left(report):
    return [(f.block, f.chain, f.reason) for f in report.fusions if f.reason]


# ---- what it computes ----


@pytest.mark.parametrize("training", [True, False])
def test_resnet_agrees_with_native(model, images, training, calls):
    model.double().train(training)
    images = images.double().requires_grad_()
    twin = copy.deepcopy(model)
    report = swap(model, fuse=True)
    assert fused(report) == [
        ("", "1 → 2", "BatchNormReLU2d"),
        *(
            (block, chain, into)
            for block in ("4", "5", "6")
            for chain, into in (
                ("bn1 → relu", "BatchNormReLU2d"),
                ("bn2 → add → relu", "BatchNormAddReLU2d"),
            )
        ),
    ]
    for step in range(2):  # the second on what the first left in the running statistics
        results = []
        for network in (model, twin):
            output = network(images)
            inputs = (images, *network.parameters())
            results.append((output, *torch.autograd.grad(output.square().mean(), inputs)))
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)
        assert set(calls) == {"batch_norm", "batch_norm_relu", "batch_norm_add_relu"}
        assert calls.count("batch_norm_relu") == 4 * (step + 1)
        assert calls.count("batch_norm_add_relu") == 3 * (step + 1)
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_integer_values_are_bit_equal(device):
    """BN of statistics 0 and 1 - eps is the identity: chains of integers have one right answer."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).to(device).eval()
    model[0].running_var.fill_(1 - model[0].eps)
    x = torch.randint(-9, 9, (2, 3, 5, 7), device=device).float()
    expected = model(x)
    assert fused(swap(model, fuse=True))
    assert_same(model(x), expected)


def test_modules_and_state_stay(model, images):
    modules, keys = list(model.modules()), list(model.state_dict())
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    kinds = [type(m) for m in modules]
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = swap(model, fuse=True)
    assert modules == list(model.modules())
    assert keys == list(model.state_dict())
    assert tensors == [id(t) for t in (*model.parameters(), *model.buffers())]
    assert all(isinstance(m, kind) for m, kind in zip(modules, kinds, strict=True))
    assert isinstance(model[4].bn2, warpwright.nn.BatchNormAddReLU2d)
    assert "warpwright.BatchNormAddReLU2d(8" in repr(model)
    assert {e.name: e.fused for e in report.swapped}["4.bn1"] == "BatchNormReLU2d"
    gradients(model, images)
    optimizer.step()
    assert not torch.equal(model[4].bn1.weight, state["4.bn1.weight"])
    model.load_state_dict(state)
    small_resnet().load_state_dict(model.state_dict())


@pytest.mark.parametrize("context", [True, False])
def test_unswap_gives_everything_back(model, images, context):
    before, attributes = classes(model), [set(vars(m)) for m in model.modules()]
    output = copy.deepcopy(model)(images)
    if context:
        with swapped(model, fuse=True):
            assert isinstance(model[4].bn1, warpwright.nn.BatchNormReLU2d)
            assert type(model[4]) not in before
    else:
        report = swap(model, fuse=True)
        assert unswap(model) == len(report.swapped)
    assert classes(model) == before
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert_same(model(images), output)


def test_swapped_twice(model, images):
    """Fusing what is ours already; again changes nothing; a context on top restores it."""
    swap(model)
    plain = classes(model)
    with swapped(model, fuse=True):
        assert isinstance(model[4].bn1, warpwright.nn.BatchNormReLU2d)
    assert classes(model) == plain
    assert len(fused(swap(model, fuse=True))) == 7
    once = classes(model)
    with pytest.warns(UserWarning, match="nothing to swap"):
        assert not swap(model, fuse=True).fusions
    assert classes(model) == once
    model(images)
    unswap(model)
    assert classes(model) == classes(small_resnet())


def test_report(model):
    report = swap(model, fuse=True)
    text = str(report)
    assert "fused 7 of 7 chains" in text
    assert "bn2 → add → relu      3  BatchNormAddReLU2d  4, 5, 6" in text
    assert "1 → 2                 1  BatchNormReLU2d     (the model)" in text
    written = json.loads(report.to_json())
    assert written["fusions"][0] == {
        "block": "",
        "chain": "1 → 2",
        "into": "BatchNormReLU2d",
        "reason": "",
    }
    assert "fused" not in str(swap(small_resnet()))


def functions(self, x):
    y = native.relu(self.bn(self.conv(x)))
    return torch.relu_(torch.add(y, self.bn2(y)))


def methods(self, x):
    y = self.bn(self.conv(x)).relu()
    return self.bn2(y).add_(y).relu_()


def swapped_operands(self, x):
    x = self.conv(x)
    return self.relu(x + self.between(self.bn(x)))


def two_norms(self, x):
    x = self.conv(x)
    return self.relu(self.bn(x) + self.bn2(x))


def one_layer_twice(self, x):
    x = self.relu(self.bn(self.conv(x)))
    return self.relu(self.bn(x)) - self.bn(-x)


def pooled(self, x):
    y = self.pool(self.relu(self.conv(x)))
    return self.pool(native.relu(y)) + self.pool(y)


def pooled_by_function(self, x):
    x = native.max_pool2d(torch.relu(x), 2, x.shape[2] // 4)
    return torch.max_pool2d(self.conv(x).relu_(), (2, 1), ceil_mode=True)


@pytest.mark.parametrize(
    ("forward", "chains"),
    [
        (functions, ["bn → relu", "bn2 → add → relu"]),
        (methods, ["bn → relu", "bn2 → add → relu"]),
        (swapped_operands, ["bn → between → add → relu"]),
        (two_norms, ["bn → add → relu"]),
        (one_layer_twice, ["bn → relu", "bn → relu"]),
        (pooled, ["relu → pool", "relu → pool"]),
        (pooled_by_function, ["relu → max_pool2d", "relu → max_pool2d"]),
    ],
)
def test_forms(device, forward, chains):
    model = with_forward(forward).to(device).double()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 13, 11, device=device, dtype=torch.float64)
    report = swap(model, fuse=True)
    assert [f.chain for f in report.fusions if not f.reason] == chains
    for _ in range(2):
        torch.testing.assert_close(model(x), twin(x))
        for mine, theirs in zip(
            model.state_dict().values(), twin.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(mine, theirs)
    assert type(model) is not type(twin)
    unswap(model)
    assert type(model) is type(twin)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("residual", ["other dtype", "broadcast"])
def test_residuals_that_the_fused_op_does_not_take(device, in_place, residual):
    def forward(self, x, skip):
        x = self.bn(x)
        if self.rate:
            x += skip
        else:
            x = x + skip
        return self.relu(x)

    model = with_forward(forward).to(device)
    model.rate = in_place
    x = torch.randn(2, 4, 5, 5, device=device)
    skip = torch.randn(2, 4, 5, 5, device=device, dtype=torch.float64)
    if residual == "broadcast":
        skip = skip[:, :, :1, :1].float()
    expected = copy.deepcopy(model)(x, skip)
    assert fused(swap(model, fuse=True))
    output = model(x, skip)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected)


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
    assert not same(x=x)
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


# ---- what else works on a model ----


def test_deepcopy_and_pickle(model, images):
    swap(model, fuse=True)
    model.eval()
    expected = model(images)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    pickled = pickle.dumps(model)
    _blocks._classes.clear()  # as in another process
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickled),
        torch.load(saved, weights_only=False),
    ):
        assert_same(twin(images), expected)
        assert [k.__name__ for k in classes(twin)] == [k.__name__ for k in classes(model)]
        assert isinstance(twin[4].bn1, warpwright.nn.BatchNormReLU2d)
        assert twin[4].bn1.weight is not model[4].bn1.weight
        unswap(twin)
        assert classes(twin) == classes(small_resnet())
    assert isinstance(model[4].bn1, warpwright.nn.BatchNormReLU2d)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(model, images, dynamic):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    swap(model, fuse=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for training in (True, False):
        model.train(training)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(compiled(images), twin(images))
        assert "warpwright.batch_norm_relu" in graphs[-1]
        assert "warpwright.relu" not in graphs[-1]
    torch.testing.assert_close(compiled(images[:2, :, :24]), model(images[:2, :, :24]))
    unswap(model)
    torch.testing.assert_close(compiled(images), model(images))
    assert "warpwright" not in graphs[-1]


def test_autocast(model, images):
    twin = copy.deepcopy(model)
    swap(twin)
    swap(model, fuse=True)
    with torch.autocast(images.device.type, torch.bfloat16):
        mine, plain = model(images), twin(images)
    assert mine.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(mine, plain, rtol=0.1, atol=0.1)
    swap(small_resnet().to(images.device, torch.bfloat16), fuse=True, check=images.bfloat16())


def test_functional_call(model, images):
    model.eval()
    names = dict(model.named_parameters())

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (images,)).square().mean()

    expected = torch.func.grad(loss)(names)
    swap(model, fuse=True)
    for name, value in torch.func.grad(loss)(names).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5)


def test_wrapped_for_distribution(tmp_path, device):
    torch.distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
    )
    try:
        model = Block().to(device)
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        x = torch.randn(2, 3, 8, 8, device=device)
        wrapped(x).square().mean().backward()
        expected = model.conv.weight.grad.clone()
        model.zero_grad()
        assert fused(swap(wrapped, fuse=True)) == [("module", "bn → relu", "BatchNormReLU2d")]
        wrapped(x).square().mean().backward()
        torch.testing.assert_close(model.conv.weight.grad, expected)
    finally:
        torch.distributed.destroy_process_group()


def test_check(model, images):
    state = copy.deepcopy(model.state_dict())
    report = swap(model, fuse=True, check=images)
    rows = {row["module"]: row["type"] for row in report.check["modules"]}
    assert rows["4.bn2"] == "BatchNormAddReLU2d"
    assert rows["5.downsample.1"] == "BatchNorm2d"
    assert rows["4.relu"] == "ReLU"
    assert not report.check["unreached"]
    for name, value in model.state_dict().items():
        assert_same(value, state[name])


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.1 * grad


@pytest.mark.parametrize("name", ["batch_norm_relu", "batch_norm_add_relu"])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [(lambda y: y * (1 + 1e-4), "output"), (WrongGradient.apply, "gradient of input 0")],
)
def test_check_finds_a_wrong_fused_op(model, images, monkeypatch, name, spoil, what):
    before, right = classes(model), getattr(warpwright.functional, name)
    monkeypatch.setattr(warpwright.functional, name, lambda *a, **k: spoil(right(*a, **k)))
    with pytest.raises(SwapCheckError) as error:
        swap(model, fuse=True, check=images)
    kind = "BatchNormReLU2d" if name == "batch_norm_relu" else "BatchNormAddReLU2d"
    assert any(f"({kind}): {what}: " in line for line in error.value.lines)
    assert classes(model) == before


def test_meta_device():
    with torch.device("meta"):
        model, x = small_resnet(), torch.randn(2, 3, 32, 32)
    assert fused(swap(model, fuse=True))
    assert model(x).shape == (2, 10)


def test_patterns_have_their_modules():
    for pattern in _patterns.PATTERNS:
        keeper = _patterns.KEEPERS[pattern]
        assert issubclass(keeper, getattr(warpwright.nn, pattern.module))
        assert issubclass(keeper, _patterns.NATIVE[keeper])
        assert hasattr(warpwright.functional, pattern.functional)
        assert pickle.loads(pickle.dumps(keeper)) is keeper


def test_profile_of_the_fused_run(model, images):
    labels = torch.randint(10, (4,), device=images.device)
    before = classes(model)
    report = warpwright.profile(
        model, images, labels, runs=("swapped", "fused"), seconds=0.05, steps=1
    )
    rows = {row["op"]: row for row in report.ops}
    assert [run["error"] for run in report.runs] == [None] * 3
    assert len(report.swap["fusions"]) == 7
    assert rows["relu"]["swapped"]["kernels"] > rows["relu"]["fused"]["kernels"] == 0
    assert rows["batch_norm"]["fused"]["kernels"] > 0
    assert classes(model) == before


# ---- models of others ----


def test_torchvision_resnet(device):
    models = pytest.importorskip("torchvision").models
    for build, blocks, chains in ((models.resnet18, 8, 17), (models.resnet50, 16, 49)):
        model = build(num_classes=7).to(device)
        twin = copy.deepcopy(model).double().eval()
        report = swap(model, fuse=True)
        assert not left(report)
        assert len(fused(report)) == chains
        assert sum(f.into == "BatchNormAddReLU2d" for f in report.fusions) == blocks
        x = torch.randn(2, 3, 32, 32, device=device)
        model.double().eval()
        torch.testing.assert_close(model(x.double()), twin(x.double()))
        assert list(model.state_dict()) == list(twin.state_dict())
        unswap(model)
        assert classes(model) == classes(twin)


def test_timm_resnet(device):
    """Its forward is in two methods, with layers that do nothing in between."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet18", num_classes=7).to(device).double().eval()
    twin = copy.deepcopy(model)
    assert len(fused(swap(model, fuse=True))) == 17
    x = torch.randn(2, 3, 32, 32, device=device, dtype=torch.float64)
    torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(model.forward_features(x), twin.forward_features(x))
