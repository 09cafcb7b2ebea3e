"""Mutation testing: builds the sources with faults in, switches on one at a time, and runs the tests.

A fault is *killed* if a test fails, the process dies, or the tests take far longer than without it.
It *survives* if the random cases, all tests of its op, and the tests that all ops share pass.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

from .mutate import Choice, Mutant, files_with_faults
from .result import ROOT, Options, Row

# The tests of an op's folder; the shared ones follow with the op's names as -k.
TESTS = {
    "attention": (["test_attention*.py", "test_multihead.py"], "attention"),
    "attention_with_kv_cache": (["test_attention_with_kv_cache*.py"], "kv_cache"),
    "batch_norm": (["test_batch_norm*.py"], "batch_norm"),
    "batch_norm_relu_max_pool2d": (["test_batch_norm_relu_max_pool2d.py"], "batch_norm"),
    "conv2d": (["test_conv2d*.py"], "conv2d"),
    "conv2d_batch_norm": (["test_conv2d_batch_norm.py"], "conv2d_batch_norm"),
    "cross_entropy": (["test_cross_entropy*.py"], "cross_entropy"),
    "gated_activation": (["test_gated_activation.py"], "gated or glu"),
    "rotary_embedding": (["test_rotary_embedding.py"], "rotary"),
    "layer_norm": (["test_layer_norm.py"], "norm"),
    "group_norm": (["test_group_norm.py"], "group_norm or instance_norm"),
    "activation": (["test_activation.py"], "gelu or silu or sigmoid or tanh or activation"),
    "dropout": (["test_dropout.py"], "dropout"),
    "squeeze_excitation": (["test_squeeze_excitation*.py"], "squeeze"),
    "embedding": (["test_embedding*.py"], "embedding"),
    "softmax": (["test_softmax.py"], "softmax"),
    "linear_8bit": (["test_linear_8bit.py"], "int8 or fp8 or quantize or scaled"),
    "reduction": (["test_reduction.py"], "sum or mean or amax or logsumexp or var or std"),
    "scan": (
        ["test_cumsum.py", "test_cumprod.py", "test_linear_scan.py"],
        "cumsum or cumprod or logcumsumexp or linear_scan",
    ),
    "fft_conv": (["test_fft_conv.py"], "fft"),
    "linear": (["test_linear.py", "test_linear_tiles.py", "test_linear_activation.py"], "linear"),
    "linear_quantized": (["test_linear_quantized.py"], "quantized"),
    "linear_cross_entropy": (["test_linear_cross_entropy*.py"], "cross_entropy"),
    "max_pool2d": (["test_max_pool2d.py", "test_relu_max_pool2d.py"], "pool"),
    "optim": (["test_optim*.py"], "optim or sgd or adam"),
    "relu": (["test_relu.py"], "relu"),
}
SHARED = [
    "test_raw_arguments.py",
    "test_malformed_windows.py",
    "test_dense_outputs.py",
    "test_derivatives.py",
    "test_mutating.py",
    "test_batching.py",
    "test_batching_attention.py",
    "test_batching_fused.py",
    "test_registration.py",
    "test_kinds.py",
    "test_threads.py",
    "test_conformance_op_db.py",
]
RANDOM = ["test_fuzz.py", "test_fuzz_fused.py"]  # first: they find most faults in seconds
EVERY = ["relu", "max_pool2d", "linear", "layer_norm"]  # for what no op owns
SLOWER = 6  # times the run without a fault: the fault hangs
# The switches change where the compiler contracts products and sums. A test of fixed tolerances may
# therefore fail without a fault. It is left out; more of them are a broken build.
MOST_LEFT_OUT = 5


def op_of(file: str) -> str | None:
    parts = file.split("/")
    return parts[1] if parts[0] == "ops" else None


def stages(mutant: Mutant) -> list[list[str]]:
    """The pytest arguments to run in turn until one fails."""
    op = op_of(mutant.file)
    ops = EVERY if op is None else [op]
    own = [p.name for o in ops for g in TESTS[o][0] for p in sorted((ROOT / "tests").glob(g))]
    names = " or ".join(TESTS[o][1] for o in ops)
    malformed = ["test_malformed_calls.py", "-k", "raw"]
    return [
        [*RANDOM, "-k", names],
        list(dict.fromkeys(own)),
        [*SHARED, "-k", names],
        malformed,
    ]


class Tree:
    """A package whose library has the faults of a choice in.

    Only files with faults are compiled, by the flags of this checkout's build; all other objects are
    that build's.
    """

    def __init__(self, folder: Path, choice: Choice):
        self.folder, self.choice = folder, choice
        rules = sorted(ROOT.glob("build/**/build.ninja"), key=lambda p: p.stat().st_mtime)
        rules = [p for p in rules if "sanitize" not in p.parts and any(p.parent.rglob("*_cpu.o"))]
        if not rules:
            raise SystemExit(
                "campaign: mutation: no build here; first run setup.py build_ext --inplace"
            )
        self.built = rules[-1].parent
        self.cuda = any(self.built.rglob("relu.o"))
        objects = {o.relative_to(self.built / "csrc").with_suffix("") for o in self.objects()}
        missing = [f for f in choice.sites if Path(f).with_suffix("") not in objects]
        if missing:
            raise SystemExit(f"campaign: mutation: {self.built} has no object of {missing[0]}")

    def objects(self) -> list[Path]:
        """The build's objects, less those of sources that are gone and of the Python module."""
        found = []
        for made in sorted(self.built.rglob("*.o")):
            source = ROOT / made.relative_to(self.built)
            exists = any(source.with_suffix(s).exists() for s in (".cpp", ".cu"))
            if exists and "python" not in made.relative_to(self.built).parts:
                found.append(made)
        return found

    def make(self) -> None:
        """Builds; faults that do not compile are dropped from the choice."""
        ignored = shutil.ignore_patterns("__pycache__", "libwarpwright.so")
        package = self.folder / "python" / "warpwright"
        shutil.copytree(ROOT / "python" / "warpwright", package, ignore=ignored, dirs_exist_ok=True)
        shutil.copytree(ROOT / "csrc", self.folder / "csrc", dirs_exist_ok=True)
        shutil.copy2(Path(__file__).with_name("mutant.h"), self.folder / "csrc" / "mutant.h")
        for file in self.choice.sites:
            self.compile(file)
        self.link(package / "libwarpwright.so")

    def compile(self, file: str) -> None:
        source = self.folder / "csrc" / file
        target = (self.folder / "objects" / file).with_suffix(".o")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler(), *flags(self.cuda), f"-I{self.folder / 'csrc'}"]
        command += ["-c", str(source), "-o", str(target)]
        for _ in range(20):
            self.choice.write(ROOT / "csrc", self.folder / "csrc", file)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return
            bad = self.blamed(file, done.stderr)
            if not bad:
                raise RuntimeError(f"{file} with faults fails for no fault:\n{done.stderr[-3000:]}")
            print(f"mutation: {file}: {len(bad)} faults do not compile", flush=True)
            self.choice.drop(bad)
        raise RuntimeError(f"{file} with faults still fails after 20 rounds")

    def link(self, library: Path) -> None:
        changed = {Path(file).with_suffix(".o") for file in self.choice.sites}
        base = self.built / "csrc"
        objects = [o for o in self.objects() if o.relative_to(base) not in changed]
        objects += [self.folder / "objects" / file for file in changed]
        folders = cpp_extension.library_paths("cuda" if self.cuda else "cpu")
        libraries = ["c10", "torch", "torch_cpu"]
        libraries += ["cudart", "c10_cuda", "torch_cuda"] if self.cuda else []
        command = [*compiler(), "-shared", "-fopenmp", "-s", *map(str, objects)]
        command += [f"-L{f}" for f in folders] + [f"-l{name}" for name in libraries]
        subprocess.run([*command, "-o", str(library)], check=True)

    def blamed(self, file: str, messages: str) -> set[int]:
        """Faults on the lines that an error, or a note of one, names; else those next to them."""
        lines = {int(n) - 1 for n in re.findall(rf"{re.escape(file)}:(\d+):", messages)}
        mine = [m for m in self.choice.mutants if m.file == file]
        exact = {m.id for m in mine if m.line in lines}
        return exact or {m.id for m in mine if any(abs(m.line - n) <= 3 for n in lines)}


def compiler() -> list[str]:
    ccache = shutil.which("ccache")
    return [*([ccache] if ccache else []), "g++"]


def flags(cuda: bool) -> list[str]:
    """setup.py's for C++, but -O1: the tests ask for right results, not for speed."""
    found = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-w"]
    found += ["-fno-math-errno", "-fno-trapping-math"]
    if platform.machine() in ("x86_64", "AMD64"):
        found += ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"]
    folders = cpp_extension.include_paths("cuda" if cuda else "cpu")
    return found + ["-DWARPWRIGHT_WITH_CUDA=1"] * cuda + [f"-isystem{f}" for f in folders]


@dataclass
class Verdict:
    mutant: Mutant
    killed_by: str  # empty: it survived

    def as_dict(self) -> dict[str, Any]:
        return {**self.mutant.as_dict(), "killed_by": self.killed_by}


@dataclass
class Runner:
    """Runs the tests of one mutant; knows how long each stage takes without a fault."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # tests that fail without a fault

    def stages(self, mutant: Mutant) -> list[list[str]]:
        return stages(mutant)

    def pytest(self, arguments: list[str], mutant: int, limit: float) -> tuple[list[str], float]:
        """What failed, and the seconds. A run with a fault stops at the first failure."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "python"),
            "WARPWRIGHT_MUTANT": str(mutant),
            "WARPWRIGHT_FUZZ_CASES": "100",
            "WARPWRIGHT_MALFORMED_CALLS": "300",
            "OMP_NUM_THREADS": "1",  # tests of threads set their number themselves
            "OMP_WAIT_POLICY": "passive",
            # A stale .pyc of a source that was changed within a second would hide the change.
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        most = 1 if mutant else MOST_LEFT_OUT + 1
        command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-m", "not slow"]
        command += ["-p", "no:cacheprovider", f"--maxfail={most}", *arguments]
        # pytest names tests from the folder of pyproject.toml here, and from its own folder in reports.
        command += [f"--deselect=tests/{test}" for test in self.left_out]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT / "tests",
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [f"longer than {limit:.0f} s"], limit
        seconds = time.monotonic() - begin
        if done.returncode in (0, 5):  # 5: no test of that name
            return [], seconds
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
        return (failed or [f"exit code {done.returncode}"]), seconds

    def measure(self, arguments: list[str]) -> None:
        """Runs a stage without a fault."""
        failed, self.seconds[" ".join(arguments)] = self.pytest(arguments, 0, 3600)
        self.left_out += failed
        if len(failed) > MOST_LEFT_OUT or any("::" not in test for test in failed):
            raise RuntimeError(f"without a fault, these fail: {', '.join(failed)}")

    def judge(self, mutant: Mutant) -> Verdict:
        for arguments in self.stages(mutant):
            key = " ".join(arguments)
            if key not in self.seconds:
                self.measure(arguments)
            failed, _ = self.pytest(arguments, mutant.id, 60 + SLOWER * self.seconds[key])
            if failed:
                return Verdict(mutant, failed[0])
        return Verdict(mutant, "")

    def judge_all(self, mutants: list[Mutant], minutes: float) -> list[Verdict]:
        """In order, until the time is over; each verdict is printed and logged."""
        begin, verdicts = time.monotonic(), []
        with (self.folder / "verdicts.jsonl").open("a") as lines:
            for mutant in mutants:
                if time.monotonic() - begin > minutes * 60:
                    break
                verdicts.append(self.judge(mutant))
                lines.write(json.dumps(verdicts[-1].as_dict()) + "\n")
                lines.flush()
                verdict = verdicts[-1].killed_by or "SURVIVED"
                print(f"mutation: {mutant.file}:{mutant.line} {verdict}", flush=True)
        return verdicts


def report(part: str, what: str, runner: Runner, verdicts: list[Verdict], seed: int) -> Row:
    detail = f"{sum(bool(v.killed_by) for v in verdicts)} killed"
    if runner.left_out:
        detail += f"; left out, as they fail without a fault: {', '.join(runner.left_out)}"
    survivors = [v.mutant for v in verdicts if not v.killed_by]
    return Row(
        part=part,
        what=what,
        cases=len(verdicts),
        unit="mutants",
        failures=[f"{m.file}:{m.line}: {m.change}: {m.text}" for m in survivors],
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


def run(options: Options) -> list[Row]:
    folder = ROOT / "build" / "mutants"
    csrc = ROOT / "csrc"
    files = [f for f in files_with_faults(csrc) if re.search(options.only, f)]
    choice = Choice.of(csrc, files, per_file=12, seed=options.seed)
    Tree(folder, choice).make()
    (folder / "mutants.json").write_text(
        json.dumps([m.as_dict() for m in choice.mutants], indent=1)
    )
    mutants = order(choice.mutants, options.seed)[: options.mutants]
    runner = Runner(folder)
    verdicts = runner.judge_all(mutants, options.minutes)
    what = "small faults in CPU kernels and bindings that the tests find"
    return [report("mutation", what, runner, verdicts, options.seed)]
