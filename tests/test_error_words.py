"""Errors of functions and calls that native has not: each names the argument, what came and what was
expected. Those of native's functions have native's words (the tests of each op)."""

import re

import pytest
import torch
from torch import nn

import warpwright
from warpwright import functional as F
from warpwright import graph_step, optim, quantization, testing
from warpwright import nn as ours

x, m, lin = torch.ones(2, 3, 8, 8), torch.ones(6, 8), torch.ones(10, 8)
conv, labels = torch.ones(4, 3, 3, 3), torch.arange(6)


def layer():
    return nn.Linear(8, 10)


def step(**changed):
    model = layer()
    arguments = {
        "model": model,
        "loss": nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "example": (m, labels),
    }
    return graph_step(**(arguments | changed))


class Own(nn.ReLU):
    def forward(self, input):
        return nn.functional.relu(input)


def register(**changed):
    arguments = {"forward": lambda self, input: F.relu(input), "example": lambda: (Own(), m)}
    warpwright.register_layer(Own, op="relu", **(arguments | changed))


def profile(**changed):
    arguments = {"model": layer(), "inputs": m, "target": labels}
    warpwright.profile(**(arguments | changed))


CALLS = {
    "linear_gelu: approximate: expected 'none' or 'tanh', got 'erf'": lambda: F.linear_gelu(
        m, lin, approximate="erf"
    ),
    "linear_gelu(): argument 'approximate' must be str, not int": lambda: F.linear_gelu(
        m, lin, approximate=1
    ),
    "linear_gelu: input: expected 7 features, got 8": lambda: F.linear_gelu(m, lin[:, :7]),
    "linear_silu: weight: expected the same dtype": lambda: F.linear_silu(m, lin.double()),
    "mlp: activation: expected one of 'relu', 'gelu', 'gelu_tanh', 'silu', got 'elu'": lambda: (
        F.mlp(m, lin, None, lin.t(), activation="elu")
    ),
    "mlp: input: expected 7 features, got 8": lambda: F.mlp(m, lin[:, :7], None, lin.t()),
    "mlp: weight2: expected 10 columns, the rows of weight1, got 8": lambda: F.mlp(
        m, lin, None, lin
    ),
    "mlp: bias1: expected shape [10], got [3]": lambda: F.mlp(m, lin, torch.ones(3), lin.t()),
    "mlp: bias2: expected shape [8], got [3]": lambda: F.mlp(m, lin, None, lin.t(), torch.ones(3)),
    "swiglu: gate and up: expected shapes that broadcast, got [6, 8] and [6, 3]": lambda: F.swiglu(
        m, m[:, :3]
    ),
    "geglu: gate: expected an even last dimension": lambda: F.geglu(m[:, :5]),
    "add_rms_norm: input and residual: expected shapes that broadcast, got [6, 8] and [2, 8]": (
        lambda: F.add_rms_norm(m, m[:2], (8,))
    ),
    "add_layer_norm: input and residual: expected shapes": lambda: F.add_layer_norm(m, m[:2], (8,)),
    "linear_scan: gate and input: expected shapes that broadcast": lambda: F.linear_scan(
        m, m[:, :3]
    ),
    "norm_weight should contain 4 elements not 3": lambda: F.conv2d_batch_norm_relu(
        x, conv, norm_weight=torch.ones(3), training=True
    ),
    "norm_bias should contain 4 elements not 3": lambda: F.conv2d_batch_norm(
        x, conv, norm_bias=torch.ones(3), running_mean=torch.ones(4), running_var=torch.ones(4)
    ),
    "fft_conv2d: weight: expected 1 to 8 elements in dimension 0": lambda: F.fft_conv2d(
        x, torch.ones(4, 3, 20, 20)
    ),
    "fft_conv1d: input: expected float32, float64, bfloat16 or float16, got Bool": (
        lambda: F.fft_conv1d(torch.ones(1, 2, 8).bool(), torch.ones(2, 2, 3).bool())
    ),
    "dropout(): argument 'p' must be float, not str": lambda: F.dropout(m, "0.5"),
    "filter_fn: expected a function of (module, name) or None, got int": lambda: warpwright.swap(
        layer(), filter_fn=3
    ),
    "filter_fn: expected a function of (module, name) or None, got one of (name)": (
        lambda: warpwright.swap(layer(), filter_fn=lambda name: True)
    ),
    "filter_fn: expected a function of (module, name) or None, got the class Linear": (
        lambda: warpwright.swap(layer(), filter_fn=nn.Linear)
    ),
    "ops: expected names of ops or None, got int": lambda: warpwright.swap(layer(), ops=3),
    "ops: expected names of ops or None, got function": (
        lambda: warpwright.patch(lambda: 1).__enter__()
    ),
    "loss_fn: expected a function of the model's output or None, got one of (output, target)": (
        lambda: warpwright.swap(layer(), check=m, loss_fn=lambda output, target: output)
    ),
    "loss_fn: expected a function of the model's output or None, got int": lambda: warpwright.swap(
        layer(), check=m, loss_fn=3
    ),
    "quantize: model: expected a torch.nn.Module, got int": lambda: warpwright.quantize(3),
    "unquantize: model: expected a torch.nn.Module, got int": lambda: warpwright.unquantize(3),
    "unquantize: dtype: expected a torch.dtype or None, got 'half'": lambda: warpwright.unquantize(
        layer(), "half"
    ),
    "quantize: group: expected a positive even number, got None": lambda: warpwright.quantize(
        layer(), group=None
    ),
    "quantize: scheme: expected one of ['int8', 'int4'], got ['int4']": lambda: warpwright.quantize(
        layer(), ["int4"]
    ),
    "forward: expected a function of (self, ...), got NoneType": lambda: register(forward=None),
    "example: expected a function of (), got one of (input)": lambda: register(example=layer()),
    "example: expected a function of (), got one of (x)": lambda: register(example=lambda x: x),
    "example: expected it to return a tuple of a Own and a call's arguments, got 3": (
        lambda: register(example=lambda: 3)
    ),
    "model: expected a torch.nn.Module, got the class Linear": lambda: profile(model=nn.Linear),
    "inputs: expected the model's inputs as a tensor, a tuple of arguments or a dict": (
        lambda: profile(inputs=None)
    ),
    "profile: a native step raises TypeError: linear(): argument 'input' (position 1) must be "
    "Tensor, not str, in the model (Linear)": lambda: profile(inputs=("x",)),
    "a native step raises TypeError: cross_entropy_loss(): argument 'target' (position 2)": (
        lambda: profile(target="x")
    ),
    "step: expected a function of (model) or None, got int": lambda: profile(step=3),
    "step: expected a function of (model) or None, got one of ()": lambda: profile(
        step=lambda: None
    ),
    "loss: expected a function of (output, target) or None, got the class CrossEntropyLoss": (
        lambda: profile(loss=nn.CrossEntropyLoss)
    ),
    "loss: expected a function of (output, target) or None, got one of (output)": (
        lambda: profile(loss=lambda output: output.sum())
    ),
    "loss: expected it to return a tensor of one element, got NoneType": lambda: profile(
        loss=lambda output, target: None
    ),
    "optimizer: expected a torch.optim.Optimizer or None, got list": lambda: profile(optimizer=[]),
    "optimizer: expected a torch.optim.Optimizer or None, got the class SGD": lambda: profile(
        optimizer=torch.optim.SGD
    ),
    "runs: expected an iterable of names or None, got int": lambda: profile(runs=3),
    "out: expected the path of a folder or None, got int": lambda: profile(out=3),
    "steps: expected an integer of at least 1, got None": lambda: profile(steps=None),
    "seconds: expected a positive number, got '1'": lambda: profile(seconds="1"),
    "scaler: expected a torch.amp.GradScaler or None, got int": lambda: step(scaler=3),
    "example: expected a batch (inputs, *targets) whose inputs are a tensor, a tuple": (
        lambda: step(example=(None, labels))
    ),
    "loss: expected a function of (output, *targets), of which example has 0, got one of (a, b)": (
        lambda: step(example=m, loss=lambda a, b: a)
    ),
    "loss: expected a function of (output, *targets), of which example has 1, got the class "
    "CrossEntropyLoss": lambda: step(loss=nn.CrossEntropyLoss),
    "device: expected a torch.device, 'cpu', 'cuda' or one of ": lambda: warpwright.explain(
        "relu", m, device="h300"
    ),
    "strict: enabled: expected a bool, got str": lambda: warpwright.strict("yes"),
    "autocast: expected a torch.dtype or None, got 'bf16'": lambda: step(autocast="bf16"),
    "clip_grad_norm: expected a positive number, got '1'": lambda: step(clip_grad_norm="1"),
    "inputs: expected a tuple of both functions' arguments, got Tensor": (
        lambda: testing.compare_with_native(F.relu, nn.functional.relu, m)
    ),
    "from_gptq: qweight: expected words of torch.int32, got torch.float32": (
        lambda: quantization.from_gptq(m, m, m)
    ),
    "from_awq: qweight: expected words of torch.int32": lambda: quantization.from_awq(m, m, m),
    "int8: weight: expected floating point numbers, got torch.int64": lambda: quantization.int8(
        labels[None]
    ),
    "QuantizedLinear: scales: expected a tensor, got NoneType": (
        lambda: ours.QuantizedLinear.from_codes(lin.char(), None)
    ),
    "linear_quantized: scales: expected shape (10) of int8 codes, got [2]": (
        lambda: ours.QuantizedLinear.from_codes(lin.char(), torch.ones(2))
    ),
    "weight_copies: expected a bool, got 'yes'": lambda: optim.AdamW([lin], weight_copies="yes"),
}


@pytest.mark.parametrize("words", CALLS)
def test_errors_name_argument_and_expectation(words):
    with pytest.raises(
        (TypeError, ValueError, RuntimeError, NotImplementedError), match=re.escape(words)
    ):
        CALLS[words]()


def test_a_filter_may_return_a_bool_of_a_tensor():
    report = warpwright.swap(layer(), filter_fn=lambda module, name: module.weight.isfinite().all())
    assert report.swapped


def test_a_name_that_matches_nothing_has_no_neighbour():
    with pytest.raises(ValueError, match=r"got 'head', which matches none$"):
        warpwright.swap(layer(), exclude="head")
    with pytest.raises(ValueError, match=r"got '8', which .* none; the model has, .*: '0', '1'"):
        warpwright.swap(nn.Sequential(layer(), nn.ReLU()), exclude="8")
