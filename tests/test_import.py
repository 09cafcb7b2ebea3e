"""What ``import warpwright`` does to a process that has torch: nothing that is seen or slow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

IMPORT = """
import os, sys, threading
import torch
modules, environment = set(sys.modules), dict(os.environ)
from torch import nn
state = lambda: (
    nn.Module.__call__, nn.Module.__getattr__, torch.utils.checkpoint.CheckpointFunction.forward,
    torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
    torch.backends.cuda.matmul.allow_tf32, torch.initial_seed(), threading.active_count(),
    sys.getprofile(), sys.gettrace(), torch.cuda.is_initialized(), torch.are_deterministic_algorithms_enabled(),
)
seed = torch.manual_seed(0)
before = state()
import warpwright
assert state() == before
assert dict(os.environ) == environment, {k for k in os.environ if k not in environment}
print(*sorted(set(sys.modules) - modules))
"""
HELP = """
import sys
modules = set(sys.modules)
from warpwright_cli import main
assert main(["--help"]) == 0
print("modules:", *sorted(set(sys.modules) - modules))
"""


@pytest.fixture
def run(tmp_path):
    """Runs code in a fresh interpreter whose home, caches and working directory are empty."""
    folders = {
        name: str(tmp_path / name.lower())
        for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME")
    }
    (tmp_path / "tmpdir").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    made = set(tmp_path.rglob("*"))

    def call(code):
        environment = {**os.environ, **folders, "PYTHONPATH": str(ROOT / "python")}
        del environment["TORCHINDUCTOR_CACHE_DIR"]  # torch._inductor would set it
        done = subprocess.run(
            [sys.executable, "-B", "-c", code],
            cwd=tmp_path / "work",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert set(tmp_path.rglob("*")) == made
        return done.stdout

    return call


def test_import_leaves_no_trace(run):
    new = run(IMPORT).split()
    assert "warpwright" in new
    others = [name for name in new if name.split(".")[0] != "warpwright"]
    # The standard library's small modules; of torch only what is loaded in microseconds.
    assert [name for name in others if name.split(".")[0] not in sys.stdlib_module_names] == []
    lazy = (
        "bench",
        "demo",
        "doctor",
        "testing",
        "swap.check",
        "profile.runs",
        "profile.command",
    )
    assert [name for name in lazy if f"warpwright.{name}" in new] == []


def test_help_is_quick(run):
    output = run(HELP)
    assert "Usage: warpwright" in output
    new = output.split("modules:")[1].split()
    # Neither torch nor anything else that takes longer than click.
    assert {name.split(".")[0] for name in new} - sys.stdlib_module_names == {
        "click",
        "warpwright_cli",
    }


# Bytecode is read from a folder, as an installed package has it. The first run writes it there.
IMPORT_TIME = """
import sys, time
import torch
sys.pycache_prefix, sys.dont_write_bytecode = {bytecode!r}, False
begin = time.process_time()
import warpwright
print("seconds:", time.process_time() - begin)
"""
HELP_TIME = """
import runpy, sys, time
sys.argv = ["warpwright", "--help"]
try:
    runpy.run_module("warpwright", run_name="__main__")
except SystemExit:
    print("seconds:", time.process_time())
"""
TORCH_TIME = """
import time
import torch
print("seconds:", time.process_time())
"""


def seconds(run, code):
    """The process's own time, which other work on the machine does not change much."""
    return float(run(code).split("seconds:")[1])


def test_import_is_quick(run, tmp_path_factory):
    bytecode = str(tmp_path_factory.mktemp("bytecode"))
    code = IMPORT_TIME.format(bytecode=bytecode)
    run(code)
    assert any(seconds(run, code) <= 0.3 for _ in range(3))


def test_help_as_a_module_is_quick(run):
    """`python -m warpwright` imports torch on its way."""
    assert any(seconds(run, HELP_TIME) <= seconds(run, TORCH_TIME) + 1 for _ in range(3))
