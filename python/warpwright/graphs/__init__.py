"""Whole training steps as CUDA graphs: :func:`graph_step`."""

from .capture import record
from .prefetch import prefetched
from .step import GraphStep, graph_step
from .watch import CaptureError

__all__ = ["CaptureError", "GraphStep", "graph_step", "prefetched", "record"]
