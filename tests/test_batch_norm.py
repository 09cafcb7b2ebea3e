"""batch_norm gives native's values, statistics, derivatives and errors."""

import re

import pytest
import torch
import torch.nn.functional as native
from batch_norm_cases import DOUBLE, LARGE, ROWS_IN_PART, SHAPES, SHORT, compare, parameters
from common import (
    assert_compiles_with_running_stats,
    assert_func_transforms_agree,
    gradcheck,
    layouts,
    opcheck,
    subsets,
)

import warpwright.functional as F
from warpwright.testing import assert_as_good_as_native, assert_same, max_error


def with_running(function, training):
    """Takes the running statistics, and returns updated copies of them with the output."""

    def call(x, mean, var, weight, bias, **kwargs):
        mean, var = mean.clone(), var.clone()
        return function(x, mean, var, weight, bias, training, **kwargs), mean, var

    return call


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES + LARGE, ids=str)
def test_error_rule(device, dtype, shape, training):
    mean, var, weight, bias = parameters(shape[1], device, dtype)
    base = torch.randn(shape, device=device) * 2 + 1
    for name, x in layouts(base.to(dtype)):
        if shape in LARGE and name not in ("contiguous", "channels_last"):
            continue
        args = (
            x.detach().requires_grad_(),
            mean,
            var,
            weight.clone().requires_grad_(),
            bias.clone().requires_grad_(),
        )
        compare(
            lambda *a: with_running(F.batch_norm, training)(*a)[0],
            lambda *a: with_running(native.batch_norm, training)(*a)[0],
            args,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ROWS_IN_PART, ids=str)
def test_rows_kept_in_part(dtype, shape):
    mean, var, weight, bias = parameters(shape[1], "cuda", dtype)
    x = (torch.randn(shape, device="cuda") * 2 + 1).to(dtype)
    args = (x.requires_grad_(), mean, var, weight.requires_grad_(), bias.requires_grad_())
    compare(
        lambda *a: with_running(F.batch_norm, True)(*a)[0],
        lambda *a: with_running(native.batch_norm, True)(*a)[0],
        args,
    )


@pytest.mark.parametrize("shape", [*SHAPES, (64, 40, 14, 14)], ids=str)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, -1.2])
def test_running_statistics(device, dtype, shape, momentum):
    mean, var, weight, bias = parameters(shape[1], device, dtype)
    for _, x in layouts((torch.randn(shape, device=device) * 3 - 2).to(dtype)):
        call = {"momentum": momentum}
        _, our_mean, our_var = with_running(F.batch_norm, True)(x, mean, var, weight, bias, **call)
        _, n_mean, n_var = with_running(native.batch_norm, True)(x, mean, var, weight, bias, **call)
        exact = with_running(native.batch_norm, True)(
            x.double(), mean.double(), var.double(), weight.double(), bias.double(), **call
        )
        if dtype == torch.float64:
            torch.testing.assert_close((our_mean, our_var), (n_mean, n_var), **DOUBLE)
            continue
        assert_as_good_as_native(our_mean, n_mean, exact[1], "running_mean")
        assert_as_good_as_native(our_var, n_var, exact[2], "running_var")


def test_running_statistics_in_place(device):
    x = torch.randn(4, 3, 5, 5, device=device)
    mean, var, weight, bias = parameters(3, device, torch.float32)
    wide = torch.zeros(6, device=device)
    version = mean._version
    F.batch_norm(x, mean, var, weight, bias, training=True)
    assert mean._version > version
    F.batch_norm(x, wide[::2], var, weight, bias, training=True)  # strided
    assert (wide[::2] != 0).all()
    assert (wide[1::2] == 0).all()
    before = mean.clone()
    F.batch_norm(x, mean, var, weight, bias, training=False)
    assert torch.equal(mean, before)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_mixed_dtype(device, dtype, training):
    for shape in ((4, 8, 6, 6), (3, 5, 7, 7)):
        mean, var, weight, bias = parameters(shape[1], device, torch.float32)
        for fmt in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=fmt)
            compare(
                lambda *a: with_running(F.batch_norm, training)(*a)[0],
                lambda *a: with_running(native.batch_norm, training)(*a)[0],
                (x.requires_grad_(), mean, var, weight.requires_grad_(), bias.requires_grad_()),
            )
            _, our_mean, _ = with_running(F.batch_norm, True)(x, mean, var, None, None)
            assert our_mean.dtype == torch.float32


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("present", [(0, 0), (1, 0), (0, 1)], ids=str)
def test_optional_arguments(device, dtype, training, present):
    mean, var, weight, bias = parameters(6, device, dtype)
    weight = weight.requires_grad_() if present[0] else None
    bias = bias.requires_grad_() if present[1] else None

    def call(function):
        def run(x, weight, bias, mean, var):
            copies = (mean, var) if mean is None else (mean.clone(), var.clone())
            if function is native.batch_norm and weight is None and bias is not None:
                # Native's CUDA backward fails ("tensor does not have a device") on a lone bias.
                weight = torch.ones_like(bias)
            return function(x, *copies, weight, bias, training)

        return run

    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 6, 5, 5, device=device).to(dtype).contiguous(memory_format=fmt)
        for stats in ((mean, var), (None, None)) if training else ((mean, var),):
            compare(
                call(F.batch_norm),
                call(native.batch_norm),
                (x.requires_grad_(), weight, bias, *stats),
            )


def test_cancellation(device):
    """A large mean, and first values far from the rest, must not cost the variance."""
    for shape in ((64, 8, 14, 14), (2048, 8), (3, 5, 33, 33), (64, 8, 7, 7), (20, 3, 61, 61)):
        for fmt in (torch.contiguous_format, torch.channels_last):
            if len(shape) != 4 and fmt == torch.channels_last:
                continue
            x = torch.randn(shape, device=device) + 1e4
            y = torch.randn(shape, device=device)
            y[0] = 1e4
            for case in (x, y):
                z = case.contiguous(memory_format=fmt)
                ours = torch.ops.warpwright.batch_norm(z, None, None, None, None, True, 1e-5)
                dims = [0, *range(2, z.dim())]
                exact = z.double()
                rstd = (exact.var(dims, unbiased=False) + 1e-5).rsqrt()
                assert max_error(ours[1] / exact.mean(dims).float(), torch.ones_like(rstd)) < 1e-5
                assert max_error(ours[2] / rstd.float(), torch.ones_like(rstd)) < 1e-3


@pytest.mark.parametrize("shape", [(64, 8, 14, 14), (64, 8, 7, 7), (20, 3, 61, 61)], ids=str)
def test_gradient_far_from_zero(device, shape):
    """Activations around a mean of many deviations, gradients that go with them."""
    for mean in (30.0, 1e3):
        values = torch.randn(shape, device=device)
        cotangent = torch.randn(shape, device=device) + 3 * values
        for _, x in layouts(values + mean):
            grads = []
            for function, dtype in (
                (F.batch_norm, x.dtype),
                (native.batch_norm, x.dtype),
                (native.batch_norm, torch.float64),
            ):
                leaf = x.detach().to(dtype).requires_grad_()
                output = function(leaf, None, None, training=True)
                grads += torch.autograd.grad(output, leaf, cotangent.to(dtype))
            assert_as_good_as_native(*grads, "grad_input")


def test_non_finite(device):
    x = torch.randn(4, 3, 5, 5, device=device)
    x[1, 0, 2, 2] = float("nan")
    x[2, 1, 0, 0] = float("inf")
    for fmt in (torch.contiguous_format, torch.channels_last):
        y = x.contiguous(memory_format=fmt)
        ours, expected = (
            f(y, None, None, None, None, True) for f in (F.batch_norm, native.batch_norm)
        )
        assert torch.equal(ours.isfinite(), expected.isfinite())
        mean, var, weight, bias = parameters(3, device, torch.float32)
        assert torch.equal(
            F.batch_norm(y, mean, var, weight, bias).isnan(),
            native.batch_norm(y, mean, var, weight, bias).isnan(),
        )


def test_constant_channel(device):
    x = torch.full((4, 3, 5, 5), 3.75, device=device, requires_grad=True)
    mean, var, weight, bias = parameters(3, device, torch.float32)
    for training in (True, False):
        output = F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training)
        if training:
            assert_same(output, bias[:, None, None].expand_as(x))
        cotangent = torch.randn_like(x)
        (grad,) = torch.autograd.grad(output, x, cotangent)
        expected = native.batch_norm(x, mean.clone(), var.clone(), weight, bias, training)
        (expected_grad,) = torch.autograd.grad(expected, x, cotangent)
        torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (0, 3), (4, 3, 0, 5), (4, 0, 3, 3)], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_empty(device, shape, training):
    mean, var, weight, bias = parameters(shape[1], device, torch.float32)
    x = torch.randn(shape, device=device, requires_grad=True)
    before = mean.clone()
    output = F.batch_norm(x, mean, var, weight.requires_grad_(), bias.requires_grad_(), training)
    grads = torch.autograd.grad(output.sum(), (x, weight, bias))
    assert output.shape == shape
    assert torch.equal(mean, before)
    assert grads[0].shape == shape
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert torch.equal(grads[2], torch.zeros_like(bias))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("needs", subsets(3), ids=str)
def test_gradients(device, training, needs):
    for shape, fmt in (((3, 2, 2, 2), torch.channels_last), ((2, 2, 3), torch.contiguous_format)):
        mean, var, weight, bias = parameters(2, device, torch.float64)
        x = torch.randn(shape, device=device, dtype=torch.float64).contiguous(memory_format=fmt)
        inputs = [t.requires_grad_(need) for t, need in zip((x, weight, bias), needs, strict=True)]

        def function(x, weight, bias, mean=mean, var=var):
            return F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training, eps=0.1)

        gradcheck(function, inputs)


def test_third_derivative(device):
    x = torch.randn(3, 2, 2, device=device, dtype=torch.float64)
    weight = torch.randn(2, device=device, dtype=torch.float64)

    def third(f):
        def first(t):
            return torch.func.grad(
                lambda s: f(s, None, None, weight, None, True, eps=0.1).pow(3).sum()
            )(t)

        def second(t):
            return torch.func.grad(lambda s: first(s).pow(2).sum())(t)

        return torch.func.grad(lambda s: second(s).pow(2).sum())(x)

    def plain(t, _m, _v, weight, _b, _training, eps):
        mean = t.mean((0, 2), keepdim=True)
        var = t.var((0, 2), unbiased=False, keepdim=True)
        return (t - mean) / (var + eps).sqrt() * weight[:, None]

    torch.testing.assert_close(third(F.batch_norm), third(plain))


@pytest.mark.parametrize("training", [True, False])
def test_double_backward_matches_native(device, training):
    mean, var, weight, bias = parameters(4, device, torch.float64)
    x = torch.randn(5, 4, 3, 3, device=device, dtype=torch.float64)

    def second(f):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        output = f(leaves[0], mean.clone(), var.clone(), leaves[1], leaves[2], training)
        grads = torch.autograd.grad(output.pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves)

    torch.testing.assert_close(second(F.batch_norm), second(native.batch_norm))


def test_func_transforms(device):
    x = torch.randn(3, 4, 2, 3, device=device, dtype=torch.float64)
    _, _, weight, bias = parameters(4, device, torch.float64)
    assert_func_transforms_agree(
        F.batch_norm,
        native.batch_norm,
        lambda f, stats: lambda t: f(t, *stats, weight, bias, True),
        x,
    )


def test_forward_ad_of_parameters(device):
    x = torch.randn(3, 4, 5, device=device, dtype=torch.float64)
    mean, var, weight, bias = parameters(4, device, torch.float64)
    for training in (True, False):
        results = [
            torch.func.jvp(
                lambda w, b, f=f, tr=training: f(x, mean.clone(), var.clone(), w, b, tr),
                (weight, bias),
                (bias, weight),
            )
            for f in (F.batch_norm, native.batch_norm)
        ]
        torch.testing.assert_close(results[0], results[1])


def test_opcheck(device):
    ops = torch.ops.warpwright
    mean, var, weight, bias = parameters(4, device, torch.float32)
    weight.requires_grad_()
    bias.requires_grad_()
    for name, x in layouts(torch.randn(3, 4, 5, 2, device=device)):
        if name.startswith("offset"):
            continue
        x = x.detach().requires_grad_()
        opcheck(ops.batch_norm.default, (x, weight, bias, mean, var, False, 1e-5))
        opcheck(ops.batch_norm.default, (x, weight, None, None, None, True, 1e-5))
        opcheck(
            ops.batch_norm_update.default, (x, weight, bias, mean.clone(), var.clone(), 0.1, 1e-5)
        )
        _, save_mean, rstd = ops.batch_norm(x, weight, bias, None, None, True, 1e-5)
        grad = torch.randn_like(x).requires_grad_()
        for training, mask in ((True, [True, True, True]), (False, [True, False, True])):
            opcheck(
                ops.batch_norm_backward.default,
                (grad, x, weight, save_mean.detach(), rstd.detach(), training, mask),
            )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=str)
def test_compile(device, dynamic, fmt):
    # float64: evaluation is native's while compiling, and the gradient is a sum that cancels.
    _, _, weight, bias = parameters(4, device, torch.float64)
    weight.requires_grad_()
    bias.requires_grad_()

    def step(x, mean, var):
        y = F.batch_norm(x * 2, mean, var, weight, bias, training=True)
        return F.batch_norm(y, mean, var, weight, bias)

    assert_compiles_with_running_stats(step, (weight, bias), fmt, dynamic)


def test_deterministic(device):
    x = torch.randn(64, 24, 28, 28, device=device)
    for fmt in (torch.contiguous_format, torch.channels_last):
        y = x.contiguous(memory_format=fmt).requires_grad_()
        runs = []
        for _ in range(3):
            output = F.batch_norm(y, None, None, training=True)
            runs.append((output, torch.autograd.grad(output.square().sum(), y)[0]))
        for run in runs[1:]:
            assert_same(run, runs[0])


def test_autocast_keeps_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        mean, var, weight, bias = parameters(3, device, torch.float32)
        x = torch.randn(2, 3, 4, 4, device=device)
        assert F.batch_norm(x, mean, var, weight, bias, True).dtype == torch.float32
        assert F.batch_norm(x.bfloat16(), mean, var, weight, bias, True).dtype == torch.bfloat16


def test_modified_statistics_do_not_break_backward(device):
    x = torch.randn(2, 3, 4, 4, device=device, requires_grad=True)
    mean, var, _, _ = parameters(3, device, torch.float32)
    first = F.batch_norm(x, mean, var, training=True)
    second = F.batch_norm(x, mean, var, training=True)
    evaluation = F.batch_norm(x, mean, var)
    F.batch_norm(x, mean, var, training=True)
    (first + second + evaluation).sum().backward()


BAD = [
    ({"running_mean": None}, True),
    ({"running_var": None}, True),
    ({"running_mean": None, "running_var": None}, False),
    ({"running_var": None}, False),
    ({"running_mean": torch.zeros(4)}, True),
    ({"running_var": torch.zeros(4)}, False),
    ({"weight": torch.zeros(4)}, True),
    ({"bias": torch.zeros(2)}, False),
    ({"eps": 0.0}, True),
    ({"input": torch.ones(1, 3)}, True),
    ({"input": torch.ones(1, 3, 1, 1)}, True),
    ({"input": torch.ones(3)}, True),
    ({"input": torch.ones(4, 3, dtype=torch.int32)}, True),
    ({"input": torch.ones(4, 3, dtype=torch.complex64)}, True),
    ({"weight": torch.ones(3).double()}, True),
    ({"input": torch.ones(4, 3).double()}, False),
    ({"running_mean": torch.ones(3, requires_grad=True)}, True),
]


@pytest.mark.parametrize(
    ("change", "training"), BAD, ids=[f"{i}-{'-'.join(c)}" for i, (c, _) in enumerate(BAD)]
)
def test_bad_input(change, training):
    mean, var, weight, bias = parameters(3, "cpu", torch.float32)
    kwargs = {
        "input": torch.randn(4, 3, 5),
        "running_mean": mean,
        "running_var": var,
        "weight": weight,
        "bias": bias,
        "training": training,
        **change,
    }
    with pytest.raises((RuntimeError, ValueError)) as expected:
        native.batch_norm(**kwargs)
    with pytest.raises(expected.type) as ours:
        F.batch_norm(**kwargs)
    assert type(ours.value) is type(expected.value)
    if not str(expected.value).startswith("The function"):
        assert str(expected.value).rstrip(".") in str(ours.value)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("eps", [0.0, -0.0, -1.0])
def test_eps(device, eps, training):
    """Newer releases take 0 in evaluation."""
    x = torch.randn(4, 3, 5, device=device)
    mean, var, weight, bias = parameters(3, device, torch.float32)
    for function in (F.batch_norm, F.batch_norm_relu):
        calls = []
        for f in (native.batch_norm, function):
            stats = mean.clone(), var.clone()
            calls.append(lambda f=f, s=stats: f(x, *s, weight, bias, training, 0.1, eps))
        try:
            expected = calls[0]()
        except ValueError as error:
            with pytest.raises(ValueError, match=f"^{re.escape(str(error))}$"):
                calls[1]()
        else:
            expected = expected if function is F.batch_norm else expected.relu()
            torch.testing.assert_close(calls[1](), expected)


def test_bad_backward(device):
    ops = torch.ops.warpwright
    x, stat = torch.ones(2, 3, device=device), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape .*2, 3.* got .*2, 4"):
        ops.batch_norm_backward(
            torch.ones(2, 4, device=device), x, None, stat, stat, True, [True] * 3
        )
    with pytest.raises(RuntimeError, match=r"mean: expected shape .*3.*, got .*2"):
        ops.batch_norm_backward(x, x, None, stat[:2], stat, True, [True] * 3)
