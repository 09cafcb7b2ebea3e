import copy
import io
import json
import pickle
import warnings

import pytest
import torch
from common import classes, gradients, small_resnet
from torch import nn

import warpwright
from warpwright import SwapCheckError, swap, swapped, unswap
from warpwright._precision import (
    CONVOLUTIONS,
    MATRIX_PRODUCTS,
    conv_allows_tf32,
    matmul_allows_tf32,
    rounded_to_tf32,
    split_products,
    tf32_products,
)
from warpwright.swap import check as swap_check
from warpwright.swap import judge
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
    report = swap(model)
    done = {e.name for e in report.swapped}
    assert {"0", "1", "2", "3", "4.conv1", "5.downsample.0", "9"} <= done
    assert {(e.name, e.reason) for e in report.left} == {("7", "warpwright has no such layer")}
    assert {(e.name, e.reason) for e in report.computes_nothing} == {("8", "computes nothing")}
    assert json.loads(report.to_json())["swapped"] == len(report.swapped) == len(done)
    text = str(report)
    assert f"swapped {len(done)} of {len(done) + 1} modules; 1 more compute nothing" in text
    assert "nn.AdaptiveAvgPool2d" in text
    assert "warpwright has no such layer: 7" in text


class MyLinear(nn.Linear):
    pass


def replaced_forward():
    module = nn.ReLU()
    module.forward = torch.tanh
    return module


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: MyLinear(2, 2), "a subclass of nn.Linear"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "parametrized"),
        (lambda: nn.LazyLinear(2), "lazy, not initialised"),
        (lambda: nn.LazyConv2d(2, 1), "lazy, not initialised"),
        (lambda: nn.LazyBatchNorm1d(), "lazy, not initialised"),
        (lambda: nn.LazyBatchNorm2d(), "lazy, not initialised"),
        (lambda: nn.LazyBatchNorm3d(), "lazy, not initialised"),
        (lambda: nn.LazyInstanceNorm2d(), "lazy, not initialised"),
        (lambda: nn.LazyConv1d(2, 1), "no such layer"),
        (lambda: nn.LazyConvTranspose2d(2, 1), "no such layer"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight: no kernel for complex64"),
        (lambda: nn.Linear(2, 2).to(torch.float8_e4m3fn), "weight: no kernel for float8_e4m3fn"),
        (lambda: torch.jit.script(nn.ReLU()), "TorchScript"),
        (lambda: warpwright.nn.ReLU(), "already warpwright's"),
        (replaced_forward, "forward is replaced on the instance"),
        (lambda: nn.Mish(), "no such layer"),
        (lambda: nn.ConvTranspose2d(1, 1, 1), "no such layer"),
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


# ---- check= ----


def test_check_agrees_and_changes_nothing(model, images):
    state = copy.deepcopy(model.state_dict())
    gradients(model, images)
    model.load_state_dict(state)
    grads = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    report = swap(model, check=images)
    assert type(model[0]) is warpwright.nn.Conv2d
    for a, b in zip(state.values(), model.state_dict().values(), strict=True):
        assert_same(b, a)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert_same(p.grad, grad)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(report.check["modules"]) == len(report.swapped)
    assert report.check["model"]["gradients_error"] < 1e-2
    assert "agree with native" in str(report)
    json.loads(report.to_json())


@pytest.mark.parametrize("fuse", [False, True])
def test_check_takes_a_resnet_on_small_images(device, fuse):
    """Its last convolutions have one output pixel: long sums that a kernel must not add in one chain."""
    models = pytest.importorskip("torchvision").models
    model = models.resnet18(num_classes=7).to(device)
    report = swap(model, fuse=fuse, check=torch.randn(4, 3, 32, 32, device=device))
    assert "agree with native" in str(report)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_check_in_low_precision(device, low):
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 9))
    model.to(device)
    x = torch.randn(16, 32, device=device)
    swap(copy.deepcopy(model).to(low), check=x.to(low))
    with torch.autocast(device, low):
        swap(model, check=x)


def test_check_measures_the_models_gradients_by_natives_error():
    """Native's bfloat16 gradients of a ResNet are off by a third; another way is seen by the output."""
    direction = torch.randn(3, 1000)

    def run(output, gradients):
        at = lambda i, length: direction[0] + length * direction[i]  # noqa: E731
        parts = {"loss": torch.ones(()), "output": at(1, output), "gradients": at(2, gradients)}
        return {part: {part: value} for part, value in parts.items()} | {"buffers": {}}

    exact, native, bf16 = run(0.0, 0.0), run(1e-3, 0.35), {torch.bfloat16}
    whole, lines = judge.compare_runs(run(1e-3, -0.35), native, exact, bf16)
    assert lines == []
    assert 0.3 < whole["gradients_native_error"] < 0.4
    _, lines = judge.compare_runs(run(1e-3, 2.0), native, exact, bf16)
    assert len(lines) == 1
    assert "gradients: relative difference" in lines[0]
    _, lines = judge.compare_runs(run(0.5, -0.35), run(0.5, 0.35), exact, bf16)
    assert len(lines) == 1, "a float64 run that took another way is no measure"


def test_check_with_dropout_loss_and_keywords(device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.unused = nn.Linear(4, 4), nn.Linear(1, 1)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x, target):
            y = nn.functional.dropout(self.linear(x), 0.5)
            return {"loss": self.loss(y, target), "labels": y.argmax(1)}

    inputs = {
        "x": torch.randn(8, 4, device=device, requires_grad=True),
        "target": torch.randint(4, (8,), device=device),
    }
    report = swap(Model().to(device), check=inputs, loss_fn=lambda out: out["loss"])
    assert report.check["unreached"] == ["unused"]
    assert "not reached by these inputs: unused" in report.check["summary"]
    with pytest.raises(TypeError, match="pass loss_fn"):
        swap(nn.Sequential(nn.MaxPool2d(2)), check=torch.ones(1, 4, 4, dtype=torch.int64))


def broken(name, monkeypatch):
    """Makes one of our functionals subtly wrong."""
    right = getattr(warpwright.functional, name)

    def wrong_forward(*args, **kwargs):
        output = right(*args, **kwargs)
        return output * (1 + 1e-4)

    monkeypatch.setattr(warpwright.functional, name, wrong_forward)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.view(-1)[0] += 0.01
        return grad


@pytest.mark.parametrize(
    ("name", "kind"), [("conv2d", "Conv2d"), ("batch_norm", "BatchNorm2d"), ("linear", "Linear")]
)
def test_check_finds_a_wrong_output(model, images, name, kind, monkeypatch):
    before, state = classes(model), copy.deepcopy(model.state_dict())
    broken(name, monkeypatch)
    with pytest.raises(
        SwapCheckError, match=rf"\({kind}\): output: relative error .*native"
    ) as error:
        swap(model, check=images)
    assert all(f"({kind})" in line for line in error.value.lines if "model:" not in line)
    assert classes(model) == before
    for a, b in zip(state.values(), model.state_dict().values(), strict=True):
        assert_same(b, a)


def test_check_finds_a_wrong_gradient(model, images, monkeypatch):
    right = warpwright.functional.max_pool2d
    monkeypatch.setattr(
        warpwright.functional,
        "max_pool2d",
        lambda x, *args, **kwargs: right(WrongGradient.apply(x), *args, **kwargs),
    )
    with pytest.raises(SwapCheckError, match=r"3 \(MaxPool2d\): gradient of input 0"):
        swap(model, check=images)


def test_check_finds_wrong_statistics(model, images, monkeypatch):
    right = warpwright.functional.batch_norm

    def wrong(x, running_mean, running_var, *args, **kwargs):
        output = right(x, running_mean, running_var, *args, **kwargs)
        if running_var is not None:
            running_var.data.mul_(0.999)  # past autograd, which saved it
        return output

    monkeypatch.setattr(warpwright.functional, "batch_norm", wrong)
    with pytest.raises(SwapCheckError, match=r"1 \(BatchNorm2d\): running_var"):
        swap(model, check=images)


@pytest.mark.parametrize(
    ("name", "module", "shape"),
    [
        ("conv2d", nn.Conv2d(24, 32, 1, stride=2), (2, 24, 12, 12)),
        ("linear", nn.Linear(200, 30), (64, 200)),
    ],
)
def test_check_measures_tf32_by_tf32(device, monkeypatch, name, module, shape):
    """If TF32 is allowed, its rounding passes even if native kept float32; no other rounding does."""
    right = getattr(warpwright.functional, name)
    model, x = nn.Sequential(module).to(device), torch.randn(shape, device=device)

    def check(allowed, rounded, split=None):
        def coarse(x, weight, *args):
            x, weight = (t + (rounded(t) - t).detach() for t in (x, weight))
            return right(x, weight, *args)

        monkeypatch.setattr(swap_check, "tf32_products", lambda device: allowed)
        monkeypatch.setattr(swap_check, "split_products", lambda device: split or {})
        monkeypatch.setattr(warpwright.functional, name, coarse)
        swap(copy.deepcopy(model), check=x)

    def tf32(t):
        return rounded_to_tf32(t.double()).to(t.dtype)

    products = {**CONVOLUTIONS, **MATRIX_PRODUCTS}
    check(products, tf32)
    with pytest.raises(SwapCheckError, match="output: relative error"):
        check({}, tf32)
    with pytest.raises(SwapCheckError, match="output: relative error"):
        check(products, lambda t: t.bfloat16().to(t.dtype))
    check({}, lambda t: rounded_to_tf32(t.double(), 20).to(t.dtype), products)
    with pytest.raises(SwapCheckError, match="output: relative error"):
        check({}, tf32, products)


@pytest.mark.gpu
def test_check_where_native_keeps_float32():
    """Native runs a strided 1x1 convolution in float32 although TF32 is allowed."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    model = nn.Sequential(nn.Conv2d(64, 128, 1, 2, bias=False), nn.Flatten(), nn.Linear(25088, 10))
    swap(model.cuda(), check=torch.randn(8, 64, 28, 28, device="cuda"))


def test_tf32_rounding():
    """To 11 bits, to nearest, whatever the sign; special values stay."""
    x = torch.tensor([1 + 2**-11, 1 + 2**-11 - 2**-20, 2 - 2**-12, 0.0, -0.0, float("inf")])
    expected = torch.tensor([1 + 2**-10, 1, 2, 0.0, -0.0, float("inf")])
    for sign in (1, -1):
        assert_same(rounded_to_tf32(sign * x.double()), sign * expected.double())
    assert rounded_to_tf32(torch.tensor(float("nan"), dtype=torch.float64)).isnan()


def test_tf32_setting():
    """Both ways to set it are read; the older getter raises once the newer was used."""
    assert not conv_allows_tf32()
    assert not matmul_allows_tf32()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    assert conv_allows_tf32()
    assert matmul_allows_tf32()


def test_products_of_our_own_setting():
    """What set_float32_matmul_precision allows to linear, whatever torch allows."""
    gpu = torch.device("cuda")
    for level, allowed, split in (
        (None, {}, {}),
        ("highest", {}, {}),
        ("high", {}, MATRIX_PRODUCTS),
        ("medium", MATRIX_PRODUCTS, {}),
    ):
        warpwright.set_float32_matmul_precision(level)
        assert tf32_products(gpu) == allowed
        assert split_products(gpu) == split
        assert tf32_products(torch.device("cpu")) == split_products(torch.device("cpu")) == {}
    torch.backends.cuda.matmul.allow_tf32 = True
    warpwright.set_float32_matmul_precision("highest")
    assert tf32_products(gpu) == {}


def test_check_measures_a_mean_by_its_terms(device, monkeypatch):
    """A running mean next to 0 may be off by the rounding of what it adds up, and by no more."""
    model = nn.Sequential(nn.BatchNorm2d(4)).to(device)
    x = torch.randn(16, 4, 32, 32, device=device)
    x -= x.mean((0, 2, 3), keepdim=True)
    right = warpwright.functional.batch_norm

    def check(ulps):
        def wrong(x, running_mean, *args, **kwargs):
            output = right(x, running_mean, *args, **kwargs)
            running_mean.data.add_(0.1 * ulps * 2.0**-23)
            return output

        monkeypatch.setattr(warpwright.functional, "batch_norm", wrong)
        swap(copy.deepcopy(model), check=x)

    check(0.5)
    with pytest.raises(SwapCheckError, match="running_mean: relative error"):
        check(3)


def test_check_restores_when_the_model_raises(model, monkeypatch):
    before = classes(model)
    with pytest.raises(RuntimeError):
        swap(model, check=torch.randn(1))
    monkeypatch.setattr(warpwright.nn.Linear, "forward", lambda self, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swap(model, check=torch.randn(4, 3, 32, 32, device=next(model.parameters()).device))
    assert classes(model) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


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
