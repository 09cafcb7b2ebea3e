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
    "loss_fn: expected a function of the model's output or None, got int": lambda: warpwright.swap(
        layer(), check=m, loss_fn=3
    ),
    "quantize: model: expected a torch.nn.Module, got int": lambda: warpwright.quantize(3),
    "unquantize: model: expected a torch.nn.Module, got int": lambda: warpwright.unquantize(3),
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


def test_a_name_that_matches_nothing_has_no_neighbour():
    with pytest.raises(ValueError, match=r"got 'head', which matches none$"):
        warpwright.swap(layer(), exclude="head")
    with pytest.raises(ValueError, match=r"got '8', which .* none; the model has, .*: '0', '1'"):
        warpwright.swap(nn.Sequential(layer(), nn.ReLU()), exclude="8")
