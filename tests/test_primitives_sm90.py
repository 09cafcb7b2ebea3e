"""Wrappers of sm_90's instructions that no kernel of the library uses: primitives_sm90.cu asks them."""

import subprocess
from pathlib import Path

import pytest
import torch
from common import NVCC

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if NVCC is None:
        pytest.skip("needs nvcc")
    target = tmp_path_factory.mktemp("primitives") / "primitives_sm90"
    sources = (
        HERE / "primitives_sm90.cu",
        CSRC / "host/tensor_map.cu",
        CSRC / "host/device_info.cu",
    )
    flags = ("-std=c++20", "-O2", "--expt-relaxed-constexpr", f"-I{CSRC}")
    code = "-gencode=arch=compute_90a,code=sm_90a"
    subprocess.run([NVCC, *flags, code, *sources, "-o", target], check=True)
    return target


def test_they_compile(program):
    assert program.stat().st_size > 0


@pytest.mark.gpu
def test_they_do_what_they_should(program):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90a")
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == ["im2col: 4 convolutions", "reduce-add: 1 and 50 writers"]
