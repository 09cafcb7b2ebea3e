"""Registers the FLOPs of our operators with ``torch.utils.flop_counter``: products alone, as native's.

That module imports triton, which takes a quarter of a second. So the formulas are registered when a
program imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ._catalog import OPERATORS

COUNTER = "torch.utils.flop_counter"


def watch_flop_counter() -> None:
    """Registers the formulas now or, if the counter is not there yet, after its import."""
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register(module)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def _register(counter: Any) -> None:
    for operator in OPERATORS.values():
        if operator.flops is not None:
            target = getattr(torch.ops.warpwright, operator.name)
            counter.register_flop_formula([target])(operator.flops)
