"""What layer_scale_add refuses, and with which words."""

import re

import pytest
import torch

import warpwright.functional as F

ops = torch.ops.warpwright


def ones(device, *sizes, dtype=torch.float32):
    return torch.ones(sizes, device=device, dtype=dtype)


def test_wrong_shapes(device):
    def t(*sizes):
        return ones(device, *sizes)

    x, channels = t(2, 3, 4, 5), t(3, 1, 1)
    of_scale = "scale: expected one value per channel, in a shape that broadcasts to [2, 3, 4, 5]"
    of_samples = "sample_scale: expected shape [2, 1, 1, 1]"
    for args, text in (
        ((x, t(2, 3, 4), channels), "residual: expected shape [2, 3, 4, 5], got [2, 3, 4]"),
        ((x, t(1), channels), "residual: expected shape [2, 3, 4, 5], got [1]"),
        ((x, x, t(3)), f"{of_scale}, got [3]"),
        ((x, x, t(3, 4, 1)), f"{of_scale}, got [3, 4, 1]"),
        ((x, x, t(1, 1, 3, 1, 1)), f"{of_scale}, got [1, 1, 3, 1, 1]"),
        ((x, x, t(0, 1, 1)), f"{of_scale}, got [0, 1, 1]"),
        ((x, x, channels, t(2)), f"{of_samples}, got [2]"),
        ((x, x, channels, t(1, 1, 1, 1)), f"{of_samples}, got [1, 1, 1, 1]"),
        ((x, x, channels, t(2, 3, 1, 1)), f"{of_samples}, got [2, 3, 1, 1]"),
    ):
        for operands in (args, [a.requires_grad_() for a in map(torch.clone, args)]):
            with pytest.raises(RuntimeError, match=re.escape(f"layer_scale_add: {text}")):
                F.layer_scale_add(*operands)
    text = "layer_scale_add_backward: grad_output: expected shape [2, 3, 4, 5], got [2, 3]"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        ops.layer_scale_add_backward(t(2, 3), x, channels, None, [True, True])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_wrong_types(device, dtype):
    """Native computes a complex tensor beside real ones, as in every op."""
    args = [ones(device, 2, 3), ones(device, 2, 3), ones(device, 3), ones(device, 2, 1)]
    for place, name in enumerate(("input", "residual", "scale", "sample_scale")):
        wrong = [*args[:place], args[place].to(dtype), *args[place + 1 :]]
        if dtype.is_complex and place > 0:
            assert F.layer_scale_add(*wrong).dtype == dtype
            continue
        with pytest.raises(
            RuntimeError, match=f"layer_scale_add: {name}: expected a floating point tensor, got "
        ):
            F.layer_scale_add(*wrong)


def test_another_device(device):
    args = [ones(device, 2, 3), ones(device, 2, 3), ones(device, 3), ones(device, 2, 1)]
    for place in range(1, 4):
        wrong = [*args[:place], args[place].to("meta"), *args[place + 1 :]]
        with pytest.raises(RuntimeError, match=r"layer_scale_add: .*expected .*, got .*meta"):
            F.layer_scale_add(*wrong)


def test_no_tensors(device):
    x, scale = ones(device, 2, 3), ones(device, 3)
    for args, name in (
        ((3, x, scale), "input"),
        ((x, None, scale), "residual"),
        ((x, x, 0.5), "scale"),
        ((x, x, scale, 0.5), "sample_scale"),
    ):
        with pytest.raises(
            TypeError, match=rf"layer_scale_add\(\): argument '{name}' must be Tensor"
        ):
            F.layer_scale_add(*args)
