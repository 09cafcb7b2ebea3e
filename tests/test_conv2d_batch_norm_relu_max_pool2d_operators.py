"""The operators of conv2d_batch_norm_relu_max_pool2d: derivatives, registration, errors."""

import pytest
import torch
from first_layer_cases import POOL, chain, fused, operands, statistics
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.library import opcheck

import warpwright.functional as F
from warpwright.testing import assert_same

OPS = torch.ops.warpwright


def small(device, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 2, 5, 6), (3, 2, 3, 3), (3,), (3,), (3,))
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for s in shapes
    ]


def operator(update):
    def run(x, weight, bias, norm_weight, norm_bias):
        stats = (torch.zeros(3).to(x), torch.ones(3).to(x), 0.1) if update else ()
        op = getattr(OPS, "conv2d_batch_norm_relu_max_pool2d" + "_update" * update)
        windows = ([1, 1], [1, 0], [1, 1], 1, [3, 2], [2, 1], [1, 0], [1, 1], True)
        return op(x, weight, bias, norm_weight, norm_bias, *stats, 1e-3, *windows)[0]

    return run


@pytest.mark.parametrize("update", [False, True])
def test_derivatives(device, update):
    run, inputs = operator(update), small(device)
    assert gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("name", ["mnist", "cifar"])
def test_second_derivatives_of_the_kernels(device, name):
    """A gradient of a gradient runs as one op after the other."""
    tensors, padding = operands(name, "nhwc", device, torch.float32)
    exact, _ = operands(name, "nhwc")
    results = []
    for function, (x, *parameters) in ((fused, tensors), (chain, exact)):
        y = function(x, *parameters, padding)
        first = torch.autograd.grad(y.square().sum(), parameters[:1], create_graph=True)[0]
        results.append(torch.autograd.grad(first.square().sum(), parameters[0])[0])
    difference = (results[0].cpu().double() - results[1]).norm()
    # Of two elements that are equal but for rounding, either may win.
    assert difference <= 2e-2 * results[1].norm()


def test_tangents(device):
    (x, *parameters), padding = operands("mnist", "nhwc", device, torch.float32)
    directions = [torch.randn_like(t) for t in parameters]

    def tangent(function):
        with forward_ad.dual_level():
            pairs = zip(parameters, directions, strict=True)
            duals = [forward_ad.make_dual(t.detach(), d) for t, d in pairs]
            return forward_ad.unpack_dual(function(x, *duals, padding)).tangent

    found, expected = tangent(fused), tangent(chain)
    assert (found - expected).norm() <= 2e-2 * expected.norm()  # the same


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("update", [False, True])
def test_opcheck(device, update, save):
    (x, *parameters), _ = operands("odd", "nhwc", device, torch.float32)
    stats = (*statistics(12, device, torch.float32), 0.1) if update else ()
    op = getattr(OPS, "conv2d_batch_norm_relu_max_pool2d" + "_update" * update).default
    opcheck(op, (x, *parameters, *stats, 1e-3, [1, 1], [1, 1], [1, 1], 1, *POOL, save))


def backward_arguments(device):
    (x, weight, *vectors), _ = operands("odd", "nhwc", device, torch.float32)
    detached = [t.detach() for t in (weight, *vectors)]
    windows = ([1, 1], [1, 1], [1, 1], 1, *POOL)
    op = OPS.conv2d_batch_norm_relu_max_pool2d
    y, mean, rstd, codes, moments = op(x, *detached, 1e-5, *windows, True)
    weight, bias, norm_weight, _ = detached
    return {
        "grad_output": torch.randn_like(y), "input": x,
        "weight": weight, "bias": bias, "norm_weight": norm_weight,
        "mean": mean, "rstd": rstd, "codes": codes, "moments": moments,
        "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1,
        "pool_kernel": [2, 2], "pool_stride": [2, 2], "pool_padding": [0, 0],
        "pool_dilation": [1, 1], "output_mask": [False, True, True, True, True],
    }  # fmt: skip


def test_opcheck_of_the_backward(device):
    opcheck(OPS.conv2d_batch_norm_relu_max_pool2d_backward.default, (), backward_arguments(device))


def test_gradients_without_kept_moments(device):
    arguments = backward_arguments(device)
    assert arguments["moments"].numel() == 54
    found = OPS.conv2d_batch_norm_relu_max_pool2d_backward(**arguments)
    without = arguments | {"moments": arguments["moments"][:0]}
    expected = OPS.conv2d_batch_norm_relu_max_pool2d_backward(**without)
    for got, want in zip(found[1:], expected[1:], strict=True):
        assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [lambda t: t[1:], lambda t: t.float(), lambda t: t.cpu(), lambda t: t.view(6, 9)],
    ids=["shape", "dtype", "device", "dim"],
)
def test_moments_of_another_call(change):
    arguments = backward_arguments("cuda")
    arguments["moments"] = change(arguments["moments"])
    with pytest.raises(RuntimeError, match="moments"):
        OPS.conv2d_batch_norm_relu_max_pool2d_backward(**arguments)


def test_codes_of_a_caller_read_nothing_else(device):
    """Codes that name no position of the window have no winner."""
    arguments = backward_arguments(device)
    codes = arguments["codes"]
    arguments["codes"] = torch.full_like(codes, 4)
    found = OPS.conv2d_batch_norm_relu_max_pool2d_backward(**arguments)
    arguments["codes"] = torch.full_like(codes, 255)
    expected = OPS.conv2d_batch_norm_relu_max_pool2d_backward(**arguments)
    for got, want in zip(found[3:], expected[3:], strict=True):
        assert_same(got, torch.zeros_like(want))
    arguments["codes"] = torch.randint_like(codes, 256)
    OPS.conv2d_batch_norm_relu_max_pool2d_backward(**arguments)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grad_output", lambda t: t[:, :, 1:]),
        ("grad_output", lambda t: t.double()),
        ("codes", lambda t: t[:, :, :, 1:]),
        ("codes", lambda t: t.int()),
        ("mean", lambda t: t[1:]),
        ("rstd", lambda t: t.double()),
        ("norm_weight", lambda t: t[1:]),
        ("bias", lambda t: t[1:]),
        ("weight", lambda t: t.double()),
    ],
)
def test_errors_of_the_backward(device, name, change):
    arguments = backward_arguments(device)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError):
        OPS.conv2d_batch_norm_relu_max_pool2d_backward(**arguments)


@pytest.mark.parametrize("name", ["pool_kernel", "pool_stride", "pool_padding", "pool_dilation"])
def test_window_of_another_length(device, name):
    """The error once freed the geometry twice, which ended the process a few calls later."""
    arguments = backward_arguments(device)
    forward = {k: arguments[k] for k in ("input", "weight", "bias", "norm_weight")}
    forward |= {
        k: v for k, v in arguments.items() if isinstance(v, list | int) and k != "output_mask"
    }
    forward |= {"norm_bias": arguments["bias"], "eps": 1e-5, "ceil_mode": False}
    mean, var = statistics(12, device, torch.float32)
    moved = {"running_mean": mean, "running_var": var, "momentum": 0.1}
    calls = (
        (OPS.conv2d_batch_norm_relu_max_pool2d, forward),
        (OPS.conv2d_batch_norm_relu_max_pool2d_update, forward | moved),
        (OPS.conv2d_batch_norm_relu_max_pool2d_backward, arguments),
    )
    for op, valid in calls:
        op(**valid)
        for _ in range(50):
            with pytest.raises(RuntimeError, match=name.removeprefix("pool_")):
                op(**valid | {name: [1, 1, 1]})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm_weight", lambda t: t[:4], "weight"),  # as the chain's batch norm calls it
        ("norm_bias", lambda t: t.half(), "bias"),
        ("running_var", lambda t: t.to("meta"), "running_var"),
        ("bias", lambda t: t[:4], "bias"),
        ("weight", lambda t: t.double(), "weight"),
        ("input", lambda t: t[:, :0], "input"),
    ],
)
def test_errors_name_the_argument(device, name, change, message):
    (x, weight, bias, norm_weight, norm_bias), padding = operands(
        "odd", "nhwc", device, torch.float32
    )
    mean, var = statistics(12, device, torch.float32)
    arguments = {
        "input": x, "weight": weight.detach(), "bias": bias.detach(), "padding": padding,
        "pool_kernel_size": 2, "norm_weight": norm_weight.detach(),
        "norm_bias": norm_bias.detach(), "running_mean": mean, "running_var": var,
        "training": True,
    }  # fmt: skip
    arguments[name] = change(arguments[name])
    with pytest.raises((RuntimeError, ValueError), match=message):
        F.conv2d_batch_norm_relu_max_pool2d(**arguments)
