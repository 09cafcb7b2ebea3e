"""Every op's choice for GPUs that are not here: the named ones, and a Hopper with 78 SMs."""

import math
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


def weight():
    return half(128, 64, 3, 3).to(memory_format=torch.channels_last)


QUERY = (4, 16, 2048, 64)
LABELS = torch.zeros(8192, dtype=torch.long)
ENDS = torch.zeros(9, dtype=torch.int32)
CALLS = {
    **{op: lambda: (half(1 << 20),) for op in ("relu", "gelu", "tanh", "dropout")},
    "linear": lambda: (half(16384, 768), half(3072, 768), half(3072)),
    "linear_gelu": lambda: (half(16384, 768), half(3072, 768), half(3072)),
    "linear_int8": lambda: (half(16384, 768), torch.empty(3072, 768).char(), torch.empty(3072)),
    "linear_quantized": lambda: (half(16, 4096), half(4096, 2048).byte(), half(4096, 32)),
    "conv2d": lambda: (image(), weight()),
    "conv_transpose2d": lambda: (image(), weight()[:64], None, 2, 1),
    "conv_transpose2d_cat": lambda: (
        half(32, 64, 112, 112).to(memory_format=torch.channels_last),
        image(),
        weight()[:64, :, :2, :2].contiguous(memory_format=torch.channels_last),
        *(None, 2),
    ),
    "conv2d_batch_norm": lambda: (image(), weight()),
    "conv2d_batch_norm_relu_max_pool2d": lambda: (
        *(torch.empty(64, 1, 28, 28), torch.empty(32, 1, 3, 3), None),
        *(1, 1),
    ),
    "fft_conv1d": lambda: (half(8, 64, 4096), half(64, 64, 1024)),
    "batch_norm": lambda: (image(), torch.zeros(64), torch.ones(64)),
    "batch_norm_relu_max_pool2d": lambda: (
        *(image(), torch.zeros(64), torch.ones(64), None, None),
        *(True, 0.1, 1e-5, 3, 2, 1),
    ),
    "layer_norm": lambda: (half(16384, 768), (768,)),
    "add_layer_norm": lambda: (half(16384, 768), half(16384, 768), (768,)),
    "group_norm": lambda: (half(32, 64, 56, 56), 32),
    "swiglu": lambda: (half(16384, 1536),),
    "layer_scale_add": lambda: (image(), image(), half(64, 1, 1)),
    "rotary_embedding": lambda: (half(*QUERY), half(*QUERY), *half(2, 1, *QUERY[2:])),
    "squeeze_excitation": lambda: (image(), half(4, 64), None, half(64, 4), None),
    "embedding": lambda: (half(16, 1024).long(), half(50257, 768)),
    "softmax": lambda: (half(16384, 4096), -1),
    "sum": lambda: (half(16384, 4096), 1),
    "cumsum": lambda: (half(16384, 4096), 1),
    "max_pool2d": lambda: (image(), 3, 2, 1),
    "adaptive_avg_pool2d": lambda: (image(), 1),
    "cross_entropy": lambda: (half(8192, 50257), LABELS),
    "linear_cross_entropy": lambda: (half(8192, 4096), half(128256, 4096), LABELS),
    "scaled_dot_product_attention": lambda: (half(*QUERY), half(*QUERY), half(*QUERY)),
    "attention_varlen": lambda: (*half(3, 8192, 16, 64), ENDS, ENDS, 2048, 2048),
    "attention_with_kv_cache": lambda: (half(8, 1, 32, 128), *half(2, 8, 4096, 8, 128)),
}
OPTIONS = {
    "conv2d_batch_norm": {"training": True},
    "conv2d_batch_norm_relu_max_pool2d": {"training": True, "pool_kernel_size": 2},
    "attention_with_kv_cache": {"cache_seqlens": ENDS[:8]},
}


@pytest.mark.parametrize(
    ("rows", "count", "sorts"),
    [
        (50257, 16384, False),
        (128256, 8192, False),
        (50257, 131072, False),
        (1_000_000, 65536, True),
    ],
)
def test_embedding_sorts_for_large_tables(rows, count, sorts):
    text = explain("embedding", torch.empty(count).long(), half(rows, 64), device="h200")
    assert ("radix sort" in text) == sorts


@pytest.fixture(params=[*GPUS, "78 SMs"])
def explain_there(request, monkeypatch):
    """explain() as if the tensors were on that GPU."""
    if request.param in GPUS:
        return lambda *call, **options: explain(*call, device=request.param, **options)
    gpu = _C.DeviceInfo()
    gpu.num_sms = 78
    monkeypatch.setattr(MODULE, "current_gpu", lambda device: (gpu, f" ({gpu.num_sms} SMs)"))
    return lambda *call, **options: explain(*call, device="cuda", **options)


@pytest.mark.parametrize("op", CALLS)
def test_every_op_has_a_kernel(op, explain_there):
    title, *lines = explain_there(op, *CALLS[op](), **OPTIONS.get(op, {})).splitlines()
    assert title.startswith(op)
    assert "SMs)" in title
    assert lines
    assert not any("native torch" in line for line in lines)


def rows_in_rings(length):
    """Calls whose kernels let rows pass through a ring in shared memory, where they take such rows."""
    x, single = half(4096, length), torch.empty(4096, length)
    return [
        ("layer_norm", x, (length,)),
        ("rms_norm", x, (length,)),
        ("add_layer_norm", x, x, (length,)),
        ("add_rms_norm", single, x, (length,)),
        ("softmax", x, -1),
        ("log_softmax", single, -1),
        ("group_norm", x.view(64, 64, 8, length // 8), 16),
        ("group_norm", single.view(4096, 8, length // 8, 1), 8),
    ]


@pytest.mark.parametrize("gpu", GPUS)
def test_rings_fit_the_shared_memory(gpu):
    """Compute capability 8.0 has 163 KiB per block, 8.6 and 8.9 have 99, and a Hopper 227."""
    ring_bytes, where_rows_meet = 192 * 1024 / 512, 2048  # per thread; per block
    most = GPUS[gpu].smem_per_block - where_rows_meet
    widest = 0
    for length in (64, 768, 1024, 3072, 4096, 8192, 12288, 16384, 32768, 65536):
        for call in rows_in_rings(length):
            for line in explain(*call, device=gpu).splitlines()[1:]:
                if "ring" in line:
                    threads = int(re.search(r"of (\d+) threads", line)[1])
                    assert threads * ring_bytes <= most, (call[0], length, line)
                    widest = max(widest, threads)
    assert widest == {99: 256, 163: 416}.get(GPUS[gpu].smem_per_block // 1024, 512)


@pytest.mark.parametrize("sms", [16, 78, 114, 132])
def test_parts_fill_the_sms(sms, monkeypatch):
    """The weight gradient of a small output is cut into parts that fill whole rounds of the SMs."""
    size = 512
    gpu = _C.DeviceInfo()
    gpu.num_sms = sms
    monkeypatch.setattr(MODULE, "current_gpu", lambda device: (gpu, ""))
    text = explain("linear", half(65536, size), half(size, size), device="cuda")
    line = next(line for line in text.splitlines() if "grad_weight" in line)
    rows, cols = map(int, re.search(r"tile (\d+)x(\d+)", line).groups())
    parts = int(re.search(r"split-k (\d+)", line)[1])
    blocks = math.ceil(size / rows) * math.ceil(size / cols) * parts
    rounds = math.ceil(blocks / sms)
    assert blocks >= 0.9 * rounds * sms


@pytest.mark.parametrize(
    ("channels", "groups"), [(24, 1), (64, 1), (72, 1), (96, 1), (144, 3), (240, 3), (512, 4)]
)
def test_rows_leave_few_threads_idle(channels, groups):
    """Batch norm's groups of channels on 132 SMs: of equal size, if the SMs then have equal shares."""
    x = half(256, channels, 112, 112).to(memory_format=torch.channels_last)
    norm = torch.zeros(channels), torch.ones(channels)
    text = explain("batch_norm", x, *norm, training=True, device="h200")
    assert f"{groups} group(s) of channels in {132 // groups} split(s)" in text
