import threading

import pytest
import torch
import torch.nn.functional as native
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright import patch
from warpwright.testing import assert_same


@pytest.fixture
def calls(monkeypatch):
    """Names of warpwright's functionals, as they are called."""
    seen = []

    def spy(name):
        right = getattr(F, name)

        def call(*args, **kwargs):
            seen.append(name)
            return right(*args, **kwargs)

        monkeypatch.setattr(F, name, call)

    for name in (
        "adaptive_avg_pool2d",
        "batch_norm",
        "conv2d",
        "conv_transpose2d",
        "cross_entropy",
        "embedding",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "linear",
        "log_softmax",
        "max_pool2d",
        "max_pool2d_with_indices",
        "relu",
        "relu_",
        "rms_norm",
        "scaled_dot_product_attention",
        *("gelu", "sigmoid", "silu", "tanh"),
        "softmax",
    ):
        spy(name)
    return seen


IMAGE, HEADS = (2, 3, 6, 6), (1, 2, 5, 8)
# the call, its input's shape, the functional of ours that it must reach
ROUTED = [
    (native.relu, IMAGE, "relu"),
    (lambda x: native.relu(x.clone(), inplace=True), IMAGE, "relu"),
    (torch.relu, IMAGE, "relu"),
    (lambda x: x.relu(), IMAGE, "relu"),
    (lambda x: torch.relu_(x.clone()), IMAGE, "relu_"),
    (lambda x: native.relu_(x.clone()), IMAGE, "relu_"),
    (lambda x: x.clone().relu_(), IMAGE, "relu_"),
    (lambda x: native.gelu(x, approximate="tanh"), IMAGE, "gelu"),
    (native.silu, IMAGE, "silu"),
    *((f, IMAGE, "sigmoid") for f in (native.sigmoid, torch.sigmoid, torch.Tensor.sigmoid)),
    *((f, IMAGE, "tanh") for f in (native.tanh, torch.tanh, torch.Tensor.tanh)),
    (lambda x: native.conv2d(x, x, padding=1), IMAGE, "conv2d"),
    (lambda x: torch.conv2d(input=x, weight=x, stride=2), IMAGE, "conv2d"),
    (lambda x: native.conv_transpose2d(x, x[0, :, None], None, 2), IMAGE, "conv_transpose2d"),
    (lambda x: torch.conv_transpose2d(x, weight=x[0, :, None]), IMAGE, "conv_transpose2d"),
    (lambda x: native.batch_norm(x, None, None, training=True), IMAGE, "batch_norm"),
    (lambda x: native.max_pool2d(x, 2), IMAGE, "max_pool2d"),
    (lambda x: torch.max_pool2d(x, 3, stride=1), IMAGE, "max_pool2d"),
    (lambda x: native.max_pool2d(x, 2, return_indices=True)[0], IMAGE, "max_pool2d_with_indices"),
    (lambda x: native.adaptive_avg_pool2d(x, 1), IMAGE, "adaptive_avg_pool2d"),
    (lambda x: native.layer_norm(x, (6,)), IMAGE, "layer_norm"),
    (lambda x: native.rms_norm(x, [6], eps=1e-5), IMAGE, "rms_norm"),
    (lambda x: torch.rms_norm(x, (6, 6)), IMAGE, "rms_norm"),
    (lambda x: native.group_norm(x, 3), IMAGE, "group_norm"),
    (lambda x: native.instance_norm(x), IMAGE, "instance_norm"),
    (nn.InstanceNorm2d(3), IMAGE, "instance_norm"),
    (lambda x: native.embedding(x.argmax(-1), x[0, 0]), IMAGE, "embedding"),
    (lambda x: native.softmax(x, 1), IMAGE, "softmax"),
    (lambda x: torch.softmax(x, -1, torch.float64), IMAGE, "softmax"),
    (lambda x: torch.special.softmax(x, 2), IMAGE, "softmax"),
    (lambda x: x.softmax(dim=1, dtype=torch.float32), IMAGE, "softmax"),
    (lambda x: native.log_softmax(x, dim=-1, dtype=torch.float64), IMAGE, "log_softmax"),
    (lambda x: torch.log_softmax(x, 1), IMAGE, "log_softmax"),
    (lambda x: torch.special.log_softmax(x, 0, dtype=torch.float32), IMAGE, "log_softmax"),
    (lambda x: x.log_softmax(1), IMAGE, "log_softmax"),
    (nn.Softmax2d(), IMAGE, "softmax"),
    (lambda x: native.linear(x, x[0, 0]), IMAGE, "linear"),
    (
        lambda x: native.cross_entropy(x, torch.zeros(2, 6, 6, dtype=torch.int64, device=x.device)),
        IMAGE,
        "cross_entropy",
    ),
    (
        lambda x: native.scaled_dot_product_attention(x, x, x, is_causal=True),
        HEADS,
        "scaled_dot_product_attention",
    ),
    (nn.ReLU(), IMAGE, "relu"),
    (nn.GELU(), IMAGE, "gelu"),
    (nn.MaxPool2d(2), IMAGE, "max_pool2d"),
    (nn.AdaptiveAvgPool2d((1, 1)), IMAGE, "adaptive_avg_pool2d"),
]


@pytest.mark.parametrize(("run", "shape", "name"), ROUTED)
def test_routes(device, calls, run, shape, name):
    x = torch.randn(shape, device=device)
    expected = run(x)
    assert calls == []
    with patch():
        actual = run(x)
    assert name in calls
    torch.testing.assert_close(actual, expected)
    calls.clear()
    run(x)
    assert calls == []


def test_gradient_needs_no_block(device):
    x = torch.randn(5, device=device, requires_grad=True)
    with patch():
        y = native.relu(x)
    assert "Warpwright" in y.grad_fn.name()
    assert_same(torch.autograd.grad(y.sum(), x)[0], (x > 0).float())


def test_ops_and_nesting(device, calls):
    x = torch.randn(IMAGE, device=device)
    with patch(ops={"max_pool2d"}):
        native.max_pool2d(native.relu(x), 2)
        assert calls == ["max_pool2d"]
        with patch(ops="relu"):
            native.max_pool2d(native.relu(x), 2)
        assert calls == ["max_pool2d", "relu", "max_pool2d"]
        native.relu(x)
    with patch(), patch():
        native.relu(x)
    assert calls == ["max_pool2d", "relu", "max_pool2d", "relu"]
    with pytest.raises(ValueError, match=r"ops: expected names out of .*; got 'mish'"):
        patch(ops=["mish"])
    with pytest.raises(TypeError, match=r"ops: expected names of ops, got a ReLU; swap\(\)"):
        patch(nn.ReLU())


def test_one_mode_twice(device, calls):
    mode = patch()
    for _ in range(2):
        with mode:
            torch.relu(torch.ones(2, device=device))
    assert calls == ["relu", "relu"]


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.ones(3, dtype=torch.int32, device=d).to_sparse(),
        lambda d: torch.ones(3, device=d).as_subclass(Tagged),
        lambda d: torch.nested.nested_tensor([torch.ones(3, device=d)]),
    ],
)
def test_without_a_kernel_it_stays_native(device, calls, make):
    with patch():
        torch.relu(make(device))
    assert calls == []


def test_complex_and_integer_linear_stay_native(device, calls):
    x = torch.ones(2, 2, dtype=torch.complex64, device=device)
    with patch():
        assert native.linear(x, x).dtype == torch.complex64
        if device == "cpu":  # native has no integer matmul on CUDA
            native.linear(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
        with pytest.raises(RuntimeError, match="Boolean inputs not supported for relu"):
            torch.relu(torch.ones(2, dtype=torch.bool, device=device))
    assert calls == []
    with patch():
        torch.relu(torch.ones(2, dtype=torch.int16, device=device))
    assert calls == ["relu"]


def test_left_after_an_error(device, calls):
    with pytest.raises(RuntimeError, match="stop"), patch():
        raise RuntimeError("stop")
    torch.relu(torch.ones(2, device=device))
    assert calls == []


def test_other_threads_are_not_touched(device, calls):
    with patch():
        thread = threading.Thread(target=lambda: torch.relu(torch.ones(2, device=device)))
        thread.start()
        thread.join()
    assert calls == []


def test_transformer_encoder_layer(device, calls):
    """multi_head_attention_forward is Python that calls the attention: routed inside it too."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(device)
    x = torch.randn(2, 5, 16, device=device)
    for training in (True, False):
        layer.train(training)
        expected = layer(x)
        calls.clear()
        with patch():
            actual = layer(x)
        assert {"scaled_dot_product_attention", "linear", "relu"} <= set(calls)
        torch.testing.assert_close(actual, expected)


def test_with_swap(device, calls):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return native.relu(self.linear(x))

    model = Model().to(device)
    x = torch.randn(3, 8, device=device)
    expected = model(x)
    with warpwright.swapped(model), patch(ops={"relu"}):
        torch.testing.assert_close(model(x), expected)
    assert calls == ["linear", "relu"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph

    weight = torch.randint(-4, 4, (5, 7), device=device).float()

    def f(x):  # small integers: the same bits in any order
        return native.linear(native.relu(x - 1), weight) * 2

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=backend)
    x = torch.randint(-4, 4, (3, 7), device=device).float()
    expected = f(x)
    with patch():
        assert_same(compiled(x), expected)
    assert "warpwright.linear" in graphs[0]
    assert_same(compiled(x), expected)  # outside: compiled again
    assert "warpwright" not in graphs[1]
    with torch.autocast(device, torch.bfloat16), patch():
        assert native.relu(x).dtype == torch.float32
