"""A decoder's ``torch.cat([skip, up(x)], 1)``, where ``up`` is a transposed convolution: one op.

The convolution writes into its slice of the result, and its backward reads its slice of the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from .. import functional as F
from .. import nn as ours
from .._arch import PLAIN
from .blocks import is_hooked
from .fuse import Block
from .readers import Kind

INTO = "conv_transpose2d_cat"
CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
CHANNELS = (1, -3)  # of a batch of images


def cat_with_upsampled(layer: Any, input: Tensor, skip: Tensor, skip_first: bool) -> Tensor:
    """``torch.cat([skip, layer(input)], 1)``, or with the operands in the other order."""
    if type(input) in PLAIN and type(skip) in PLAIN and input.dim() == skip.dim() == 4:
        window = layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation
        operands = skip, input, layer.weight, layer.bias
        return F.conv_transpose2d_cat(*operands, *window, skip_first=skip_first)
    upsampled = layer(input)
    return torch.cat((skip, upsampled) if skip_first else (upsampled, skip), 1)


class CatPass:
    """Joins such calls in one graph. ``chains`` names them."""

    def __init__(self, block: Block, kind_of: Kind) -> None:
        self.block, self.graph, self.kind_of = block, block.graph, kind_of
        self.chains: list[str] = []

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            operands = _operands(node)
            if operands is not None:
                self._join(node, *operands)
        return bool(self.chains)

    def _join(self, node: fx.Node, first: fx.Node, second: fx.Node) -> None:
        for upsampled, skip in ((second, first), (first, second)):
            if not self._is_upsampling(upsampled) or upsampled is skip:
                continue
            if self.block.writer_between(upsampled, node) is not None:
                continue  # the convolution moves past it
            path = str(upsampled.target)
            with self.graph.inserting_before(node):
                layer = self.graph.get_attr(path)
                arguments = (layer, upsampled.args[0], skip, skip is first)
                joined = self.graph.call_function(cat_with_upsampled, arguments)
            node.replace_all_uses_with(joined)
            self.graph.erase_node(node)
            self.graph.erase_node(upsampled)
            self.block.depend_on(path, (ours.ConvTranspose2d,))
            self.chains.append(f"{path} → cat")
            return

    def _is_upsampling(self, node: fx.Node) -> bool:
        """Whether ``node`` is the call of a transposed convolution that nothing else reads."""
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs or len(node.users) != 1:
            return False
        layer: nn.Module = self.block.module.get_submodule(str(node.target))
        return self.kind_of(layer) is ours.ConvTranspose2d and not is_hooked(layer)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that ``node`` concatenates over channels."""
    if node.op != "call_function" or node.target not in CONCATENATIONS:
        return None
    given = dict(zip(("tensors", "dim"), node.args, strict=False)) | node.kwargs
    tensors: Any = given.pop("tensors", None)
    dim = given.pop("dim", given.pop("axis", 0))
    if given or type(dim) is not int or dim not in CHANNELS:
        return None
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2:
        return None
    first, second = tensors
    both = isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return (first, second) if both else None
