"""What the source of a class says about its attention and its masks.

transformers has no flags for these facts. If a source is missing or not understood, the answer
leaves the class to transformers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedModel, masking_utils

OP = "scaled_dot_product_attention"

_BY_NAME = re.compile(r"config\._attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
# Other names that can restrict a causal mask further, or demand that it is built.
_OVERLAYS = re.compile(
    r"(or_mask_function|and_mask_function|block_sequence_ids|allow_is_\w+_skip|indexed_attention)"
)
_SHAPING = {"arange", "unsqueeze", "expand", "view", "repeat", "to", "size", "get_seq_length"}
# These classes are common to all models.
_COMMON = {*PreTrainedModel.__mro__}
_COMMON_FILES = {"builtins", "transformers.generation.utils"}


def class_of(module: nn.Module) -> Any:
    """Its type; mypy takes a ``type`` for unhashable."""
    return type(module)


def _bases(kind: type) -> list[type]:
    """``kind`` and those of its bases that belong to the model."""
    return [
        base
        for base in kind.__mro__
        if base not in _COMMON
        and base.__module__ not in _COMMON_FILES
        and base.__module__.split(".")[0] not in ("torch", "warpwright")
    ]


def _source(thing: object) -> str | None:
    try:
        return inspect.getsource(thing)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None


@functools.cache
def asks_for_sdpa(kind: type) -> bool:
    """Whether the code of ``kind`` compares the implementation's name with "sdpa"."""
    sources = [_source(base) for base in _bases(kind)]
    return any(source is None or _BY_NAME.search(source) for source in sources)


@functools.cache
def makes_masks(kind: type) -> bool:
    """Whether ``kind`` calls transformers' mask functions, and nowhere asks for "sdpa" by name."""
    if asks_for_sdpa(kind):
        return False
    for base in _bases(kind):
        names = vars(sys.modules[base.__module__])
        for word in set(re.findall(r"\w+", _source(base) or "")):
            function = names.get(word)
            if _is_mask_function(function):
                return True
            # A function of the same file that calls one.
            if inspect.isfunction(function) and function.__module__ == base.__module__:
                called = function.__code__.co_names
                if any(_is_mask_function(names.get(name)) for name in called):
                    return True
    return False


def _is_mask_function(thing: object) -> bool:
    return getattr(thing, "__module__", None) == masking_utils.__name__ and callable(thing)


def counts_positions(module: nn.Module) -> bool:
    """Whether a plain call of ``module``, which makes masks, makes causal masks and nothing more.

    Plain: the caller gives no position ids. The forward then makes its own, which must count up
    by 1. The code may add no overlay to the masks, except in branches that the config switches off.
    """
    kind = class_of(module)
    options = _options_with_overlays(kind)
    if options is None or not _forward_counts(kind):
        return False
    config = vars(module).get("config")
    return not any(getattr(config, name, True) for name in options)


@functools.cache
def _options_with_overlays(kind: type) -> frozenset[str] | None:
    """The options ``X`` of ``if self.config.X:`` around overlays; None if other code has overlays."""
    options: set[str] = set()
    for base in _bases(kind):
        source = _source(base)
        if source is None:
            return None
        names = vars(sys.modules[base.__module__])
        for word in set(re.findall(r"\w+", source)):
            function = names.get(word)
            if inspect.isfunction(function) and function.__module__.startswith(
                (base.__module__, "transformers.models.")
            ):
                called = _source(function)
                if called is None or _OVERLAYS.search(called):
                    return None
        visitor = _Overlays()
        visitor.visit(ast.parse(textwrap.dedent(source)))
        if visitor.elsewhere:
            return None
        options |= visitor.options
    return frozenset(options)


class _Overlays(ast.NodeVisitor):
    def __init__(self) -> None:
        self.options: set[str] = set()
        self.elsewhere = False

    def visit_If(self, node: ast.If) -> None:
        option = re.fullmatch(r"self\.config\.(\w+)", ast.unparse(node.test))
        if option is None:
            self.generic_visit(node)
            return
        if any(_OVERLAYS.search(ast.unparse(statement)) for statement in node.body):
            self.options.add(option[1])
        for statement in node.orelse:
            self.visit(statement)

    def generic_visit(self, node: ast.AST) -> None:
        named = [value for _, value in ast.iter_fields(node) if isinstance(value, str)]
        if any(_OVERLAYS.fullmatch(name) for name in named):
            self.elsewhere = True
        super().generic_visit(node)


@functools.cache
def _forward_counts(kind: type) -> bool:
    """By the source of the forward: each assignment to a name that ends in ``position_ids`` is
    None, ``arange`` or ``cache_position``, shifted by a number and reshaped."""
    source = _source(inspect.unwrap(kind.forward))  # type: ignore[attr-defined]
    if source is None:
        return False
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets: list[ast.expr] = [node.target]
        elif isinstance(node, ast.Assign):
            targets = node.targets
        else:
            continue
        if any(_is_position_ids(target) for target in targets) and not (
            isinstance(node, ast.Assign) and _counts(node.value)
        ):
            return False
    return True


def _is_position_ids(target: ast.expr) -> bool:
    parts = (part for part in ast.walk(target) if isinstance(part, ast.expr))
    return any(ast.unparse(part).endswith("position_ids") for part in parts)


def _counts(value: ast.expr) -> bool:
    """``torch.arange(...) + offset``, ``cache_position.unsqueeze(0)``, ``position_ids[0]`` ..."""
    if isinstance(value, ast.Constant) and value.value is None:
        return True
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name not in _SHAPING:
                return False
        elif isinstance(node, ast.BinOp):
            if not isinstance(node.op, ast.Add):
                return False
        elif isinstance(node, (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)):
            return False
    text = ast.unparse(value)
    return "arange(" in text or "cache_position" in text or text.startswith("position_ids")


def _forward_code(kind: type) -> CodeType | None:
    return getattr(inspect.unwrap(kind.forward), "__code__", None)  # type: ignore[attr-defined]


def attends(kind: type) -> bool:
    """Whether the forward of ``kind`` takes its attention function from transformers' registry."""
    code = _forward_code(kind)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def attends_itself(kind: type) -> bool:
    """Whether ``kind`` is named an attention layer and computes attention without the registry."""
    code = _forward_code(kind)
    names = code.co_names if code is not None else ()
    return "Attention" in kind.__name__ and (
        OP in names or ("softmax" in names and "matmul" in names)
    )
