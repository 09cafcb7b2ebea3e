"""Registers our operators' sharding rules once a program uses DTensors.

``torch.distributed.tensor`` takes longer to import than all of warpwright, so nothing imports it here.
"""

from __future__ import annotations

from types import ModuleType

from ._after_import import after_import


def watch_dtensor() -> None:
    after_import("torch.distributed.tensor", _register)


def _register(tensor: ModuleType) -> None:
    from .distributed.sharding import register_all

    register_all(tensor)
