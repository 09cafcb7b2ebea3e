"""Parallel over the sequence: ring attention, Ulysses, and the layouts of tokens on ranks."""

from .attention import ring_attention
from .context import context_parallel
from .cost import INFINIBAND, NVLINK, Hardware, Shape, explain
from .layouts import positions, shard, unshard

__all__ = [
    "INFINIBAND",
    "NVLINK",
    "Hardware",
    "Shape",
    "context_parallel",
    "explain",
    "positions",
    "ring_attention",
    "shard",
    "unshard",
]
