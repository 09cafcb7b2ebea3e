"""What several functionals share.

A comparison of classes passes the usual arguments on. Others go to `_arguments`, which has native's
rules. So does every error that an operator raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _arguments

# Together they say what torch.compiler.is_compiling() says, in 40 ns per call instead of 60. While
# compiling, native's op replaces an op of ours that only moves memory: Inductor fuses it.
dynamo, exporting = torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting


def is_exported() -> bool:
    """Whether torch.export traces, with Dynamo or without. Dynamo takes is_exporting() for true in
    every trace, and this flag for what it is."""
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def trains_on_gpu(input: Tensor) -> bool:
    """While compiling: whether an op stays whose backward is faster than Inductor's of the chain."""
    return input.device.type == "cuda" and torch.is_grad_enabled() and not is_exported()


def pair(function: str, name: str, value: int | Sequence[int]) -> Sequence[int]:
    if value.__class__ is int:
        return (value, value)  # type: ignore[return-value]
    if value.__class__ is tuple and len(value) == 2:  # type: ignore[arg-type]
        first, last = value  # type: ignore[misc]
        if first.__class__ is last.__class__ is int:
            return value  # type: ignore[return-value]
    return _arguments.integers(function, name, value)


def is_sizes(value: Any) -> bool:
    """Whether it is a list, tuple or torch.Size of integers of Python's own type."""
    if value.__class__ not in (tuple, torch.Size, list):
        return False
    if len(value) == 1:  # as usual, and four times faster than the loop
        return value[0].__class__ is int
    return all(size.__class__ is int for size in value)


def pool_window(
    function: str, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[Any, ...]:
    """The arguments of pooling as the operators take them."""
    return (
        pair(function, "kernel_size", kernel_size),
        () if stride is None else pair(function, "stride", stride),
        pair(function, "padding", padding),
        pair(function, "dilation", dilation),
        _arguments.flag(function, "ceil_mode", ceil_mode),
    )
