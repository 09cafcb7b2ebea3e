"""What a class computes, as a hash of its code: equal code in two classes has one hash.

The hash covers the forward and the methods that it calls on ``self``. Comments, docstrings and
annotations do not count. Names do: a renamed argument is another hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from torch import nn

# Fields of a syntax tree that do not change what it computes, or that depend on Python's version.
_IGNORED = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}


def fingerprint(kind: type[nn.Module], init: bool = False) -> str | None:
    """The hash of what ``kind`` computes; None if it has no source.

    Args:
        init: include the constructor, for classes whose forward calls what the constructor chose.
    """
    # The forward is an argument, so that a class with an exchanged forward gets another hash.
    hashable: Any = kind  # mypy takes a ``type`` for unhashable
    return _fingerprint(hashable, kind.forward, init)


def fingerprint_of(kind: Any, forward: Any) -> str | None:
    """The same for a ``forward`` without the decorators that ``kind`` has around it."""
    return _fingerprint(kind, forward, False)


@functools.cache
def _fingerprint(kind: Any, forward: Any, init: bool) -> str | None:
    try:
        functions = [*_called(kind, forward), *([_tree(kind.__init__)] if init else [])]
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(repr([_normal(f) for f in functions]).encode()).hexdigest()[:16]


def function_fingerprint(function: Any) -> str | None:
    """The hash of a function and of those in its file that it calls; None if one has no source.

    Decorators do not count: ``function`` itself is what they returned.
    """
    left, seen, trees = [function], {function}, []
    try:
        while left:
            function = left.pop(0)
            trees.append(_tree(function))
            trees[-1].decorator_list = []
            for name in function.__code__.co_names:
                called = function.__globals__.get(name)
                is_near = inspect.isfunction(called) and called.__module__ == function.__module__
                if is_near and called not in seen:
                    seen.add(called)
                    left.append(called)
    except (OSError, TypeError, SyntaxError):
        return None
    return hashlib.sha256(repr([_normal(tree) for tree in trees]).encode()).hexdigest()[:16]


def _tree(function: Any) -> ast.FunctionDef:
    if hasattr(function, "__wrapped__"):
        raise TypeError(f"{function} runs other code than its source shows")
    text = textwrap.dedent(inspect.getsource(function))
    (found,) = ast.parse(text).body
    if not isinstance(found, ast.FunctionDef):
        raise TypeError(f"{function} is no function with a definition of its own")
    return found


def _called(kind: type[nn.Module], forward: Any) -> Iterator[ast.FunctionDef]:
    """The forward, and each method of ``kind`` that it calls on ``self``, in the order of use."""
    left, seen = [forward], set()
    while left:
        function = left.pop(0)
        tree = _tree(function)
        yield tree
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"):
                continue
            method = getattr(kind, node.attr, None)
            if inspect.isfunction(method) and node.attr not in seen and not _is_torchs(method):
                seen.add(node.attr)
                left.append(method)


def _is_torchs(function: Any) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


def _normal(node: Any) -> Any:
    if isinstance(node, ast.AST):
        fields = [
            (name, _normal(value))
            for name, value in ast.iter_fields(node)
            if name not in _IGNORED and value is not None and value != []
        ]
        return (type(node).__name__, *fields)
    if isinstance(node, list):
        return tuple(_normal(item) for item in node if not _is_text(item))
    return repr(node)


def _is_text(node: Any) -> bool:
    """Whether ``node`` is a docstring, or another constant on a line of its own."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
