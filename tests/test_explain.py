import pytest
import torch

from warpwright import explain

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

    assert "mma.sync" in first(4096, 4096, 4096)
    assert "fp64 FMA" in first(4096, 4096, 4096, torch.float64)
    assert "split-k" in first(64, 64, 16384)
    assert "element accesses" in first(128, 128, 33)
    big = first(8192, 8192, 4096)
    assert big != first(128, 128, 4096)
    with_bias = explain("linear", torch.empty(8, 16), torch.empty(4, 16), torch.empty(4), **ON_GPU)
    assert "grad_bias" in with_bias
    assert "grad_bias" not in explain("linear", torch.empty(8, 16), torch.empty(4, 16), **ON_GPU)


def test_max_pool2d_layouts():
    x = torch.randn(2, 8, 6, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    assert "16 bytes of channels" in explain("max_pool2d", last, 2, **ON_GPU)
    assert "one channel" in explain("max_pool2d", x, 2, **ON_GPU)
    assert "3x3 windows unrolled" in explain("max_pool2d", x, 3, 2, 1, **ON_GPU)
    assert "any window" in explain("max_pool2d", x, (2, 3), **ON_GPU)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"op: expected one of relu, .*; got 'gelu'"):
        explain("gelu", torch.ones(1))
    with pytest.raises(TypeError, match="missing a required argument: 'weight'"):
        explain("linear", torch.ones(1))
    with pytest.raises(TypeError, match="relu: expected a tensor first, got int"):
        explain("relu", 3)
