"""swap() and unswap() exchange a model's layers, and keep its tensors, hooks, copies and files as they are."""

import copy
import io
import json
import pickle
import warnings

import pytest
import torch
from common import classes, gradients, small_resnet
from torch import nn
from torch.distributed.fsdp import FSDPModule

import warpwright
from warpwright import swap, swapped, unswap
from warpwright.testing import assert_same


def test_swap_and_unswap(model, images):
    before, output = classes(model), copy.deepcopy(model)(images)
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    report = swap(model)
    assert {type(m).__name__ for m in model.modules() if type(m).__module__ == "warpwright.nn"} == {
        "Conv2d",
        "BatchNorm2d",
        "ReLU",
        "MaxPool2d",
        "AdaptiveAvgPool2d",
        "Linear",
    }
    assert not any(type(m) in (nn.Conv2d, nn.BatchNorm2d, nn.Linear) for m in model.modules())
    assert tensors == [id(t) for t in (*model.parameters(), *model.buffers())]
    torch.testing.assert_close(copy.deepcopy(model)(images), output)
    assert unswap(model) == len(report.swapped)
    assert classes(model) == before
    assert_same(model(images), output)
    assert unswap(model) == 0


def test_report(model):
    model.append(nn.Softplus())
    report = swap(model)
    done = {e.name for e in report.swapped}
    assert {"0", "1", "2", "3", "4.conv1", "5.downsample.0", "7", "9"} <= done
    assert {(e.name, e.reason) for e in report.left} == {("10", "warpwright has no such layer")}
    assert {(e.name, e.reason) for e in report.computes_nothing} == {("8", "computes nothing")}
    assert json.loads(report.to_json())["swapped"] == len(report.swapped) == len(done)
    text = str(report)
    assert f"swapped {len(done)} of {len(done) + 1} modules; 1 more compute nothing" in text
    assert "nn.Softplus" in text
    assert "warpwright has no such layer: 10" in text


class MyLinear(nn.Linear):
    pass


class CallsRelu(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x)


def sharded():
    """A layer with a class as fully_shard derives it."""
    layer = nn.Linear(2, 2)
    layer.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return layer


def replaced_forward():
    module = nn.ReLU()
    module.forward = torch.tanh
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: MyLinear(2, 2), "a subclass of nn.Linear"),
        (lambda: MyLinear(2, 2), "may compute something else; see warpwright.register_layer"),
        (sharded, "a subclass of nn.Linear that fully_shard made: swap before fully_shard"),
        (CallsRelu, "no such layer, but patch() routes the functions that it calls"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized"),
        (lambda: nn.LazyLinear(2), "lazy, not initialised"),
        (lambda: nn.LazyConv2d(2, 1), "lazy, not initialised"),
        (lambda: nn.LazyBatchNorm1d(), "lazy, not initialised"),
        (lambda: nn.LazyBatchNorm2d(), "lazy, not initialised"),
        (lambda: nn.LazyBatchNorm3d(), "lazy, not initialised"),
        (lambda: nn.LazyInstanceNorm2d(), "lazy, not initialised"),
        (lambda: nn.LazyConv1d(2, 1), "no such layer"),
        (lambda: nn.LazyConvTranspose2d(2, 1), "lazy, not initialised"),
        (lambda: nn.LazyConvTranspose3d(2, 1), "no such layer"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight: no kernel for complex64"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "weight: no kernel for float8_e4m3fn"),
        (lambda: torch.jit.script(nn.ReLU()), "TorchScript"),
        (lambda: warpwright.nn.ReLU(), "already warpwright's"),
        (replaced_forward, "forward is replaced on the instance: swap before it is replaced"),
        (lambda: nn.Mish(), "no such layer"),
        (lambda: nn.ConvTranspose3d(1, 1, 1), "no such layer"),
        (lambda: nn.LocalResponseNorm(2), "no such layer"),
    ],
)
def test_left_with_a_reason(make, reason):
    model = nn.Sequential(make(), nn.ReLU())
    kind = type(model[0])
    report = swap(model)
    assert type(model[0]) is kind
    (entry,) = (e for e in report.left if e.name == "0")
    assert reason in entry.reason
    assert [e.name for e in report.swapped] == ["1"]


def test_tensor_subclass_is_left():
    class Tagged(torch.Tensor):
        pass

    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Tagged))
    report = swap(nn.Sequential(linear, nn.ReLU()))
    assert report.left[0].reason == "weight: a Tagged, expected a plain tensor"


def test_ops_and_filter(model):
    report = swap(
        model, ops={"conv2d", "linear"}, filter_fn=lambda m, name: "downsample" not in name
    )
    assert {e.op for e in report.swapped} == {"conv2d", "linear"}
    reasons = {e.name: e.reason for e in report.left}
    assert reasons["1"] == "batch_norm is not in ops"
    assert reasons["5.downsample.0"] == "filter_fn said no"


def test_nothing_to_swap():
    with pytest.warns(UserWarning, match=r"nothing to swap \(1 x nn.Mish: warpwright has no such"):
        report = swap(nn.Sequential(nn.Mish()))
    assert not report.swapped
    with pytest.warns(UserWarning, match="the model has no layers"):
        swap(nn.Sequential())
    with pytest.warns(UserWarning, match="nothing to swap"), swapped(nn.Mish()):
        pass


def test_bad_arguments(model):
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got function"):
        swap(lambda x: x)
    with pytest.raises(TypeError, match="model: expected"):
        unswap(None)
    with pytest.raises(ValueError, match=r"ops: expected names out of conv2d, .*; got 'conv3d'"):
        swap(model, ops=["conv2d", "conv3d"])
    with pytest.raises(TypeError, match=r"check: expected the model's inputs as .* got int"):
        swap(model, check=3)
    assert not any(type(m).__module__ == "warpwright.nn" for m in model.modules())


def test_the_model_itself_and_shared_modules(device):
    linear = nn.Linear(3, 3).to(device)
    report = swap(linear)
    assert [e.name for e in report.swapped] == [""]
    assert type(linear) is warpwright.nn.Linear
    assert unswap(linear) == 1
    shared = nn.ReLU()
    model = nn.Sequential(linear, shared, linear, shared).to(device)
    assert len(swap(model).swapped) == 2
    assert model[0] is model[2] is linear
    model(torch.randn(2, 3, device=device)).sum().backward()


def test_hooks_optimizer_and_state_dict(model, images):
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append("forward"))
    model[0].register_full_backward_hook(lambda module, gi, go: seen.append("backward"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    native_state = copy.deepcopy(model.state_dict())
    swap(model)
    model(images).sum().backward()
    assert seen == ["forward", "backward"]
    weight = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, model[0].weight)
    assert list(model.state_dict()) == list(native_state)
    model.load_state_dict(native_state)
    native = small_resnet()
    native.load_state_dict(model.state_dict())


def test_deepcopy_and_pickle(model, images):
    swap(model)
    model.eval()
    expected = model(images)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert classes(twin) == classes(model)
        assert_same(twin(images), expected)
        unswap(twin)
        assert type(twin[0]) is nn.Conv2d
    assert type(model[0]) is warpwright.nn.Conv2d


def test_swapped_restores_even_on_error(model, images):
    model[2].__class__ = warpwright.nn.ReLU
    before = classes(model)
    with swapped(model) as same:
        assert same is model
        assert type(model[0]) is warpwright.nn.Conv2d
        model(images)
    assert classes(model) == before
    with pytest.raises(RuntimeError, match="stop"), swapped(model):
        raise RuntimeError("stop")
    assert classes(model) == before


def test_meta_device():
    with torch.device("meta"):
        model = small_resnet()
        x = torch.randn(2, 3, 32, 32)
    assert swap(model).swapped
    assert model(x).shape == (2, 10)


def test_compiled_model_sees_the_swap(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 4, device=device)
    expected = compiled(x)
    assert "warpwright" not in graphs[-1]
    with swapped(model):
        torch.testing.assert_close(compiled(x), expected)
        assert "warpwright" in graphs[-1]
    assert_same(compiled(x), expected)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(device):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    wrapped = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(2, 4, device=device)
    expected = gradients(model, x)
    assert len(swap(wrapped).swapped) == 2
    for a, b in zip(gradients(wrapped, x), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_training_stays_beside_native(device):
    """200 steps of SGD from the same seed: the loss curves stay together."""

    def train(convert):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        ).to(device)
        criterion = nn.CrossEntropyLoss()
        if convert:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                swap(model)
                swap(criterion)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x = torch.randn(32, 1, 8, 8, device=device)
        y = torch.randint(10, (32,), device=device)
        losses = []
        for _ in range(200):
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    native, mine = train(False), train(True)
    assert native[-1] < 0.3 * native[0]
    torch.testing.assert_close(mine, native, rtol=1e-3, atol=1e-4)


class Twice(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def parametrize_some(model):
    nn.utils.parametrize.register_parametrization(model[0], "weight", Twice())
    nn.utils.parametrize.register_parametrization(model[1], "bias", Twice())
    nn.utils.parametrize.register_parametrization(model[1], "weight", Twice())


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("context", [False, True])
def test_undone_after_parametrizing(fuse, context):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    x = torch.randn(2, 1, 6, 6)
    expected = model(x)
    if context:
        with warpwright.swapped(model, fuse=fuse):
            parametrize_some(model)
            twin = copy.deepcopy(model)
    else:
        warpwright.swap(model, fuse=fuse)
        parametrize_some(model)
        twin = copy.deepcopy(model)
        assert warpwright.unswap(model) == 3
    assert [type(m).__bases__[0] for m in model[:2]] == [nn.Conv2d, nn.BatchNorm2d]
    assert type(model[0]).__name__ == "ParametrizedConv2d"
    assert isinstance(twin[0], warpwright.nn.Conv2d)  # a copy is another model
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected)
    model[0].weight = model[0].weight + 1
    assert not torch.equal(model(x), expected)
    for layer, name in ((model[0], "weight"), (model[1], "bias"), (model[1], "weight")):
        nn.utils.parametrize.remove_parametrizations(layer, name)
    assert [type(m) for m in model] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU]


def test_unswap_says_what_it_leaves():
    class Mine(warpwright.nn.Linear):
        pass

    model = nn.Sequential(Mine(2, 2), nn.ReLU())
    warpwright.swap(model)
    message = r"left classes that derive from warpwright's \(Mine: 0\)"
    with pytest.warns(UserWarning, match=message):
        assert warpwright.unswap(model) == 1
    assert type(model[0]) is Mine
