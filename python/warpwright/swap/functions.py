"""Attention that a forward calls as a function: no layer stands for it, so the graph calls ours."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from .. import functional
from .fuse import Block

OP = "scaled_dot_product_attention"
CHAIN = f"F.{OP}"
INTO = "attention"


class FunctionPass:
    """Changes such calls in one graph; ``count`` of them."""

    def __init__(self, block: Block, ops: Collection[str]) -> None:
        self.graph, self.count = block.graph, 0
        self.is_wanted = OP in ops

    def run(self) -> bool:
        for node in self.graph.nodes if self.is_wanted else ():
            if node.op == "call_function" and node.target is getattr(nn.functional, OP):
                node.target = getattr(functional, OP)
                self.count += 1
        return bool(self.count)
