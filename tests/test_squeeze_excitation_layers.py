"""The SqueezeExcitation layer takes the place of torchvision's and timm's, under autocast and compiled too."""

import copy
import pickle

import pytest
import torch
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright import nn as ours
from warpwright import swap, unswap
from warpwright.testing import assert_as_good_as_native, assert_same


def test_layer(device):
    layer = ours.SqueezeExcitation(8, 4, "silu", "hardsigmoid", device=device)
    x = torch.randn(2, 8, 5, 5, device=device)
    parameters = layer.fc1.weight, layer.fc1.bias, layer.fc2.weight, layer.fc2.bias
    assert_same(layer(x), F.squeeze_excitation(x, *parameters, "silu", "hardsigmoid"))
    assert sorted(layer.state_dict()) == ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"]
    assert "activation='silu'" in repr(layer)
    assert_same(pickle.loads(pickle.dumps(layer))(x), layer(x))
    with pytest.raises(ValueError, match="scale_activation"):
        ours.SqueezeExcitation(8, 4, "silu", "tanh")


def of_torchvision(activation, scale_activation):
    misc = pytest.importorskip("torchvision.ops.misc")
    return misc.SqueezeExcitation(16, 4, activation, scale_activation)


def of_timm(activation, scale_activation):
    blocks = pytest.importorskip("timm.models._efficientnet_blocks")
    return blocks.SqueezeExcite(16, 0.25, act_layer=activation, gate_layer=scale_activation)


def se_module_of_timm(activation, scale_activation):
    timm = pytest.importorskip("timm.layers")
    gate = "sigmoid" if scale_activation is nn.Sigmoid else scale_activation  # a class of timm's
    return timm.SEModule(16, rd_channels=4, act_layer=activation, gate_layer=gate)


MAKERS = (of_torchvision, of_timm, se_module_of_timm)


@pytest.fixture
def runs(monkeypatch):
    """The number of calls of the functional, one entry each."""
    function, found = F.squeeze_excitation, []
    monkeypatch.setattr(
        F, "squeeze_excitation", lambda *a, **k: found.append(1) or function(*a, **k)
    )
    return found


def differentiated(layer, x):
    x = x.detach().requires_grad_()
    output = layer(x)
    leaves = [x, *layer.parameters()]
    return [output, *torch.autograd.grad(output, leaves, torch.ones_like(output))]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("scale_activation", [nn.Sigmoid, nn.Hardsigmoid])
@pytest.mark.parametrize("fuse", [False, True])
def test_swapped(device, make, activation, scale_activation, fuse, runs):
    theirs = nn.Sequential(make(activation, scale_activation)).to(device)
    mine = copy.deepcopy(theirs)
    x = torch.randn(3, 16, 6, 5, device=device)
    kind = type(mine[0])
    report = swap(mine, fuse=fuse, check=x)
    entry = next(e for e in report.entries if e.name == "0")
    assert entry.swapped
    assert entry.op == "squeeze_excitation"
    parts = [e.reason for e in report.entries if e.name.startswith("0.")]
    assert parts
    assert all(reason == f"runs as a part of {kind.__name__}" for reason in parts)
    runs.clear()
    found = differentiated(mine, x)
    assert len(runs) == 1
    truth = differentiated(copy.deepcopy(theirs).double(), x.double())
    for a, b, e in zip(found, differentiated(theirs, x), truth, strict=True):
        assert_as_good_as_native(a, b, e, factor=3)
    assert_same(copy.deepcopy(mine)(x), mine(x))
    assert_same(pickle.loads(pickle.dumps(mine))(x), mine(x))
    assert unswap(mine) == 1
    assert type(mine[0]) is kind
    assert_same(mine(x), theirs(x))


@pytest.mark.parametrize("make", MAKERS)
def test_layers_that_stay_native(device, make, runs):
    """Another activation, a hook, a replaced part: the layer's own forward."""
    x = torch.randn(3, 16, 6, 5, device=device)
    theirs = make(nn.GELU, nn.Sigmoid).to(device)
    mine = nn.Sequential(copy.deepcopy(theirs))
    swap(mine)
    runs.clear()
    assert_same(mine(x), theirs(x))
    theirs = make(nn.ReLU, nn.Sigmoid).to(device)
    mine = nn.Sequential(copy.deepcopy(theirs))
    swap(mine)
    name = next(name for name, part in mine[0].named_children() if isinstance(part, nn.Conv2d))
    seen = []
    handle = getattr(mine[0], name).register_forward_hook(lambda *a: seen.append(a))
    assert_same(mine(x), theirs(x))
    assert seen
    handle.remove()
    if hasattr(theirs, "avgpool"):
        for layer in (mine[0], theirs):
            layer.avgpool.output_size = (6, 5)  # a factor per pixel
        assert_same(mine(x), theirs(x))
    strided = nn.Conv2d(16, 4, 1, padding=1).to(device)
    setattr(mine[0], name, strided)
    setattr(theirs, name, copy.deepcopy(strided))
    with pytest.raises(RuntimeError):  # (3, 3) factors for (6, 5) pixels
        theirs(x)
    with pytest.raises(RuntimeError):
        mine(x)
    assert runs == []


@pytest.mark.parametrize("make", MAKERS)
def test_autocast_of_layers(device, make):
    theirs = make(nn.SiLU, nn.Sigmoid).to(device)
    mine = nn.Sequential(copy.deepcopy(theirs))
    swap(mine)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3, 16, 6, 5, device=device).to(dtype)
        with torch.autocast(device, dtype=torch.bfloat16):
            found, expected = mine(x), theirs(x)
        assert found.dtype == expected.dtype
        exact = copy.deepcopy(theirs).double()(x.double())
        assert_as_good_as_native(found, expected, exact)


@pytest.mark.parametrize("make", MAKERS)
def test_compiled_layers(device, make):
    mine = nn.Sequential(make(nn.SiLU, nn.Sigmoid).to(device))
    x = torch.randn(3, 16, 6, 5, device=device)
    expected = mine(x)
    swap(mine)
    compiled = torch.compile(mine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("efficientnet_b0", {"dropout": 0.0, "stochastic_depth_prob": 0.0}),
        ("mobilenet_v3_small", {"dropout": 0.0}),
    ],
)
def test_models_of_torchvision(device, name, options, runs):
    models = pytest.importorskip("torchvision.models")
    mine = getattr(models, name)(num_classes=5, **options).to(device)
    blocks = sum(type(m).__name__ == "SqueezeExcitation" for m in mine.modules())
    x = torch.randn(2, 3, 64, 64, device=device)
    theirs = copy.deepcopy(mine)
    swap(mine, fuse=True)
    runs.clear()  # the first swap of a class tries its forward on examples
    mine(x)
    assert len(runs) == blocks
    warpwright.unswap(mine)
    mine.load_state_dict(theirs.state_dict())
    mine.eval()
    theirs.eval()
    swap(mine, fuse=True)
    torch.testing.assert_close(mine(x), theirs(x), rtol=1e-3, atol=1e-3)
