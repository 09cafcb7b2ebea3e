"""`explain` on the CPU names the kernel that runs there, and the reason."""

import pytest
import torch
from public_calls import public_calls

from warpwright import _explain_cpu, explain
from warpwright import functional as F
from warpwright._catalog import VARIANTS


def lines(op, *args, **kwargs):
    title, *found = explain(op, *args, **kwargs).splitlines()
    assert f"{torch.get_num_threads()} threads" in title
    return dict(line.strip().split("  ", 1) for line in found)


@pytest.mark.parametrize("seed", range(4))
def test_every_call_has_an_answer(seed):
    for name, (args, kwargs) in public_calls("cpu", seed).items():
        if name in VARIANTS:
            continue
        title, *found = explain(name, *args, **kwargs).splitlines()
        assert title.startswith(f"{name}, ")
        assert found
        assert all(len(line.split("  ")[-1]) > 3 for line in found), found


def test_special_answers_are_of_ops():
    assert all(hasattr(F, name) for name in _explain_cpu.SPECIAL)


def test_convolutions_say_why_onednn_runs_or_not():
    onednn = torch.backends.mkldnn
    if not onednn.is_available():
        pytest.skip("torch without oneDNN")
    x, w = torch.empty(4, 16, 32, 32), torch.empty(32, 16, 3, 3)
    assert all("native's kernel (oneDNN)" in text for text in lines("conv2d", x, w).values())
    for call, reason in (
        ((x.double(), w.double()), "float32 only"),
        ((x[:1, :, :4, :4], w), "too small for oneDNN"),
    ):
        assert all(reason in text for text in lines("conv2d", *call).values())
    with onednn.flags(enabled=False):
        assert all("oneDNN is off" in text for text in lines("conv2d", x, w).values())
    groups = lines("conv2d", x.repeat(1, 4, 1, 1), w[:, :8], groups=8)
    assert all("NCHW groups" in text for text in groups.values())
    odd = lines("conv2d", x, torch.empty(32, 16, 2, 2), padding="same")
    assert all("pads all sides equally" in text for text in odd.values())
    image = lines("conv2d", torch.empty(8, 3, 64, 64), torch.empty(8, 3, 3, 3))
    assert "8 channels at a time" in image["grad_input"]
    one = lines("conv2d", torch.empty(8, 1, 64, 64), torch.empty(32, 1, 3, 3))
    assert "too few for a matrix product (oneDNN is slower for one channel)" in one["forward"]
    strided = lines("conv2d", x, torch.empty(32, 16, 1, 1), stride=2)
    assert "strided 1x1" in strided["grad_input"]
    depthwise = lines("conv2d", x.repeat(4, 1, 2, 2), torch.empty(16, 1, 7, 7), groups=16)
    assert "long depthwise window" in depthwise["grad_weight"]
    last = torch.empty(2, 64, 4, 4).contiguous(memory_format=torch.channels_last)
    few = lines("conv2d", last, torch.empty(64, 64, 3, 3), padding=1)
    assert "for few pixels" in few["forward"]


def test_composed_convolutions_explain_their_parts():
    x, w = torch.empty(4, 16, 32, 32), torch.empty(32, 16, 3, 3)
    assert [*lines("conv2d_batch_norm_relu", x, w)] == [
        "convolution, forward",
        "convolution, grad_input",
        "convolution, grad_weight",
        "batch_norm_relu",
    ]
    up = lines("conv_transpose2d_cat", x, x[:, :, :16, :16], torch.empty(16, 4, 2, 2), stride=2)
    assert [*up] == ["forward", "grad_input", "grad_weight", "concatenation"]


def test_gelu_says_why_onednn_runs_or_not():
    x = torch.empty(200, 200)
    if torch.backends.mkldnn.is_available():
        for dense in (x, x.t()):
            assert "native's kernel (oneDNN)" in lines("gelu", dense)["forward"]
    with torch.backends.mkldnn.flags(enabled=False):
        assert "oneDNN is off" in lines("gelu", x)["forward"]
    assert "vectorised loops" in lines("gelu", x[:4])["forward"]
    assert "dense float32" in lines("gelu", x[:, ::2])["forward"]
    assert "dense float32" in lines("gelu", x.double())["forward"]
    for call in (("gelu", x, "tanh"), ("silu", x)):
        assert "oneDNN" not in explain(*call)


def test_layouts_have_a_reason():
    x = torch.empty(4, 16, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    for op, args in (("batch_norm", (None, None)), ("group_norm", (4,)), ("max_pool2d", (2,))):
        assert "plane by plane" in explain(op, x, *args)
        assert "channels are innermost" in explain(op, last, *args)
    assert "channels are innermost" in explain("batch_norm", x[:, :, 0, 0], None, None)
    assert "native adaptive_avg_pool2d" in explain("adaptive_avg_pool2d", x, 2)


def test_dimensions_have_a_reason():
    x = torch.empty(6, 40, 30)
    for op in ("softmax", "log_softmax", "cumsum"):
        assert "because dim is the innermost" in explain(op, x, -1)
        assert "because dim is not the innermost" in explain(op, x, 1)
        assert "because dim is the innermost" in explain(op, x[:, :, :1], 1)
    for dim, reason in (
        (2, "along rows, in blocks: the innermost dimension is reduced"),
        ((0, 1), "across rows"),
        (None, "along rows"),
    ):
        assert reason in lines("sum", x, dim)["forward"]
    assert "fewer columns than lanes" in lines("amax", x[:, :, :3], 1)["forward"]
    assert "across rows" in lines("sum", x.transpose(1, 2), 2)["forward"]
    assert "ATen's formula" in lines("var", x[:, ::2], 1)["backward"]
