"""Parts that run files of the suite: random well-formed calls, the portable kernels, PyTorch's tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .result import PROCESSES, ROOT, Options, Row

NO_GPU = "needs a GPU"
# By pytest-xdist; tests/gpu_sharing.py gives tests that need much memory the GPU alone.
IN_PARALLEL = ["-n", "auto", "--dist", "worksteal", "--timeout=0"]
REPEATED = ["test_stress.py", "-k", "repeats"]


@dataclass
class Outcome:
    """Each test's result, as pytest's JUnit file has it."""

    passed: set[str]
    failed: dict[str, str]
    text: str


def pytest(arguments: list[str], environment: dict[str, str], limit: float) -> Outcome:
    """Runs pytest in a process of its own, in tests/."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={file}", *arguments]
        path = {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "python"))}
        try:
            done = subprocess.run(
                command,
                cwd=ROOT / "tests",
                env={**os.environ, **path, **environment},
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(set(), {"pytest": f"longer than {limit:.0f} s"}, "")
        text = done.stdout + done.stderr
        if not file.exists():
            return Outcome(set(), {"pytest": f"exit code {done.returncode}: {text[-800:]}"}, text)
        return parse(file, text)


def parse(file: Path, text: str = "") -> Outcome:
    passed, failed = set(), {}
    for case in ElementTree.parse(file).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [child for child in case if child.tag in ("failure", "error")]
        if bad:
            failed[name] = (bad[0].get("message") or "")[:300]
        elif not any(child.tag == "skipped" for child in case):
            passed.add(name)
    return Outcome(passed, failed, text)


def fuzz(options: Options) -> list[Row]:
    """Random well-formed calls; the options' seed chooses them."""
    environment = {"WARPWRIGHT_FUZZ_CASES": str(options.cases), "WARPWRIGHT_FUZZ_RANDOM": "1"}
    arguments = ["test_fuzz.py", "test_fuzz_fused.py", f"--hypothesis-seed={options.seed}"]
    arguments += [*IN_PARALLEL, "-k", options.device if options.device == "cuda" else "not cuda"]
    found = pytest(arguments, environment, options.minutes * 60)
    tests = len(found.passed) + len(found.failed)
    return [
        Row(
            part="fuzz",
            what="random well-formed calls against native and float64",
            cases=tests * max(1, options.cases // 4),
            unit="calls",
            failures=[f"{name}: {why}" for name, why in found.failed.items()],
            seed=options.seed,
            detail=f"{tests} ops and dtypes",
        )
    ]


REPEATS = 10_000


def gpu_suite(options: Options) -> list[Row]:
    """What the suite has for a GPU alone."""
    repeats = {"WARPWRIGHT_REPEATS": str(REPEATS)}
    portable = {"WARPWRIGHT_PATH": "portable"}
    parts = [
        ("repeats", f"{REPEATS:,} bit-equal repeats beside a busy stream", REPEATED, repeats),
        ("large", "ops beyond 2^31 and 2^32 elements", ["test_stress.py", "-k", "test_large"], {}),
        (
            "portable",
            "the suite on the portable kernels",
            ["-m", "gpu and not slow", "."],
            portable,
        ),
    ]
    rows = []
    for part, what, chosen, environment in parts:
        row = Row(part=part, what=what, unit="tests")
        rows.append(row)
        if not torch.cuda.is_available():
            row.not_run = NO_GPU
        elif not re.search(options.only, part):
            row.not_run = "left out by --only"
        else:
            found = pytest([*chosen, *IN_PARALLEL], environment, options.minutes * 60)
            row.cases = len(found.passed) + len(found.failed)
            row.failures = [f"{name}: {why}" for name, why in found.failed.items()]
    return rows


UPSTREAM = (
    "test_nn.py",
    "nn/test_convolution.py",
    "nn/test_pooling.py",
    "nn/test_multihead_attention.py",
    "test_optim.py",
    "test_transformers.py",
)
# Tests whose failure docs/numerics.md explains ("PyTorch's own tests"), by the beginning of their names.
EXPLAINED = (
    "test_MaxPool2d_indices",
    "test_multihead_self_attn_two_masks_fast_path_mock",
    "test_functional_grad_conv2d",
)
PLUGIN = """
import pytest
import torch
import warpwright

# Before the tests' own tables of optimizers are made.
for name in ("SGD", "Adam", "AdamW"):
    setattr(torch.optim, name, getattr(warpwright.optim, name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with warpwright.patch():
        return (yield)
"""


def upstream(options: Options) -> list[Row]:
    """PyTorch's own test files under patch() and with our optimizers; what fails there, natively too.
    The files may be of another release than the torch that runs them.
    """
    what = "PyTorch's own tests under patch(): what native passes"
    row = Row(part="upstream", what=what, unit="tests")
    if options.pytorch is None:
        row.not_run = "needs PyTorch's folder test/ (--pytorch: the folder above)"
        return [row]
    tests = options.pytorch / "test"
    both_fail = explained = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "warpwright_patched.py").write_text(PLUGIN)
        folders = [folder, Path(__file__).parent, ROOT / "python", tests]
        where = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        common = ["--timeout=0", "--rootdir", str(tests), "--noconftest", "-p", "no:cacheprovider"]
        names = ["-p", "upstream_names"]
        chosen = ["-k", options.device if options.device == "cuda" else "not cuda"]
        for name in UPSTREAM:
            file = tests / name
            if not file.is_file():
                row.failures.append(f"{name}: not in the folder")
                continue
            patched = [str(file), *common, *chosen, "-p", "warpwright_patched", *names]
            ours = pytest(patched, where, options.minutes * 60)
            if not ours.passed:
                row.failures.append(f"{name}: {ours.failed.get('pytest', 'none passed')}")
                continue
            # A name is MODULE.CLASS::TEST.
            again = [
                f"{file}::{n.split('::')[0].split('.')[-1]}::{n.split('::')[1]}"
                for n in ours.failed
            ]
            if again:
                native = pytest([*again, *common, *names], where, options.minutes * 60)
            else:
                native = Outcome(set(), {}, "")
            lost = sorted(native.passed & ours.failed.keys())
            both_fail += len(ours.failed) - len(lost)
            row.cases += len(ours.passed) + len(lost)
            for test in lost:
                if test.split("::")[1].startswith(EXPLAINED):
                    explained += 1
                else:
                    row.failures.append(f"{test}: {ours.failed[test]}")
    row.detail = f"{explained} differ as docs/numerics.md says; {both_fail} more fail natively, too"
    return [row]


TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Ops with many cases; a process then has those of one data type.
MANY_CASES = {"linear", "linear_activation", "linear_quantized", "conv2d", "attention"}
ENDS = ("[-.]float64$", "bfloat16$", "-float16$", "32$")


def shards() -> list[str]:
    """Regular expressions of sanitize_cases.py: each case is found by one of them."""
    from sanitize_cases import CASES

    found = []
    for op in sorted(CASES, key=lambda op: op not in MANY_CASES):  # the longest first
        if op in MANY_CASES:
            found += [f"^{op}-.*{end}" for end in ENDS]
            found.append(f"^{op}-(?!.*({'|'.join(ENDS)}))")
        else:
            found.append(f"^{op}-")
    return found


def sanitized_cases(options: Options) -> list[Row]:
    """compute-sanitizer over tools/sanitize_cases.py: every kernel variant on a GPU."""
    rows = []
    for tool in TOOLS:
        row = Row(part="compute-sanitizer", what=f"{tool}, a case per kernel variant")
        rows.append(row)
        if not torch.cuda.is_available():
            row.not_run = NO_GPU
        elif not re.search(options.only, tool):
            row.not_run = "left out by --only"
        else:
            sanitize(row, tool, time.monotonic() + options.minutes * 60)
    return rows


@dataclass
class Shard:
    """What one process of sanitize_cases.py did."""

    cases: int
    failures: list[str]
    ended: bool  # before the time was over


def sanitize(row: Row, tool: str, end: float) -> None:
    """Runs the shards, several at once; the row names those that have not ended at `end`."""
    cut: dict[str, int] = {}

    def one(pattern: str) -> None:
        limit = end - time.monotonic()
        found = sanitized_shard(tool, limit, pattern) if limit > 0 else Shard(0, [], False)
        row.cases += found.cases
        row.failures += found.failures
        if not found.ended:
            cut[pattern] = found.cases
        said = f"{found.cases} cases, {len(found.failures)} failed"
        print(f"{tool}: {pattern}: {said}{'' if found.ended else ', cut off'}", flush=True)

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(one, shards()))
    if cut:
        listed = ", ".join(f"{pattern} ({cases} cases)" for pattern, cases in sorted(cut.items()))
        row.detail = f"cut off by the time limit: {listed}"


def sanitized_shard(tool: str, limit: float, pattern: str) -> Shard:
    """Runs the cases that `pattern` finds, for at most `limit` seconds."""
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
    command += ["--kernel-name-exclude", "kns=nvjet"]
    command += ["--padding=64"] if tool == "memcheck" else []
    command += [sys.executable, str(ROOT / "tools" / "sanitize_cases.py"), pattern]
    path = os.environ.get("PYTHONPATH", str(ROOT / "python"))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as output:  # keeps what a process said that is killed
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return shard_of(pattern, code, output.read())


# The summary line counts the reports, which the exit code does not always show.
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+)|(\d+) hazards? displayed")
NAMED = re.compile(r"^[a-z]\w*-\S.*$", re.MULTILINE)  # a case's name, before it runs
REPORT = re.compile(
    r"^========= (Invalid|Error|Uninitialized|Race|Barrier|Program hit)", re.MULTILINE
)


def shard_of(pattern: str, code: int | None, text: str) -> Shard:
    """What a process with this exit code said; None: it was killed, perhaps inside a case."""
    if code is None:
        reports = REPORT.search(text) is not None or "differs from the CPU" in text
        started = len(NAMED.findall(text))
        return Shard(max(0, started - 1), [f"{pattern}: {text[-1500:]}"] if reports else [], False)
    cases = re.search(r"^(\d+) cases", text, re.MULTILINE)
    summary = SUMMARY.search(text)
    clean = code == 0 and summary is not None and not int(summary[1] or summary[2])
    failures = [] if clean else [f"{pattern}: {text[-1500:]}"]
    return Shard(int(cases[1]) if cases else 0, failures, True)
