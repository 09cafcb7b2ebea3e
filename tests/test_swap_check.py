"""swap(check=...) measures the swapped model by native's own error, and changes nothing in it."""

import copy
import json

import pytest
import torch
from common import classes, gradients
from torch import nn

import warpwright
from warpwright import SwapCheckError, swap
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
    with pytest.raises(ValueError, match="check: expected inputs that the native model takes"):
        swap(model, check=torch.randn(1))
    monkeypatch.setattr(warpwright.nn.Linear, "forward", lambda self, x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        swap(model, check=torch.randn(4, 3, 32, 32, device=next(model.parameters()).device))
    assert classes(model) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x, scale, bias=None):
        return self.head(x) * scale


@pytest.mark.parametrize(
    ("inputs", "raised", "words"),
    [
        (torch.ones(3, 5), TypeError, ["got TwoInputs(float32 (3, 5) on cpu)", "'scale'"]),
        (
            (torch.ones(3, 5), 2.0),
            RuntimeError,
            ["got TwoInputs(float32 (3, 5) on cpu, float)", "(3x5 and 4x2)", "in head (Linear)"],
        ),
        (
            {"x": torch.ones(3, 4).long(), "scale": None},
            RuntimeError,
            ["got TwoInputs(x=int64 (3, 4) on cpu, scale=None)", "same dtype", "in head (Linear)"],
        ),
        ({"y": torch.ones(3, 4)}, TypeError, ["got TwoInputs(y=float32 (3, 4) on cpu)", "'y'"]),
    ],
)
def test_check_names_inputs_that_native_refuses(inputs, raised, words):
    model = nn.Sequential(nn.ReLU(), TwoInputs())[1]
    before, random = classes(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"^check: expected inputs that") as error:
        swap(model, check=inputs)
    text = str(error.value)
    for word in (*words, "TwoInputs.forward(x, scale, bias=)", raised.__name__):
        assert word in text
    assert text.endswith("Nothing was swapped")
    assert isinstance(error.value.__cause__, raised)
    assert classes(model) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_check_names_a_backward_that_native_refuses():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x).exp()
            return y.add_(1)

    with pytest.raises(ValueError, match=r"check: .* modified by an inplace operation"):
        swap(InPlace(), check=torch.ones(2, 4))


def test_check_names_a_bad_loss():
    for loss, error, words in (
        (lambda out: 1.0, TypeError, "loss_fn: expected it to return a scalar tensor, got float"),
        (lambda out: out, ValueError, r"loss_fn: expected .* scalar tensor, got shape \(2, 3\)"),
    ):
        model = nn.Sequential(nn.Linear(4, 3))
        with pytest.raises(error, match=words):
            swap(model, check=torch.ones(2, 4), loss_fn=loss)
        assert type(model[0]) is nn.Linear
