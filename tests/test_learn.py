"""The course in docs/learn: its exercises, its pages and the project.

Every exercise has a solution that passes its check, and wrong answers that do not.
"""

import importlib.util
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from common import NVCC

ROOT = Path(__file__).resolve().parents[1]
LEARN = ROOT / "docs" / "learn"
PAGES = sorted(LEARN.glob("*.md"))
PROJECT = ROOT / "examples" / "replace_layers.py"


def load(path):
    spec = importlib.util.spec_from_file_location(f"learn_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


sys.path.insert(0, str(LEARN))  # check.py imports its neighbour
check = load(LEARN / "check.py")
kernels = check.check_kernels
timing = load(LEARN / "time_kernels.py")
each_exercise = pytest.mark.parametrize("name", check.CHECKS)


# ---- exercises ----


def test_every_exercise_has_a_check_a_solution_and_a_line_on_the_page():
    page = (LEARN / "index.md").read_text()
    for folder in ("exercises", "solutions"):
        assert {path.stem for path in (LEARN / folder).glob("*.py")} == set(check.CHECKS)
        assert {path.stem for path in (LEARN / folder).glob("*.cu")} == set(kernels.KERNELS)
    assert set(re.findall(r"\]\(exercises/(\w+)\.py\)", page)) == set(check.CHECKS)
    assert set(re.findall(r"\]\(exercises/(\w+)\.cu\)", page)) == set(kernels.KERNELS)


def functions(module):
    found = inspect.getmembers(module, inspect.isfunction)
    return {name: f for name, f in found if f.__module__ == module.__name__}


@each_exercise
def test_a_solution_is_right_and_a_gap_is_named(name):
    assert check.result_of(LEARN / "solutions" / f"{name}.py") == "right"
    gaps = functions(load(LEARN / "exercises" / f"{name}.py"))
    first = check.result_of(LEARN / "exercises" / f"{name}.py")
    assert first.removeprefix("to do: ") in gaps
    answers = functions(load(LEARN / "solutions" / f"{name}.py"))
    assert {f: inspect.signature(g) for f, g in gaps.items()} == {
        f: inspect.signature(answers[f]) for f in gaps
    }
    assert all(inspect.getdoc(gap) for gap in gaps.values())


# (exercise, a piece of the solution, what a learner might write, what the check must say)
WRONG = [
    ("bytes_and_flops", "3 * numel", "2 * numel", r"relu\(1, 4\) is \(8, 8\), expected \(8"),
    ("bytes_and_flops", "4 * rows", "2 * rows", r"linear_backward\(1, 1, 1, 4\) is"),
    ("bytes_and_flops", "* c * r * r\n", "* r * r\n", r"conv2d\(64, 32"),
    ("roofline", "max(", "sum((", "SyntaxError|TypeError|not the least time"),
    ("roofline", "/ 1e9", "/ 1e12", "not the least time"),
    ("roofline", "1.5", "3.0", "the bytes take 0.5 times as long"),
    ("memory_access", "// 32 for", "// 64 for", r"sectors\("),
    ("memory_access", "if stride_words else 1", "", r"conflict_degree\(0\) is 32, expected 1"),
    ("memory_access", "columns | 1", "columns + 1", r"pitch\(1\) is 2, expected 1"),
    ("online_softmax", "a[1] * math.exp(a[0] - m)", "a[1]", "the softmax is off by"),
    (
        "online_softmax",
        "    if m == -math.inf:\n        return EMPTY\n    # Each",
        "    # Each",
        "nan",
    ),
    ("online_softmax", "math.exp(x - m)", "math.exp(x)", "OverflowError|off by"),
    ("welford", "delta * (x - mean)", "delta * delta", "m2 is"),
    ("welford", "    if count == 0:\n        return EMPTY\n", "", "ZeroDivisionError"),
    ("welford", "np.float32(a[0]) * share", "share", "merge of parts .* m2 is"),
    ("reduction_order", "sums[offset : 2 * offset]", "sums[1 : 2 * offset : 2]", "order differs"),
    ("reduction_order", "x.astype(np.float32)", "x.astype(np.float64)", "expected a float32"),
    ("reduction_order", "n // threads - 1 +", "n // threads +", r"longest_chain\(8, 8\) is 4"),
    ("reduction_order", "1e8, -1e8, 1.0", "1.0, 2.0, 3.0", "both orders of 1.0, 2.0, 3.0 give 6.0"),
    ("look_back", "prefix = prefix + sums[later]", "prefix = sums[later] + 0", "expected the bits"),
    ("look_back", "max((t for", "min((t for", "from before the nearest prefix"),
    ("look_back", ": 3,", ": 4,", "traffic of 'reduce the tiles"),
    ("ladder_reduction", "(ghz * 1e9) * 1e3", "ghz * 1e3", r"atomic_ms\(268435456, 1.7\) is"),
    ("ladder_reduction", "max(1, 32 >> round_number)", "32 >> round_number", r"active_lanes\(6\)"),
    (
        "ladder_reduction",
        "for value in sums:",
        "for value in sorted(sums, key=lambda x: tickets[sums.index(x)]):",
        "depends on the tickets",
    ),
    ("ladder_reduction", "// 16 * 4", "// 4", r"longest_row\(100000, 50\)"),
    ("ladder_scan", "exponent * 2**exponent", "2**exponent", r"additions\(1\)|additions\(10\)"),
    (
        "ladder_scan",
        "for t in range(start + 1, tile)",
        "for t in reversed(range(start + 1, tile))",
        "expected the bits of",
    ),
    ("ladder_scan", "{0}, {0, 1}", "{0}, {0}", "two_that_differ: both give"),
    (
        "ladder_attention",
        "weights[0] * x + weights[1] * y",
        "a[1] * x + b[1] * y",
        "merge of keys 0 to 0",
    ),
    (
        "ladder_attention",
        "row // 8 * 2 + column % 2",
        "row // 8 + column % 2 * 2",
        r"lane_of\(0, 1\)",
    ),
    (
        "ladder_attention",
        "    if largest == -math.inf:\n        return a\n",
        "",
        "nan|math domain|ZeroDivision|ValueError",
    ),
    ("ladder_conv2d", "tap // 3 * (side + 2)", "tap // 3 * side", r"shift_of_tap\(3, 5\) is 5"),
    ("ladder_conv2d", "0 <= x < side", "x < side", r"under_tap\(0, 0, 0, 5\)"),
    ("ladder_conv2d", "-(-side * (side + 2) // columns)", "1", r"stored_share\(56, 256\)"),
    (
        "ladder_batch_norm",
        "max(itemsize, stride_bytes)",
        "stride_bytes * 2",
        r"sector_share\(2, 2\)",
    ),
    ("ladder_batch_norm", "delta**2 * a[0] * share", "delta**2 * share", "merge_moments: m2 is"),
    ("ladder_batch_norm", "np.float32(1e4)", "np.float32(1e2)", "mean_that_breaks: with 100"),
    ("vjp", "dy - (y * dy).sum(-1, keepdim=True)", "dy", r"softmax of \(5,\): off by"),
    ("vjp", ".mean(-1, keepdim=True)\n\n", ".sum(-1, keepdim=True)\n\n", r"rms_norm of \(5,\)"),
    ("vjp", "[*range(added), *stretched]", "[*range(added)]", "broadcast from|RuntimeError"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "says"), WRONG, ids=str)
def test_a_wrong_answer_is_refused_and_says_why(name, right, wrong, says, tmp_path):
    text = (LEARN / "solutions" / f"{name}.py").read_text()
    assert text.count(right) == 1
    (tmp_path / f"{name}.py").write_text(text.replace(right, wrong))
    result = check.result_of(tmp_path / f"{name}.py")
    assert result.startswith("wrong: ")
    assert re.search(says, result), result


def test_sums_from_right_to_left_are_found(tmp_path):
    """The classic look-back, whose bits depend on where it stops."""
    text = (LEARN / "solutions" / "look_back.py").read_text()
    fold = re.search(r"    prefix = published.*?return prefix\n", text, re.S)[0]
    classic = (
        "    back = np.float32(0)\n"
        "    for later in reversed(range(start + 1, tile)):\n"
        "        back = sums[later] + back\n"
        "    return published.get(start, np.float32(0)) + back\n"
    )
    (tmp_path / "look_back.py").write_text(text.replace(fold, classic))
    assert "expected the bits of" in check.result_of(tmp_path / "look_back.py")


def test_why_welford():
    """E[x²] - E[x]² in float32, the formula that the exercise replaces."""
    x = check.float32s(1, 1000) + np.float32(1e4)
    naive = np.mean(x * x, dtype=np.float32) - np.mean(x, dtype=np.float32) ** 2
    assert abs(naive - np.var(x.astype(np.float64))) > 0.5


def test_the_roofline_of_the_record():
    """The exercise's formula gives the floors in the recorded run."""
    record = json.loads((ROOT / "benchmarks" / "results" / "h200" / "full.json").read_text())
    answer = load(LEARN / "solutions" / "roofline.py")
    rates = (record["copy_tbs"], record["matmul_tflops"])
    rows = [
        row
        for row in record["rows"]
        if row["op"] in ("relu", "linear", "linear_relu") and "tf32" not in row["case"]
    ]
    assert rows
    for row in rows:
        assert row["floor_ms"] == pytest.approx(
            answer.floor_ms(row["bytes"], row["flops"], *rates), rel=1e-3, abs=1e-5
        )


def test_the_command(capsys, tmp_path):
    assert check.main([*check.CHECKS, "--folder", str(LEARN / "solutions")]) == 0
    assert capsys.readouterr().out.count(" right\n") == len(check.CHECKS)
    assert check.main(["welford"]) == 1
    assert re.fullmatch(r"welford +to do: push\n", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        check.main(["welfrod"])
    assert "expected some of bytes_and_flops, " in capsys.readouterr().err
    assert check.main(["vjp", "--folder", str(tmp_path)]) == 1
    assert "FileNotFoundError" in capsys.readouterr().out


# ---- exercises that are CUDA kernels ----


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_a_kernels_solution_is_right_and_its_gap_is_named(name):
    assert kernels.result_of(LEARN / "solutions" / f"{name}.cu") == "right"
    gap = LEARN / "exercises" / f"{name}.cu"
    assert "  GAP();\n" in gap.read_text()
    if name == "scan":  # one is enough: each costs a compiler's run
        assert kernels.result_of(gap) == "to do: scan"
    runs = [(LEARN / folder / gap.name).read_text().split('extern "C"') for folder in FOLDERS]
    assert runs[0][1] == runs[1][1]  # the same contract
    assert all(first.startswith("// ") for first, _ in runs)


FOLDERS = ("exercises", "solutions")
SHOWN = "x of 3 x 31: y[0, 2] is 10.0, expected 9"  # on the page
WRONG_KERNELS = [
    ("row_sum", "  sums[t] = sum;\n  __syncthreads();\n", "  sums[t] = sum;\n", "barrier|y\\[0"),
    (
        "row_sum",
        "if (t < offset) sums[t] += sums[t + offset];\n    __syncthreads();",
        "if (t < offset) {\n sums[t] += sums[t + offset];\n __syncthreads(); }",
        r"deadlock: thread 0 waits at __syncthreads, thread \d+ has returned",
    ),
    ("row_sum", "i < columns", "i <= columns", r"y\[\d\] is .*, expected"),
    (
        "warp_sum",
        "if (t < 32)",
        "if (t < kWarps)",
        "deadlock: thread 0 waits for its warp, thread 4 has returned",
    ),
    ("transpose", "  __syncthreads();\n", "", r"barrier|y\[\d+, \d+\] is"),
    ("transpose", "columns + column + lane]", "columns + lane]", r"x of 1 x 70: y\[32, 0\] is"),
    ("transpose", "column + i < columns && ", "", "outside of y|SIG|y\\["),
    ("scan", "    __syncthreads();  // all have read\n", "", re.escape(SHOWN)),
    ("gram", "    __syncthreads();  // the tiles are whole\n", "", r"barrier|y\[\d+, \d+\] is"),
    ("gram", "    __syncthreads();  // nobody", "    // nobody", r"barrier|y\[\d+, \d+\] is"),
    ("variance", "if (count == 0) return {0, 0, 0};", "", "nan, expected"),
    ("softmax", "if (m == -INFINITY) return {m, 0};", "", "is nan, expected"),
    ("softmax", "State other", "Stat other", "it does not compile: .*Stat"),
]


@pytest.mark.parametrize(("name", "right", "wrong", "says"), WRONG_KERNELS, ids=str)
def test_a_wrong_kernel_is_refused_and_says_why(name, right, wrong, says, tmp_path):
    text = (LEARN / "solutions" / f"{name}.cu").read_text()
    assert text.count(right) == 1
    (tmp_path / f"{name}.cu").write_text(
        text.replace(right, wrong).replace('"../simt.h"', '"simt.h"')
    )
    result = kernels.result_of(tmp_path / f"{name}.cu")
    assert result.startswith("wrong: ")
    assert re.search(says, result), result


def test_the_page_shows_what_the_check_says():
    assert f"wrong: {SHOWN}\n" in (LEARN / "index.md").read_text()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda y, order: y + (order > 1), "another order of the threads gives other results"),
        (lambda y, order: y * float("nan"), r"y\[0, 0\] is nan, expected"),
    ],
)
def test_what_differs_between_orders_or_was_not_written_is_found(spoil, says):
    scan = kernels.KERNELS["scan"]

    def run(x, whole, order):
        whole[kernels.GUARD : -kernels.GUARD] = spoil(scan.reference(x), order).ravel()

    with pytest.raises(AssertionError, match=says):
        kernels.check(scan, run)


def test_a_write_outside_of_the_result_is_found():
    def run(x, whole, order):
        whole[kernels.GUARD : -kernels.GUARD + 1] = 0

    with pytest.raises(AssertionError, match="it writes outside of y"):
        kernels.check(kernels.KERNELS["scan"], run)


def test_a_kernel_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "SECONDS", 4)
    text = (LEARN / "solutions" / "scan.cu").read_text()
    (tmp_path / "scan.cu").write_text(text.replace("d *= 2", "d *= 1").replace("../", ""))
    assert kernels.result_of(tmp_path / "scan.cu") == "wrong: it does not end within 4 s"


def nvcc(source, target, *flags):
    done = subprocess.run(
        [NVCC, "-std=c++20", "-O3", *flags, str(source), "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.skipif(NVCC is None, reason="nvcc is not here")
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_kernels_are_cuda(name, tmp_path):
    """nvcc takes the solutions as they are, and spills nothing."""
    source = LEARN / "solutions" / f"{name}.cu"
    said = nvcc(source, tmp_path / "out.cubin", "-cubin", "-arch=sm_90a", "-Xptxas=-v")
    assert "warning" not in said, said
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills
    assert set(spills) == {("0", "0")}


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_kernels_are_right_and_timed_on_a_gpu(name, capsys):
    assert timing.main([str(LEARN / "solutions" / f"{name}.cu")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{name}, x of ")
    assert [line.split()[0] for line in lines[1:]] == ["yours", "torch", "copy"]


def test_every_kernel_can_be_timed(capsys, monkeypatch):
    """torch's op computes what the exercise does. Without a GPU the command says so."""
    assert set(timing.NATIVE) == set(kernels.KERNELS)
    for name, (native, _) in timing.NATIVE.items():
        x = kernels.KERNELS[name].make(5, 40)
        exact = kernels.KERNELS[name].reference(x.astype(np.float64))
        np.testing.assert_allclose(native(torch.from_numpy(x)).numpy(), exact, rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing.main(["scan.cu"]) == 2
    assert "no GPU here" in capsys.readouterr().out


# ---- pages ----

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@each_page
def test_programs_of_a_page_run(page, tmp_path, monkeypatch):
    """All of a page in one namespace, as a reader runs them in a clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {"__name__": page.stem}
    for program in blocks(page, "python"):
        exec(compile(program, str(page), "exec"), names)


@each_page
def test_code_that_a_page_quotes_is_in_the_sources(page):
    """A C++ block opens with the name of its file; "…" stands for lines left out."""
    for block in blocks(page, "cpp"):
        first, *lines = block.splitlines()
        source = (ROOT / first.removeprefix("// ")).read_text().splitlines()
        at = 0
        for line in lines:
            if line.strip() in ("", "// …"):
                continue
            found = [i for i in range(at, len(source)) if source[i].strip() == line.strip()]
            assert found, f"{first}: {line}"
            at = found[0] + 1


# ---- the project ----


def run_project(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(PROJECT), *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_project_replaces_one_layer_after_another(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.clamp(min=0)\n"
    )
    layer = f"relu1={tmp_path}/mine.py:Mine"
    done = run_project("--steps", "2", "--batch", "8", "--layer", layer)
    assert done.returncode == 0, done.stderr
    for network, replaced in load(PROJECT).REPLACED.items():
        table = re.search(rf"^{network}, batch 8, 5 steps.*?(?:\n\n|\Z)", done.stdout, re.M | re.S)
        named = re.findall(r"^([+\w][^\n]{21}) +[\d.e+]+ +[\d.]+x ", table[0], re.M)
        assert [name.strip() for name in named] == [
            "native",
            *(f"+ {op}" for op in replaced),
            *("+ cross_entropy", "+ SGD", "+ fusion", "relu1 = Mine"),
        ]


def test_a_stage_swaps_what_it_says():
    project = load(PROJECT)
    for network, build in project.NETWORKS.items():
        stages = list(project.stages_of(network, build(), 0.01))
        swapped = [
            {type(layer).__name__ for layer in stage.model.modules() if is_ours(layer)}
            for stage in stages
        ]
        assert swapped[0] == set()
        for before, after in itertools.pairwise(swapped[:-3]):
            assert before < after  # one kind of layer more
        assert len(swapped[-2]) == len(project.REPLACED[network])
        assert is_ours(stages[-1].optimizer)
        assert not is_ours(stages[-3].optimizer)


def test_the_guides_own_layer_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(LEARN / "project.md", "python")
    exec(program, {})
    project = load(PROJECT)
    model = project.cnn()
    (*_, last) = project.stages_of("cnn", model, 0.01)
    images = torch.randn(4, 1, 28, 28)
    stage = project.own_stage("relu1=my_relu.py:MyReLU", last, model, images, 0.01)
    stage.step(images, torch.zeros(4, dtype=torch.long))
    assert type(stage.model.relu1).__name__ == "MyReLU"
    assert is_ours(stage.model.relu2)


def is_ours(thing):
    return type(thing).__module__.startswith("warpwright")


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (
            "relu9=x.py:X",
            "expected NAME=FILE.py:CLASS with a NAME of flatten, linear1, relu1, linear2",
        ),
        ("relu1", "expected NAME=FILE.py:CLASS"),
        ("relu1=no_such.py:X", "--layer: expected a Python file, got no_such.py"),
        ("relu1=mine.py:Wrong", "relu1: Wrong fails warpwright.testing's rule: output"),
    ],
)
def test_the_project_refuses_a_wrong_layer(layer, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Wrong(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x.clamp(min=0) * 1.001\n"
    )
    project = load(PROJECT)
    model = project.mlp()
    (*_, last) = project.stages_of("mlp", model, 0.01)
    with pytest.raises(SystemExit, match=re.escape(says)):
        project.own_stage(layer, last, model, torch.randn(2, 1, 28, 28), 0.01)
