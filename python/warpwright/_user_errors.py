"""Sentences for what a user's script or model raises: the error, the line, and the module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from traceback import extract_tb
from types import FrameType

import torch
from torch import nn

# Files that are not the user's.
INSTALLED = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    "<frozen",
)


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
