"""What the source of a class says about its attention and its masks.

transformers has no flags for these facts. Where a source is missing or not understood, the answer is
the one that leaves the class to transformers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import textwrap
from types import CodeType

from transformers import PreTrainedModel, masking_utils

OP = "scaled_dot_product_attention"

_BY_NAME = re.compile(r"config\._attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*[\"']sdpa[\"']")
# What else can make a causal mask more than causal, or demand that it is built.
_OVERLAYS = re.compile(
    r"\b(or_mask_function|and_mask_function|block_sequence_ids|allow_is_\w+_skip|indexed_attention)\b"
)
_SHAPING = {"arange", "unsqueeze", "expand", "view", "repeat", "to", "size", "get_seq_length"}
# Their classes say nothing of one model.
_COMMON = {*PreTrainedModel.__mro__}
_COMMON_FILES = {"builtins", "transformers.generation.utils"}


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


@functools.cache
def counts_positions(kind: type) -> bool:
    """Whether position ids that the forward of ``kind`` makes itself always count up by 1.

    By its source: each assignment to a name that ends in ``position_ids`` is ``arange`` or
    ``cache_position``, shifted by a number and reshaped. And whether the files of its classes
    mention no overlay but that of packed sequences.
    """
    for base in _bases(kind):
        file = _source(sys.modules[base.__module__])
        if file is None or _OVERLAYS.search(file):
            return False
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
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name not in _SHAPING:
                return False
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Add):
            return False
        elif isinstance(node, (ast.BoolOp, ast.Lambda, ast.NamedExpr)):
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
