"""Shortcuts around a convolution: the convolution's backward adds the gradient of the shortcut.

A residual block reads its input twice, in its first convolution and in the shortcut. Autograd adds
the two gradients in a pass of its own, which reads both and writes a third. Here the shortcut reads
a view that belongs to the convolution's node. So the node gets the shortcut's gradient, too, and its
kernel adds it while it stores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import nn as ours
from .._ops import ops
from ..functional._common import is_exported
from .classes import forward_of
from .fuse import Block
from .patterns import MAKES_NEW
from .readers import Kind

JOINS = "its backward adds the gradient of the shortcut"
# Layers that write into no argument and return a new tensor.
READERS = (*MAKES_NEW, nn.AvgPool2d)


def skip_of(input: Tensor, output: Any) -> Tensor:
    """``input`` for a shortcut around the layers that made ``output`` of it.

    If one of these layers is a convolution of ours that read ``input``, its node takes the result's
    gradient along. Both gradients then have to come in one backward pass, or in passes that retain
    the graph.
    """
    if input.__class__ is not Tensor or output.__class__ is not Tensor or not input.requires_grad:
        return input
    if is_exported() or torch.jit.is_tracing() or not torch.is_grad_enabled():  # type: ignore[attr-defined]
        return input
    joined: Tensor = ops.conv2d_join_skip(input, output)
    return joined


def first_layer(block: Block, node: fx.Node, source: fx.Node) -> nn.Module | None:
    """The layer that reads ``source`` if ``node`` calls one, perhaps inside of containers."""
    if node.op != "call_module" or not node.args or node.args[0] is not source:
        return None
    fused: Any = node.kwargs.get("fused")
    convolution = fused.get("conv") if isinstance(fused, dict) else None
    if isinstance(convolution, fx.Node):
        return block.module.get_submodule(str(convolution.target))
    layer: nn.Module = block.module.get_submodule(str(node.target))
    while isinstance(layer, nn.Sequential) and len(layer) > 0:
        if _forward_of(type(layer)) is not nn.Sequential.forward:
            return None
        layer = layer[0]
    return layer


class JoinPass:
    """Joins the gradients of shortcuts in one graph. ``notes`` has a remark on each convolution."""

    def __init__(self, block: Block, kind_of: Kind) -> None:
        self.block, self.graph, self.kind_of = block, block.graph, kind_of
        self.notes: dict[nn.Module, str] = {}

    def run(self) -> bool:
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        for source in list(self.graph.nodes):
            readers = sorted((n for n in source.users if n in order), key=order.__getitem__)
            if len(readers) > 1 and not any(self._may_write_to(n, source) for n in readers):
                self._join(source, readers)
        return bool(self.notes)

    def _join(self, source: fx.Node, readers: list[fx.Node]) -> None:
        for i, first in enumerate(readers):
            convolution = self._convolution(first, source)
            if convolution is None:
                continue
            after = _followers(first)
            shortcuts = [
                n
                for n in readers[i + 1 :]
                if self._only_reads(n, source) and not after.isdisjoint((n, *_followers(n)))
            ]
            if shortcuts:
                with self.graph.inserting_after(first):
                    skip = self.graph.call_function(skip_of, (source, first))
                for node in shortcuts:
                    node.replace_input_with(source, skip)
                self.notes[convolution] = JOINS
            return

    def _convolution(self, node: fx.Node, source: fx.Node) -> nn.Module | None:
        layer = first_layer(self.block, node, source)
        is_ours = layer is not None and issubclass(self.kind_of(layer), ours.Conv2d)
        return layer if is_ours and source not in node.args[1:] else None

    def _only_reads(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether ``node`` computes a new tensor of ``source``."""
        if node.op == "call_module":
            layer: Any = first_layer(self.block, node, source)
            if layer is None:  # the residual of a fused chain
                layer = self.block.module.get_submodule(str(node.target))
            return isinstance(layer, READERS)
        return _is_addition(node)

    def _may_write_to(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether ``node`` changes ``source``, as far as its graph and the layer's options show."""
        if node.op == "call_module":
            layer = first_layer(self.block, node, source)
            return layer is not None and bool(getattr(layer, "inplace", False))
        return self.block.may_write(node) and bool(node.args) and node.args[0] is source


def _followers(node: fx.Node) -> set[fx.Node]:
    """All nodes that depend on ``node``, except the graph's output."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.op != "output" and user not in found:
                found.add(user)
                todo.append(user)
    return found


def _forward_of(kind: type[nn.Module]) -> Any:
    """The function below what ``functools.wraps`` put around it."""
    forward = forward_of(kind)
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _is_addition(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    return node.op in ("call_function", "call_method") and name in ("add", "iadd", "add_")
