"""Mutation testing: builds the sources with faults in, switches on one at a time, and runs the tests.

A fault is *killed* if a test fails that passes without it, the process dies, or a test hangs.
It *survives* if the random cases, all tests of its op, and the tests that all ops share pass.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from warpwright.bench import sources

from .mutate import Choice, Mutant, files_of_cpu, files_of_kernels
from .result import PROCESSES, ROOT, Options, Row
from .survivors import reason

# The tests of an op's folder; the shared ones follow with the op's names as -k.
TESTS = {
    "attention": (
        ["test_attention*.py", "test_multihead.py", "test_split_qkv.py"],
        "attention or split_qkv",
    ),
    "attention_with_kv_cache": (["test_attention_with_kv_cache*.py"], "kv_cache"),
    "batch_norm": (["test_batch_norm*.py"], "batch_norm"),
    "batch_norm_relu_max_pool2d": (["test_batch_norm_relu_max_pool2d.py"], "batch_norm"),
    "conv2d": (["test_conv2d*.py"], "conv2d"),
    "conv_transpose2d": (["test_conv_transpose2d*.py"], "conv_transpose2d"),
    "conv2d_batch_norm": (["test_conv2d_batch_norm.py"], "conv2d_batch_norm"),
    "conv2d_batch_norm_relu_max_pool2d": (
        ["test_conv2d_batch_norm_relu_max_pool2d*.py"],
        "conv2d_batch_norm_relu_max_pool2d",
    ),
    "cross_entropy": (["test_cross_entropy*.py"], "cross_entropy"),
    "gated_activation": (["test_gated_activation.py"], "gated or glu"),
    "rotary_embedding": (["test_rotary_embedding.py"], "rotary"),
    "layer_scale_add": (["test_layer_scale_add*.py", "test_swap_copies.py"], "layer_scale"),
    "layer_norm": (["test_layer_norm.py", "test_add_norm.py", "test_norm_dtype.py"], "norm"),
    "group_norm": (["test_group_norm.py"], "group_norm or instance_norm"),
    "activation": (["test_activation.py"], "gelu or silu or sigmoid or tanh or activation"),
    "dropout": (["test_dropout.py"], "dropout"),
    "squeeze_excitation": (["test_squeeze_excitation*.py"], "squeeze"),
    "embedding": (["test_embedding*.py"], "embedding"),
    "softmax": (["test_softmax.py"], "softmax"),
    "linear_8bit": (
        ["test_linear_8bit.py", "test_quantize.py"],
        "int8 or fp8 or quantize or scaled",
    ),
    "reduction": (
        ["test_reduction.py", "test_adaptive_avg_pool2d.py"],
        "sum or mean or amax or logsumexp or var or std or avg_pool",
    ),
    "scan": (
        ["test_cumsum.py", "test_cumprod.py", "test_linear_scan.py"],
        "cumsum or cumprod or logcumsumexp or linear_scan",
    ),
    "fft_conv": (["test_fft_conv.py"], "fft"),
    "linear": (
        [
            *("test_linear.py", "test_linear_tiles.py", "test_linear_activation.py", "test_mlp.py"),
            *("test_linear_transposed.py", "test_linear_cluster_split.py", "test_split_qkv.py"),
            *("test_autocast_products.py", "test_float32_precision.py", "test_weight_copies.py"),
        ],
        "linear or mlp or split_qkv",
    ),
    "linear_quantized": (["test_linear_quantized.py", "test_quantize.py"], "quantized"),
    "linear_cross_entropy": (["test_linear_cross_entropy*.py"], "cross_entropy"),
    "max_pool2d": (["test_max_pool2d.py", "test_relu_max_pool2d.py"], "pool"),
    "optim": (["test_optim*.py"], "optim or sgd or adam or grad_norm"),
    "relu": (["test_relu.py"], "relu"),
}
SHARED = [
    "test_raw_arguments.py",
    "test_raw_memory.py",
    "test_arguments.py",
    "test_direct_call.py",
    "test_explain.py",
    "test_kinds.py",
    "test_malformed_windows.py",
    "test_dense_outputs.py",
    "test_derivatives.py",
    "test_mutating.py",
    "test_batching.py",
    "test_batching_attention.py",
    "test_batching_fused.py",
    "test_registration.py",
    "test_threads.py",
    "test_conformance_op_db.py",
]
RANDOM = ["test_fuzz.py", "test_fuzz_fused.py"]  # first: they find most faults in seconds
EVERY = ["layer_norm", "linear", "max_pool2d", "conv2d", "attention", "reduction", "softmax"]
MOST_OPS = 3  # of EVERY, for a file that no op owns
HANG = 120  # seconds of one test; a process that takes longer ends
# The switches change where the compiler contracts products and sums. A test of fixed tolerances may
# therefore fail without a fault. It is left out; more of them are a broken build.
MOST_LEFT_OUT = 5
MOST_ROUNDS = 20  # of compiling and dropping faults
MUTANTS, VERDICTS = "mutants.json", "verdicts.jsonl"


def op_of(file: str) -> str | None:
    parts = file.split("/")
    return parts[1] if parts[0] == "ops" else None


def readers(csrc: Path) -> dict[str, set[str]]:
    """For each source, the folders of csrc/ops that it is part of: by the includes."""
    found: dict[str, set[str]] = {}
    for op in sorted(p.name for p in (csrc / "ops").iterdir()):
        for path in sources.with_includes(sources.files_in(csrc / "ops" / op), csrc):
            found.setdefault(path.relative_to(csrc).as_posix(), set()).add(op)
    return found


def tested_ops(mutant: Mutant, readers: list[str]) -> list[str]:
    """The op that owns the file, and some of those that read it. None: it belongs to no op's files."""
    own = op_of(mutant.file)
    first = [own] if own is not None else [op for op in EVERY if op in readers]
    # linear_cross_entropy before others that call linear
    others = sorted(readers, key=lambda op: own is None or not op.startswith(own))
    return list(dict.fromkeys([*first, *others]))[:MOST_OPS]


def stages(ops: list[str], kernels: bool) -> list[list[str]]:
    """The pytest arguments to run in turn until one fails."""
    if not ops:
        return [SHARED]
    names = " or ".join(TESTS[o][1] for o in ops)
    found = [[*RANDOM, "-k", names], files_of(ops[0]), [*SHARED, "-k", names]]
    if not kernels:
        found.append(["test_malformed_calls.py", "-k", "raw"])
    return found + [files_of(op) for op in ops[1:]]


def files_of(op: str) -> list[str]:
    names = [p.name for g in TESTS[op][0] for p in sorted((ROOT / "tests").glob(g))]
    return list(dict.fromkeys(names))


class Tree:
    """A copy of this checkout whose sources have the faults of a choice, built by its own setup.py."""

    def __init__(self, folder: Path, choice: Choice, environment: dict[str, str]):
        self.folder, self.choice = folder, choice
        jobs = {"MAX_JOBS": os.environ.get("MAX_JOBS", str(PROCESSES))}
        self.environment = {**os.environ, **jobs, **environment}

    def make(self) -> None:
        """Builds; faults that do not compile are dropped from the choice."""
        self.copy()
        for _ in range(MOST_ROUNDS):
            self.choice.write(ROOT / "csrc", self.folder / "csrc")
            messages = self.build()
            if not messages:
                break
            bad = self.blamed(messages)
            if not bad:
                raise RuntimeError(f"the build fails for no fault:\n{messages[-3000:]}")
            print(f"mutation: {len(bad)} faults do not compile", flush=True)
            self.choice.drop(bad)
        else:
            raise RuntimeError(f"the build still fails after {MOST_ROUNDS} rounds")
        read = readers(ROOT / "csrc")
        self.save({m.file: sorted(read.get(m.file, ())) for m in self.choice.mutants})

    def copy(self) -> None:
        """Files that did not change keep their times, so that a second build compiles little."""
        ignored = shutil.ignore_patterns("__pycache__", "*.so", "_built_for.txt")
        for name in ("csrc", "python"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored, dirs_exist_ok=True)
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy2(ROOT / name, self.folder / name)
        shutil.copy2(Path(__file__).with_name("mutant.h"), self.folder / "csrc" / "mutant.h")

    def build(self) -> str:
        """The compilers' messages if the build fails, of as many files as fail."""
        setup = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        rules = sorted(self.folder.glob("build/**/build.ninja"))
        if not rules:  # setup.py writes the rules and stops at the first file that fails
            self.run(setup, self.folder)
            rules = sorted(self.folder.glob("build/**/build.ninja"))
        if not rules:
            return self.run(setup, self.folder)
        done = self.run(["ninja", "-k", "0"], rules[0].parent)
        return done or self.run(setup, self.folder)

    def run(self, command: list[str], where: Path) -> str:
        """What the command printed if it failed."""
        done = subprocess.run(
            command,
            cwd=where,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return (done.stdout or "failed") if done.returncode else ""

    def blamed(self, messages: str) -> set[int]:
        """Faults on the lines that an error, or a note of one, names; else those next to them."""
        named: dict[str, set[int]] = {}
        told = "\n".join(line for line in messages.split("\n") if "warning" not in line)
        for file, n in re.findall(r"csrc/([\w/.]+?)[:(](\d+)[:)]", told):
            named.setdefault(file, set()).add(int(n) - 1)  # the file begins with an include
        bad = set()
        for file, lines in named.items():
            mine = [m for m in self.choice.mutants if m.file == file]
            exact = {m.id for m in mine if m.line in lines}
            bad |= exact or {m.id for m in mine if any(abs(m.line - n) <= 3 for n in lines)}
        return bad

    def save(self, ops: dict[str, list[str]]) -> None:
        mutants = [m.as_dict() for m in self.choice.mutants]
        text = json.dumps({"sources": digest(), "mutants": mutants, "ops": ops}, indent=1)
        (self.folder / MUTANTS).write_text(text)


def digest() -> str:
    """Of the sources that faults are put into."""
    return sources.digest_of_files(sources.files_in(ROOT / "csrc"), ROOT)


@dataclass
class Verdict:
    mutant: Mutant
    killed_by: str  # empty: it survived

    def as_dict(self) -> dict[str, Any]:
        return {**self.mutant.as_dict(), "killed_by": self.killed_by}


@dataclass
class Runner:
    """Runs the tests of mutants."""

    folder: Path
    processes: int = 1
    kernels: bool = False  # the faults are in CUDA kernels
    readers: dict[str, list[str]] = field(default_factory=dict)  # by file
    passes: dict[str, bool] = field(default_factory=dict)  # tests, without a fault
    lock: threading.Lock = field(default_factory=threading.Lock)

    def stages(self, mutant: Mutant) -> list[list[str]]:
        found = stages(tested_ops(mutant, self.readers.get(mutant.file, [])), self.kernels)
        return found if self.kernels or op_of(mutant.file) is not None else [*found, SHARED]

    @property
    def left_out(self) -> list[str]:
        """Tests that fail without a fault."""
        return [test for test, passes in self.passes.items() if not passes]

    def pytest(self, arguments: list[str], mutant: int) -> str:
        """The first test that failed, or how the process died. Empty: all passed."""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(self.python_path()),
            "WARPWRIGHT_MUTANT": str(mutant),
            "WARPWRIGHT_FUZZ_CASES": "25" if self.kernels else "100",
            "WARPWRIGHT_MALFORMED_CALLS": "300",
            "OMP_NUM_THREADS": "1",  # tests of threads set their number themselves
            "OMP_WAIT_POLICY": "passive",
            # A stale .pyc of a source that was changed within a second would hide the change.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        mark = "gpu and not slow" if self.kernels else "not slow"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "--maxfail=1", "-m", mark]
        command += ["-p", "no:cacheprovider", f"--timeout={HANG}", "--timeout-method=thread"]
        command += ["-p", "switch_kernels"] * self.kernels
        # pytest names tests from the folder of pyproject.toml here, and from its own folder in reports.
        command += [f"--deselect=tests/{test}" for test in self.left_out]
        done = subprocess.run(
            [*command, *arguments],
            cwd=ROOT / "tests",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode in (0, 5):  # 5: no test of that name
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
        return failed[1] if failed else f"exit code {done.returncode}"

    def python_path(self) -> list[str]:
        """The package with faults, and the plugin; then what this process has."""
        mine = [str(self.folder / "python"), str(Path(__file__).parent)]
        return mine + [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]

    def passes_without_a_fault(self, failed: str) -> bool:
        """Runs the test that failed without a fault, once. One that fails then is left out from now on."""
        known = self.passes.get(failed)
        if known is not None:
            return known
        passes = "::" not in failed or not self.pytest([failed], 0)
        with self.lock:
            self.passes[failed] = passes
        if len(self.left_out) > MOST_LEFT_OUT:
            raise RuntimeError(f"without a fault, these fail: {', '.join(self.left_out)}")
        return passes

    def judge(self, mutant: Mutant) -> Verdict:
        for arguments in self.stages(mutant):
            seen: set[str] = set()
            while (failed := self.pytest(arguments, mutant.id)) and failed not in seen:
                seen.add(failed)
                if self.passes_without_a_fault(failed):
                    return Verdict(mutant, failed)
        return Verdict(mutant, "")

    def judge_all(self, mutants: list[Mutant], minutes: float) -> list[Verdict]:
        """In order, until the time is over. The log keeps the verdicts, so a later run goes on."""
        end = time.monotonic() + minutes * 60
        log = self.folder / VERDICTS
        known = {}
        for line in log.read_text().splitlines() if log.exists() else []:
            entry = json.loads(line)
            known[entry["id"]] = entry["killed_by"]
        lines = log.open("a")

        def judge(mutant: Mutant) -> Verdict | None:
            if mutant.id in known:
                return Verdict(mutant, known[mutant.id])
            if time.monotonic() > end:
                return None
            verdict = self.judge(mutant)
            with self.lock:
                lines.write(json.dumps(verdict.as_dict()) + "\n")
                lines.flush()
                said = verdict.killed_by or "SURVIVED"
                print(f"mutation: {mutant.id}: {mutant.file}:{mutant.line} {said}", flush=True)
            return verdict

        with lines, ThreadPoolExecutor(self.processes) as pool:
            return [v for v in pool.map(judge, mutants) if v is not None]


def report(part: str, what: str, runner: Runner, verdicts: list[Verdict], seed: int) -> Row:
    survivors = [v.mutant for v in verdicts if not v.killed_by]
    explained = sum(bool(reason(m)) for m in survivors)
    detail = f"{len(verdicts) - len(survivors)} killed"
    if explained:
        detail += f", {explained} of the others change no result that a test could see"
    if runner.left_out:
        detail += f"; left out, as they fail without a fault: {', '.join(runner.left_out)}"

    def described(m: Mutant) -> str:
        why = reason(m)
        return f"{m.file}:{m.line}: {m.change}: {m.text}" + (f" ({why})" if why else "")

    return Row(
        part=part,
        what=what,
        cases=len(verdicts),
        unit="mutants",
        failures=[described(m) for m in survivors],
        seed=seed,
        detail=detail,
    )


def order(mutants: list[Mutant], seed: int) -> list[Mutant]:
    """All ops in turn, so that the first n of them are a fair sample."""
    rng = random.Random(seed)
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant)
    queues = list(by_file.values())
    for queue in queues:
        rng.shuffle(queue)
    rng.shuffle(queues)
    found = []
    while queues:
        found += [queue.pop() for queue in queues]
        queues = [queue for queue in queues if queue]
    return found


def prepared(folder: Path, files: list[str], options: Options, cuda: bool) -> dict[str, Any]:
    """The mutants of these files and their ops; builds them unless the folder has those of the sources."""
    made = folder / MUTANTS
    if not made.exists() or json.loads(made.read_text()).get("sources") != digest():
        for old in (made, folder / VERDICTS):
            old.unlink(missing_ok=True)
        files = [f for f in files if re.search(options.only, f)]
        choice = Choice.of(ROOT / "csrc", files, options.per_file, options.seed)
        Tree(folder, choice, {"FORCE_CUDA": "1"} if cuda else {"NO_CUDA": "1"}).make()
    found: dict[str, Any] = json.loads(made.read_text())
    return found


def judged(folder: Path, found: dict[str, Any], runner: Runner, options: Options) -> list[Verdict]:
    mutants = [Mutant(**m) for m in found["mutants"] if re.search(options.only, m["file"])]
    return runner.judge_all(order(mutants, options.seed)[: options.mutants], options.minutes)


def run(options: Options) -> list[Row]:
    folder = ROOT / "build" / "mutants"
    found = prepared(folder, files_of_cpu(ROOT / "csrc"), options, cuda=False)
    runner = Runner(folder, processes=PROCESSES, readers=found["ops"])
    verdicts = judged(folder, found, runner, options)
    what = "small faults in CPU kernels and bindings that the tests find"
    return [report("mutation", what, runner, verdicts, options.seed)]


def run_kernels(options: Options) -> list[Row]:
    """Without a GPU it builds alone. A machine with one then runs the folder that was built."""
    folder = ROOT / "build" / "kernel-mutants"
    found = prepared(folder, files_of_kernels(ROOT / "csrc"), options, cuda=True)
    what = "small faults in CUDA kernels that the tests find"
    if not torch.cuda.is_available():
        return [Row(part="kernel-mutation", what=what, unit="mutants", not_run="needs a GPU")]
    runner = Runner(folder, processes=PROCESSES, kernels=True, readers=found["ops"])
    verdicts = judged(folder, found, runner, options)
    return [report("kernel-mutation", what, runner, verdicts, options.seed)]
