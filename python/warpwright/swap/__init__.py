"""Runs an existing model on warpwright: in place, reversible, with a report and a check."""

import sys

from . import blocks, fuse, patterns
from .classes import OPS
from .fuse import Fusion
from .model import swap, swapped, unswap, unswapped
from .registry import register_layer
from .report import SwapCheckError, SwapEntry, SwapReport

# Old pickles of fused models and of reports name these modules.
for _former, _module in (("_blocks", blocks), ("_fuse", fuse), ("_patterns", patterns)):
    sys.modules[f"warpwright.{_former}"] = _module

__all__ = [
    "OPS",
    "Fusion",
    "SwapCheckError",
    "SwapEntry",
    "SwapReport",
    "register_layer",
    "swap",
    "swapped",
    "unswap",
    "unswapped",
]
