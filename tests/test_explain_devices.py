"""Every op's choice for GPUs that are not here: the named ones, and a Hopper with 78 SMs."""

import re
import sys

import pytest
import torch

from warpwright import _C, explain

GPUS = _C.named_devices()
MODULE = sys.modules["warpwright.explain"]


def half(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


def image():
    return half(32, 64, 56, 56).to(memory_format=torch.channels_last)


QUERY = (4, 16, 2048, 64)
LABELS = torch.zeros(8192, dtype=torch.long)
CALLS = {
    "relu": lambda: (half(1 << 20),),
    "linear": lambda: (half(16384, 768), half(3072, 768), half(3072)),
    "linear_gelu": lambda: (half(16384, 768), half(3072, 768), half(3072)),
    "conv2d": lambda: (image(), half(128, 64, 3, 3).to(memory_format=torch.channels_last)),
    "batch_norm": lambda: (image(), torch.zeros(64), torch.ones(64)),
    "layer_norm": lambda: (half(16384, 768), (768,)),
    "max_pool2d": lambda: (image(), 3, 2, 1),
    "cross_entropy": lambda: (half(8192, 50257), LABELS),
    "linear_cross_entropy": lambda: (half(8192, 4096), half(128256, 4096), LABELS),
    "scaled_dot_product_attention": lambda: (half(*QUERY), half(*QUERY), half(*QUERY)),
}


@pytest.fixture(params=[*GPUS, "78 SMs"])
def explain_there(request, monkeypatch):
    """explain() as if the tensors were on that GPU."""
    if request.param in GPUS:
        return lambda *call: explain(*call, device=request.param)
    gpu = _C.DeviceInfo()
    gpu.num_sms = 78
    monkeypatch.setattr(MODULE, "current_gpu", lambda device: (gpu, f" ({gpu.num_sms} SMs)"))
    return lambda *call: explain(*call, device="cuda")


@pytest.mark.parametrize("op", CALLS)
def test_every_op_has_a_kernel(op, explain_there):
    title, *lines = explain_there(op, *CALLS[op]()).splitlines()
    assert title.startswith(op)
    assert "SMs)" in title
    assert lines
    assert not any("native torch" in line for line in lines)


def test_the_number_of_sms_decides(monkeypatch):
    """The weight gradient of a small output is cut into parts that fill the SMs, few or many."""
    parts = {}
    for sms in (16, 78, 114, 132):
        gpu = _C.DeviceInfo()
        gpu.num_sms = sms
        monkeypatch.setattr(MODULE, "current_gpu", lambda device, gpu=gpu: (gpu, ""))
        text = explain("linear", half(65536, 512), half(512, 512), device="cuda")
        line = next(line for line in text.splitlines() if "grad_weight" in line)
        split = re.search(r"split-k (\d+)", line)
        parts[sms] = int(split[1]) if split else 1
    assert parts[16] < parts[78] <= parts[114] <= parts[132]
