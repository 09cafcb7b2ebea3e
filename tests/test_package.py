"""The package as pip sees it: metadata, licence, typing, and what a CPU-only build says."""

import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
import torch

import warpwright

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(warpwright.__file__).parent


def run(args, cwd, **env):
    return subprocess.run(
        args, cwd=cwd, capture_output=True, text=True, timeout=3000, env={**os.environ, **env}
    )


@pytest.fixture
def tree(tmp_path):
    """The sources without anything built, so that these tests and a build don't meet."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "_built_for.txt")
    for name in ("csrc", "python"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def wheel_metadata(tree):
    code = (
        "from setuptools import build_meta\n"
        "import os; os.mkdir('meta')\n"
        "print('NAME', build_meta.prepare_metadata_for_build_wheel('meta'))"
    )
    result = run([sys.executable, "-c", code], tree, NO_CUDA="1")
    assert result.returncode == 0, result.stderr
    name = result.stdout.strip().split("NAME ")[-1]
    return tree / "meta" / name


def test_metadata(tree):
    folder = wheel_metadata(tree)
    fields = Parser().parsestr((folder / "METADATA").read_text())
    assert fields["Name"] == "warpwright"
    assert fields["Version"] == warpwright.__version__
    assert fields["License-Expression"] == "BSD-3-Clause"
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-File"] == "LICENSE"
    assert any(r.startswith("torch>=2.11") for r in fields.get_all("Requires-Dist"))
    assert {"demo", "test", "lint"} <= set(fields.get_all("Provides-Extra"))
    assert "# warpwright" in fields.get_payload()
    licences = list(folder.rglob("LICENSE"))
    assert licences
    assert "Redistribution and use in source and binary forms" in licences[0].read_text()


def test_installed_version_is_the_modules():
    assert metadata.version("warpwright") == warpwright.__version__


def test_typed():
    assert (PACKAGE / "py.typed").exists()
    stub = (PACKAGE / "_C.pyi").read_text()
    from warpwright import _C

    for name in vars(_C):
        if not name.startswith("_"):
            assert f"def {name}(" in stub or f"class {name}" in stub, f"_C.pyi lacks {name}"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"NO_CUDA": "1"}, "CUDA off (CPU kernels only)"),
        ({"NO_CUDA": "yes"}, "NO_CUDA: expected 0 or 1, got 'yes'"),
        ({"FORCE_CUDA": "2"}, "FORCE_CUDA: expected 0 or 1, got '2'"),
    ],
)
def test_switches_say_what_they_do(tree, env, says):
    switches = {"NO_CUDA": "", "FORCE_CUDA": "", **env}  # these tests may run in a build with one
    result = run([sys.executable, "setup.py", "--version"], tree, **switches)
    assert says in result.stdout + result.stderr
    assert (result.returncode == 0) == (env.get("NO_CUDA") == "1")


def test_no_nvcc_is_a_cpu_only_build(tree):
    """With nvcc nowhere to be found the configuration goes on for the CPU and says so."""
    code = (
        "import os, shutil, sys\n"
        "real = os.access\n"
        "os.access = lambda p, m: False if str(p).endswith('nvcc') else real(p, m)\n"
        "sys.argv = ['setup.py', '--version']\n"
        "exec(compile(open('setup.py').read(), os.path.abspath('setup.py'), 'exec'),\n"
        "     {'__name__': '__main__', '__file__': os.path.abspath('setup.py')})\n"
    )
    result = run([sys.executable, "-c", code], tree, NO_CUDA="", FORCE_CUDA="")
    assert result.returncode == 0, result.stderr
    assert "CUDA off (CPU kernels only)" in result.stdout
    result = run([sys.executable, "-c", code], tree, NO_CUDA="", FORCE_CUDA="1")
    assert result.returncode != 0
    assert "FORCE_CUDA=1, but nvcc is" in result.stderr


@pytest.mark.timeout(3600)
def test_wheel(tree):
    """`pip wheel` of a CPU-only build, installed elsewhere: complete, and it runs an op.

    By a compiler that links a static C++ runtime, if it is let: beside torch's it can't print
    numbers.
    """
    result = run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "w", "."],
        tree,
        NO_CUDA="1",
        LDFLAGS="-static-libstdc++",
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (wheel,) = (tree / "w").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "libwarpwright.so",
        "py.typed",
        "_C.pyi",
        "_built_for.txt",
        "functional/__init__.py",
    ):
        assert f"warpwright/{needed}" in names, needed
    assert any(n.endswith("LICENSE") for n in names)
    assert not [n for n in names if n.startswith(("csrc", "tests"))]
    site = tree / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import torch, warpwright; print(warpwright.__file__)\n"
        "from warpwright._C import build_info; assert not build_info()['with_cuda']\n"
        "print(warpwright.functional.relu(torch.tensor([-1.0, 2.0])).tolist())\n"
        "try: warpwright.functional.linear(torch.ones(2, 5), torch.ones(3, 4))\n"
        "except RuntimeError as e: print(str(e)[:46])"
    )
    result = run([sys.executable, "-c", code], tree, PYTHONPATH=str(site))
    assert result.stdout.strip().split("\n") == [
        str(site / "warpwright" / "__init__.py"),
        "[0.0, 2.0]",
        "linear: input: expected 4 features, got 5: mat",
    ]


def test_one_cpp_runtime():
    """The libraries load the C++ runtime that torch loads, and bring none along."""
    for library in PACKAGE.glob("*.so"):
        assert b"\0libstdc++.so.6\0" in library.read_bytes(), library


def test_supports_this_torch():
    major, minor = map(int, torch.__version__.split(".")[:2])
    assert (major, minor) >= (2, 11)
