"""The backward of conv2d_batch_norm as one operator, which the trace of a compilation has."""

import pytest
import torch
from common import opcheck
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck

from warpwright.swap.joins import skip_of

ops = torch.ops.warpwright
WINDOW = ([1, 1], [1, 1], [1, 1], 1)
NAMES = ("input", "weight", "residual", "norm_weight", "norm_bias")
ALL = dict.fromkeys(NAMES, True)


def operands(device, dtype=torch.float64):
    """x, weight, norm_weight, norm_bias, residual."""
    generator = torch.Generator().manual_seed(11)
    shapes = (2, 4, 5, 6), (3, 4, 3, 3), (3,), (3,), (2, 3, 5, 6)
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for s in shapes
    ]


def forward(x, weight, a, b, residual, activation):
    added = residual if activation == "relu" else None
    return ops.conv2d_batch_norm(x, weight, None, added, a, b, 1e-3, activation, *WINDOW)


def gate_of(x):
    """What the block that wrote `x` kept: its norm's input, mean and relu's mask."""
    convolved, residual = torch.randn_like(x), torch.randn_like(x)
    _, mean, _, mask = ops.batch_norm_relu(convolved, residual, None, None, None, None, True, 1e-3)
    return convolved, mean, mask


def arguments(device, activation="relu", dtype=torch.float64, gate=False, sums=None, **changes):
    """Of the operator, by name."""
    x, weight, a, b, residual = (t.detach() for t in operands(device, dtype))
    y, convolved, mean, rstd, mask = forward(x, weight, a, b, residual, activation)
    generator = torch.Generator().manual_seed(2)
    draw = lambda like: torch.randn(like.shape, generator=generator).to(like)  # noqa: E731
    parts = dict(zip(("convolved", "mean", "mask"), gate_of(x), strict=True)) if gate else {}
    wanted = {**ALL, "residual": activation == "relu" and sums is None}
    return {
        "grad_output": draw(y),
        "sums": sums,
        "skip": draw(x),
        "input": x,
        "weight": weight,
        "norm_weight": a,
        "norm_bias": b,
        "mean": mean,
        "rstd": rstd,
        "mask": mask,
        "convolved": convolved,
        **{f"gate_{name}": parts.get(name) for name in ("convolved", "mean", "mask")},
        "eps": 1e-3,
        "activation": activation,
        **dict(zip(("stride", "padding", "dilation", "groups"), WINDOW, strict=True)),
        "output_mask": list(wanted.values()),
        **changes,
    }


def call(given):
    return ops.conv2d_batch_norm_backward(*given.values())


ACTIVATIONS = pytest.mark.parametrize("activation", ["none", "relu", "silu", "hardswish"])


@ACTIVATIONS
def test_values(device, activation):
    """Those of the node, and the gradient of a shortcut around the convolution."""
    given = arguments(device, activation)
    x, weight, a, b, residual = operands(device)
    y = forward(x, weight, a, b, residual, activation)[0]
    inputs = [x, weight, residual, a, b] if activation == "relu" else [x, weight, a, b]
    expected = list(torch.autograd.grad(y, inputs, given["grad_output"]))
    expected[0] = expected[0] + given["skip"]
    *found, sums = call(given)
    assert sums is None
    torch.testing.assert_close([f for f in found if f is not None], expected)


def test_gate(device):
    """The gradient of the input passes the relu before, and is summed for the norm before."""
    given = arguments(device, gate=True)
    whole = call({**given, **dict.fromkeys(("gate_convolved", "gate_mean", "gate_mask"))})
    *found, sums = call(given)
    convolved, mean = given["gate_convolved"], given["gate_mean"]
    gated = ops.batch_norm_relu_backward(
        *(whole[0], convolved, None, None, mean, mean, given["gate_mask"], True),
        [False, False, False, True],
    )[3]
    assert torch.equal(found[0], gated)
    assert 0.2 < (gated == 0).double().mean() < 0.8
    centered = convolved - mean.view(-1, 1, 1)
    exact = [gated.sum((0, 2, 3)), (gated * centered).sum((0, 2, 3))]
    torch.testing.assert_close(sums, torch.stack(exact, 1))
    for got, want in zip(found[1:], whole[1:5], strict=True):
        assert torch.equal(got, want)


def test_sums(device):
    """A gradient that comes with its sums has passed the relu's gate."""
    given = arguments(device, "relu")
    gated = call(given)[2]
    centered = given["convolved"] - given["mean"].view(-1, 1, 1)
    sums = torch.stack([gated.sum((0, 2, 3)), (gated * centered).sum((0, 2, 3))], 1)
    wanted = [True, True, False, True, True]
    found = call({**given, "grad_output": gated, "sums": sums, "output_mask": wanted})
    expected = call({**given, "output_mask": wanted})
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("gate", [False, True])
def test_opcheck(device, gate):
    given = arguments(device, gate=gate, dtype=torch.float32)
    opcheck(ops.conv2d_batch_norm_backward.default, tuple(given.values()))
    some = {**given, "skip": None, "output_mask": [False, True, True, False, True]}
    if not gate:
        opcheck(ops.conv2d_batch_norm_backward.default, tuple(some.values()))


def test_derivatives(device):
    given = arguments(device, "silu")
    names = ("grad_output", "skip", "input", "weight", "norm_weight")

    def run(*tensors):
        found = call({**given, **dict(zip(names, tensors, strict=True))})
        return [f for f in found if f is not None]

    assert gradcheck(run, [given[name].requires_grad_() for name in names], fast_mode=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": lambda t: t[0]}, "input: expected 4 dimensions, got 3"),
        ({"weight": lambda t: t.half()}, "should be the same"),
        ({"convolved": lambda t: t[..., :-1]}, "convolved: expected shape"),
        ({"convolved": lambda t: t.float()}, "convolved: expected Double, got Float"),
        ({"grad_output": lambda t: t[1:]}, "grad_output: expected shape"),
        ({"mean": lambda t: t[1:]}, "mean: expected shape"),
        ({"norm_bias": lambda t: t[1:]}, "bias should contain 3 elements not 2"),
        ({"skip": lambda t: t[1:]}, "skip: expected shape"),
        ({"gate_mean": lambda t: t[1:]}, "gate_mean: expected shape"),
        ({"gate_mask": lambda t: t.int()}, "gate_mask: expected 1 dimension of Byte"),
        ({"gate_mask": lambda t: t[1:]}, "mask: expected"),
        ({"gate_mask": lambda t: None}, "expected all of them or none"),
        ({"skip": lambda t: None}, "gate_convolved: expected none without skip"),
        ({"sums": lambda t: torch.ones(3, 2)}, "sums: expected (shape|Double|device)"),
        ({"activation": lambda t: "silu"}, "expected no gradient of a residual without relu"),
        ({"activation": lambda t: "gelu"}, "expected none, relu, silu or hardswish, got gelu"),
    ],
)
def test_errors(device, changes, message):
    given = arguments(device, gate=True)
    if "sums" in changes:
        given["output_mask"][2] = False
    given |= {name: change(given[name]) for name, change in changes.items()}
    with pytest.raises(RuntimeError, match=message):
        call(given)


# ---- under torch.compile ----


def traced(function, *args):
    """A compilation's result, and the targets of its backward's calls."""
    seen = []

    def note(module, _):
        seen.extend(n for n in module.graph.nodes if n.op == "call_function")
        return module

    backend = aot_autograd(fw_compiler=lambda module, _: module, bw_compiler=note)
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)(*args), seen


@ACTIVATIONS
def test_compiled(device, activation):
    """One operator for the whole backward, also with a shortcut around the convolution."""

    def run(x, weight, a, b, residual):
        source = x * 1
        y = forward(source, weight, a, b, residual, activation)[0]
        skip = skip_of(source, y)
        return y.sin().sum() + skip.sin().sum()

    inputs = operands(device)[: 5 if activation == "relu" else 4]
    args = [*inputs, None][:5] if activation != "relu" else inputs
    expected = torch.autograd.grad(run(*args), inputs)
    result, seen = traced(run, *args)
    torch.testing.assert_close(torch.autograd.grad(result, inputs), expected)
    backward = [n for n in seen if n.target is ops.conv2d_batch_norm_backward.default]
    assert len(backward) == 1
    assert backward[0].args[2] is not None  # the shortcut's gradient
    assert not any(n.target is torch.ops.aten.add.Tensor for n in seen)


def test_compiled_with_symbols(device):
    def run(x, weight, a, b):
        return forward(x, weight, a, b, None, "relu")[0].square().sum()

    x, *rest, _ = operands(device)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 4):
        images = torch.cat([x.detach()] * (batch // 2)).requires_grad_()
        expected = torch.autograd.grad(run(images, *rest), (images, *rest))
        found = torch.autograd.grad(compiled(images, *rest), (images, *rest))
        torch.testing.assert_close(found, expected)


def test_fake_tensors(device):
    """With gradients of all inputs, and of some."""

    def image(*sizes):
        values = torch.empty(*sizes, dtype=torch.bfloat16, device=device)
        return values.to(memory_format=torch.channels_last).requires_grad_()

    windows = ([1, 1], [0, 0], [1, 1], 1)
    with FakeTensorMode():
        x, weights = image(64, 256, 56, 56), (image(256, 256, 1, 1), image(64, 256, 1, 1))
        for inputs in ((x, *weights), (weights[1],)):
            norm = (None, None, 1e-5, "relu", *windows)
            y = ops.conv2d_batch_norm(x, weights[0], None, x, *norm)[0]
            z = ops.conv2d_batch_norm(y, weights[1], None, None, *norm)[0]
            loss = z.sum() + skip_of(y, z).sum()
            for gradient, value in zip(torch.autograd.grad(loss, inputs), inputs, strict=True):
                assert gradient.shape == value.shape
