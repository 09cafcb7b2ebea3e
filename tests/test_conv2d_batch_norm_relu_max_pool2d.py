"""conv2d_batch_norm_relu_max_pool2d against the chain of native ops that it replaces."""

import pytest
import torch
from common import assert_repeats, assert_replays
from first_layer_cases import (
    LAYOUTS,
    POOL,
    chain,
    every_layout,
    every_shape,
    fused,
    operands,
    statistics,
    step,
)
from torch import nn

import warpwright
import warpwright.functional as F
from warpwright import explain, swap, unswap
from warpwright.functional import _conv_norm
from warpwright.swap import patterns
from warpwright.testing import assert_same

native = nn.functional
OPS = torch.ops.warpwright


def names(call):
    """The names of the library's operators that ``call`` reaches below autograd."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {e.name.removeprefix("warpwright::") for e in profile.events() if "::" in e.name}


@every_layout
@every_shape
def test_values_statistics_and_gradients(device, name, layout):
    exact = step(chain, *operands(name, layout))
    found = step(fused, *operands(name, layout, device, torch.float32))
    for what, got, want in zip(
        ("output", "mean", "var", "weight", "bias", "norm_weight", "norm_bias"),
        found, exact, strict=True,
    ):  # fmt: skip
        assert got.dtype == torch.float32
        assert got.shape == want.shape
        error = (got.cpu().double() - want).abs().max()
        # A bias that batch norm subtracts has no gradient: its size is that of the norm's.
        scale = exact[-1].abs().max() if what == "bias" else want.abs().max()
        assert error <= 2e-5 * scale, what
    assert found[0].is_contiguous(memory_format=LAYOUTS[layout])


@pytest.mark.gpu
@every_layout
@every_shape
def test_the_kernels_run_and_leave_nothing_else(name, layout):
    """One op in place of four, whose kernels keep nothing of the size of the convolution's output."""
    (x, *rest), padding = operands(name, layout, "cuda", torch.float32)
    assert "fused" in explain_text(x, rest[0], padding)
    reached = names(lambda: fused(x, *rest, padding))
    assert "conv2d_batch_norm_relu_max_pool2d" in reached
    assert not reached & {"conv2d", "batch_norm_relu_max_pool2d"}


def explain_text(x, weight, padding, device=None):
    return explain(
        "conv2d_batch_norm_relu_max_pool2d", x, weight, None, 1, padding, pool_kernel_size=2,
        training=True, **({} if device is None else {"device": device}),
    )  # fmt: skip


@pytest.mark.gpu
@every_layout
@pytest.mark.parametrize("name", ["mnist", "lenet", "cifar"])
def test_error_next_to_native(name, layout):
    """In IEEE float32 both, the op has at most 1.5 times native's error."""
    exact = step(chain, *operands(name, layout))
    mine, theirs = (
        step(function, *operands(name, layout, "cuda", torch.float32)) for function in (fused, ieee)
    )
    for got, compared, want in zip(mine, theirs, exact, strict=True):
        errors = [(t.cpu().double() - want).norm() for t in (got, compared)]
        assert errors[0] <= 1.5 * errors[1] + 2.0**-23 * want.norm()


def ieee(*args):
    with torch.backends.cudnn.flags(allow_tf32=False):
        return chain(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [100.0, -3000.0])
def test_mean_far_from_zero(offset):
    """The covariance does not cancel: without padding, an offset changes means alone."""
    found = []
    for shift in (0.0, offset):
        tensors, padding = operands("lenet_valid", "nhwc", "cuda", torch.float32, shift)
        found.append(step(fused, tensors, padding))
    plain, shifted = found
    bound = 2e-6 * abs(offset)  # of an output, the rounding of x + offset
    torch.testing.assert_close(shifted[0], plain[0], rtol=0, atol=20 * bound)
    torch.testing.assert_close(shifted[2], plain[2], rtol=bound, atol=0)


@pytest.mark.parametrize("missing", [{1}, {2}, {3}, {1, 2, 3}], ids=str)
def test_absent_vectors(device, missing):
    def without(dtype, device):
        tensors, padding = operands("odd", "nhwc", device, dtype)
        x, weight, *vectors = tensors
        kept = [None if i + 1 in missing else t for i, t in enumerate(vectors)]
        return [x, weight, *kept], padding

    exact = step(chain, *without(torch.float64, "cpu"))
    found = step(fused, *without(torch.float32, device))
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-4, atol=1e-4)


def test_without_running_statistics(device):
    (x, *rest), padding = operands("mnist", "nhwc", device, torch.float32)
    alone = fused(x, *rest, padding)
    assert_same(alone, fused(x, *rest, padding, statistics(32, device, torch.float32)))


def test_the_first_maximum_wins(device):
    """All elements of a window are equal if the norm's weight is zero."""
    (x, weight, bias, norm_weight, norm_bias), padding = operands(
        "cifar", "nhwc", device, torch.float32
    )
    with torch.no_grad():
        norm_weight.zero_()
        norm_bias.abs_().add_(0.1)
    tensors = [x, weight, bias, norm_weight, norm_bias]
    found, expected = (step(function, tensors, padding) for function in (fused, chain))
    assert_same(found[0], expected[0])
    torch.testing.assert_close(found[5], expected[5], rtol=1e-4, atol=1e-3)
    assert not found[3].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_pixel(device, value):
    """It makes the statistics of each channel NaN, and so every output, as in the chain."""
    (x, *rest), padding = operands("mnist", "nchw", device, torch.float32)
    x[1, 0, 3, 4] = value
    y, expected = fused(x, *rest, padding), chain(x, *rest, padding)
    assert_same(y.isnan(), expected.isnan())
    assert y.isnan().all()


def test_strides_and_addresses(device):
    """Slices, expanded gradients and views that begin anywhere give the bits of copies."""
    (x, weight, *vectors), padding = operands("mnist", "nhwc", device, torch.float32)
    wide = torch.zeros(5, 1, 28, 31, device=device)
    wide[..., 2:30] = x
    stats = torch.zeros(2, 64, device=device)
    strided, dense = stats[:, ::2], [torch.zeros(32, device=device) for _ in range(2)]
    y = fused(wide[..., 2:30], weight, *vectors, padding, list(strided))
    expected = fused(wide[..., 2:30].contiguous(), weight, *vectors, padding, dense)
    assert_same(y, expected)
    assert_same(list(strided), dense)
    parameters = [weight, *vectors]
    buffer = torch.randn(y.numel() + 1, device=device)[1:].view(y.shape)
    for dy in (torch.ones((), device=device).expand_as(y), buffer):
        found = torch.autograd.grad(y, parameters, dy, retain_graph=True)
        copied = torch.autograd.grad(expected, parameters, dy.clone(), retain_graph=True)
        assert_same(found, copied)


@pytest.mark.gpu
@every_layout
def test_repeats_have_the_same_bits(layout):
    (x, *parameters), padding = operands("many_images", layout, "cuda", torch.float32)
    assert_repeats(lambda: step(fused, [x, *parameters], padding), 20)


@pytest.mark.gpu
def test_in_a_graph():
    (x, *parameters), padding = operands("mnist", "nhwc", "cuda", torch.float32)
    dy = torch.randn_like(fused(x, *parameters, padding))

    def run():
        y = fused(x, *parameters, padding)
        return y.detach(), *torch.autograd.grad(y, parameters, dy)

    assert_replays(run)


# ---- the choice ----


def test_the_choice():
    def text(*sizes, window=3, k=32, dtype=torch.float32):
        x = torch.empty(sizes, dtype=dtype, device="meta")
        return explain_text(x, x.new_empty(k, sizes[1], window, window), 1, "h200")

    assert "moments, convolution and pool in one kernel" in text(64, 1, 28, 28)
    assert "moments, convolution and pool in one kernel" in text(64, 3, 32, 32)
    for reason, other in {
        "float32 only": text(64, 1, 28, 28, dtype=torch.bfloat16),
        "only windows of": text(64, 32, 14, 14),
        "no multiple of 4": text(64, 1, 28, 28, k=6 + 1),
    }.items():
        assert f"one op after the other ({reason}" in other or reason in other


def test_functions_and_kernels_agree_on_the_windows():
    for c in (1, 2, 3, 4):
        for window in (1, 2, 3, 5, 7):
            x = torch.empty(8, c, 16, 16, device="meta")
            weight = x.new_empty(8, c, window, window)
            takes = "in one kernel" in explain_text(x, weight, window // 2, "h200")
            assert takes == ((c, window, window) in _conv_norm.FEW_ELEMENTS)


@pytest.mark.parametrize(
    "change",
    [
        {"stride": 2}, {"dilation": 2}, {"padding": "same"}, {"pool_kernel_size": 3},
        {"pool_stride": 1}, {"pool_padding": 1}, {"ceil_mode": True}, {"training": False},
        {"pool_kernel_size": 2, "pool_dilation": 2},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_run_one_after_the_other(device, change):
    (x, weight, *_), padding = operands("mnist", "nhwc", device, torch.float32)
    conv = {"stride": 1, "padding": padding, "dilation": 1}
    pool = {"pool_kernel_size": 2, "pool_stride": None, "pool_padding": 0, "pool_dilation": 1}
    pool |= {"ceil_mode": False}
    conv |= {k: v for k, v in change.items() if k in conv}
    pool |= {k: v for k, v in change.items() if k in pool}
    stats = statistics(32, device, torch.float32)
    training = change.get("training", True)
    y = F.conv2d_batch_norm_relu_max_pool2d(
        x, weight, **conv, **pool, running_mean=stats[0], running_var=stats[1], training=training
    )
    copies = statistics(32, device, torch.float32)
    convolved = F.conv2d(x, weight, None, **conv)
    window = [pool[f"pool_{name}"] for name in ("kernel_size", "stride", "padding", "dilation")]
    expected = F.batch_norm_relu_max_pool2d(
        convolved, *copies, None, None, training, 0.1, 1e-5, *window, pool["ceil_mode"]
    )
    assert_same(y, expected)
    assert_same(stats, copies)


def test_an_image_that_needs_a_gradient(device):
    (x, *parameters), padding = operands("mnist", "nhwc", device, torch.float32)
    x.requires_grad_()
    y, expected = fused(x, *parameters, padding), chain(x, *parameters, padding)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    dy = torch.randn_like(y)
    got, want = (torch.autograd.grad(t, x, dy)[0] for t in (y, expected))
    # One window of 31,360 with another winner, of two that are equal but for rounding, is 0.8 %.
    assert (got - want).norm() <= 1e-2 * want.norm()


@pytest.mark.gpu
def test_autocast_computes_in_16_bits():
    (x, *parameters), padding = operands("mnist", "nhwc", "cuda", torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        y = fused(x, *parameters, padding)
        windows = ([1, 1], [1, 1], [1, 1], 1, *POOL)
        op = OPS.conv2d_batch_norm_relu_max_pool2d(x, *parameters, 1e-5, *windows)[0]
    assert y.dtype == op.dtype == torch.bfloat16
    assert_same(y, op)


# ---- layers and swap ----


def mnist_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 49, 10)),
    )


def test_swap_hands_the_convolution_to_the_chain(device, monkeypatch):
    model, twin = mnist_cnn().to(device), mnist_cnn().to(device)
    swap(model, fuse=True)
    seen = []
    asked = patterns.runs_as_one

    def recorded(norm, conv, *rest, **pool):
        seen.append((conv, asked(norm, conv, *rest, **pool)))
        return seen[-1][1]

    monkeypatch.setattr(patterns, "runs_as_one", recorded)
    x, target = torch.randn(6, 1, 28, 28, device=device), torch.arange(6, device=device)
    losses = []
    for net in (model, twin):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = native.cross_entropy(net(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert [conv for conv, _ in seen[:2]] == [model[0], model[4]]
    assert [fits for _, fits in seen[:2]] == [device == "cuda", False]
    torch.testing.assert_close(torch.stack(losses[:3]), torch.stack(losses[3:]), rtol=1e-3, atol=0)
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    model.eval(), twin.eval()
    torch.testing.assert_close(model(x), twin(x), rtol=1e-2, atol=1e-2)
    unswap(model)
    assert type(model[1]) is nn.BatchNorm2d


def test_layer(device):
    layer = warpwright.nn.Conv2dBatchNormReLUMaxPool2d(
        1, 8, 3, padding=1, bias=True, pool_kernel_size=2, eps=1e-3, momentum=None
    ).to(device)
    copy = nn.BatchNorm2d(8, eps=1e-3, momentum=None).to(device)
    x = torch.randn(4, 1, 10, 10, device=device)
    for _ in range(2):
        convolved = native.conv2d(x, layer.conv.weight, layer.conv.bias, 1, 1)
        expected = native.max_pool2d(native.relu(copy(convolved)), 2)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.norm.running_var, copy.running_var, rtol=1e-4, atol=1e-4)
    assert "kernel_size=2" in repr(layer)
    layer.eval()
    assert layer(x).shape == expected.shape
