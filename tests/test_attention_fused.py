"""The backward of one kernel, whose additions to dq have planned turns."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from common import subsets
from test_attention import compare, ours, qkv

from warpwright import explain
from warpwright.testing import assert_same

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Checks plans of random shapes: a program of the plan's header alone."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path_factory.mktemp("attention") / "attention_schedule"
    source = Path(__file__).with_name("attention_schedule.cpp")
    include = source.parents[1] / "csrc"
    subprocess.run(
        [compiler, "-std=c++20", "-O2", f"-I{include}", source, "-o", program], check=True
    )

    def run(*arguments):
        done = subprocess.run(
            [program, *map(str, arguments)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout
        return int(done.stdout)

    return run


def test_turns(plans):
    """Every addition has a turn of its own, in the order of the plan, so that no wait is circular."""
    assert plans(300, 1) > 0


@pytest.mark.slow
def test_turns_of_many_shapes(plans):
    assert plans(5000, 2) > 0
