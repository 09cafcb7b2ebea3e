"""Sentences about what a user gives: functions of another form, and what a script or model raises."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from traceback import extract_tb
from types import FrameType
from typing import Any

import torch
from torch import nn

# Files that are not the user's.
INSTALLED = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    "<frozen",
)


def kind_of(value: Any) -> str:
    """``int`` for 3, ``the class Linear`` for a class that was meant to be called first."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def require_function(
    name: str, function: Any, *parameters: Any, words: str = "", optional: bool = False
) -> None:
    """Raises TypeError if ``function`` can't be called with so many positional arguments.

    ``words`` says what it is called with; by default the names of the ``parameters``.
    """
    if optional and function is None:
        return
    expected = f"expected a function of {words or '(' + ', '.join(parameters) + ')'}"
    expected += " or None" if optional else ""
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"{name}: {expected}, got {kind_of(function)}")
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        taken = ", ".join(map(as_written, signature.parameters.values()))
        raise TypeError(f"{name}: {expected}, got one of ({taken})") from None


def as_written(parameter: inspect.Parameter) -> str:
    """The name, with its stars, or ``=`` if it has a default."""
    of_any_number: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    stars = of_any_number.get(parameter.kind, "")
    return f"{stars}{parameter.name}{'' if parameter.default is parameter.empty else '='}"


def sentence(error: Exception) -> str:
    """``TypeError: … (train.py:12)``: the error, and the innermost line that is the user's."""
    text = f"{type(error).__name__}: {error}".strip()
    place = ""
    for frame in extract_tb(error.__traceback__):
        if not frame.filename.startswith(INSTALLED):
            place = f" ({Path(frame.filename).name}:{frame.lineno})"
    return text + place


def _frames(error: Exception) -> Iterator[FrameType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame
        at = at.tb_next


def module_of(error: Exception, model: nn.Module) -> str:
    """The innermost of the model's modules that was running; empty if none was."""
    names = {id(module): name for name, module in model.named_modules()}
    found = ""
    for frame in _frames(error):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            name = names[id(module)] or "the model"
            found = f", in {name} ({type(module).__name__})"
    return found
