"""What a node of a traced forward is to a chain of layers (``fuse``)."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .patterns import OPTIONS
from .trace import IN_PLACE

ADDITIONS = (operator.add, operator.iadd, torch.add)


@dataclass
class Step:
    """A node of the graph that is an op of a chain."""

    node: fx.Node
    op: str
    options: dict[str, Any]
    layer: nn.Module | None = None
    kinds: tuple[type[nn.Module], ...] = ()  # what the layer may be: native and ours
    constants: frozenset[str] = frozenset()  # options that are no attributes of the layer
    residual: fx.Node | None = None
    why_not: str = ""  # the reason that it can't be part of a chain

    @property
    def in_place(self) -> bool:
        return is_in_place(self.node)

    @property
    def held(self) -> dict[str, Any]:
        """Options that are attributes of the layer."""
        return {name: value for name, value in self.options.items() if name not in self.constants}

    @property
    def passed(self) -> list[str]:
        """Options that the fused op takes too."""
        known = set(OPTIONS.get(self.op, ())) - {"return_indices"}
        return [name for name in self.options if name in known]


def is_dilated(options: dict[str, Any]) -> bool:
    """A dilated window may have no tap in the image: native gives -inf, a fused op has no result."""
    return options.get("dilation", 1) not in (1, (1, 1), [1, 1])


def is_in_place(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = label(node)
    return (
        node.target in IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
        or bool(node.kwargs.get("inplace"))
        or "out" in node.kwargs
    )


def is_addition(node: fx.Node) -> bool:
    """Whether ``node`` adds two operands, perhaps in place."""
    is_function = node.op == "call_function" and node.target in ADDITIONS
    is_method = node.op == "call_method" and node.target in ("add", "add_")
    return (is_function or is_method) and len(node.args) == 2 and not node.kwargs


def label(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))
