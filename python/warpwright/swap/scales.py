"""Layer scale with the addition of the shortcut after it: one op in place of two or three.

``x + drop(scale * f(x))``, where ``scale`` has a value per channel, and ``drop`` perhaps scales whole
samples (stochastic depth). The forward moves each tensor once, and one pass of the backward computes
the gradients of the branch and of ``scale``. ``drop`` draws its factors from the same random numbers.

Under autocast a float32 ``x`` is cast for the product or convolution that ``f`` begins with. The cast
and the shortcut then belong to one node, whose kernel adds their gradients. If such a block follows
another in an ``nn.Sequential``, the first one also writes its output in 16 bits, and the cast reads
nothing. The copy is a constant next to the output: all of the gradient passes through the output.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import Identity

from .. import functional as F
from .. import nn as ours
from .._arch import PLAIN
from .._ops import ops
from .blocks import is_hooked
from .fuse import Block
from .joins import first_layer, skip_of
from .readers import Kind
from .residual import dtype_of_products
from .steps import is_addition, is_in_place

CHAIN = "layer scale → add"
INTO = "layer_scale_add"

# Layers that multiply each sample by a factor, by module and name, and the attribute that holds the
# probability of zero. With 0, and in evaluation, they return their input.
SAMPLE_SCALES = {
    ("torchvision.ops.stochastic_depth", "StochasticDepth"): "p",
    ("timm.layers.drop", "DropPath"): "drop_prob",
}
# Layers that return ``x * gamma``, and the attribute that would make them write into x.
LAYER_SCALES = {("timm.layers.layer_scale", "LayerScale"): "inplace"}
# The attribute of a block's output that holds its copy in 16 bits, and the output's version then.
COPY = "_warpwright_copy"
PRODUCTS = (operator.mul, torch.mul)
RESHAPES = ("reshape", "view")


def _name(layer: nn.Module) -> tuple[str, str]:
    return type(layer).__module__, type(layer).__name__


def _sample_scale(drop: Any, input: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The factors that ``drop`` would multiply ``input`` by; None if it would return it."""
    if drop is None or not drop.training:
        return None
    if not getattr(drop, SAMPLE_SCALES[_name(drop)]):
        return None
    shape = (input.shape[0], *(1 for _ in input.shape[1:]))
    return drop(torch.ones(shape, dtype=dtype, device=input.device))  # type: ignore[no-any-return]


def scale_and_add(
    scale: Tensor, input: Tensor, residual: Tensor, drop: Any, in_place: bool, copies: bool = False
) -> Tensor:
    """``drop(scale * input) + residual``; ``in_place``: the sum has the dtype of the product.

    ``copies``: the next reader is :func:`cast_and_shortcut`.
    """
    tensors = (scale, input, residual)
    if all(type(t) in PLAIN or type(t) is nn.Parameter for t in tensors):
        dtype = torch.promote_types(input.dtype, scale.dtype)
        fits = input.shape == residual.shape and input.dim() > 1 and input.is_floating_point()
        keeps = not in_place or torch.promote_types(dtype, residual.dtype) == dtype
        per_channel = sum(size != 1 for size in scale.shape) == 1 and scale.dim() <= input.dim()
        if fits and keeps and per_channel and not torch.compiler.is_compiling():
            arguments = (input, residual, scale, _sample_scale(drop, input, dtype))
            is_wide = torch.promote_types(dtype, residual.dtype) == torch.float32
            narrow = dtype_of_products(residual, narrow=True) if copies and is_wide else None
            return F.layer_scale_add(*arguments) if narrow is None else _copied(arguments, narrow)
    scaled = scale * input
    if drop is not None:
        scaled = drop(scaled)
    return scaled.add_(residual) if in_place else scaled + residual


def _copied(arguments: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    """``layer_scale_add`` with its copy as an attribute, if a gradient will need both readers."""
    if not any(t is not None and t.requires_grad for t in arguments) or not torch.is_grad_enabled():
        return F.layer_scale_add(*arguments)
    total: Tensor
    total, copy = ops.layer_scale_add_with_copy(*arguments, dtype)
    vars(total)[COPY] = copy, total._version
    return total


def _copy_of(x: Tensor) -> Tensor | None:
    """The copy that the block before has left, if ``x`` has not changed since."""
    copy, version = vars(x).pop(COPY, (None, None))
    return copy if x._version == version else None


def cast_and_shortcut(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` as autocast's products read it, and ``x`` for the shortcut around them."""
    dtype = dtype_of_products(x)
    if dtype is None or torch.compiler.is_compiling() or not x.requires_grad:
        return x, x
    shortcut, cast = ops.cast_with_residual(x, dtype, _copy_of(x))
    return cast, shortcut


def begins_with_a_cast(graph: fx.Graph) -> bool:
    """Whether its first input has a cast and a shortcut as readers."""
    first = next(iter(graph.nodes), None)
    return first is not None and any(node.target is cast_and_shortcut for node in first.users)


class ScalePass:
    """Joins such chains in one graph; ``count`` of them. ``absorbed``: the layers that they had.

    ``copies``: whether all that follows the block begins with :func:`cast_and_shortcut`.
    """

    def __init__(self, block: Block, kind_of: Kind, copies: bool) -> None:
        self.block, self.graph, self.kind_of, self.count = block, block.graph, kind_of, 0
        self.copies = copies
        self.absorbed: list[nn.Module] = []

    def run(self) -> bool:
        for node in list(self.graph.nodes):
            if is_addition(node):
                self._join(node)
        return bool(self.count)

    def _join(self, addition: fx.Node) -> None:
        for branch, residual in (addition.args, addition.args[::-1]):
            in_place = is_in_place(addition)
            if in_place and branch is not addition.args[0]:
                return  # it writes into the shortcut
            if not isinstance(branch, fx.Node) or not isinstance(residual, fx.Node):
                return
            drop = self._layer(branch)
            if drop is not None and _name(drop) not in SAMPLE_SCALES and type(drop) is not Identity:
                drop = None
            product = branch if drop is None else branch.args[0]
            if branch is residual or not isinstance(product, fx.Node):
                continue
            found = self._factors(product)
            alone = all(len(node.users) == 1 for node in {branch, product})
            if found is None or not alone:
                continue
            if self.block.writer_between(product, addition) is not None:
                continue  # the product moves past it
            scale, input = found
            with self.graph.inserting_before(addition):
                if isinstance(scale, str):
                    scale = self.graph.get_attr(scale)
                scales_samples = drop is not None and type(drop) is not Identity
                layer = self.graph.get_attr(str(branch.target)) if scales_samples else None
                arguments = (scale, input, residual, layer, in_place)
                joined = self.graph.call_function(scale_and_add, arguments)
            addition.replace_all_uses_with(joined)
            if self.copies and all(node.op == "output" for node in joined.users):
                joined.args = (*arguments, True)
            for node in dict.fromkeys((addition, branch, product)):
                self.graph.erase_node(node)
                if node.op == "call_module":
                    self._depend_on(str(node.target))
            self._join_shortcut(joined, residual)
            self.count += 1
            return

    def _join_shortcut(self, joined: fx.Node, residual: fx.Node) -> None:
        """Makes one node of the shortcut and of the cast for the only other reader of its source."""
        source, follows = residual, joined  # `follows` reads the source for the shortcut
        while self._passes_on(source):
            source, follows = source.args[0], source  # type: ignore[assignment]
        readers = [node for node in source.users if node is not follows]
        if len(readers) != 1 or any(self.block.may_write(node) for node in self.graph.nodes):
            return
        (reader,) = readers
        layer = first_layer(self.block, reader, source)
        if layer is None or not issubclass(self.kind_of(layer), (ours.Conv2d, ours.Linear)):
            return
        if source in reader.args[1:] or source in reader.kwargs.values():
            return
        with self.graph.inserting_before(reader):
            pair = self.graph.call_function(cast_and_shortcut, (source,))
            cast = self.graph.call_function(operator.getitem, (pair, 0))
            shortcut = self.graph.call_function(operator.getitem, (pair, 1))
        reader.replace_input_with(source, cast)
        follows.replace_input_with(source, shortcut)

    def _passes_on(self, node: fx.Node) -> bool:
        """Whether ``node`` returns its first argument, to one reader."""
        is_skip = node.op == "call_function" and node.target is skip_of
        return len(node.users) == 1 and (is_skip or type(self._layer(node)) is Identity)

    def _layer(self, node: fx.Node) -> nn.Module | None:
        """The layer that ``node`` calls with its input alone."""
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            return None
        layer = self.block.module.get_submodule(str(node.target))
        return None if is_hooked(layer) else layer

    def _factors(self, node: fx.Node) -> tuple[fx.Node | str, fx.Node] | None:
        """The scale, or its path, and what it scales, if ``node`` multiplies by a parameter."""
        layer = self._layer(node)
        if layer is not None and _name(layer) in LAYER_SCALES:
            writes, scaled = getattr(layer, LAYER_SCALES[_name(layer)]), node.args[0]
            if writes or not isinstance(scaled, fx.Node):
                return None
            return f"{node.target}.gamma", scaled
        is_function = node.op == "call_function" and node.target in PRODUCTS
        is_method = node.op == "call_method" and node.target == "mul"
        if not (is_function or is_method) or len(node.args) != 2 or node.kwargs:
            return None
        first, second = node.args
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            return None
        if self._is_parameter(first):
            return first, second
        return (second, first) if self._is_parameter(second) else None

    def _is_parameter(self, node: fx.Node) -> bool:
        if node.op == "call_method" and node.target in RESHAPES:
            source = node.args[0]
            return isinstance(source, fx.Node) and self._is_parameter(source)
        if node.op != "get_attr":
            return False
        owner, _, name = str(node.target).rpartition(".")
        return name in self.block.module.get_submodule(owner)._parameters

    def _depend_on(self, path: str) -> None:
        """The graph holds while this layer has its class and no hooks."""
        layer = self.block.module.get_submodule(path)
        self.absorbed.append(layer)
        writes = LAYER_SCALES.get(_name(layer))
        held = () if writes is None else ((writes, False),)
        self.block.depend_on(path, (type(layer),), held)
