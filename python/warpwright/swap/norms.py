"""Norms in a user's own forwards: what they write, and the addition before them.

``residual`` knows classes of blocks by their code. Here the graph of any forward that ``trace`` can
read shows the same: which layers read a norm, and which addition a norm reads. The rules are those of
``residual``: under autocast a norm that products alone read writes their dtype, and an addition
becomes part of the norm. Without autocast, and for other dtypes, the calls run as they were written.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as native

from .. import nn as ours
from .blocks import base_of
from .classes import forward_of
from .fuse import Block
from .readers import Kind, products_that_read
from .residual import ADDS, CASTS, LAYER_NORM, NARROW, NORMS, RMS_NORM, dtype_of_products
from .steps import is_addition, is_in_place

KINDS = (ours.LayerNorm, ours.RMSNorm)
# Forwards of swapped layers that normalise the channels of images (N, C, H, W). Integrations add them.
IMAGE_NORMS: set[Any] = set()


# ---- what generated forwards call ----


def _has_float32_vectors(layer: nn.Module) -> bool:
    vectors = layer._parameters.values()
    return all(vector is None or vector.dtype == torch.float32 for vector in vectors)


def norm_for_products(layer: Any, x: Tensor) -> Tensor:
    """``layer(x)``, under autocast in the dtype of the products that read it.

    Autocast would cast 16-bit rows to float32 for a layer norm, and its result back. The kernel reads
    and writes 16 bits, and computes in float32.
    """
    narrow = isinstance(layer, nn.LayerNorm)
    dtype = dtype_of_products(x, narrow)
    if dtype is None or not _has_float32_vectors(layer):
        return layer(x)  # type: ignore[no-any-return]
    norm = LAYER_NORM if isinstance(layer, nn.LayerNorm) else RMS_NORM
    return norm.alone(layer, x, dtype)


def image_norm_for_products(layer: Any, x: Tensor) -> Tensor:
    """The same for a norm of the channels of images."""
    dtype = dtype_of_products(x, narrow=True)
    if dtype is None or not _has_float32_vectors(layer):
        return layer(x)  # type: ignore[no-any-return]
    return LAYER_NORM.alone(layer, x.permute(0, 2, 3, 1), dtype).permute(0, 3, 1, 2)


def norm_and_rows(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` for its other readers, and ``norm_for_products(layer, x)``; one pass adds their gradients."""
    dtype = dtype_of_products(x)
    if dtype is None or torch.compiler.is_compiling() or not _has_float32_vectors(layer):
        return x, norm_for_products(layer, x)
    norm = LAYER_NORM if isinstance(layer, nn.LayerNorm) else RMS_NORM
    return norm.beside(layer, x, dtype)


def add_and_norm(layer: Any, first: Tensor, second: Tensor, casts: bool) -> tuple[Tensor, Tensor]:
    """``first + second`` and its norm, as one op under autocast.

    ``casts`` says whether products alone read the norm.
    """
    residual, branch = (first, second) if first.dtype == torch.float32 else (second, first)
    dtype = dtype_of_products(residual)
    one_op = (
        dtype is not None
        and type(branch) is type(residual)
        and branch.dtype in (torch.float32, *NARROW)
        and branch.shape == residual.shape
        and _has_float32_vectors(layer)
    )
    if not one_op:
        total = first + second
        return total, norm_for_products(layer, total) if casts else layer(total)
    norm = LAYER_NORM if isinstance(layer, nn.LayerNorm) else RMS_NORM
    return norm.added(layer, branch, residual, dtype if casts else None)


# ---- the pass ----


class NormPass:
    """Changes the norms in one graph. ``notes`` has a remark on each."""

    def __init__(self, block: Block, kind_of: Kind) -> None:
        self.block, self.graph, self.kind_of = block, block.graph, kind_of
        self.notes: dict[nn.Module, str] = {}

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if self._is_norm(node):
                self._change(node)
        return bool(self.notes)

    def _layer(self, node: fx.Node) -> nn.Module:
        return self.block.module.get_submodule(str(node.target))

    def _is_norm(self, node: fx.Node) -> bool:
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return False
        layer = self._layer(node)
        is_fast = getattr(layer, "_fast_norm", False)  # timm's: it computes in autocast's dtype
        is_known = (
            self.kind_of(layer) in KINDS or self._is_of_rows(layer) or self._is_of_images(layer)
        )
        return is_known and not is_fast and isinstance(node.args[0], fx.Node)

    def _is_of_rows(self, layer: nn.Module) -> bool:
        """Whether the registry knows it as a layer norm."""
        return (
            isinstance(layer, nn.LayerNorm)
            and NORMS.get(forward_of(self.kind_of(layer))) is LAYER_NORM
        )

    def _is_of_images(self, layer: nn.Module) -> bool:
        return forward_of(self.kind_of(layer)) in IMAGE_NORMS

    def _change(self, node: fx.Node) -> None:
        layer, source = self._layer(node), node.args[0]
        assert isinstance(source, fx.Node)
        readers = self._products_of(node)
        of_images = self._is_of_images(layer)
        addition = source if not of_images and self._is_addition(source, node) else None
        if readers is None and addition is None:
            return
        path = str(node.target)
        if addition is not None:
            with self.graph.inserting_before(addition):
                arguments = (self.graph.get_attr(path), *addition.args, readers is not None)
                pair = self.graph.call_function(add_and_norm, arguments)
                total = self.graph.call_function(operator.getitem, (pair, 0))
                changed = self.graph.call_function(operator.getitem, (pair, 1))
            addition.replace_all_uses_with(total)
        elif not of_images and (later := self._later_readers(source, node)):
            with self.graph.inserting_before(node):
                arguments = (self.graph.get_attr(path), source)
                pair = self.graph.call_function(norm_and_rows, arguments)
                rows = self.graph.call_function(operator.getitem, (pair, 0))
                changed = self.graph.call_function(operator.getitem, (pair, 1))
            for later_reader in later:
                later_reader.replace_input_with(source, rows)
        else:
            with self.graph.inserting_before(node):
                arguments = (self.graph.get_attr(path), source)
                norm = image_norm_for_products if of_images else norm_for_products
                changed = self.graph.call_function(norm, arguments)
        node.replace_all_uses_with(changed)
        self.graph.erase_node(node)
        if addition is not None:
            self.graph.erase_node(addition)
        self._depend_on(path)
        for reader in readers or ():
            self._depend_on(reader)
        said = [ADDS] if addition is not None else []
        self.notes[layer] = "; ".join(said + ([CASTS] if readers is not None else []))

    def _later_readers(self, source: fx.Node, norm: fx.Node) -> list[fx.Node]:
        """The ops that read ``source`` after ``norm``; none if something may write to a tensor."""
        if any(self.block.may_write(node) for node in self.graph.nodes):
            return []
        return [node for node in source.users if norm < node and node.op != "output"]

    def _depend_on(self, path: str) -> None:
        """The graph holds while this layer has its class and no hooks."""
        if path not in self.block.layers:
            kind = self.kind_of(self.block.module.get_submodule(path))
            kinds = (base_of(kind) or kind,)  # a generated class has no name to pickle it by
            self.block.depend_on(path, kinds, may_be_cut=True)

    def _products_of(self, node: fx.Node) -> set[str] | None:
        """Paths of the layers that read ``node``, if all of them are or contain products."""
        found: set[str] = set()
        for user in node.users:
            if user.op == "call_function" and user.target is native.linear:
                if user.args[0] is not node or node in user.args[1:] or user.kwargs:
                    return None
                continue
            if user.op != "call_module":
                return None
            layer, path = self._layer(user), str(user.target)
            places = [i for i, argument in enumerate(user.args) if argument is node]
            if issubclass(self.kind_of(layer), nn.MultiheadAttention):
                places = [i for i in places if i > 2]  # query, key and value are read alike
            else:
                places = [i for i in places if i > 0]
            if places or node in user.kwargs.values() or node not in user.args:
                return None
            products = products_that_read(layer, self.kind_of)
            if products is None:
                return None
            found.add(path)
            for inner in products:  # and the layers on the way
                found.update(".".join((path, *inner[: i + 1])) for i in range(len(inner)))
        return found or None

    def _is_addition(self, source: fx.Node, norm: fx.Node) -> bool:
        """Whether ``source`` adds two tensors, and nothing writes to its result before ``norm``."""
        if not is_addition(source) or is_in_place(source):
            return False
        if not all(isinstance(argument, fx.Node) for argument in source.args):
            return False
        return self.block.writer_between(source, norm) is None
