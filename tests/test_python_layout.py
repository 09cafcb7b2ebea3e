"""The form of the Python code: no import circles in the package, no long files, no long functions."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / "python"
MAX_LINES = 500
MAX_FUNCTION_LINES = 100


def modules(root):
    """Dotted name -> file, stubs of extension modules included."""
    found = {}
    for path in (*root.rglob("*.pyi"), *root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def nodes(tree):
    """All nodes that run: those that only a type checker reads are left out."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if not is_for_types(child):
            yield from nodes(child)


def imports(name, path, known):
    """The modules of `known` that `name` imports, inside of functions too."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                member = f"{source}.{alias.name}"
                found.add(member if member in known else source)
    return found & known.keys() - {name}


def circles(graph):
    """Every import that leads back to the module that imports."""

    def reachable(start):
        seen, left = set(), [start]
        while left:
            for following in graph[left.pop()] - seen:
                seen.add(following)
                left.append(following)
        return seen

    reach = {name: reachable(name) for name in graph}
    return sorted(
        f"{name} imports {other}, which leads back to it"
        for name in graph
        for other in graph[name]
        if name in reach[other]
    )


def import_graph(root):
    known = modules(root)
    return {name: imports(name, path, known) for name, path in known.items()}


def test_no_import_circles():
    graph = import_graph(PYTHON)
    assert "warpwright.swap.classes" in graph["warpwright.swap.check"]
    assert not circles(graph), "\n" + "\n".join(circles(graph))


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"a.py": "from . import b", "b.py": "import p.a"}, 2),
        ({"a.py": "def f():\n    from .b import g", "b.py": "from .a import f"}, 2),
        ({"a.py": "from .b import g", "b.py": "from . import version"}, 3),
        ({"a.py": "if TYPE_CHECKING:\n    from .b import T", "b.py": "from .a import f"}, 0),
        ({"a.py": "from .b import g", "b.py": "import os"}, 0),
    ],
)
def test_circles_are_found(tmp_path, files, count):
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {"__init__.py": "from .a import f\nversion = 1\n", **files}.items():
        (package / name).write_text(text)
    assert len(circles(import_graph(tmp_path))) == count


def long_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.name}: {length} lines"


def test_files_and_functions_are_short():
    scripts = [path for folder in ("tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    for path in (*modules(PYTHON).values(), *scripts):
        text = path.read_text()
        assert text.count("\n") <= MAX_LINES, f"{path}: {text.count(chr(10))} lines"
        assert not list(long_functions(text)), f"{path}: {list(long_functions(text))}"


def test_files_of_tests_are_short():
    for path in (ROOT / "tests").glob("*.py"):
        lines = path.read_text().count("\n")
        assert lines <= MAX_LINES, f"{path}: {lines} lines"


def test_long_functions_are_found():
    assert list(long_functions("def f():\n" + "    g()\n" * 100)) == ["f: 101 lines"]
    assert not list(long_functions("def f():\n" + "    g()\n" * 99))


def test_files_open_with_their_purpose():
    for name, path in modules(PYTHON).items():
        if path.suffix == ".py":
            assert ast.get_docstring(ast.parse(path.read_text())), f"{name}: no docstring"
