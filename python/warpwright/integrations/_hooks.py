"""Hooks that are functions of a file: copies and pickles of a module keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def remove_hooks_of(module: nn.Module, functions: tuple[Callable[..., Any], ...]) -> None:
    """Removes forward hooks by their functions, because a copy of a module has no handles."""
    for hooks, marks in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (
            module._forward_hooks,
            (module._forward_hooks_with_kwargs, module._forward_hooks_always_called),
        ),
    ):
        for key in [key for key, hook in hooks.items() if hook in functions]:
            for table in (hooks, *marks):
                table.pop(key, None)
