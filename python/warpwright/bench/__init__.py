"""Side-by-side measurement of warpwright and its peers; `warpwright bench`."""

from .cases import Case
from .implementation import Implementation
from .measure import Timing, interleaved, ratio_interval
from .peers import PEERS, Peer
from .records import load_records, machine_header, save_records
from .shapes import CASES
from .steps import Workload

__all__ = [
    "CASES",
    "PEERS",
    "Case",
    "Implementation",
    "Peer",
    "Timing",
    "Workload",
    "interleaved",
    "load_records",
    "machine_header",
    "ratio_interval",
    "save_records",
]
