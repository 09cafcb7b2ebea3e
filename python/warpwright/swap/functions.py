"""Ops that a forward calls as functions: no layer stands for them, so the graph calls ours.

Attention, and global average pooling, which has two forms: a pool to one element, and a mean over
height and width.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import functional
from .._arch import PLAIN
from ..functional._pool import is_one
from .fuse import Block

ATTENTION = "scaled_dot_product_attention"
POOL = "adaptive_avg_pool2d"
# The name of a chain in reports, and the op that replaces it.
INTO = {f"F.{ATTENTION}": "attention", f"F.{POOL}": POOL, "mean": POOL}


def mean_along(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """``x.mean(dim, keepdim)``, by the pool if these are the last two of four dimensions."""
    is_planes = (
        type(x) in PLAIN
        and x.dim() == 4
        and x.is_floating_point()
        and len(dim) == 2
        and {d % 4 for d in dim} == {2, 3}
    )
    if not is_planes or torch.compiler.is_compiling():
        return x.mean(dim, keepdim)
    means = functional.adaptive_avg_pool2d(x, 1).flatten(1)
    return means[:, :, None, None] if keepdim else means


class FunctionPass:
    """Changes such calls in one graph. ``chains`` names them, and what they became."""

    def __init__(self, block: Block, ops: Collection[str]) -> None:
        self.graph, self.ops = block.graph, ops
        self.chains: dict[str, str] = {}

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            found = self._change(node)
            if found is not None:
                self.chains[found] = INTO[found]
        return bool(self.chains)

    def _change(self, node: fx.Node) -> str | None:
        """The name of the chain, if ``node`` is one and calls ours now."""
        if node.op == "call_function" and node.target is getattr(nn.functional, ATTENTION):
            return self._call(node, ATTENTION)
        if POOL not in self.ops:
            return None
        if node.op == "call_function" and node.target is getattr(nn.functional, POOL):
            size = node.kwargs.get("output_size", node.args[1] if len(node.args) > 1 else None)
            return self._call(node, POOL) if is_one(size) else None
        is_function = node.op == "call_function" and node.target is torch.mean
        is_method = node.op == "call_method" and node.target == "mean"
        if not (is_function or is_method) or not _is_over_planes(node):
            return None
        node.op, node.target = "call_function", mean_along
        return "mean"

    def _call(self, node: fx.Node, op: str) -> str | None:
        if op not in self.ops:
            return None
        node.target = getattr(functional, op)
        return f"F.{op}"


def _is_over_planes(node: fx.Node) -> bool:
    """Whether ``node`` is a mean over the dimensions 2 and 3 of four, given as numbers."""
    names: dict[str, Any] = dict(zip(("dim", "keepdim"), node.args[1:], strict=False))
    names |= node.kwargs
    dim, keepdim = names.pop("dim", None), names.pop("keepdim", False)
    if names or len(node.args) > 3 or type(keepdim) is not bool:
        return False
    if not isinstance(dim, (tuple, list)) or len(dim) != 2:
        return False
    return all(type(d) is int and -2 <= d < 4 for d in dim) and {d % 4 for d in dim} == {2, 3}
