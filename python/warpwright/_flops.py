"""Registers the FLOPs of our operators with ``torch.utils.flop_counter``: products alone, as native's.

That module imports triton, which takes a quarter of a second. So the formulas are registered when a
program imports it.
"""

from __future__ import annotations

from typing import Any

import torch

from ._after_import import after_import
from ._catalog import OPERATORS


def watch_flop_counter() -> None:
    """Registers the formulas now or, if the counter is not there yet, after its import."""
    after_import("torch.utils.flop_counter", _register)


def _register(counter: Any) -> None:
    for operator in OPERATORS.values():
        if operator.flops is not None:
            target = getattr(torch.ops.warpwright, operator.name)
            counter.register_flop_formula([target])(operator.flops)
