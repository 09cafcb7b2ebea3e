import itertools
import re

import pytest
import torch

from warpwright import _C, explain

ON_GPU = {"device": "cuda"}


def test_names_and_devices(device):
    x = torch.randn(4, 8, device=device)
    text = explain("relu", x)
    assert text.splitlines()[0].startswith("relu, float32 (4, 8) on ")
    assert len(text.splitlines()) > 1
    assert explain(torch.relu, x) == explain(torch.nn.functional.relu, x) == text
    assert "shapes only" in explain("relu", torch.ones(2, device="meta"))
    assert "native torch: a Parameter" not in explain("relu", torch.nn.Parameter(x))
    assert "native torch: no kernel for complex64" in explain(
        "linear", x.to(torch.complex64), x.to(torch.complex64)
    )


def test_a_gpu_that_is_not_here():
    text = explain("relu", torch.ones(1000), **ON_GPU)
    assert "16-byte accesses" in text
    assert torch.cuda.is_available() or "assuming sm_90 with 132 SMs" in text


def test_linear_tiles():
    def first(m, n, k, dtype=torch.bfloat16):
        text = explain(
            "linear", torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype), **ON_GPU
        )
        return next(line for line in text.splitlines() if "forward" in line)

    assert "wgmma, tile 128x256" in first(4096, 4096, 4096)
    assert "fp64 FMA" in first(4096, 4096, 4096, torch.float64)
    assert "split-k" in first(64, 64, 16384)
    assert "element accesses" in first(128, 128, 33)
    big = first(8192, 8192, 4096)
    assert big != first(128, 128, 4096)
    with_bias = explain("linear", torch.empty(8, 16), torch.empty(4, 16), torch.empty(4), **ON_GPU)
    assert "grad_bias" in with_bias
    assert "grad_bias" not in explain("linear", torch.empty(8, 16), torch.empty(4, 16), **ON_GPU)


def linear_lines(m, n, k, dtype="bfloat16", tf32=False, arch=90, sm90=True, pad=0, address=0):
    gpu = _C.DeviceInfo()
    gpu.sm_arch = arch
    x = _C.Operand([m, k], [k + pad, 1], address)
    w = _C.Operand([n, k], [k + pad, 1], 0)
    return dict(_C.explain_linear(dtype, tf32, x, w, gpu, sm90))


def test_linear_takes_wgmma_where_tma_can_read():
    big = linear_lines(4096, 4096, 4096)
    for role in ("forward", "grad_input", "grad_weight"):
        assert "sm_90a 16-bit wgmma" in big[role]
    assert "A m-major, B n-major" in big["grad_weight"]
    assert "portable" in linear_lines(4096, 4096, 4095)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, pad=4)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, address=8)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, pad=-4096)["forward"]
    assert "wgmma" in linear_lines(4096, 50257, 768)["forward"]
    assert "portable" in linear_lines(4096, 50257, 768)["grad_input"]
    tf32 = linear_lines(4096, 4096, 4096, "float32", tf32=True)
    assert "TF32 wgmma" in tf32["forward"]
    assert "portable TF32" in tf32["grad_input"]
    assert "fp32 FMA" in linear_lines(4096, 4096, 4096, "float32")["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, arch=80)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, arch=100)["forward"]
    assert "portable" in linear_lines(4096, 4096, 4096, sm90=False)["forward"]


def test_linear_choices_are_legal():
    sizes = [1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257, 384, 511, 512, 4096, 50257]
    for m, n, k in itertools.product(sizes, sizes, sizes):
        for text in linear_lines(m, n, k).values():
            split = re.search(r"split-k (\d+)", text)
            assert split is None or int(split[1]) <= -(-max(m, n, k) // 64), (m, n, k, text)


def test_max_pool2d_layouts():
    x = torch.randn(2, 8, 6, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    assert "16 bytes of channels" in explain("max_pool2d", last, 2, **ON_GPU)
    assert "one channel" in explain("max_pool2d", x, 2, **ON_GPU)
    assert "3x3 windows unrolled" in explain("max_pool2d", x, 3, 2, 1, **ON_GPU)
    assert "any window" in explain("max_pool2d", x, (2, 3), **ON_GPU)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"op: expected one of conv2d, .*; got 'gelu'"):
        explain("gelu", torch.ones(1))
    with pytest.raises(TypeError, match="missing a required argument: 'weight'"):
        explain("linear", torch.ones(1))
    with pytest.raises(TypeError, match="relu: expected a tensor first, got int"):
        explain("relu", 3)


def test_conv2d():
    x = torch.randn(8, 64, 16, 16, dtype=torch.bfloat16)
    w = torch.randn(128, 64, 3, 3, dtype=torch.bfloat16)
    last = x.contiguous(memory_format=torch.channels_last)
    text = explain("conv2d", last, w, padding=1, **ON_GPU)
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        "forward",
        "grad_input",
        "grad_weight",
    ]
    assert "NHWC with whole 16-byte vectors" in text
    assert explain("conv2d", x, last_w(w), padding="same", **ON_GPU).count("NHWC") == 3
    assert "grad_weight" in explain("conv2d", x[0], w, padding="same", **ON_GPU)
    assert "NCHW" in explain("conv2d", x, w, stride=2, padding="valid", **ON_GPU)
    assert "TF32" in explain_conv_fp32(True)
    assert "fp32 FMA" in explain_conv_fp32(False)


def last_w(w):
    return w.contiguous(memory_format=torch.channels_last)


def explain_conv_fp32(tf32):
    torch.backends.cudnn.allow_tf32 = tf32
    return explain("conv2d", torch.empty(2, 16, 8, 8), torch.empty(4, 16, 3, 3), **ON_GPU)


def test_conv2d_direct_kernels():
    def lines(x, w, **kwargs):
        x, w = x.contiguous(memory_format=torch.channels_last), last_w(w)
        text = explain("conv2d", x.bfloat16(), w.bfloat16(), **kwargs, **ON_GPU)
        return dict(line.split(maxsplit=1) for line in text.splitlines()[1:])

    stem = lines(torch.empty(2, 3, 64, 64), torch.empty(64, 3, 7, 7), stride=2, padding=3)
    assert "160 taps in pairs" in stem["forward"]
    assert "blocks of 2x2 pixels as 12 columns" in stem["grad_input"]
    assert "152 columns of taps" in stem["grad_weight"]
    mnist = lines(torch.empty(2, 1, 28, 28), torch.empty(32, 1, 3, 3), padding=1)
    assert all("few-channel" in line for line in mnist.values())
    depthwise = lines(torch.empty(2, 8, 9, 9), torch.empty(8, 1, 3, 3), groups=8)
    assert all("depthwise" in line for line in depthwise.values())
    many = lines(torch.empty(2, 3, 9, 9), torch.empty(2048, 3, 3, 3))
    assert "implicit GEMM" in many["grad_input"]


def test_batch_norm():
    x = torch.randn(4, 64, 8, 8)
    last = x.contiguous(memory_format=torch.channels_last)
    assert "a block holds a channel" in explain("batch_norm", x, None, None, **ON_GPU)
    large = torch.empty(64, 32, 56, 56, device="meta")
    assert "planes, 16-byte accesses" in explain("batch_norm", large, None, None, **ON_GPU)
    odd = torch.empty(64, 32, 55, 55, device="meta")
    assert "shared with the neighbours" in explain("batch_norm", odd, None, None, **ON_GPU)
    # 14 x 14 in float32 at batch 256: a block can hold one operand of a channel and no second one.
    one = torch.empty(256, 256, 14, 14, device="meta")
    text = explain("batch_norm_relu", one, None, None, **ON_GPU)
    assert text.count("a block holds a channel") == 1
    text = explain("batch_norm_add_relu", one, one, None, None, **ON_GPU)
    assert "a block holds a channel" not in text
    assert "rows of channels" in explain("batch_norm", last, None, None, **ON_GPU)
    assert "rows of channels" in explain("batch_norm", x[:, :, 0, 0], None, None, **ON_GPU)


def test_cross_entropy():
    def text(*shape, target=None):
        x = torch.empty(shape)
        target = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64) if target is None else target
        return explain("cross_entropy", x, target, **ON_GPU)

    assert "one block does it all" in text(64, 10)
    assert "a block each" in text(4096, 32000)
    assert "pixels" in text(4, 20, 64, 64)
    assert "rows" in text(4096, 1000, target=torch.empty(4096, 1000))


def test_attention():
    def text(dtype, d, **kwargs):
        q = torch.empty(1, 2, 128, d, dtype=dtype)
        return explain("scaled_dot_product_attention", q, q, q, **kwargs, **ON_GPU)

    assert "padded to 64" in text(torch.bfloat16, 40)
    assert "padded to 256" in text(torch.float16, 200)
    assert "FMA" in text(torch.float32, 64)
    assert "FMA" in text(torch.bfloat16, 512)
    assert "with mask" in text(torch.bfloat16, 64, attn_mask=torch.ones(128, 128))


def test_on_the_cpu():
    x = torch.randn(2, 3, 4, 4)
    for call in (
        ("relu", x),
        ("conv2d", x, x),
        ("batch_norm", x, None, None),
        ("batch_norm_relu", x, None, None),
        ("batch_norm_add_relu", x, x, None, None),
        ("max_pool2d", x, 2),
        ("linear", x, x[0, 0]),
        ("cross_entropy", x, x),
        ("scaled_dot_product_attention", x, x, x),
    ):
        assert f"{torch.get_num_threads()} threads" in explain(*call)
