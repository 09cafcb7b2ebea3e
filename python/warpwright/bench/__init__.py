"""Side-by-side measurement of warpwright and native PyTorch; `python -m warpwright bench`."""

from .cases import CASES, Case
from .measure import Timing, interleaved
from .records import load_records, machine_header, save_records

__all__ = [
    "CASES",
    "Case",
    "Timing",
    "interleaved",
    "load_records",
    "machine_header",
    "save_records",
]
