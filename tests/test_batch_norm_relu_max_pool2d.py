"""batch_norm_relu_max_pool2d against the chain of native ops that it replaces."""

import pytest
import torch
import torch.nn.functional as native
from batch_norm_cases import SHORT, compare, parameters
from common import (
    assert_compiles_with_running_stats,
    assert_func_transforms_agree,
    assert_no_leak,
    gradcheck,
    layouts,
    opcheck,
    subsets,
)
from native_suites import Errors
from native_suites import compare as compare_cases
from test_max_pool2d import SHAPES, WINDOWS, distinct
from torch import nn

import warpwright.functional as F
import warpwright.nn as ours
from warpwright.testing import assert_same

FORMATS = (torch.contiguous_format, torch.channels_last)
TRAINING = pytest.mark.parametrize("training", [True, False])
# Every kernel: unrolled with and without overlap, pairs, any window.
SOME_WINDOWS = [(2, 2, 0, 1), (3, 2, 1, 1), (2, 2, 1, 1), ((3, 2), (1, 2), 1, 1), (3, 2, 1, 2)]


def chain(x, mean, var, weight, bias, training, momentum, eps, *window):
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # native's CUDA backward fails on a lone bias
    y = native.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
    return native.max_pool2d(torch.relu(y), *window)


def on_copies(function, training, *window, eps=1e-5):
    """Leaves the running statistics that it is given as they are."""

    def call(x, weight, bias, mean, var):
        stats = (None, None) if mean is None else (mean.clone(), var.clone())
        return function(x, *stats, weight, bias, training, 0.1, eps, *window)

    return call


def fused(*args):
    return F.batch_norm_relu_max_pool2d(*args)


@TRAINING
def test_error_rule(device, dtype, training):
    """Over many cases: which outputs the relu cuts is luck of the roundings in a single one."""
    errors = Errors()
    for window in SOME_WINDOWS:
        for shape in [*SHAPES, (6, 40, 14, 14), (3, 7, 30, 31)]:
            mean, var, weight, bias = parameters(shape[1], device, dtype)
            base = torch.randn(shape, device=device) * 2 + 1
            for name, x in layouts(base.to(dtype)):
                if shape != SHAPES[0] and name not in ("contiguous", "channels_last"):
                    continue
                args = (
                    x.detach().requires_grad_(),
                    weight.clone().requires_grad_(),
                    bias.clone().requires_grad_(),
                    mean,
                    var,
                )
                functions = (
                    on_copies(fused, training, *window),
                    on_copies(chain, training, *window),
                )
                what = f"{shape} {name} {window}"
                compare_cases(*functions, args, {}, what, errors, amplifies=True)
    errors.check()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_bit_equal_on_integers(device, dtype, window, ceil_mode):
    """Nothing rounds: output and gradients are native's bits. rstd is 1 / sqrt(0.75 + 0.25)."""
    for shape in SHAPES:
        c = shape[1]
        stats = torch.full((c,), -3.0, device=device), torch.full((c,), 0.75, device=device)
        weight = torch.tensor([1.0, -2.0, 0.5, 0.0], device=device).repeat(c)[:c]
        bias = torch.tensor([-8.0, 4.0, 0.0, 1.0, -2.0], device=device).repeat(c)[:c]
        values = [t.to(dtype) for t in (weight, bias, *stats)]
        for fmt in FORMATS:
            x = distinct(shape, device, dtype).contiguous(memory_format=fmt)
            leaves = [t.clone().requires_grad_() for t in (x, *values[:2])]
            results = []
            for f in (fused, chain):
                output = on_copies(f, False, *window, ceil_mode, eps=0.25)(*leaves, *values[2:])
                cotangent = torch.arange(output.numel(), device=device) % 3 - 1.0
                cotangent = cotangent.to(dtype).reshape(output.shape)
                grads = torch.autograd.grad(output, leaves, cotangent)
                results.append((output.detach() + 0.0, *(g + 0.0 for g in grads)))
            assert results[0][0].stride() == results[1][0].stride()
            # The input's order. Native's CUDA batch norm of inference falls out of channels_last.
            assert results[0][1].stride() == torch.empty_like(x).stride()
            assert_same(results[0][:2], results[1][:2], f"{shape} {fmt}")
            if dtype not in SHORT:  # whose sums need not fit
                torch.testing.assert_close(results[0][2:], results[1][2:])


@TRAINING
def test_winners_are_those_of_the_single_ops(device, dtype, training):
    """Values are rounded before they are compared: ties, zeros and NaN fall as in the chain."""
    for shape in ((4, 16, 9, 10), (3, 5, 8, 8)):
        mean, var, weight, bias = parameters(shape[1], device, dtype)
        weight[::3] = 0  # the whole plane is one tie, of either sign or 0
        bias[:3] = torch.tensor([0.0, 1.0, -1.0], device=device).to(dtype)
        base = torch.randint(-3, 4, shape, device=device).to(dtype) / 2  # ties
        if not training:
            base[0, 1, 2, 3] = float("nan")
            base[1, 2, 0, 0] = float("inf")
        for window in SOME_WINDOWS:
            for fmt in FORMATS:
                x = base.contiguous(memory_format=fmt).requires_grad_()
                output = on_copies(fused, training, *window)(x, weight, bias, mean, var)
                y = F.batch_norm_relu(x, mean.clone(), var.clone(), weight, bias, training)
                expected = F.max_pool2d(y, *window) + 0.0
                cotangent = torch.randn_like(expected)
                grads = [torch.autograd.grad(o, x, cotangent)[0] for o in (output, expected)]
                if training and device == "cuda":  # statistics summed in another order
                    torch.testing.assert_close(output, expected)
                    continue
                assert_same(output, expected, f"{shape} {window}")
                near = {"rtol": 2e-2, "atol": 2e-2} if dtype in SHORT else {}
                torch.testing.assert_close(*grads, equal_nan=True, **near)


@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics(device, dtype, momentum):
    for shape in ((2, 3, 9, 11), (6, 8, 7, 7)):
        mean, var, weight, bias = parameters(shape[1], device, dtype)
        for _, x in layouts((torch.randn(shape, device=device) * 3 - 2).to(dtype)):
            one, two = (mean.clone(), var.clone()), (mean.clone(), var.clone())
            version = one[0]._version
            fused(x, *one, weight, bias, True, momentum, 1e-5, 2)
            F.batch_norm(x, *two, weight, bias, True, momentum)
            assert one[0]._version > version
            if device == "cuda":  # summed in another order
                torch.testing.assert_close(one, two)
            else:
                assert_same(one, two)


@pytest.mark.parametrize("present", [(0, 0), (1, 0), (0, 1)], ids=str)
@TRAINING
def test_optional_arguments(device, dtype, training, present):
    mean, var, weight, bias = parameters(6, device, dtype)
    weight = weight.requires_grad_() if present[0] else None
    bias = bias.requires_grad_() if present[1] else None
    for fmt in FORMATS:
        x = torch.randn(4, 6, 5, 5, device=device).to(dtype)
        # Nothing at the kink, where the rounding of either side decides.
        x = torch.where(x == mean[:, None, None], x + 1, x).contiguous(memory_format=fmt)
        for stats in ((mean, var), (None, None)) if training else ((mean, var),):
            compare(
                on_copies(fused, training, 2),
                on_copies(chain, training, 2),
                (x.requires_grad_(), weight, bias, *stats),
            )


@TRAINING
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_mixed_dtype(device, dtype, training):
    for shape in ((4, 8, 6, 6), (3, 5, 7, 7)):
        mean, var, weight, bias = parameters(shape[1], device, torch.float32)
        for fmt in FORMATS:
            x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=fmt)
            compare(
                on_copies(fused, training, 3, 2, 1),
                on_copies(chain, training, 3, 2, 1),
                (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), mean, var),
            )


def test_large_windows(device, dtype):
    # 255 taps are the last that fit a byte, 256 the first that don't.
    mean, var, weight, bias = parameters(3, device, dtype)
    for kernel in ((15, 17), (16, 16)):
        for fmt in FORMATS:
            x = torch.randn(2, 3, 20, 23, device=device).to(dtype).contiguous(memory_format=fmt)
            compare(
                on_copies(fused, True, kernel, 3, 5),
                on_copies(chain, True, kernel, 3, 5),
                (x.requires_grad_(), weight, bias, mean, var),
            )


@TRAINING
def test_empty(device, training):
    mean, var, weight, bias = parameters(3, device, torch.float32)
    x = torch.randn(0, 3, 4, 4, device=device, requires_grad=True)
    output = fused(
        x, mean, var, weight.requires_grad_(), bias.requires_grad_(), training, 0.1, 1e-5, 2
    )
    grads = torch.autograd.grad(output.sum(), (x, weight, bias))
    assert output.shape == (0, 3, 2, 2)
    assert grads[0].shape == x.shape
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert torch.equal(grads[2], torch.zeros_like(bias))


@TRAINING
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradients(device, training, needs):
    for fmt, window in zip(FORMATS, ((2,), (3, 2, 1)), strict=True):
        mean, var, weight, bias = parameters(2, device, torch.float64)
        x = torch.randn(2, 2, 4, 3, device=device).double().contiguous(memory_format=fmt)
        inputs = [t.requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]

        def function(x, weight, bias, mean=mean, var=var, window=window):
            return on_copies(fused, training, *window, eps=0.1)(x, weight, bias, mean, var)

        gradcheck(function, inputs)


@TRAINING
def test_double_backward_matches_native(device, training):
    mean, var, weight, bias = parameters(4, device, torch.float64)
    x = torch.randn(5, 4, 6, 6, device=device, dtype=torch.float64)

    def second(f):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        output = on_copies(f, training, 3, 2, 1)(*leaves, mean, var)
        grads = torch.autograd.grad(output.pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)

    torch.testing.assert_close(second(fused), second(chain))


def test_func_transforms(device):
    x = torch.randn(3, 4, 4, 4, device=device, dtype=torch.float64)
    _, _, weight, bias = parameters(4, device, torch.float64)
    assert_func_transforms_agree(
        fused,
        chain,
        lambda f, stats: lambda t: f(t, *stats, weight, bias, True, 0.1, 1e-5, 2),
        x,
    )


def test_forward_ad_of_parameters(device):
    x = torch.randn(3, 4, 5, 5, device=device, dtype=torch.float64)
    mean, var, weight, bias = parameters(4, device, torch.float64)
    for training in (True, False):
        results = [
            torch.func.jvp(
                lambda w, b, f=f, tr=training: on_copies(f, tr, 2)(x, w, b, mean, var),
                (weight, bias),
                (bias, weight),
            )
            for f in (fused, chain)
        ]
        torch.testing.assert_close(results[0], results[1])


def test_opcheck(device):
    ops = torch.ops.warpwright
    mean, var, weight, bias = parameters(4, device, torch.float32)
    weight.requires_grad_()
    bias.requires_grad_()
    window = ([3, 3], [2, 2], [1, 1], [1, 1])
    for name, x in layouts(torch.randn(3, 4, 5, 6, device=device)):
        if name.startswith("offset"):
            continue
        x = x.detach().requires_grad_()
        forward = ops.batch_norm_relu_max_pool2d.default
        opcheck(forward, (x, weight, bias, mean, var, False, 1e-5, *window, False))
        opcheck(forward, (x, weight, None, None, None, True, 1e-5, *window, True))
        opcheck(forward, (x.detach(), None, None, mean, var, False, 1e-5, *window, False, True))
        update = ops.batch_norm_relu_max_pool2d_update.default
        stats = mean.clone(), var.clone()
        opcheck(update, (x, weight, bias, *stats, 0.1, 1e-5, *window, False))
        output, *saved = forward(x, weight, bias, None, None, True, 1e-5, *window, False)
        save_mean, rstd, codes, winners = (t.detach() for t in saved)
        grad = torch.randn_like(output).requires_grad_()
        for training, wanted in ((True, [True] * 3), (False, [True, False, True])):
            opcheck(
                ops.batch_norm_relu_max_pool2d_backward.default,
                (grad, x, codes, winners, weight, bias, save_mean, rstd, training, *window, wanted),
            )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_compile(device, dynamic, fmt):
    # float64: evaluation is native's while compiling, and the gradient is a sum that cancels.
    _, _, weight, bias = parameters(4, device, torch.float64)
    weight.requires_grad_()
    bias.requires_grad_()

    def step(x, mean, var):
        y = fused(x * 2, mean, var, weight, bias, True, 0.1, 1e-5, 3, 2, 1)
        return fused(y, mean, var, weight, bias, False, 0.1, 1e-5, 2)

    assert_compiles_with_running_stats(step, (weight, bias), fmt, dynamic)


def test_deterministic(device):
    x = torch.randn(32, 24, 28, 28, device=device)
    for fmt in FORMATS:
        y = x.contiguous(memory_format=fmt).requires_grad_()
        runs = []
        for _ in range(3):
            output = fused(y, None, None, None, None, True, 0.1, 1e-5, 3, 2, 1)
            runs.append((output, *torch.autograd.grad(output.square().sum(), y)))
        for run in runs[1:]:
            assert_same(run, runs[0])


def test_keeps_no_activation(device):
    """For the backward: of an output a byte and the winner, and two vectors of the channels."""
    x = torch.randn(8, 16, 12, 12, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = fused(x, None, None, None, None, True, 0.1, 1e-5, 2)
    own = sum(t.nbytes for t in kept if t.numel() and t.data_ptr() != x.data_ptr())
    assert own == 2 * 16 * 4 + output.numel() * 5
    assert_no_leak(lambda t: fused(t, None, None, None, None, True, 0.1, 1e-5, 2), x)


def test_autocast_keeps_dtype(device):
    mean, var, weight, bias = parameters(3, device, torch.float32)
    x = torch.randn(2, 3, 4, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for value in (x, x.bfloat16()):
            output = fused(value, mean, var, weight, bias, False, 0.1, 1e-5, 2)
            assert output.dtype == value.dtype


@pytest.mark.parametrize(
    "change",
    [
        {"eps": 0.0},
        {"running_mean": None},
        {"running_var": torch.zeros(4)},
        {"weight": torch.zeros(4)},
        {"bias": torch.zeros(2)},
        {"input": torch.ones(1, 3, 1, 1)},
        {"input": torch.ones(4, 3, 5, 5, dtype=torch.int32)},
        {"running_mean": torch.ones(3, requires_grad=True)},
        {"kernel_size": 0},
        {"kernel_size": (2, 2, 2)},
        {"stride": 0},
        {"padding": 2},
        {"dilation": 0},
        {"kernel_size": 9},
    ],
    ids=lambda c: next(iter(c)),
)
def test_bad_input(change):
    mean, var, weight, bias = parameters(3, "cpu", torch.float32)
    arguments = {
        "input": torch.randn(4, 3, 5, 5),
        "running_mean": mean,
        "running_var": var,
        "weight": weight,
        "bias": bias,
        "training": True,
        "momentum": 0.1,
        "eps": 1e-5,
        "kernel_size": 2,
        "stride": None,
        "padding": 0,
        "dilation": 1,
        **change,
    }
    with pytest.raises((RuntimeError, ValueError)) as expected:
        chain(*arguments.values())
    with pytest.raises(expected.type) as error:
        fused(*arguments.values())
    if not str(expected.value).startswith("The function"):
        first_words = str(expected.value).split(": ")[0].split(", but")[0].rstrip(".")
        assert first_words in str(error.value)


def test_bad_shapes_and_saved_tensors(device):
    arguments = (None, None, None, None, True, 0.1, 1e-5)
    with pytest.raises(RuntimeError, match=r"expected 4D input \(got 3D input\)"):
        fused(torch.ones(3, 4, 4, device=device), *arguments, 2)
    with pytest.raises(RuntimeError, match="a window has no tap inside the image"):
        fused(torch.ones(3, 4, 1, 5, device=device), *arguments, (2, 2), 1, 1, 2)
    x = torch.ones(2, 3, 4, 4, device=device)
    pooled, stat = x[:, :, :2, :2].contiguous(), torch.ones(3, device=device)
    codes = torch.zeros(2, 3, 2, 2, dtype=torch.uint8, device=device)
    window = ([2, 2], [2, 2], [0, 0], [1, 1])
    for saved, message in (
        ((pooled, x, codes, x), "winners: expected shape .*2, 3, 2, 2.* got .*4, 4"),
        ((x, x, codes, pooled), "grad_output: expected shape .*2, 3, 2, 2.* got .*4, 4"),
        ((pooled, x, codes.int(), pooled), "codes: expected Byte .* got Int"),
        ((pooled, x, codes, pooled.double()), "winners: expected Float, got Double"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.warpwright.batch_norm_relu_max_pool2d_backward(
                *saved, None, None, stat, stat, True, *window, [True] * 3
            )


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_module(device, options):
    """Three training steps and an evaluation, and the state goes both ways."""
    module = ours.BatchNormReLUMaxPool2d(6, 3, stride=2, padding=1, **options).to(device)
    norm = nn.BatchNorm2d(6, **options).to(device)
    reference = nn.Sequential(norm, nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    for p in module.parameters():
        nn.init.normal_(p)
    norm.load_state_dict(module.state_dict())
    assert list(module.state_dict()) == list(norm.state_dict())
    for training in (True, True, True, False):
        module.train(training)
        reference.train(training)
        x = torch.randn(4, 6, 5, 7, device=device, requires_grad=True)
        output, expected = module(x), reference(x)
        cotangent = torch.randn_like(output)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(
            torch.autograd.grad(output, [x, *module.parameters()], cotangent),
            torch.autograd.grad(expected, [x, *reference.parameters()], cotangent),
        )
        torch.testing.assert_close(module.state_dict(), norm.state_dict())
    nn.BatchNorm2d(6, **options).load_state_dict(module.state_dict())
    assert repr(module).startswith("warpwright.BatchNormReLUMaxPool2d(6, eps=1e-05")
    assert "kernel_size=3, stride=2, padding=1" in repr(module)
    with pytest.raises(ValueError, match="expected 4D input"):
        module(torch.randn(4, 6, device=device))
