"""Batch norm with an activation gives the values, statistics and errors of the chain that it replaces."""

import pytest
import torch
import torch.nn.functional as native
from batch_norm_cases import LARGE, ROWS_IN_PART, SHAPES, SHORT, compare, parameters
from batch_norm_relu_cases import (
    FORMS,
    TRAINING,
    chain,
    every_form,
    fused,
    on_copies,
    residual_like,
)
from common import layouts
from native_suites import Errors
from native_suites import compare as compare_cases
from torch import nn

import warpwright.functional as F
import warpwright.nn as ours
from warpwright.testing import assert_as_good_as_native, assert_same

# Besides the shared shapes: planes shorter than a 16-byte vector, and one element longer.
SMALL = [(5, 6, 1, 3), (3, 16, 2, 1), (4, 3, 3, 3), (2, 8, 5, 1)]
relus = pytest.mark.parametrize("form", FORMS[:2])


@every_form
@TRAINING
def test_error_rule(device, dtype, training, form):
    """Over many cases: which outputs the relu cuts is luck of the roundings in a single one."""
    errors = Errors()
    rows = ROWS_IN_PART if device == "cuda" and training else []
    for shape in SHAPES + SMALL + LARGE + rows:
        mean, var, weight, bias = parameters(shape[1], device, dtype)
        base = torch.randn(shape, device=device) * 2 + 1
        for name, x in layouts(base.to(dtype)):
            if shape in LARGE + rows and name not in ("contiguous", "channels_last"):
                continue
            args = (
                x.detach().requires_grad_(),
                residual_like(x, form),
                weight.clone().requires_grad_(),
                bias.clone().requires_grad_(),
                mean,
                var,
            )
            functions = (on_copies(fused, form, training), on_copies(chain, form, training))
            compare_cases(*functions, args, {}, f"{shape} {name}", errors, amplifies=True)
    errors.check()


@TRAINING
def test_residual_layouts(device, dtype, training):
    """The residual and the gradient in layouts that are not the input's."""
    mean, var, weight, bias = parameters(6, device, dtype)
    x = torch.randn(4, 6, 5, 7, device=device).to(dtype)
    for fmt in (torch.contiguous_format, torch.channels_last):
        for name, residual in layouts(torch.randn_like(x)):
            args = (
                x.contiguous(memory_format=fmt).requires_grad_(),
                residual.detach().requires_grad_(),
                weight.clone().requires_grad_(),
                bias,
                mean,
                var,
            )
            leaves = args[:3]
            output = on_copies(fused, "add_relu", training)(*args)
            expected = on_copies(chain, "add_relu", training)(*args)
            for _, cotangent in layouts(torch.randn_like(output)):
                grads = torch.autograd.grad(output, leaves, cotangent, retain_graph=True)
                reference = torch.autograd.grad(expected, leaves, cotangent, retain_graph=True)
                if dtype in SHORT:
                    # The chain rounds twice. If its sum is 0, it may lose an element's gradient.
                    same = (output > 0) == (expected > 0)
                    assert same.float().mean() > 0.97
                    assert torch.equal(grads[1][same], reference[1][same]), name
                else:
                    torch.testing.assert_close(grads, reference)


@every_form
@pytest.mark.parametrize("momentum", [0.1, 1.0])
def test_running_statistics(device, dtype, momentum, form):
    for shape in ((16, 64), (2, 3, 9, 11), (6, 8, 7, 7)):
        mean, var, weight, bias = parameters(shape[1], device, dtype)
        for _, x in layouts((torch.randn(shape, device=device) * 3 - 2).to(dtype)):
            one, two = (mean.clone(), var.clone()), (mean.clone(), var.clone())
            version = one[0]._version
            fused(form)(x, residual_like(x, form), *one, weight, bias, True, momentum)
            F.batch_norm(x, *two, weight, bias, True, momentum)
            assert one[0]._version > version
            # On a GPU two operands are shared out over blocks in another way.
            if form == "add_relu" and device == "cuda":
                torch.testing.assert_close(one, two)
            else:
                assert_same(one, two)


@every_form
@pytest.mark.parametrize("present", [(0, 0), (1, 0), (0, 1)], ids=str)
@TRAINING
def test_optional_arguments(device, dtype, training, present, form):
    mean, var, weight, bias = parameters(6, device, dtype)
    weight = weight.requires_grad_() if present[0] else None
    bias = bias.requires_grad_() if present[1] else None
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 6, 5, 5, device=device).to(dtype)
        # Nothing at the kink, where the rounding of either side decides.
        x = torch.where(x == mean[:, None, None], x + 1, x).contiguous(memory_format=fmt)
        for stats in ((mean, var), (None, None)) if training else ((mean, var),):
            compare(
                on_copies(fused, form, training),
                on_copies(chain, form, training),
                (x.requires_grad_(), residual_like(x, form), weight, bias, *stats),
            )


@every_form
@TRAINING
@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_mixed_dtype(device, dtype, training, form):
    for shape in ((4, 8, 6, 6), (3, 5, 7, 7)):
        mean, var, weight, bias = parameters(shape[1], device, torch.float32)
        for fmt in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=fmt)
            compare(
                on_copies(fused, form, training),
                on_copies(chain, form, training),
                (
                    x.requires_grad_(),
                    residual_like(x, form),
                    weight.requires_grad_(),
                    bias.requires_grad_(),
                    mean,
                    var,
                ),
            )


@relus
@TRAINING
def test_gate(device, dtype, training, form):
    """Exactly where the stored output is positive or NaN, and bit for bit batch norm's gradients."""
    for shape in ((8, 24), (3, 8, 7, 7), (3, 6, 9, 9), (4, 16, 8, 8), (20, 3, 61, 61)):
        mean, var, weight, bias = parameters(shape[1], device, dtype)
        weight[::3] = 0  # the output is the bias, of either sign or 0
        bias[:3] = torch.tensor([0.0, 1.0, -1.0], device=device)[: shape[1]].to(dtype)
        base = torch.randn(shape, device=device).to(dtype)
        for fmt in (torch.contiguous_format, torch.channels_last)[: 2 if len(shape) == 4 else 1]:
            x = base.contiguous(memory_format=fmt).requires_grad_()
            residual = residual_like(x, form)
            leaves = [t.requires_grad_() for t in (x, weight, bias)]
            if form == "add_relu":
                residual = torch.where(residual.abs() < 0.5, 0, residual).detach().requires_grad_()
                leaves.append(residual)
            args = (x, residual, weight, bias, mean, var)
            output = on_copies(fused, form, training)(*args)
            assert (output >= 0).all()
            cotangent = torch.randn_like(output)
            grads = torch.autograd.grad(output, leaves, cotangent)
            gated = torch.where(output > 0, cotangent, 0)
            plain = F.batch_norm(x, mean.clone(), var.clone(), weight, bias, training)
            expected = torch.autograd.grad(plain, leaves[:3], gated)
            torch.testing.assert_close(grads[:3], expected)
            if form == "add_relu":
                assert torch.equal(grads[3], gated)
            assert not grads[1].isnan().any()


@every_form
def test_non_finite(device, form):
    x = torch.randn(4, 3, 7, 7, device=device)
    x[1, 0, 2, 2] = float("nan")
    x[2, 1, 0, 0] = float("inf")
    x[3, 2, 1, 1] = -float("inf")
    mean, var, weight, bias = parameters(3, device, torch.float32)
    residual = torch.randn_like(x) if form == "add_relu" else None
    if residual is not None:
        residual[0, :, 0, 0] = float("nan")
    for fmt in (torch.contiguous_format, torch.channels_last):
        for training in (True, False):
            y = x.contiguous(memory_format=fmt).requires_grad_()
            results = []
            for f in (fused, chain):
                args = (y, residual, weight.requires_grad_(), bias, mean, var)
                output = on_copies(f, form, training)(*args)
                grads = torch.autograd.grad(output, (y, weight), torch.ones_like(output))
                results.append([t.isnan() for t in (output, *grads)])
                results[-1] += [t.isinf() for t in (output, *grads)]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@every_form
@TRAINING
@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (0, 3), (4, 3, 0, 5), (4, 0, 3, 3)], ids=str)
def test_empty(device, shape, training, form):
    mean, var, weight, bias = parameters(shape[1], device, torch.float32)
    x = torch.randn(shape, device=device, requires_grad=True)
    args = (x, residual_like(x, form), mean, var, weight.requires_grad_(), bias.requires_grad_())
    output = fused(form)(*args, training)
    grads = torch.autograd.grad(output.sum(), (x, weight, bias))
    assert output.shape == shape
    assert grads[0].shape == shape
    assert torch.equal(grads[1], torch.zeros_like(weight))
    assert torch.equal(grads[2], torch.zeros_like(bias))


def test_autocast_and_other_residuals(device):
    """Dtypes stay; a residual that broadcasts or promotes gives what the chain gives."""
    mean, var, weight, bias = parameters(3, device, torch.float32)
    x = torch.randn(2, 3, 4, 4, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        for form in ("relu", "silu"):
            assert fused(form)(x, None, mean, var, weight, bias).dtype == torch.float32
            half = fused(form)(x.bfloat16(), None, mean, var, weight, bias)
            assert half.dtype == torch.bfloat16
        half = x.bfloat16()
        assert F.batch_norm_add_relu(half, half, mean, var, weight, bias).dtype == torch.bfloat16
        assert F.batch_norm_add_relu(half, x, mean, var, weight, bias).dtype == torch.float32
    for residual in (torch.randn(3, 1, 1, device=device), torch.randn(2, 3, 1, 4, device=device)):
        args = (x, residual, mean, var, weight, bias)
        torch.testing.assert_close(fused("add_relu")(*args), chain("add_relu")(*args))


@every_form
@pytest.mark.parametrize(
    "change",
    [
        {"eps": 0.0},
        {"running_mean": None},
        {"running_var": torch.zeros(4)},
        {"weight": torch.zeros(4)},
        {"bias": torch.zeros(2)},
        {"input": torch.ones(1, 3, 1, 1)},
        {"input": torch.ones(4, 3, dtype=torch.int32)},
        {"running_mean": torch.ones(3, requires_grad=True)},
        {"residual": torch.ones(2, 3, 5)},
    ],
    ids=lambda c: next(iter(c)),
)
def test_bad_input(change, form):
    add = form == "add_relu"
    if "residual" in change and not add:
        return
    mean, var, weight, bias = parameters(3, "cpu", torch.float32)
    kwargs = {
        "input": torch.randn(4, 3, 5),
        "running_mean": mean,
        "running_var": var,
        "weight": weight,
        "bias": bias,
        "training": True,
        **change,
    }
    residual = kwargs.pop("residual", torch.ones_like(kwargs["input"])) if add else None
    x = kwargs.pop("input")
    with pytest.raises((RuntimeError, ValueError)) as expected:
        chain(form)(x, residual, **kwargs)
    with pytest.raises(expected.type) as error:
        fused(form)(x, residual, **kwargs)
    if not str(expected.value).startswith("The function"):
        assert str(expected.value).rstrip(".") in str(error.value)


def test_bad_residual_and_mask(device):
    ops = torch.ops.warpwright
    x, stat = torch.ones(2, 3, 4, device=device), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=r"residual: expected shape .*2, 3, 4.* got .*2, 3"):
        ops.batch_norm_relu(x, x[:, :, 0], None, None, None, None, True, 1e-5)
    with pytest.raises(RuntimeError, match=r"residual: expected Float, got Double"):
        ops.batch_norm_relu(x, x.double(), None, None, None, None, True, 1e-5)
    saved = (stat, stat)
    for mask, message in (
        (torch.ones(5, device=device, dtype=torch.uint8), "mask: expected 6 bytes or none, got 5"),
        (torch.ones(6, device=device), "mask: expected 1 dimension of Byte, got 1 of Float"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.batch_norm_relu_backward(x, x, None, None, *saved, mask, True, [True] * 4)


MODULES = [
    ("BatchNormReLU2d", "relu"),
    ("BatchNormAddReLU2d", "add_relu"),
    ("BatchNormSiLU2d", "silu"),
    ("BatchNormHardswish2d", "hardswish"),
]


@pytest.mark.parametrize(("name", "form"), MODULES)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}],
    ids=str,
)
def test_modules(device, name, form, options):
    """Three training steps and an evaluation, and the state goes both ways."""
    module = getattr(ours, name)(6, **options).to(device)
    reference = nn.BatchNorm2d(6, **options).to(device)
    for p in module.parameters():
        nn.init.normal_(p)
    reference.load_state_dict(module.state_dict())
    assert list(module.state_dict()) == list(reference.state_dict())
    for training in (True, True, True, False):
        module.train(training)
        reference.train(training)
        x = torch.randn(4, 6, 5, 7, device=device, requires_grad=True)
        residual = residual_like(x, form)
        extra = () if residual is None else (residual,)
        output = module(x, *extra)
        normalized = reference(x)
        activation = getattr(native, form.removeprefix("add_"))
        expected = activation(normalized if residual is None else normalized + residual)
        cotangent = torch.randn_like(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(
            torch.autograd.grad(output, [x, *extra, *module.parameters()], cotangent),
            torch.autograd.grad(expected, [x, *extra, *reference.parameters()], cotangent),
        )
        torch.testing.assert_close(module.state_dict(), reference.state_dict())
    nn.BatchNorm2d(6, **options).load_state_dict(module.state_dict())
    assert f"warpwright.{name}" in repr(module)
    with pytest.raises(ValueError, match="expected 4D input"):
        module(*[torch.randn(4, 6, device=device)] * (1 + (form == "add_relu")))


@pytest.mark.parametrize("shape", [(64, 40, 14, 14), (6, 8, 7, 7), (1500, 48)], ids=str)
def test_as_accurate_as_double(device, shape):
    """One rounding of the sum: never worse than the chain, whose output is rounded twice."""
    x = torch.randn(shape, device=device).bfloat16()
    residual = torch.randn(shape, device=device).bfloat16()
    args = (x, residual, None, None, None, None, True)
    ours_of, theirs = fused("add_relu"), chain("add_relu")
    exact = theirs(x.double(), residual.double(), *args[2:])
    assert_as_good_as_native(ours_of(*args), theirs(*args), exact, "output", factor=1.0)
