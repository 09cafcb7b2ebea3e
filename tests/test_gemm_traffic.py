"""The bytes that the cost model predicts, and those that Nsight Compute counted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from warpwright import _C, explain

GPUS = _C.named_devices()
GB = 1e9


def traffic(mnk, tile, gpu="h100", **cut):
    return _C.gemm_traffic(mnk, 2, tile, GPUS[gpu], **cut)


SQUARE = (4096, 4096, 4096)
WIDE = (14336, 4096, 8192)  # a gradient of linear 8192 x 4096 -> 14336

RASTER_ROWS = 2048  # of the kernel that Nsight Compute counted

# bf16, GB read from memory: Nsight Compute on both machines (docs/kernels/linear.md).
READ = [
    (SQUARE, (128, 128), "h200", 0.13),
    (SQUARE, (256, 128), "h100", 0.15),
    (SQUARE, (256, 128), "h200", 0.15),
    (WIDE, (128, 128), "h200", 1.70),
    (WIDE, (256, 128), "h100", 1.13),
    (WIDE, (256, 128), "h200", 1.13),
]
# The same, GB from L2 to the SMs. docs/kernels/linear.md has the counts that are not predicted:
# ping-pong on an H100, whose SMs drift apart along k, and requests that L2 merges at 4096^3.
FROM_L2 = [
    (WIDE, (128, 128), "h100", 13.8),
    (WIDE, (128, 128), "h200", 13.2),
]


@pytest.mark.parametrize("case", READ, ids=lambda c: "-".join(map(str, c)))
def test_bytes_read_from_memory(case):
    mnk, tile, gpu, measured = case
    found = traffic(mnk, tile, gpu, raster_rows=RASTER_ROWS)
    assert found["dram_read"] / GB == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("case", FROM_L2, ids=lambda c: "-".join(map(str, c)))
def test_bytes_from_l2(case):
    mnk, tile, gpu, measured = case
    found = traffic(mnk, tile, gpu, raster_rows=RASTER_ROWS)
    assert found["l2"] / GB == pytest.approx(measured, rel=0.15)


def test_a_small_product_is_read_once():
    m, n, k = 512, 1024, 768
    for gpu in GPUS:
        found = traffic((m, n, k), (128, 128), gpu)
        assert found["dram_read"] == (m + n) * k * 2
        assert found["dram_written"] == m * n * 2
        assert found["l2"] == (m // 128) * (n // 128) * 256 * k * 2


def test_ragged_tiles_read_no_more_than_there_is():
    assert traffic((130, 200, 64), (128, 128))["dram_read"] == (130 + 200) * 64 * 2


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("mnk", [SQUARE, WIDE, (1024, 1024, 65536), (50257, 768, 4096)])
def test_bounds(mnk, gpu):
    """Each operand at least once from memory, and no more often than L2 hands it out."""
    m, n, k = mnk
    for tile in ((64, 64), (128, 128), (256, 128), (128, 256)):
        for splits in (1, 4):
            found = traffic(mnk, tile, gpu, splits=splits)
            assert (m + n) * k * 2 <= found["dram_read"] <= found["l2"]


def test_larger_tiles_and_sharing_ask_l2_for_less():
    asked = [traffic(WIDE, tile)["l2"] for tile in ((64, 64), (128, 128), (256, 128))]
    assert asked == sorted(asked, reverse=True)
    assert traffic(WIDE, (256, 128), sharing=2)["l2"] < asked[-1]


def test_parts_that_l2_does_not_keep_go_to_memory():
    few = traffic((768, 3072, 16384), (128, 128), splits=2)
    many = traffic((768, 3072, 16384), (128, 128), splits=16)
    assert few["dram_written"] == 768 * 3072 * 2
    assert many["dram_written"] > few["dram_written"]


def test_more_cache_never_reads_more():
    gpu = _C.DeviceInfo()
    read = []
    for mib in (8, 20, 40, 50, 60, 120, 1000):
        gpu.l2_bytes = mib << 20
        read.append(_C.gemm_traffic(WIDE, 2, (128, 128), gpu)["dram_read"])
    assert read == sorted(read, reverse=True)


def test_linear_products_by_role():
    x, w = _C.Operand([8192, 4096], [4096, 1], 0), _C.Operand([14336, 4096], [4096, 1], 0)
    roles = _C.linear_traffic("bfloat16", x, w, GPUS["h100"])
    assert set(roles) == {"forward", "grad_input", "grad_weight"}
    assert roles["grad_weight"] == traffic(WIDE, (128, 128))
    assert _C.linear_traffic("float64", x, w, GPUS["h100"]) == {}


def test_explain_for_named_devices():
    x, w = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096)
    for name, gpu in GPUS.items():
        text = explain("linear", x, w.bfloat16(), device=name)
        assert text.splitlines()[0].endswith(f" on {name} ({gpu.num_sms} SMs)")
        assert ("wgmma" in text) == (gpu.sm_arch == 90)
    with pytest.raises(ValueError, match=r"device: expected .*'h100', .*, got 'h1000'"):
        explain("linear", x, w.bfloat16(), device="h1000")


def test_facts_of_named_devices():
    bandwidth = {name: gpu.memory_clock_khz * gpu.memory_bus_bits for name, gpu in GPUS.items()}
    assert bandwidth["h100-pcie"] < bandwidth["h100"] < bandwidth["gh200"] < bandwidth["h200"]
    assert GPUS["h100"].l2_bytes < GPUS["h200"].l2_bytes
    assert GPUS["h100-pcie"].num_sms == 114


def test_the_tool_skips_clearly():
    tool = Path(__file__).parents[1] / "tools/gemm_traffic.py"
    package = Path(_C.__file__).parents[1]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(package)}

    def output(*arguments):
        return subprocess.run(
            [sys.executable, tool, *arguments],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout

    assert "skipped: no GPU" in output()
    assert output("--predict", "h100").count("grad_weight") > 1
