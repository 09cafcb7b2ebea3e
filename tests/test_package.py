"""The package as pip sees it: metadata, licence, typing, and what a CPU-only build says."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib import import_module, metadata
from pathlib import Path

import pytest
import torch

import warpwright
from warpwright import distributed

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(warpwright.__file__).parent
PUBLIC_MODULES = (
    *("warpwright", "warpwright.functional", "warpwright.nn", "warpwright.optim"),
    *("warpwright.quantization", "warpwright.testing"),
    "warpwright.distributed.sequence",
)


def run(args, cwd, **env):
    return subprocess.run(
        args, cwd=cwd, capture_output=True, text=True, timeout=3000, env={**os.environ, **env}
    )


@pytest.fixture
def tree(tmp_path):
    """The sources without anything built, so that these tests and a build don't meet.

    The path has a space.
    """
    folder = tmp_path / "a clone"
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "_built_for.txt")
    for name in ("csrc", "python", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build_with(tree, hook, **env):
    """What a PEP 517 front end does: one hook of the build backend in a process of its own."""
    code = (
        "from setuptools import build_meta\n"
        "import os; os.mkdir('out')\n"
        f"print('NAME', build_meta.{hook}('out'))"
    )
    result = run([sys.executable, "-c", code], tree, NO_CUDA="1", **env)
    assert result.returncode == 0, result.stderr
    return tree / "out" / result.stdout.strip().split("NAME ")[-1]


def test_metadata(tree):
    folder = build_with(tree, "prepare_metadata_for_build_wheel")
    fields = Parser().parsestr((folder / "METADATA").read_text())
    assert fields["Name"] == "warpwright"
    assert fields["Version"] == warpwright.__version__
    assert fields["License-Expression"] == "BSD-3-Clause"
    assert fields["Requires-Python"] == ">=3.10"
    assert fields["License-File"] == "LICENSE"
    major, minor = map(int, torch.__version__.split(".")[:2])
    (needed,) = (r for r in fields.get_all("Requires-Dist") if re.match(r"torch\W", r))
    # A binary loads with the torch minor that it was built for, and with no other.
    assert set(needed.removeprefix("torch").split(",")) == {
        f">={major}.{minor}",
        f"<{major}.{minor + 1}",
    }
    assert {"demo", "test", "lint"} <= set(fields.get_all("Provides-Extra"))
    assert "# warpwright" in fields.get_payload()
    licences = list(folder.rglob("LICENSE"))
    assert licences
    assert "Redistribution and use in source and binary forms" in licences[0].read_text()


def test_one_version():
    version = warpwright.__version__
    assert metadata.version("warpwright").split("+")[0] == version
    assert re.search(f"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_local_version(tree):
    """Wheels of one release for several torch versions have names of their own."""
    folder = build_with(
        tree, "prepare_metadata_for_build_wheel", WARPWRIGHT_LOCAL_VERSION="torch2.11.cu130"
    )
    assert folder.name == f"warpwright-{warpwright.__version__}+torch2.11.cu130.dist-info"


def tracked(folder):
    """The files of a folder as git has them; in an unpacked source distribution those on the disk."""
    if (ROOT / ".git").exists():
        return run(["git", "ls-files", folder], ROOT).stdout.split()
    built = {".so", ".pyc"}
    return [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in built and "egg-info" not in path.as_posix()
    ]


def test_sdist(tree):
    """It has every source and nothing built, and any torch will do for it."""
    for name in ("libwarpwright.so", "_built_for.txt"):  # as in a checkout that was built in place
        (tree / "python" / "warpwright" / name).write_bytes(b"built")
    archive = build_with(tree, "build_sdist")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        base = archive.name.removesuffix(".tar.gz")
        fields = Parser().parsestr(opened.extractfile(f"{base}/PKG-INFO").read().decode())
    sources = tracked("csrc") + tracked("python") + tracked("tests")
    assert len(sources) > 400
    assert set(sources) <= names, sorted(set(sources) - names)
    assert {"setup.py", "pyproject.toml", "LICENSE", "README.md"} <= names
    assert not [n for n in names if n.endswith((".so", ".pyc", "_built_for.txt"))]
    assert "torch>=2.11" in fields.get_all("Requires-Dist")


def fake_tool(folder, name, prints):
    tool = folder / name
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + prints + "\nEND\n")
    tool.chmod(0o755)
    return str(tool)


OLD_GCC = "#define __GNUC__ 9\n#define __GNUC_MINOR__ 4"


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (
            {"CXX": "no-such-compiler"},
            "the compiler 'no-such-compiler' was not found. Install g++ 11",
        ),
        (
            {"CXX": "false"},
            "the compiler 'false' does not accept -std=c++20. warpwright needs g++ 11",
        ),
        ({"CXX": OLD_GCC}, "g++' is g++ 9.4, expected g++ 11 or newer"),
    ],
)
def test_compilers_that_cannot_build(tree, tools, says):
    """The last line says what to do, and nothing is compiled."""
    if tools["CXX"] == OLD_GCC:
        tools = {"CXX": fake_tool(tree.parent, "g++", OLD_GCC)}
    result = run([sys.executable, "setup.py", "build"], tree, NO_CUDA="1", **tools)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("setup.py: ")
    assert says in last
    assert not list(tree.rglob("*.o"))


def test_nvcc_of_another_cuda(tree):
    fake_tool(tree.parent / "cuda", "bin/nvcc", "Cuda compilation tools, release 10.2, V10.2.89")
    environment = {"NO_CUDA": "", "FORCE_CUDA": "1", "CUDA_HOME": str(tree.parent / "cuda")}
    result = run([sys.executable, "setup.py", "build"], tree, **environment)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    if torch.version.cuda is None:
        assert last == "setup.py: FORCE_CUDA=1, but the installed torch is a CPU-only build"
        return
    assert f"bin/nvcc is CUDA 10.2, but torch {torch.__version__} was built with CUDA" in last
    assert "or NO_CUDA=1 for the CPU kernels only" in last


def test_reused_library_must_be_there(tree):
    package = tree / "python" / "warpwright"
    call = [sys.executable, "setup.py", "--version"]
    result = run(call, tree, WARPWRIGHT_REUSE_LIBRARY="1")
    assert result.returncode == 1
    assert f"{package}/libwarpwright.so is missing" in result.stderr
    (package / "libwarpwright.so").write_bytes(b"built")
    (package / "_built_for.txt").write_text("2.9.1+cu128\n")
    result = run(call, tree, WARPWRIGHT_REUSE_LIBRARY="1")
    assert result.returncode == 1
    assert f"was built for torch 2.9.1+cu128, and this build has torch {torch.__version__}" in (
        result.stderr
    )


@pytest.mark.slow  # compiles _C
def test_wheel_with_a_reused_library(tree):
    for name in ("libwarpwright.so", "_built_for.txt"):
        shutil.copy(PACKAGE / name, tree / "python" / "warpwright")
    stale = tree / "build"
    run([sys.executable, "setup.py", "build_py"], tree, NO_CUDA="1")
    (left,) = stale.glob("lib*/warpwright")
    (left / "left_from_before.py").write_text("")
    wheel = build_with(tree, "build_wheel", WARPWRIGHT_REUSE_LIBRARY="1")
    with zipfile.ZipFile(wheel) as opened:
        library = opened.read("warpwright/libwarpwright.so")
        assert "warpwright/left_from_before.py" not in opened.namelist()
    assert library == (PACKAGE / "libwarpwright.so").read_bytes()
    site = tree / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = "import torch, warpwright as w; print(w.__file__, w.functional.relu(torch.ones(1)))"
    result = run([sys.executable, "-c", code], tree, PYTHONPATH=str(site))
    assert result.stdout.strip() == f"{site}/warpwright/__init__.py tensor([1.])", result.stderr


def test_release_workflow():
    """Both lists of torch versions agree, and start at the oldest that is supported."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    lists = re.findall(r"torch: \[(.+)\]", text)
    assert len(lists) == 2
    assert lists[0] == lists[1]
    versions = [tuple(map(int, v.strip(' "').split("."))) for v in lists[0].split(",")]
    assert versions == sorted(versions)
    assert versions[0][:2] == (2, 11)


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
@pytest.mark.parametrize("reused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_wheel(tree, reused):
    """`pip wheel` of the source distribution, CPU-only, installed elsewhere: complete, and it runs an op.

    With the library of this build or with one compiled from the distribution, which has the same
    sources (test_sdist). By a compiler that links a static C++ runtime, if it is let: next to torch's
    it can't print numbers.
    """
    archive = build_with(tree, "build_sdist")
    with tarfile.open(archive) as opened:
        opened.extractall(tree / "unpacked")
    (unpacked,) = (tree / "unpacked").iterdir()
    if reused:
        for name in ("libwarpwright.so", "_built_for.txt"):
            shutil.copy(PACKAGE / name, unpacked / "python" / "warpwright")
    result = run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
            *("-w", "w", str(unpacked)),
        ],
        tree,
        NO_CUDA="1",
        WARPWRIGHT_REUSE_LIBRARY=str(int(reused)),
        LDFLAGS="-static-libstdc++",
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    (wheel,) = (tree / "w").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "libwarpwright.so",
        "py.typed",
        "_C.pyi",
        "_built_for.txt",
        "functional/__init__.py",
        "include/torch/autograd.h",
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


def public_names():
    """Each name with its module. Those of warpwright.distributed come at the first use."""
    names = (*distributed.FAILURES, *distributed.SEQUENCE, *distributed.TENSOR_PARALLEL)
    lazy = [f"{distributed.__name__}.{n}" for n in names]
    listed = [f"{m}.{name}" for m in PUBLIC_MODULES for name in import_module(m).__all__]
    return sorted([*lazy, *listed])


def test_public_names_stay():
    """tests/public_names.txt is written by hand: a name that goes from there breaks programs."""
    kept = Path(__file__).with_name("public_names.txt").read_text().split()
    assert public_names() == kept
    for name in kept:
        module, _, attribute = name.rpartition(".")
        assert getattr(import_module(module), attribute) is not None
