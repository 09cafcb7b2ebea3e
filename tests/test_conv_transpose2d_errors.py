"""Calls of conv_transpose2d that raise: native's errors, and extents that 64 bits do not hold."""

import pytest
import torch

import warpwright.functional as F
from warpwright.testing import assert_same

native = torch.nn.functional.conv_transpose2d


def r(*shape):
    return torch.randn(*shape)


BAD = {
    "rank2": lambda f: f(r(4, 5), r(4, 6, 3, 3)),
    "rank5": lambda f: f(r(1, 2, 4, 5, 5), r(4, 6, 3, 3)),
    "weight_rank3": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3)),
    "weight_rank1": lambda f: f(r(2, 4, 5, 5), r(4)),
    "padding": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), padding=-1),
    "stride": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), stride=-1),
    "stride_zero": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), stride=(1, 0)),
    "output_padding_negative": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), None, 2, 0, -1),
    "output_padding": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), None, 2, 0, 2),
    "output_padding_of_one": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), None, (2, 1), 0, 1),
    "groups": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), groups=3),
    "groups_many": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), groups=8),
    "groups_zero": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), groups=0),
    "channels": lambda f: f(r(2, 5, 5, 5), r(4, 6, 3, 3)),
    "bias": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), r(5)),
    "bias_of_groups": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), r(6), groups=2),
    "bias_rank": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), r(6, 1)),
    "stride_three": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), stride=(1, 2, 3)),
    "padding_four": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), padding=(1, 1, 1, 1)),
    "output_padding_three": lambda f: f(r(2, 4, 5, 5), r(4, 6, 3, 3), None, 2, 0, (1, 1, 1)),
    "no_input_channels": lambda f: f(r(2, 0, 5, 5), r(0, 6, 3, 3)),
    "no_rows": lambda f: f(r(2, 4, 0, 5), r(4, 6, 3, 3)),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_are_natives(case):
    with pytest.raises(RuntimeError) as expected:
        BAD[case](native)
    with pytest.raises(RuntimeError) as actual:
        BAD[case](F.conv_transpose2d)
    assert str(actual.value).split("\n")[0] == str(expected.value).split("\n")[0]


def test_errors():
    x, w = r(2, 4, 5, 5), r(4, 6, 3, 3)
    with pytest.raises(RuntimeError, match=r"Input type .* and weight type .* should be the same"):
        F.conv_transpose2d(x, w.double())
    with pytest.raises(RuntimeError, match=r"Input type .* and bias type .* should be the same"):
        F.conv_transpose2d(x, w, r(6).double())
    with pytest.raises(RuntimeError, match="same device"):
        F.conv_transpose2d(x, w.to("meta"))
    # Native's oneDNN kernels name a descriptor instead.
    with pytest.raises(RuntimeError, match=r"Calculated output size .* is too small"):
        F.conv_transpose2d(x, w, padding=4)
    with pytest.raises(RuntimeError, match="non-empty 2D or 4D weight tensor expected"):
        F.conv_transpose2d(x, w[:, :0])
    with pytest.raises(RuntimeError, match="kernel size should be greater than zero"):
        F.conv_transpose2d(x, w[:, :, :0])
    with pytest.raises(RuntimeError, match="dilation should be greater than zero"):
        F.conv_transpose2d(x, w, dilation=0)
    with pytest.raises(TypeError, match="argument 'input' must be Tensor, not NoneType"):
        F.conv_transpose2d(None, w)
    backward = torch.ops.warpwright.conv_transpose2d_backward
    windows = [1, 1], [0, 0], [0, 0], 1, [1, 1]
    with pytest.raises(RuntimeError, match=r"grad_output: expected shape .*7, 7.*, got .*4, 3"):
        backward(r(2, 6, 4, 3), x, w, *windows, [True] * 3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("stride", {"stride": 2**62}),
        ("dilation", {"dilation": 2**62}),
        ("padding", {"padding": 2**62}),
        ("both", {"stride": 2**40, "dilation": 2**62}),
        ("many windows", {"stride": 2**46}),
    ],
)
def test_extents_beyond_64_bits(device, name, options):
    """Native computes with the wrapped number."""
    x, w = torch.ones(1, 2, 9, 9, device=device), torch.ones(2, 2, 3, 3, device=device)
    with pytest.raises(RuntimeError, match=r"integer out of range|at most"):
        F.conv_transpose2d(x, w, **options)
    y = F.conv_transpose2d(x[..., :1, :1], w, stride=2**62)
    assert_same(y, native(x[..., :1, :1], w))
