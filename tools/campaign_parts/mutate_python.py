"""Small faults in the Python sources: one at a time in a copy of the package, which the tests then run.

Needs no build. `mutation.py` says when a fault is killed.
"""

from __future__ import annotations

import ast
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .mutate import Mutant
from .mutation import Runner, order, report
from .result import ROOT, Options, Row

PACKAGE = ROOT / "python" / "warpwright"
# The functions, layers and optimizers that users call, and the files that check their arguments.
TESTS = {
    "functional/_activation.py": ["test_relu.py", "test_activation.py"],
    "functional/_attention.py": ["test_attention*.py"],
    "functional/_common.py": ["test_relu.py", "test_linear.py"],
    "functional/_conv.py": ["test_conv2d*.py"],
    "functional/_conv_norm.py": [
        *("test_conv2d_batch_norm.py", "test_conv2d_batch_norm_relu_max_pool2d.py"),
    ],
    "functional/_conv_transpose.py": ["test_conv_transpose2d*.py"],
    "functional/_dropout.py": ["test_dropout.py"],
    "functional/_embedding.py": ["test_embedding*.py"],
    "functional/_group_norm.py": ["test_group_norm.py"],
    "functional/_kv_cache.py": ["test_attention_with_kv_cache*.py"],
    "functional/_layer_scale.py": ["test_layer_scale_add*.py"],
    "functional/_linear.py": [
        "test_linear.py",
        "test_linear_tiles.py",
        "test_linear_activation.py",
    ],
    "functional/_linear_8bit.py": ["test_linear_8bit.py"],
    "functional/_loss.py": ["test_cross_entropy*.py", "test_linear_cross_entropy*.py"],
    "functional/_norm.py": ["test_batch_norm*.py"],
    "functional/_pool.py": [
        *("test_max_pool2d.py", "test_*relu_max_pool2d.py", "test_adaptive_avg_pool2d.py"),
    ],
    "functional/_quantized.py": ["test_linear_quantized.py"],
    "functional/_softmax.py": ["test_softmax.py"],
    "functional/_squeeze_excitation.py": ["test_squeeze_excitation*.py"],
    "functional/_reduction.py": ["test_reduction.py"],
    "functional/_fft_conv.py": ["test_fft_conv.py"],
    "functional/_rotary.py": ["test_rotary_embedding.py"],
    "functional/_row_norm.py": ["test_layer_norm.py", "test_norm_dtype.py", "test_add_norm.py"],
    "functional/_scan.py": ["test_cumsum.py", "test_cumprod.py", "test_linear_scan.py"],
    "functional/_varlen.py": ["test_attention_varlen*.py"],
    "optim/_shards.py": ["test_optim*.py"],
    "optim/_step.py": ["test_optim*.py"],
    "optim/adam.py": ["test_optim*.py"],
    "optim/sgd.py": ["test_optim*.py"],
    "quantization/_formats.py": ["test_quantize.py"],
    "quantization/_model.py": ["test_quantize.py"],
    "quantization/_quantizers.py": ["test_quantize.py"],
    "swap/plan.py": ["test_swap*.py", "test_fuse*.py"],
    "swap/selection.py": ["test_swap*.py"],
    "_arguments.py": ["test_relu.py", "test_conv2d_errors.py", "test_max_pool2d.py"],
    "_loss_layers.py": ["test_linear_cross_entropy*.py", "test_cross_entropy_extras.py"],
    "_multihead.py": ["test_multihead.py"],
    "_running_statistics.py": ["test_batch_norm*.py"],
    "nn.py": ["test_linear.py", "test_layer_norm.py"],
}
QUICK = ["test_arguments.py"]  # first: seconds, and every function's arguments
SHARED = [
    *("test_nn.py", "test_kinds.py", "test_patch.py", "test_registration.py"),
    *("test_compile.py", "test_export.py"),
]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
# What Python does not evaluate, or evaluates for type checkers alone.
SKIPPED = ("annotation", "returns", "type_params")


@dataclass(frozen=True)
class Site:
    """A node of a module's tree, and the change that makes a fault of it."""

    node: ast.AST
    line: int
    kind: str
    change: str
    apply: Callable[[], None]


def _comparison(node: ast.Compare) -> Iterator[Site]:
    for i, op in enumerate(node.ops):
        wrong = COMPARISONS[type(op)]

        def apply(i: int = i, wrong: type[ast.cmpop] = wrong) -> None:
            node.ops[i] = wrong()

        change = f"{type(op).__name__} becomes {wrong.__name__}"
        yield Site(node, node.lineno, "operator", change, apply)


def _boolean(node: ast.BoolOp) -> Iterator[Site]:
    is_and = isinstance(node.op, ast.And)

    def apply() -> None:
        node.op = ast.Or() if is_and else ast.And()

    change = "and becomes or" if is_and else "or becomes and"
    yield Site(node, node.lineno, "operator", change, apply)


def _sum(node: ast.BinOp) -> Iterator[Site]:
    wrong = {ast.Add: ast.Sub, ast.Sub: ast.Add}.get(type(node.op))
    if wrong is None or any(
        isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right)
    ):
        return

    def apply() -> None:
        node.op = wrong()

    yield Site(
        node, node.lineno, "operator", f"{type(node.op).__name__} becomes {wrong.__name__}", apply
    )


def _condition(node: ast.If | ast.IfExp) -> Iterator[Site]:
    test = node.test
    if isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
        return
    drops = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise) and not node.orelse

    def apply() -> None:
        node.test = ast.Constant(False) if drops else ast.UnaryOp(ast.Not(), test)

    kind, change = (
        ("check", "the check is dropped") if drops else ("condition", "the condition is negated")
    )
    yield Site(node, node.lineno, kind, change, apply)


def _constant(node: ast.Constant) -> Iterator[Site]:
    if type(node.value) not in (int, bool):
        return
    wrong = (not node.value) if isinstance(node.value, bool) else node.value + 1

    def apply() -> None:
        node.value = wrong

    yield Site(node, node.lineno, "constant", f"{node.value} becomes {wrong}", apply)


FINDERS: dict[type[ast.AST], Callable[..., Iterator[Site]]] = {
    ast.Compare: _comparison,
    ast.BoolOp: _boolean,
    ast.BinOp: _sum,
    ast.If: _condition,
    ast.IfExp: _condition,
    ast.Constant: _constant,
}


def sites_of(tree: ast.Module) -> list[Site]:
    """Every place where a fault can stand, in the order of the text."""
    found: list[Site] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: never reached if right
            return
        found.extend(FINDERS.get(type(node), lambda node: iter(()))(node))
        for name, value in ast.iter_fields(node):
            if name not in SKIPPED:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(child)

    visit(tree)
    return found


def mutated(text: str, number: int) -> str:
    """The text with the fault at this place of `sites_of` in."""
    tree = ast.parse(text)
    sites_of(tree)[number].apply()
    return ast.unparse(tree)


@dataclass
class PythonRunner(Runner):
    """Runs the tests on a copy of the package with one fault in its sources."""

    places: dict[int, tuple[str, int]] = field(default_factory=dict)  # mutant -> (file, place)

    def stages(self, mutant: Mutant) -> list[list[str]]:
        folder = ROOT / "tests"
        own = [p.name for pattern in TESTS[mutant.file] for p in sorted(folder.glob(pattern))]
        return [QUICK, list(dict.fromkeys(own)), SHARED]

    def pytest(self, arguments: list[str], mutant: int) -> str:
        if mutant == 0:
            return super().pytest(arguments, mutant)
        file, place = self.places[mutant]
        text = (PACKAGE / file).read_text()
        target = self.folder / "python" / "warpwright" / file
        target.write_text(mutated(text, place))
        try:
            return super().pytest(arguments, mutant)
        finally:
            target.write_text(text)


def choose(
    files: list[str], per_file: int, seed: int
) -> tuple[list[Mutant], dict[int, tuple[str, int]]]:
    """Up to `per_file` faults in each file, the same ones for the same seed and sources."""
    rng = random.Random(seed)
    mutants, places = [], {}
    for file in files:
        text = (PACKAGE / file).read_text()
        sites = list(enumerate(sites_of(ast.parse(text))))
        rng.shuffle(sites)
        for place, site in sites[:per_file]:
            number = len(mutants) + 1
            source = text.split("\n")[site.line - 1].strip()
            mutants.append(Mutant(number, file, site.line, site.kind, source, site.change))
            places[number] = (file, place)
    return mutants, places


def run(options: Options) -> list[Row]:
    folder = ROOT / "build" / "python_mutants"
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "python" / "warpwright", ignore=ignored)
    files = [f for f in TESTS if re.search(options.only, f)]
    mutants, places = choose(files, per_file=12, seed=options.seed)
    runner = PythonRunner(folder, places=places)
    verdicts = runner.judge_all(order(mutants, options.seed)[: options.mutants], options.minutes)
    what = "small faults in the Python functions and checks that the tests find"
    return [report("python-mutation", what, runner, verdicts, options.seed)]
