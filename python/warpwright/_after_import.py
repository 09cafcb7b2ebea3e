"""Runs a function once a module has been imported, by whoever imports it.

Some parts of torch take longer to import than all of warpwright. What we register with them waits
until a program imports them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, run: Callable[[ModuleType], None]) -> None:
    """Calls ``run(module)`` now, or right after the first import of the module ``name``."""
    if name in sys.modules:
        run(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, run))


class _Watch(MetaPathFinder):
    def __init__(self, name: str, run: Callable[[ModuleType], None]) -> None:
        self.name, self.run = name, run

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_run(module: ModuleType) -> None:
                execute(module)
                self.run(module)

            spec.loader.exec_module = execute_and_run  # type: ignore[method-assign]
        return spec
