"""examples/custom_op, built and tested as a user does: against an installed warpwright, not the checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from common import NVCC
from conftest import DEVICES

import warpwright
from warpwright import _include

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(warpwright.__file__).parent
SOURCES = ("csrc", "python", "setup.py", "pyproject.toml", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "_built_for.txt", "build")


def run(arguments, cwd, **environment):
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout


@pytest.fixture
def site(tmp_path):
    """A folder with warpwright as a wheel installs it: Python files, libraries and headers."""
    tree = tmp_path / "tree"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=IGNORED)
        else:
            shutil.copy(ROOT / name, tree)
    site = tmp_path / "site"
    run(["setup.py", "-q", "build_py", "--build-lib", str(site)], tree, NO_CUDA="1")
    shutil.rmtree(tree)  # nothing may come from the sources
    for built in (*PACKAGE.glob("*.so"), PACKAGE / "_built_for.txt"):
        (site / "warpwright" / built.name).symlink_to(built)
    return site


def compilers(tmp_path):
    """Environment of the build; ccache, if it is here, sees paths that do not change between runs."""
    chosen = {"MAX_JOBS": "2", "NO_CUDA": "" if NVCC else "1"}
    chosen["TORCH_CUDA_ARCH_LIST"] = os.environ.get("TORCH_CUDA_ARCH_LIST", "9.0a")
    ccache = shutil.which("ccache")
    if ccache is not None and "CXX" not in os.environ:
        (tmp_path / "g++").symlink_to(ccache)
        chosen |= {"CXX": str(tmp_path / "g++"), "CCACHE_BASEDIR": str(tmp_path)}
    return chosen


@pytest.mark.parametrize("device", DEVICES)
def test_the_example_builds_and_passes_its_tests(site, tmp_path, device):
    package = tmp_path / "custom_op"
    shutil.copytree(ROOT / "examples" / "custom_op", package, ignore=IGNORED)
    here = {"PYTHONPATH": str(site)} | compilers(tmp_path)
    where = "import warpwright; print(warpwright.__file__, warpwright.get_include())"
    installed = site / "warpwright"
    assert run(["-c", where], tmp_path, **here).split() == [
        str(installed / "__init__.py"),
        str(installed / "include"),
    ]
    run(["setup.py", "-q", "build_ext", "--inplace"], package, **here)

    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", "-k"]
    here["PYTHONPATH"] += os.pathsep + str(package)
    if device == "cpu":
        said = run([*tests, "not cuda"], package, **here, CUDA_VISIBLE_DEVICES="")
    else:
        said = run([*tests, "cuda"], package, **here)
    last = said.strip().splitlines()[-1]
    assert "passed" in last, last
    assert "skipped" not in last, last


def shipped_headers():
    text = (ROOT / "setup.py").read_text()
    listed = re.search(r"^PUBLIC_HEADERS = \(.*?^\)", text, re.M | re.S)
    return re.findall(r'"([\w/]+\.cuh?|[\w/]+\.h)"', listed[0])


def test_shipped_headers_include_shipped_headers_alone():
    headers = shipped_headers()
    assert headers == sorted(set(headers))
    for header in headers:
        text = (ROOT / "csrc" / header).read_text()
        assert set(re.findall(r'#include "([^"]+)"', text)) <= set(headers), header


def test_get_include_of_a_checkout_and_without_headers(monkeypatch, tmp_path):
    assert Path(warpwright.get_include(), "torch", "autograd.h").is_file()
    monkeypatch.setattr(_include, "_PACKAGE", tmp_path / "python" / "warpwright")
    with pytest.raises(FileNotFoundError, match=r"expected torch/autograd\.h in .*/include or"):
        warpwright.get_include()
