"""Which layers read a module's input, by the code of its forward.

Under autocast a matrix product or a convolution casts its input. If these are all that reads a
tensor, it may have autocast's dtype from the start.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import nn

from .blocks import Path, base_of, copied_class
from .classes import MODULES, NATIVE_LAYERS, forward_of
from .trace import undecorated

# What a forward may ask of its input besides: none of it depends on the dtype.
_ASKED = {"shape", "size", "dim", "ndim", "device"}

Kind = Callable[[nn.Module], type[nn.Module]]


def native_of(kind: type[nn.Module]) -> type[nn.Module]:
    """The class before a swap."""
    kind = copied_class(base_of(kind) or kind)
    return NATIVE_LAYERS.get(kind, kind)


def products_that_read(module: nn.Module, kind_of: Kind) -> tuple[Path, ...] | None:
    """Paths in ``module`` of the layers that read its first argument, if all are products.

    A convolution is one, too.

    Args:
        kind_of: the class that a layer has, or will have after the swap.
    Returns:
        None if something else reads the argument, or may do so. Attention as a whole
        (``nn.MultiheadAttention``) counts as a product: the empty path.
    """
    kind = native_of(kind_of(module))
    if kind is nn.MultiheadAttention:
        return ((),) if kind_of(module) is not kind else None
    if MODULES.get(kind, (None, ""))[1] in ("linear", "conv2d"):
        return ((),)
    if forward_of(kind) is nn.Sequential.forward:
        first = next(iter(module._modules.items()), None)
        if first is None or first[1] is None:
            return None
        found = products_that_read(first[1], kind_of)
        return None if found is None else tuple((first[0], *path) for path in found)
    paths: list[Path] = []
    for name in _names_that_read(kind) or ():
        child = getattr(module, name, None)
        if child is None:  # an optional layer that is absent
            continue
        inner = products_that_read(child, kind_of) if isinstance(child, nn.Module) else None
        if inner is None:
            return None
        paths += [(name, *path) for path in inner]
    return tuple(paths) or None


class _Other(Exception):
    """Something else than a layer reads the argument."""


def _names_that_read(kind: type[nn.Module]) -> list[str] | None:
    """Attributes of ``self`` that the forward calls with its first argument alone."""
    try:
        source = textwrap.dedent(inspect.getsource(undecorated(kind)[0]))
        (tree,) = ast.parse(source).body
        if not isinstance(tree, ast.FunctionDef) or len(tree.args.args) < 2:
            return None
        found: list[str] = []
        _scan(tree.body, tree.args.args[1].arg, found)
    except (OSError, TypeError, SyntaxError, ValueError, _Other):
        return None
    return found


def _scan(statements: list[ast.stmt], name: str, found: list[str]) -> bool:
    """Reads statements in order; whether ``name`` is still the argument after them."""
    for statement in statements:
        if isinstance(statement, ast.If):
            _reads(statement.test, name, found)
            kept = [_scan(s, name, found) for s in (statement.body, statement.orelse)]
            if not any(kept):
                return False
        elif isinstance(statement, ast.Assign):
            _reads(statement.value, name, found)
            if any(_stores(target, name) for target in statement.targets):
                return False
        elif _stores(statement, name):
            raise _Other
        else:
            _reads(statement, name, found)
    return True


def _stores(node: ast.AST, name: str) -> bool:
    return any(
        isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load)
        for n in ast.walk(node)
    )


def _reads(node: ast.AST, name: str, found: list[str]) -> None:
    """Collects the layers that read ``name`` in ``node``."""

    def is_it(value: Any) -> bool:
        return isinstance(value, ast.Name) and value.id == name

    if is_it(node):
        raise _Other
    if isinstance(node, ast.Attribute) and is_it(node.value):
        if node.attr not in _ASKED:
            raise _Other
        return
    if isinstance(node, ast.Call) and len(node.args) == 1 and is_it(node.args[0]):
        function = node.func
        of_self = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "self"
        if not of_self or node.keywords:
            raise _Other
        assert isinstance(function, ast.Attribute)
        found.append(function.attr)
        return
    for child in ast.iter_child_nodes(node):
        _reads(child, name, found)
