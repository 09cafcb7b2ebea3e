"""Tools that look into models: they work on a swapped model as on a native one, or say why not."""

import copy
import pickle
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as native
from malformed_calls import public_calls
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.flop_counter import FlopCounterMode

import warpwright
import warpwright.functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down = nn.Conv2d(4, 8, 1)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn(self.conv(x)))))
        return self.relu(y + self.down(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        self.block = Block()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x):
        return self.fc(self.pool(self.block(self.stem(x))).flatten(1))


HOW = ("native", "swapped", "fused")


def net(how, seed=0):
    torch.manual_seed(seed)
    model = Net().eval()
    if how != "native":
        warpwright.swap(model, fuse=how == "fused")
    return model


@pytest.fixture
def images():
    return torch.randn(2, 3, 16, 16)


# ---- torch.fx ----


def layers_of(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_symbolic_trace(how, training, images):
    right = net("native").train(training)
    model = net(how).train(training)
    traced = torch.fx.symbolic_trace(model)
    assert layers_of(traced.graph) == layers_of(torch.fx.symbolic_trace(right).graph)
    torch.testing.assert_close(traced(images), right(images))
    assert traced.get_submodule("block.conv") is model.block.conv  # our kernels run
    again = torch.fx.symbolic_trace(pickle.loads(pickle.dumps(model)))
    assert layers_of(again.graph) == layers_of(traced.graph)


@pytest.mark.parametrize("how", HOW)
def test_feature_extractor(how, images):
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    model = net(how)
    features = extraction.create_feature_extractor(model, ["stem.2", "block.relu", "fc.0"])(images)
    assert {name: tuple(x.shape) for name, x in features.items()} == {
        "stem.2": (2, 4, 14, 14),
        "block.relu": (2, 8, 7, 7),
        "fc.0": (2, 16),
    }


def test_modules_of_classes_and_instances():
    for layer in (warpwright.nn.Linear(2, 2), warpwright.nn.MLP(2, 4, 2)):
        assert type(layer).__module__ == "warpwright.nn"
        assert layer.__module__.startswith("torch.nn")
        assert not layer.__module__.startswith("torch.nn.")  # torch.compile's built-in layers

    class Mine(warpwright.nn.Linear):
        pass

    assert Mine.__module__ == Mine(2, 2).__module__ == __name__
    assert "warpwright" not in repr(Mine)
    Mine.__module__ = "elsewhere"
    assert Mine.__module__ == "elsewhere"
    copied = pickle.loads(pickle.dumps(warpwright.nn.ReLU()))
    assert type(copied) is warpwright.nn.ReLU


# ---- torch.ao.quantization ----

SAYS = r"leaves warpwright's layers in floating point: call warpwright.unswap\(model\) first"


@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_quantize_dynamic(how, images):
    from torch.ao.quantization import quantize_dynamic

    model = net(how)
    expected = model(images)
    with pytest.warns(UserWarning, match=SAYS):
        same = quantize_dynamic(model, {nn.Linear})
    torch.testing.assert_close(same(images), expected)
    warpwright.unswap(model)
    quantised = quantize_dynamic(model, {nn.Linear})
    assert type(quantised.fc[2]).__module__.startswith("torch.ao.nn.quantized")
    assert "qconfig" not in vars(net(how).fc[0])


@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_prepare_fx(how, images):
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model = net(how)
    expected = model(images)
    with pytest.warns(UserWarning, match=SAYS):
        prepared = prepare_fx(model, get_default_qconfig_mapping(), (images,))
    torch.testing.assert_close(prepared(images), expected)
    torch.testing.assert_close(convert_fx(prepared)(images), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_fuse_modules(how):
    from torch.ao.quantization import fuse_modules

    model = net(how)
    with pytest.raises(AssertionError, match=r"warpwright\.nn\.Conv2d', which warpwright\.unswap"):
        fuse_modules(model, [["stem.0", "stem.1", "stem.2"]])
    warpwright.unswap(model)
    assert (
        type(fuse_modules(model, [["stem.0", "stem.1", "stem.2"]]).stem[0]).__name__ == "ConvReLU2d"
    )


def test_quantisation_of_one_layer():
    layer = warpwright.nn.Linear(2, 2)
    assert not hasattr(layer, "qconfig")
    with pytest.warns(UserWarning, match=SAYS):
        layer.qconfig = None
    assert layer.qconfig is None
    assert copy.deepcopy(layer).qconfig is None
    del layer.qconfig
    assert not hasattr(layer, "qconfig")


# ---- TorchScript ----


@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_script(how, images):
    model = net(how)
    children = dict(model.named_modules())
    message = (
        r"torch.jit.script can't compile warpwright's \w+: call warpwright.unswap\(model\) first"
    )
    for module in (model, model.fc[0], model.fc):
        with pytest.raises(RuntimeError, match=message):
            torch.jit.script(module)
    assert dict(model.named_modules()) == children
    expected = model(images)
    torch.testing.assert_close(torch.jit.trace(model, images)(images), expected)
    warpwright.unswap(model)
    torch.testing.assert_close(torch.jit.script(model)(images), expected)


# ---- FLOPs ----


def flops(function, *args):
    with FlopCounterMode(display=False) as counter:
        result = function(*args)
        result = result[0] if isinstance(result, tuple) else result
        if result.requires_grad:
            result.sum().backward()
    return counter.get_flop_counts(), counter.get_total_flops()


@pytest.mark.parametrize("how", ["swapped", "fused"])
@pytest.mark.parametrize("training", [False, True])
def test_flops_of_a_model(device, how, training):
    images = torch.randn(2, 3, 16, 16, device=device, requires_grad=training)
    right, model = (
        net(h).to(device).train(training).requires_grad_(training) for h in ("native", how)
    )
    theirs, total = flops(right, images)
    mine, found = flops(model, images)
    assert found == total > 0
    assert {name: sum(c.values()) for name, c in mine.items()} == {
        name: sum(c.values()) for name, c in theirs.items()
    }


CALLS = {
    "linear of a vector": (lambda of: of.linear, [(4,), (6, 4)]),
    "linear": (lambda of: of.linear, [(2, 3, 4), (6, 4), (6,)]),
    "conv2d": (
        lambda of: lambda x, w, b: of.conv2d(x, w, b, 2, 1),
        [(2, 3, 9, 9), (4, 3, 3, 3), (4,)],
    ),
    "conv2d of one image": (lambda of: of.conv2d, [(3, 9, 9), (4, 3, 3, 3)]),
    "conv_transpose2d": (
        lambda of: lambda x, w, b: of.conv_transpose2d(x, w, b, 2, 1, 1),
        [(2, 3, 5, 6), (3, 4, 3, 3), (4,)],
    ),
    "conv_transpose2d of one image": (lambda of: of.conv_transpose2d, [(3, 5, 6), (3, 4, 3, 3)]),
    "conv_transpose2d in groups": (
        lambda of: lambda x, w: of.conv_transpose2d(x, w, groups=2),
        [(2, 4, 5, 6), (4, 2, 3, 3)],
    ),
    "conv2d same": (
        lambda of: lambda x, w: of.conv2d(x, w, padding="same"),
        [(2, 3, 9, 9), (4, 3, 3, 3)],
    ),
    "conv2d in groups": (
        lambda of: lambda x, w: of.conv2d(x, w, groups=2),
        [(2, 4, 9, 9), (4, 2, 3, 3)],
    ),
}


@pytest.mark.parametrize("gradients", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", CALLS)
def test_flops_as_native(device, name, gradients):
    make, shapes = CALLS[name]
    needs = (*gradients, False)
    args = [
        torch.randn(s, device=device, requires_grad=n) for s, n in zip(shapes, needs, strict=False)
    ]
    assert flops(make(F), *args)[1] == flops(make(native), *args)[1] > 0


def test_flops_of_the_others(device):
    """Products alone: b h S_q S_k (d + d_v) forward; the backward computes the scores once more."""
    shapes = [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)]
    q, k, v = (torch.randn(s, device=device, requires_grad=True) for s in shapes)
    scores = 2 * 2 * 3 * 5 * 7
    found = flops(F.scaled_dot_product_attention, q, k, v)[1]
    assert found == scores * (8 + 6) + scores * (3 * 8 + 2 * 6)
    x, w = torch.randn(3, 8, device=device, requires_grad=True), torch.randn(5, 8, device=device)
    target, product = torch.tensor([0, 1, 4], device=device), 2 * 3 * 5 * 8
    assert flops(F.linear_cross_entropy, x, w, target)[1] == 2 * product
    whole = flops(lambda *a: F.linear_cross_entropy(*a, reduction="none"), x, w, target)[1]
    assert whole == product + 2 * product  # the backward computes the logits once more
    for name in ("linear_relu", "linear_gelu", "linear_silu"):
        assert flops(getattr(F, name), x, w)[1] == 2 * product
    assert flops(F.relu, x)[1] == 0


def excited(x, w1, b1, w2, b2):
    hidden = native.silu(native.conv2d(x.mean((2, 3), keepdim=True), w1, b1))
    return x * native.conv2d(hidden, w2, b2).sigmoid()


@pytest.mark.parametrize(
    "needs", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
def test_flops_of_squeeze_excitation(device, needs):
    """Native's chain counts the two convolutions."""
    x, w1, w2 = (
        torch.randn(s, device=device, requires_grad=n)
        for s, n in zip(((2, 6, 5, 5), (3, 6, 1, 1), (6, 3, 1, 1)), needs, strict=True)
    )
    b1, b2 = torch.randn(3, device=device), torch.randn(6, device=device)
    found = flops(lambda *a: F.squeeze_excitation(*a, "silu"), x, w1, b1, w2, b2)[1]
    assert found == flops(excited, x, w1, b1, w2, b2)[1] > 0


# Functions without a product; dropout's and norms' arithmetic counts for nothing in native, too.
WITHOUT_PRODUCTS = re.compile(
    r"relu_?|gelu|silu|sigmoid|tanh|dropout|swiglu|geglu|layer_scale_add|(rotary_)?embedding|quantize_rows|"
    r"(log_)?softmax|(layer|rms|group|instance|batch)_norm(_\w+)?|add_(layer|rms)_norm|"
    r"cum(sum|prod)|logcumsumexp|linear_scan|sum|mean|amax|logsumexp|var|std|cross_entropy|"
    r"(relu_)?max_pool2d(_with_indices)?|adaptive_avg_pool2d"
)


@pytest.mark.parametrize("name", public_calls("cpu", 0))
def test_every_function_with_a_product_has_flops(name):
    args, kwargs = public_calls("cpu", 0)[name]
    found = flops(lambda *a: getattr(F, name)(*a, **kwargs), *args)[1]
    assert (found > 0) == (WITHOUT_PRODUCTS.fullmatch(name) is None)


@pytest.mark.parametrize("first", ["warpwright", "torch.utils.flop_counter"])
def test_flops_in_any_order_of_imports(first):
    code = f"""
import {first}
import torch, warpwright
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    warpwright.functional.linear(torch.randn(2, 3), torch.randn(4, 3))
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["48"]


# ---- hooks on every module ----


@pytest.mark.parametrize("how", ["swapped", "fused"])
@pytest.mark.parametrize(
    "register",
    [
        global_hooks.register_module_forward_hook,
        global_hooks.register_module_forward_pre_hook,
        global_hooks.register_module_full_backward_hook,
        global_hooks.register_module_full_backward_pre_hook,
    ],
)
def test_global_hooks_see_every_layer(how, register, images):
    def calls(model):
        names = {module: name for name, module in model.named_modules()}
        seen = []
        hook = register(lambda module, *args: seen.append(names[module]))
        try:
            model(images.clone().requires_grad_()).sum().backward()
        finally:
            hook.remove()
        return seen

    model = net(how)
    assert calls(model) == calls(net("native"))
    seen = []
    model.stem[0].register_forward_hook(lambda module, args, output: seen.append(output))
    model(images)
    assert len(seen) == 1


def test_fused_again_without_global_hooks(monkeypatch, images):
    calls = []
    right = F.batch_norm_relu
    monkeypatch.setattr(F, "batch_norm_relu", lambda *a, **k: calls.append(1) or right(*a, **k))
    model = net("fused")
    with torch.no_grad():
        hook = global_hooks.register_module_forward_hook(lambda *args: None)
        model(images)
        hook.remove()
        assert calls == []
        model(images)
    assert calls


def test_names_in_a_summary():
    """Summaries name layers by their classes and count parameters."""
    text = str(net("fused"))
    assert "(conv): warpwright.Conv2d(4, 8, kernel_size=(3, 3)" in text
    assert sum(p.numel() for p in net("fused").parameters()) == sum(
        p.numel() for p in net("native").parameters()
    )


@pytest.mark.parametrize("how", ["swapped", "fused"])
def test_torchinfo(how, images):
    """The same layers, sizes and products."""
    torchinfo = pytest.importorskip("torchinfo")

    def summary(model):
        found = torchinfo.summary(model, input_data=images, verbose=0, depth=9)
        layers = [(i.var_name, i.output_size, i.num_params) for i in found.summary_list]
        return layers, found.total_mult_adds

    assert summary(net(how)) == summary(net("native"))
