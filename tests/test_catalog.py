"""The catalog of ops, held against everything that cannot derive from it: C++, stubs, cases, tests."""

import ast
import dataclasses
import re
import sys
from pathlib import Path

import pytest
import test_explain_devices
import test_launches
import torch
from malformed_calls import native_functions, public_calls
from native_suites import OURS

import warpwright
from warpwright import _catalog, _explain_cpu, doctor, explain, functional, nn, optim
from warpwright._catalog import FUNCTIONALS, NATIVE_OPERATORS, OPERATORS, OPS, VARIANTS
from warpwright._ops import ops
from warpwright.bench import overhead, plots, sources
from warpwright.bench.optimizers import optimizer_cases
from warpwright.bench.peers import COMPILE_CALLS_NATIVE, CUDNN_OPS
from warpwright.bench.shapes import CASES
from warpwright.demo import op_times
from warpwright.explain import EXPLAINERS
from warpwright.patch import ROUTED
from warpwright.profile import ranges
from warpwright.swap import OPS as SWAPPED
from warpwright.swap import patterns
from warpwright.swap.classes import MODULES, OF_LIBRARIES

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from campaign_parts import injected_child, mutate_python, mutation  # noqa: E402

CSRC = ROOT / "csrc"
DEFINITION = re.compile(r'm\.(?:def\(\s*"(\w+)\(|impl\("(\w+)")')
COMPOSED = {"mlp"}  # two ops, measured and tested on their own
MEASURED_AS = {"adam": "adamw"}  # the same kernel
RANDOM = {"dropout"}  # a record needs results that two runs share; its page has the times
NATIVE_HAS = [op for op in FUNCTIONALS.values() if op.routes]


# ---- a record is whole ----


def gaps(op):
    """What a record lacks."""
    if op.is_optimizer:
        return [] if op.operators else ["operators"]
    needed = {"operators", "explain", "cpu"}
    if op.name in _explain_cpu.SPECIAL:  # the function may need no text
        needed.remove("cpu")
    needed |= {"modules", "work", "example"} if op.routes else set()
    found = sorted(name for name in needed if not getattr(op, name))
    if not (op.modules or op.layer or op.chain or op.is_plain):
        found.append("modules, layer, chain or is_plain")
    return found


@pytest.mark.parametrize("name", OPS)
def test_records_are_whole(name):
    assert not gaps(OPS[name])


@pytest.mark.parametrize(
    ("op", "field"),
    [
        ("relu", "operators"),
        ("relu", "modules"),
        ("linear", "work"),
        ("conv2d", "example"),
        ("mlp", "explain"),
        ("linear_relu", "cpu"),
        ("linear_relu", "chain"),
        ("mlp", "layer"),
        ("cumsum", "is_plain"),
        ("sgd", "operators"),
    ],
)
def test_a_gap_is_found(op, field):
    empty = None if field in ("work", "example", "chain") else type(getattr(OPS[op], field))()
    assert any(field in gap for gap in gaps(dataclasses.replace(OPS[op], **{field: empty})))


def test_names_are_unique():
    assert len(OPS) == len(_catalog._RECORDS)
    listed = [operator for op in OPS.values() for operator in op.operators]
    assert all(OPERATORS[operator.name] is operator for operator in listed)


# ---- C++ ----


def defined_operators(text):
    """Its definitions and its kernels: a loop may define two operators at once."""
    return {name for names in DEFINITION.findall(text) for name in names if name}


def test_operators_are_those_of_the_library():
    sources = [path.read_text() for path in sorted(CSRC.rglob("*.cpp"))]
    fragments = [text for text in sources if "TORCH_LIBRARY_FRAGMENT(warpwright" in text]
    assert set().union(*map(defined_operators, fragments)) == set(OPERATORS)
    assert set(vars(ops)) == set(OPERATORS)


def test_definitions_are_found():
    text = 'm.def("a(Tensor x) -> Tensor");\n  m.def(\n      "b_(Tensor(a!) x) -> ()", tags);'
    text += 'm.impl("c", c_kernel);'
    assert defined_operators(text) == {"a", "b_", "c"}


def test_folders_are_those_of_the_library():
    assert {folder for op in OPS.values() for folder in op.sources} == {
        path.name for path in (CSRC / "ops").iterdir() if path.is_dir()
    }
    for name in OPS:
        assert sources.folders_of(name) == OPS[name].sources


def test_explain_is_the_same_in_cpp_stub_and_python():
    in_cpp = set(
        re.findall(
            r'm\.def\("(explain_\w+)"',
            "".join(p.read_text() for p in CSRC.glob("python/explain*.cpp")),
        )
    )
    package = Path(warpwright.__file__).parent
    in_stub = set(re.findall(r"def (explain_\w+)\(", (package / "_C.pyi").read_text()))
    asked = {
        node.attr
        for file in (package / "explain.py", *package.glob("_explain_*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.startswith("explain_")
    }
    assert in_cpp == in_stub == asked


# ---- Python ----


def test_every_functional_has_a_record():
    assert set(functional.__all__) == {*FUNCTIONALS, *VARIANTS}
    assert all(getattr(functional, name).__module__ == functional.__name__ for name in FUNCTIONALS)


def test_every_layer_has_a_record():
    ours = {name for op in OPS.values() for _, name in op.modules}
    ours |= {op.layer for op in OPS.values() if op.layer}
    ours |= {op.chain.module for op in OPS.values() if op.chain}
    assert set(nn.__all__) == ours


def test_every_optimizer_has_a_record():
    assert {name.lower() for name in optim.__all__} == {
        name for name, op in OPS.items() if op.is_optimizer
    }


def test_tables_derive():
    native_has = [op.name for op in NATIVE_HAS]
    assert list(ROUTED) == native_has
    assert list(SWAPPED) == [*native_has, *OF_LIBRARIES]
    assert set(OF_LIBRARIES) < set(FUNCTIONALS)
    torchs = {op for kind, (_, op) in MODULES.items() if kind.__module__.startswith("torch.")}
    assert torchs == set(native_has)
    assert list(overhead.calls("cpu")) == native_has
    assert set(EXPLAINERS) == set(FUNCTIONALS)
    assert {p.functional for p in patterns.PATTERNS} == {n for n, op in OPS.items() if op.chain}
    layers = {layer.op for layer in patterns.LAYERS} | {"add"}
    assert {op for pattern in patterns.PATTERNS for op in pattern.ops} <= layers
    assert set(CUDNN_OPS) | set(COMPILE_CALLS_NATIVE) <= set(FUNCTIONALS)


def test_the_demos_ops_are_the_catalogs():
    for name, (layer, _) in op_times.OPS.items():
        assert layer in [theirs for theirs, _ in FUNCTIONALS[name].modules], name


def test_longer_chains_come_first():
    lengths = [len(pattern.ops) for pattern in patterns.PATTERNS]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("op", NATIVE_HAS, ids=lambda op: op.name)
def test_example(op, device):
    """It runs, natively and on ours, through each route that takes it; its work is known."""
    shape, args, kwargs = op.example(device)
    assert shape
    expected = getattr(torch.nn.functional, op.name)(*args, **kwargs)
    result = getattr(functional, op.name)(*args, **kwargs)
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)
    assert op.name in explain(op.name, *args, **kwargs)
    a = {"args": args, "kwargs": kwargs, "weight": args[1] if len(args) > 1 else None}
    work = ranges.work_of(op.name, args[0], result, a)
    assert work.forward.bytes > 0
    assert work.backward.bytes > 0
    assert (work.forward.flops > 0) == any(operator.flops for operator in op.operators)
    row = {"op": op.name, "flops": work.forward.flops, "bytes": work.forward.bytes}
    assert plots.operations({**row, "dtype": "float32"}) > 0


@pytest.mark.parametrize("name", NATIVE_OPERATORS)
def test_fallback_takes_the_arguments(name):
    """By position, as many as the operator's schema requires, or any."""
    schema = getattr(torch.ops.warpwright, name).default._schema
    code = getattr(NATIVE_OPERATORS[name], "__code__", None)
    if code is not None and code.co_filename.endswith("_native.py"):
        required = [a for a in schema.arguments if not a.kwarg_only and not a.has_default_value()]
        takes_more = code.co_flags & 0x04
        assert takes_more or code.co_argcount >= len(required)


# ---- what is written by hand for each op ----


def test_every_operator_has_a_sharding_rule():
    """Composed operators run as what they are composed of."""
    from warpwright.distributed.sharding import HANDLERS, RULES

    composed = {name for name, operator in OPERATORS.items() if operator.composed}
    assert {*RULES, *HANDLERS} | composed == {*OPERATORS}
    assert not composed & {*RULES, *HANDLERS}


def test_every_op_is_measured():
    measured = {case.op for case in (*CASES, *optimizer_cases("full"))}
    assert measured | COMPOSED | RANDOM | {*MEASURED_AS} == {*OPS}
    assert {*MEASURED_AS.values()} <= measured


def test_every_op_is_tested():
    assert {*public_calls("cpu", 0)} == {*FUNCTIONALS, *VARIANTS}
    assert {op.name for op in NATIVE_HAS} <= {*native_functions()}
    ours = {getattr(f, "__name__", "") for f in OURS.values()} | {"scaled_dot_product_attention"}
    assert {op.name for op in NATIVE_HAS} <= ours
    cases = (ROOT / "tools" / "sanitize_parts").glob("*.py")
    called = "".join(path.read_text() for path in cases)
    for name in {*FUNCTIONALS} - COMPOSED:
        family = name.rpartition("_")[0] + "_{"  # f"linear_{activation}"
        assert f"F.{name}" in called or family in called, f"tools/sanitize_parts: {name}"


def test_every_folder_has_its_page():
    pages = {path.stem for path in (ROOT / "docs" / "kernels").glob("*.md")}
    for op in OPS.values():
        assert {op.name, *op.sources} & pages, op.name
    listed = (ROOT / "docs" / "kernels" / "README.md").read_text()
    for page in pages - {"README"}:
        assert f"({page}.md)" in listed, f"docs/kernels/README.md: {page}.md"


def test_doctor_calls_what_native_has():
    """Besides, functions of torch, and ops that native computes by several functions."""
    more = {*doctor.REDUCTIONS, *doctor.SCANS, *doctor.COMPOSED}
    assert set(doctor.calls("cpu")) - more == {op.name for op in NATIVE_HAS}


def folders_without(named):
    """The folders of csrc/ops that none of these ops uses; names of no op count for nothing."""
    folders = {folder for op in OPS.values() for folder in op.sources}
    return folders - {folder for name in {*named} & {*OPS} for folder in OPS[name].sources}


def functions_without(files):
    """The files of functional/ and optim/ with code of their own that the list lacks."""
    package = Path(warpwright.__file__).parent
    found = {
        f"{folder}/{path.name}"
        for folder in ("functional", "optim")
        for path in (package / folder).glob("*.py")
        if path.name != "__init__.py"
    }
    return found - {*files}


# By the catalog's names: what a list of calls need not have.
NOT_EXPLAINED = {"optim"}  # an optimizer has no plan
NOT_COUNTED = {"dropout", "linear_cross_entropy"}
COUNTED_WITH_OPTIMIZERS = {"optim"}  # tests/test_optim_extras.py
NOT_REPEATED = {"dropout", "optim"}  # a second call gives other numbers


def test_every_folder_is_explained_for_other_gpus():
    assert folders_without(test_explain_devices.CALLS) == NOT_EXPLAINED


def test_every_folder_counts_its_launches():
    named = {name.split(",")[0].split()[0] for name in test_launches.CASES}
    missing = folders_without({*named, *test_launches.ELSEWHERE})
    assert missing == NOT_COUNTED | COUNTED_WITH_OPTIMIZERS
    assert all(hasattr(test_launches, test) for test in test_launches.ELSEWHERE.values())


def test_the_campaign_covers_every_folder():
    assert {*mutation.TESTS} == {path.name for path in (CSRC / "ops").iterdir() if path.is_dir()}
    assert folders_without(injected_child.large_calls()) == NOT_REPEATED
    assert functions_without(mutate_python.TESTS) == set()


def test_a_folder_without_a_call_is_found():
    assert "relu" in folders_without({*OPS} - {"relu"})
    assert "scan" not in folders_without({"cumsum"})
    lacking = {*mutate_python.TESTS} - {"functional/_scan.py"}
    assert functions_without(lacking) == {"functional/_scan.py"}
