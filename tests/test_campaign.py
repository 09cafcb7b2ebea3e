"""tools/campaign.py: what its parts count, how faults stand in a source, and what the record says."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpwright.bench import reliability

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "warpwright"
sys.path.insert(0, str(ROOT / "tools"))

from campaign_parts import (  # noqa: E402
    injected,
    mutate,
    mutate_python,
    mutation,
    sanitizers,
    soak,
    suites,
)
from campaign_parts.result import Row  # noqa: E402

SOURCE = """// if (a < b) in a comment
constexpr int kTile = 2 + 3;
void f(int64_t a, int64_t b) {
  TORCH_CHECK(a < b, "a < b, got ", a);
  if (a == b) return;
  check_shape(a);
  const int64_t c = std::min(a, b) - 1;
  total += c;
}
#ifdef WARPWRIGHT_WITH_CUDA
int g(int a) { return a + 1; }
#endif
"""


def test_faults_stand_in_expressions_alone():
    sites = mutate.sites_of(SOURCE)
    assert {s.kind for s in sites} == {"operator", "constant", "condition", "check", "bound", "sum"}
    lines = {SOURCE.count("\n", 0, s.at) + 1 for s in sites}
    assert lines == {4, 5, 6, 7, 8}  # neither in the comment nor in the constexpr
    text = mutate.mutated(SOURCE, list(enumerate(sites, 1)))
    assert "constexpr int kTile = 2 + 3;" in text
    assert '"a < b, got "' in text
    assert text.count("warpwright_mutants::on<") == 3  # two checks and a sum
    assert "{id}" not in text


def test_a_fault_changes_one_result(tmp_path):
    """Compiled: without a fault the program is what it was, with one it is not."""
    source = (
        '#include "mutant.h"\n#include <cstdio>\n#include <algorithm>\nint main() {\n'
        "  int total = 0;\n  for (int i = 0; i < 3; ++i) {\n    total += 2 * i + 1;\n  }\n"
        '  if (total > 8) total = std::max(total, 20) - 4;\n  std::printf("%d", total);\n}\n'
    )
    sites = mutate.without_overlap(mutate.sites_of(source))
    text = mutate.mutated(source, list(enumerate(sites, 1)))
    (tmp_path / "main.cpp").write_text(text)
    header = ROOT / "tools" / "campaign_parts"
    program = tmp_path / "main"
    subprocess.run(
        ["g++", "-std=c++20", f"-I{header}", tmp_path / "main.cpp", "-o", program], check=True
    )

    def output(mutant):
        done = subprocess.run(
            [program], env={"WARPWRIGHT_MUTANT": str(mutant)}, capture_output=True, text=True
        )
        return done.stdout

    assert output(0) == "16"
    changed = [n for n in range(1, len(sites) + 1) if output(n) != "16"]
    assert len(sites) >= 8
    assert len(changed) >= 8  # some faults are equivalent, such as `> 8` and `>= 8`


def test_same_faults_for_the_same_seed():
    csrc = ROOT / "csrc"
    files = mutate.files_of_cpu(csrc)
    assert "ops/relu/relu_cpu.cpp" in files
    assert "ops/conv2d/cpu/common.h" in files
    assert "ops/relu/relu.cu" in mutate.files_of_kernels(csrc)
    first, second = (mutate.Choice.of(csrc, files[:8], per_file=3, seed=5) for _ in range(2))
    assert first.mutants == second.mutants
    assert len(first.mutants) > 8


def test_every_op_with_faults_has_tests():
    csrc = ROOT / "csrc"
    for file in (*mutate.files_of_cpu(csrc), *mutate.files_of_kernels(csrc)):
        op = mutation.op_of(file)
        assert op is None or op in mutation.TESTS, file
    for patterns, _ in mutation.TESTS.values():
        for pattern in patterns:
            assert list((ROOT / "tests").glob(pattern)), pattern
    for file in (*mutation.SHARED, *mutation.RANDOM):
        assert (ROOT / "tests" / file).exists(), file


KERNEL = """__launch_bounds__(128) __global__ void f(const float* x) {
  Tile<4, 8> tile;
  ring.wait_full(at);
  if (lane == 0) shared[0] = max(a, b);
  __syncthreads();
  asm volatile("" ::"r"(a + b));
}
"""


def test_faults_of_a_kernel():
    """Barriers too; neither template arguments nor what the compiler must know."""
    changes = {(KERNEL.count("\n", 0, s.at) + 1, s.kind) for s in mutate.sites_of(KERNEL)}
    assert changes == {
        (3, "barrier"),
        (4, "condition"),
        (4, "operator"),
        (4, "constant"),
        (4, "bound"),
        (5, "barrier"),
    }


def test_ops_of_a_file_that_many_read():
    readers = mutation.readers(ROOT / "csrc")
    assert readers["ops/relu/relu.cu"] == {"relu"}
    assert {"linear", "conv2d"} <= readers["gemm/kernel_sm90.cuh"]

    def ops(file):
        mutant = mutate.Mutant(1, file, 3, "operator", "a < b", "< becomes <=")
        return mutation.tested_ops(mutant, sorted(readers.get(file, ())))

    assert ops("ops/relu/relu.cu") == ["relu"]
    assert ops("gemm/kernel_sm90.cuh")[:2] == ["linear", "conv2d"]
    assert len(ops("device/vec.cuh")) == mutation.MOST_OPS
    assert mutation.stages(ops("torch/mutating.cpp"), kernels=False) == [mutation.SHARED]


def test_messages_of_compilers(tmp_path):
    """The faults on the lines of errors; else those next to them. The file begins with an include."""
    mutants = [
        mutate.Mutant(n, file, line, "operator", "", "")
        for n, (file, line) in enumerate([("a.cpp", 10), ("a.cpp", 40), ("b.cuh", 7)], 1)
    ]
    tree = mutation.Tree(tmp_path, mutate.Choice(mutants, {}), {})
    assert tree.blamed("/x/csrc/a.cpp:11:5: error: no") == {1}
    assert tree.blamed("/x/csrc/a.cpp:43:5: error: no") == {2}
    assert tree.blamed("/x/csrc/b.cuh(8): error: no") == {3}
    assert tree.blamed("/x/csrc/a.cpp:11:5: warning: so so") == set()


def test_shards_of_sanitized_cases():
    """Each case is in one of them."""
    import re

    patterns = suites.shards()
    names = [
        f"{op}-case-{dtype}"
        for op in ("linear", "linear_activation", "relu", "attention")
        for dtype in ("float32", "float64", "bfloat16", "float16", "tf32", "3xtf32")
    ]
    names += ["attention-dropout", "cross_entropy-bad-label", "conv2d-x.5-float64"]
    for name in names:
        assert sum(re.search(p, name) is not None for p in patterns) == 1, name


SAID = """========= COMPUTE-SANITIZER
linear-1x10x84-float32
conv2d-tails (3, 4)-bfloat16
"""


def test_what_a_sanitized_shard_said():
    """One that the time limit cuts off keeps the cases that it has ended."""
    ended = SAID + "2 cases, 0 wrong results\n========= ERROR SUMMARY: 0 errors\n"
    assert suites.shard_of("x", 0, ended) == suites.Shard(2, [], True)
    for code, text in (
        (9, ended),
        (0, ended.replace("0 errors", "3 errors")),
        (0, SAID),  # it ended without its summary
        (0, SAID + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"),
    ):
        assert suites.shard_of("x", code, text).failures, text
    assert suites.shard_of("x", None, SAID) == suites.Shard(1, [], False)
    assert suites.shard_of("x", None, "") == suites.Shard(0, [], False)
    report = "========= Invalid __global__ read of size 4 bytes\n"
    assert suites.shard_of("x", None, SAID + report).failures


def test_a_sanitized_shard_is_killed_with_its_children(tmp_path, monkeypatch):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho linear-a-float32\necho linear-b-float32\nsleep 60 & wait\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert suites.sanitized_shard("memcheck", 1.0, "^linear-") == suites.Shard(1, [], False)


PYTHON = '''
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import numpy
def f(x: "int > 3", y: int = 1) -> "1 + 2":
    """1 < 2."""
    if x < 0:
        raise ValueError(f"x: expected 0 or more, got {x}")
    for _ in zip([x], [y], strict=True):
        return x + y if x == 5 or not y else 7
'''


def test_faults_of_python_stand_in_what_runs():
    sites = mutate_python.sites_of(ast.parse(PYTHON))
    changes = [(site.line, site.change) for site in sites]
    assert changes == [
        (5, "1 becomes 2"),
        (7, "the check is dropped"),
        (7, "Lt becomes LtE"),
        (7, "0 becomes 1"),
        (10, "the condition is negated"),
        (10, "or becomes and"),
        (10, "Eq becomes NotEq"),
        (10, "5 becomes 6"),
        (10, "Add becomes Sub"),
        (10, "7 becomes 8"),
    ]

    def results(text):
        scope = {}
        exec(text, scope)
        found = []
        for x in (-1, 0, 4, 5, 6):
            for arguments in ((x,), (x, 0)):
                try:
                    found.append(scope["f"](*arguments))
                except ValueError:
                    found.append("an error")
        return found

    changed = [results(mutate_python.mutated(PYTHON, n)) for n in range(len(sites))]
    assert results(PYTHON) not in changed


def test_every_python_file_with_faults_has_tests():
    functions = {f"functional/{p.name}" for p in (PACKAGE / "functional").glob("_[a-z]*.py")}
    assert functions <= set(mutate_python.TESTS)
    for file, patterns in mutate_python.TESTS.items():
        assert mutate_python.sites_of(ast.parse((PACKAGE / file).read_text())), file
        for pattern in (*patterns, *mutate_python.QUICK, *mutate_python.SHARED):
            assert list((ROOT / "tests").glob(pattern)), pattern
    first, again = (mutate_python.choose(["_arguments.py", "nn.py"], 4, 1) for _ in range(2))
    assert first == again
    assert len(first[0]) == 8


class FakeRunner(mutation.Runner):
    """Two stages. test_tight fails without a fault; mutant 1 is found by the second stage."""

    def stages(self, mutant):
        return [["first"], ["second"]]

    def pytest(self, arguments, mutant):
        if mutant == 0:
            return arguments[0] if "test_tight" in arguments[0] else ""
        if arguments == ["first"]:
            return "" if self.left_out else "test_x.py::test_tight"
        return "test_y.py::test_z" if mutant == 1 else ""


def test_verdicts(tmp_path):
    found, survivor = (
        mutate.Mutant(n, "ops/relu/x.cpp", 3, "operator", "a < b", "< becomes <=") for n in (1, 2)
    )
    runner = FakeRunner(tmp_path)
    verdicts = runner.judge_all([found, survivor], minutes=1)
    assert [v.killed_by for v in verdicts] == ["test_y.py::test_z", ""]
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 2
    row = mutation.report("mutation", "faults", runner, verdicts, seed=3)
    assert row.failures == ["ops/relu/x.cpp:3: < becomes <=: a < b"]
    assert row.detail == "1 killed; left out, as they fail without a fault: test_x.py::test_tight"
    again = FakeRunner(tmp_path).judge_all([found, survivor], minutes=0)  # from the log
    assert again == verdicts


def test_a_build_of_other_sources_is_made_again(tmp_path, monkeypatch):
    made = []

    class FakeTree(mutation.Tree):
        def make(self):
            made.append(self.choice)
            self.save({})

    monkeypatch.setattr(mutation, "Tree", FakeTree)
    (tmp_path / mutation.VERDICTS).write_text("old")
    options = mutation.Options(per_file=1)
    for _ in range(2):
        found = mutation.prepared(tmp_path, ["ops/relu/relu_cpu.cpp"], options, cuda=False)
    assert len(made) == 1
    assert not (tmp_path / mutation.VERDICTS).exists()
    assert [m["file"] for m in found["mutants"]] == ["ops/relu/relu_cpu.cpp"]
    (tmp_path / mutation.MUTANTS).write_text(json.dumps({**found, "sources": "other"}))
    mutation.prepared(tmp_path, ["ops/relu/relu_cpu.cpp"], options, cuda=False)
    assert len(made) == 2


def test_a_build_whose_tests_fail_without_a_fault(tmp_path):
    runner = FakeRunner(tmp_path)
    assert runner.passes_without_a_fault("exit code -11")
    for n in range(mutation.MOST_LEFT_OUT):
        assert not runner.passes_without_a_fault(f"test_x.py::test_tight[{n}]")
    with pytest.raises(RuntimeError, match="without a fault, these fail"):
        runner.passes_without_a_fault("test_x.py::test_tight[more]")


@pytest.mark.parametrize("kind", ["memory_limit", "fork", "threads"])
@pytest.mark.slow
def test_injected_faults(kind):
    row = injected.run_child(kind, 0, {})
    assert row.cases > 0
    assert not row.failures


def test_growth_of_memory():
    assert abs(soak.growth([50] * 5 + [100] * 30)) < 1e-9
    assert soak.growth([100 + i for i in range(60)]) > soak.FLAT


def test_junit(tmp_path):
    file = tmp_path / "x.xml"
    file.write_text(
        '<testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure message="why"/></testcase>'
        '<testcase classname="a" name="left"><skipped/></testcase></testsuite>'
    )
    found = suites.parse(file)
    assert found.passed == {"a::good"}
    assert found.failed == {"a::bad": "why"}


def row(part, **changes):
    stamp = {"date": "2020-02-02", "source_hash": "0" * 16}
    return {**Row(part=part, what="calls", cases=7, unit="calls").as_dict(), **stamp, **changes}


def test_record_and_page(tmp_path):
    record = {
        "schema": 1,
        "device": "cpu",
        "gpu": "a CPU",
        "torch": "2.11.0",
        "date": "2020-02-02",
        "source_hash": "0" * 16,
        "rows": [row("fuzz"), row("soak"), row("gpu", cases=0, not_run="needs a GPU")],
        "found": [{"date": "2020-02-01", "part": "fuzz", "fault": "wrong", "test": "tests/t.py"}],
    }
    path = tmp_path / reliability.RESULT
    reliability.save(record, path)
    assert reliability.load(path) == record
    page = reliability.page({"results/reliability.json": record})
    assert "| fuzz | calls | 7 calls | 0 |" in page
    assert "- gpu: calls: needs a GPU" in page
    assert "wrong" in page
    line = reliability.summary([record])
    assert "**7 trials**" in line
    assert "1 fault found and fixed, 0 open" in line
    again = reliability.merge(record, [row("fuzz", failures=["x | y"])])
    assert [r["part"] for r in again["rows"]] == ["soak", "gpu", "fuzz"]
    assert "1 fault found and fixed, 1 open" in reliability.summary([again])
    assert "- `x \\| y`" in reliability.page({"p": again})
    skipped = reliability.merge(record, [{**row("fuzz"), "not_run": "left out", "cases": 0}])
    assert "**7 trials**" in reliability.summary([skipped])
    later = {**record, "rows": [{**row("fuzz"), "date": "2020-02-03"}]}
    assert "1 open" in reliability.summary([again, {**later, "device": "cuda"}])
    assert "0 open" in reliability.summary([again, later])
    assert "Not in the later run: fuzz" in reliability.page({"p": again, "q": later})
    survived = reliability.merge(record, [row("python-mutation", failures=["a < b"])])
    assert "0 open" in reliability.summary([survived])
    assert "Survivors: python-mutation" in reliability.page({"p": survived})


def test_a_record_without_a_field(tmp_path):
    path = tmp_path / reliability.RESULT
    path.write_text(json.dumps({"schema": 1}))
    with pytest.raises(ValueError, match="field 'device' is missing"):
        reliability.load(path)
    path.write_text("no JSON")
    with pytest.raises(ValueError, match="expected a record of tools/campaign"):
        reliability.load(path)


def test_command_line():
    def run(*arguments):
        command = [sys.executable, str(ROOT / "tools" / "campaign.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    listed = run("--list")
    assert listed.returncode == 0
    assert "mutation" in listed.stdout
    wrong = run("fuz")
    assert wrong.returncode == 2
    assert "expected one of fuzz" in wrong.stderr


# ---- sanitizers ----


def test_a_file_per_op_runs_under_the_sanitizers():
    """Each folder of csrc/ops has a test of its name, or one whose name begins with it."""
    names = [file.removeprefix("test_").removesuffix(".py") for file in sanitizers.FILES]
    assert all((ROOT / "tests" / file).is_file() for file in sanitizers.FILES)
    others = {"scan": "cumsum"}
    for folder in (ROOT / "csrc" / "ops").iterdir():
        name = others.get(folder.name, folder.name)
        assert any(found == name or found.startswith(f"{name}_") for found in names), name
