"""swap(fuse=True): chains of layers as one op, with the results and the state of the model as before."""

import copy
import io
import json
import pickle

import pytest
import torch
from common import classes, gradients, small_resnet
from fusion import Block, fused, left, with_forward
from torch import nn
from torch.nn import functional as native

import warpwright
from warpwright import SwapCheckError, _running_statistics, swap, swapped, unswap
from warpwright.functional import _conv_norm
from warpwright.swap import blocks, patterns
from warpwright.testing import assert_same

# ---- what it computes ----


@pytest.mark.parametrize("training", [True, False])
def test_resnet_agrees_with_native(model, images, training, calls):
    model.double().train(training)
    images = images.double().requires_grad_()
    twin = copy.deepcopy(model)
    report = swap(model, fuse=True)
    assert fused(report) == [
        ("", "1 → 2 → 3", "BatchNormReLUMaxPool2d"),
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
        assert set(calls) == {
            "batch_norm",
            "batch_norm_relu",
            "batch_norm_add_relu",
            "batch_norm_relu_max_pool2d",
        }
        assert calls.count("batch_norm_relu") == 3 * (step + 1)
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
    assert "bn2 → add → relu      3  BatchNormAddReLU2d      4, 5, 6" in text
    assert "1 → 2 → 3             1  BatchNormReLUMaxPool2d  (the model)" in text
    written = json.loads(report.to_json())
    assert written["fusions"][0] == {
        "block": "",
        "chain": "1 → 2 → 3",
        "into": "BatchNormReLUMaxPool2d",
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


def stem(self, x):
    return self.pool(self.relu(self.bn(self.conv(x))))


def stem_of_functions(self, x):
    return native.max_pool2d(native.relu(self.bn(self.conv(x))), 3, (2, 1), padding=1)


def stem_read_twice(self, x):
    x = self.relu(self.bn(self.conv(x)))
    return self.pool(x) + self.pool(2 * x)


def mlp(self, x):
    return native.silu(self.out(native.gelu(self.up(x), approximate="tanh")))


def mlp_of_layers(self, x):
    return torch.relu(self.out(self.gelu(self.up(x))))


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
        (stem, ["bn → relu → pool"]),
        (stem_of_functions, ["bn → relu → max_pool2d"]),
        (stem_read_twice, ["bn → relu"]),
        (mlp, ["up → gelu", "out → silu"]),
        (mlp_of_layers, ["up → gelu", "out → relu"]),
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
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # the norm is of fp32


# ---- what else works on a model ----


def test_deepcopy_and_pickle(model, images):
    swap(model, fuse=True)
    model.eval()
    expected = model(images)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    pickled = pickle.dumps(model)
    blocks._classes.clear()  # as in another process
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


def test_pickles_of_former_releases(model, images):
    """They name modules that are elsewhere now."""
    report = swap(model, fuse=True)
    model.eval()
    text = pickle.dumps((model, report), protocol=2)
    for name in ("blocks", "fuse", "patterns"):
        now = f"cwarpwright.swap.{name}\n".encode()
        assert now in text
        text = text.replace(now, f"cwarpwright._{name}\n".encode())
    twin, twins_report = pickle.loads(text)
    assert_same(twin(images), model(images))
    assert classes(twin) == classes(model)
    assert twins_report == report


def kept_in(graphs):
    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    return backend


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(model, images, dynamic):
    graphs = []
    swap(model, fuse=True)
    compiled = torch.compile(model, backend=kept_in(graphs), fullgraph=True, dynamic=dynamic)
    for training in (True, False):
        model.train(training)
        twin = copy.deepcopy(model)
        torch.testing.assert_close(compiled(images), twin(images))
        assert ("warpwright.batch_norm_relu" in graphs[-1]) == training
        assert "warpwright.relu" not in graphs[-1]
    torch.testing.assert_close(compiled(images[:2, :, :24]), model(images[:2, :, :24]))
    unswap(model)
    torch.testing.assert_close(compiled(images), model(images))
    assert "warpwright" not in graphs[-1]


def test_compile_with_statistics(model, images, monkeypatch):
    """One graph, too, with the operators that 16-bit images get on a GPU."""
    for module in (_running_statistics, _conv_norm):
        monkeypatch.setattr(module, "takes_statistics", lambda *_: True)
    graphs = []
    swap(model, fuse=True)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=kept_in(graphs), fullgraph=True)
    torch.testing.assert_close(compiled(images), twin(images))
    assert "warpwright.conv2d_batch_norm" in graphs[-1]


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


@pytest.mark.usefixtures("process_group")
def test_wrapped_for_distribution(device):
    model = Block().to(device)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    x = torch.randn(2, 3, 8, 8, device=device)
    wrapped(x).square().mean().backward()
    expected = model.conv.weight.grad.clone()
    model.zero_grad()
    assert fused(swap(wrapped, fuse=True)) == [("module", "bn → relu", "BatchNormReLU2d")]
    wrapped(x).square().mean().backward()
    torch.testing.assert_close(model.conv.weight.grad, expected)


def test_check(model, images):
    state = copy.deepcopy(model.state_dict())
    report = swap(model, fuse=True, check=images)
    rows = {row["module"]: row["type"] for row in report.check["modules"]}
    assert rows["4.bn2"] == "BatchNormAddReLU2d"
    assert rows["5.downsample.1"] == "Conv2dBatchNorm2d"
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
    natives = {layer.op: layer.theirs for layer in patterns.LAYERS}
    for pattern in patterns.PATTERNS:
        keeper = patterns.KEEPERS[pattern, natives[pattern.ops[pattern.keeper]]]
        assert issubclass(keeper, getattr(warpwright.nn, pattern.module))
        assert issubclass(keeper, patterns.KEEPER_LAYERS[keeper])
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
    for build, count, chains in ((models.resnet18, 8, 17), (models.resnet50, 16, 49)):
        model = build(num_classes=7).to(device)
        twin = copy.deepcopy(model).double().eval()
        report = swap(model, fuse=True)
        assert not left(report)
        assert len(fused(report)) == chains
        assert sum(f.into == "BatchNormAddReLU2d" for f in report.fusions) == count
        x = torch.randn(2, 3, 32, 32, device=device)
        model.double().eval()
        torch.testing.assert_close(model(x.double()), twin(x.double()))
        assert list(model.state_dict()) == list(twin.state_dict())
        unswap(model)
        assert classes(model) == classes(twin)


@pytest.mark.parametrize(
    ("build", "layer", "chains"),
    [("efficientnet_b0", "SiLU", 33), ("mobilenet_v3_large", "Hardswish", 20)],
)
def test_torchvision_activations(device, build, layer, chains):
    """A convolution, its norm and an activation in place, as one Sequential each.

    Native runs on the CPU: its CUDA kernel of hardswish is no float64 (batch_norm_relu_cases.py).
    """
    models = pytest.importorskip("torchvision").models
    twin = getattr(models, build)(num_classes=7).double().eval()
    model = copy.deepcopy(twin).to(device)
    report = swap(model, fuse=True)
    assert not left(report)
    assert sum(f.into == f"BatchNorm{layer}2d" for f in report.fusions) == chains
    # Norms of fewer values than these amplify roundings until no digit of a gradient is left.
    x = torch.randn(4, 3, 64, 64, device=device, dtype=torch.float64)
    torch.testing.assert_close(model(x).cpu(), twin(x.cpu()))
    for network in (model, twin):
        network.train()
        for block in network.modules():
            if "StochasticDepth" in type(block).__name__ or isinstance(block, nn.Dropout):
                block.p = 0.0
    results = []
    for network in (model, twin):
        output = network(x.to(next(network.parameters()).device))
        grads = torch.autograd.grad(output.sum(), tuple(network.parameters()))
        results.append([t.cpu() for t in (output, *grads)])
    torch.testing.assert_close(*results)
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
