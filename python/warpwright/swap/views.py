"""Views whose gradients cost a pass: ``qkv.permute(2, 0, 3, 1, 4).unbind(0)``.

The backward of ``unbind`` stacks the three gradients in the permuted order, and that of the product
before it copies them into its own. Unbinding first, and permuting each part, gives the same views;
the gradients are then stacked in the product's order. If the parts are query, key and value,
``split_qkv`` needs no stack. Indices, ``qkv[0]``, are dearer still: the backward of each fills a tensor
of the whole size, and adds.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .._ops import ops
from .fuse import Block

INTO = "unbind → permute"


def unbound(x: Tensor, dims: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
    """``x.permute(dims).unbind(dim)``, unbound first."""
    dims = tuple(d % x.dim() for d in dims)
    taken = dims[dim]
    rest = [d - (d > taken) for d in dims if d != taken]
    if x.size(taken) == 3 and taken == x.dim() - 3 and x.is_contiguous():
        parts = ops.split_qkv(x.flatten(-3), x.size(-2))
    else:
        parts = x.unbind(taken)
    return tuple(part.permute(rest) for part in parts)


class ViewPass:
    """Changes such views in one graph. ``chains`` names them."""

    def __init__(self, block: Block) -> None:
        self.graph = block.graph
        self.chains: list[str] = []

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            dims = _dims(node)
            if dims is not None:
                self._change(node, dims)
        return bool(self.chains)

    def _change(self, node: fx.Node, dims: tuple[int, ...]) -> None:
        users = [*node.users]
        if len(users) == 1 and _unbound_dim(users[0]) is not None:
            dim = _unbound_dim(users[0])
            assert dim is not None
            if not -len(dims) <= dim < len(dims) or dims[dim] == 0:
                return
            with self.graph.inserting_before(users[0]):
                parts = self.graph.call_function(unbound, (node.args[0], dims, dim))
            users[0].replace_all_uses_with(parts)
            self.chains.append("permute → unbind")
        elif len(users) > 1 and all(_is_index(user) for user in users) and dims[0] != 0:
            with self.graph.inserting_before(users[0]):
                parts = self.graph.call_function(unbound, (node.args[0], dims, 0))
            for user in users:
                user.replace_input_with(node, parts)
            self.chains.append("permute → index")
            users = []
        else:
            return
        for user in users:
            self.graph.erase_node(user)
        self.graph.erase_node(node)


def _dims(node: fx.Node) -> tuple[int, ...] | None:
    """The order of a ``permute`` by numbers."""
    if node.op != "call_method" or node.target != "permute" or node.kwargs:
        return None
    dims = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], (tuple, list)):
        dims = tuple(dims[0])
    found = tuple(d for d in dims if type(d) is int)
    return found if len(found) == len(dims) > 1 else None


def _unbound_dim(node: fx.Node) -> int | None:
    if node.op != "call_method" or node.target != "unbind":
        return None
    dim: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    return dim if type(dim) is int else None


def _is_index(node: fx.Node) -> bool:
    is_item = getattr(node.target, "__name__", "") == "getitem" and node.op == "call_function"
    return is_item and type(node.args[1]) is int
