"""PyTorch's styles of tensor parallelism for ``nn.Linear``, on local tensors.

``torch.distributed.tensor.parallel`` makes a DTensor of each layer's input and output. That costs the
host several times what it takes to launch the product, and each column-parallel layer adds its own
gradient over the ranks. Here the parameters are the same DTensors, so that ``state_dict``, optimizers
and FSDP2 see no difference. The product reads their local shards, and layers with one input share
its gradient's collective: one for q, k and v, one for gate and up (Shoeybi et al. 2019, figure 3).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwiseParallel
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwiseParallel
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakTensorKeyDictionary

from .. import functional
from .. import nn as our_nn
from ..swap.classes import PARALLEL

_collective = torch.ops._c10d_functional


class _Group:
    """The ranks of a mesh with one dimension."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size, self.rank = mesh, mesh.size(), mesh.get_local_rank()
        self.name: str = mesh.get_group().group_name

    def sum(self, x: Tensor) -> Tensor:
        total = _collective.all_reduce(x.contiguous(), "sum", self.name)
        return _collective.wait_tensor(total)  # type: ignore[no-any-return]


# Two pairs of functions, each the other's derivative: a replicated tensor has a replicated gradient.


class _Copy(torch.autograd.Function):
    """A replicated tensor, each of whose users computes a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.detach()  # no view: a view would keep x alive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Sum.apply(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Copy.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """The whole tensor from each rank's shard along ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, dim: int) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.dim = group, dim
        return _collective.wait_tensor(all_gather_tensor(x.contiguous(), dim, group.mesh))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _SumShard.apply(grad, ctx.group, ctx.dim), None, None


class _SumShard(torch.autograd.Function):
    """This rank's shard along ``dim`` of the sum of all ranks' tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _Group, dim: int) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.dim = group, dim
        part = reduce_scatter_tensor(x.contiguous(), "sum", dim, group.mesh)
        return _collective.wait_tensor(part)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Gather.apply(grad, ctx.group, ctx.dim), None, None


# What the layers of one input share: the input's version, and results by group and dimension.
_results: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _shared(x: Tensor, key: object, make: Callable[[Tensor], Tensor]) -> Tensor:
    """``make(x)``, once for all layers that take `x`. The result lives as long as `x`.

    A leaf has none: its result would keep it alive, by the node that accumulates its gradient. An
    inference tensor has no version.
    """
    if torch.compiler.is_compiling() or (x.is_leaf and x.requires_grad) or x.is_inference():
        return make(x)
    now = x._version, torch.is_grad_enabled()
    state, results = _results.get(x, (None, {}))
    if state != now:
        results = {}
        _results[x] = now, results
    if key not in results:
        results[key] = make(x)
    return results[key]


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _product(layer: nn.Linear) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Ours for a swapped layer, native's for another."""
    swapped = isinstance(layer, our_nn.Linear)
    return functional.linear if swapped else nn.functional.linear


def _partial(x: Any) -> Tensor:
    """The local tensor of a replicated DTensor, each of whose users adds a part of its gradient."""
    return x.to_local(grad_placements=[Partial()])  # type: ignore[no-any-return]


class _Columns:
    """Each rank computes some of the output's features from the whole input."""

    def __init__(self, mesh: DeviceMesh, input_layout: Placement) -> None:
        self.group, self.layout = _Group(mesh), input_layout

    def input(self, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):  # as PrepareModuleInput hands it on
            if not x.placements[0].is_replicate():
                x = x.redistribute(placements=[Replicate()])
            return _shared(x, self.group.name, _partial)
        if isinstance(self.layout, Shard):
            dim = self.layout.dim % x.dim()
            return _shared(x, (self.group.name, dim), lambda t: _Gather.apply(t, self.group, dim))
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        return _shared(x, self.group.name, lambda t: _Copy.apply(t, self.group))

    def output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        return _product(layer)(self.input(x), _local(layer.weight), _local(layer.bias))


class _Rows:
    """Each rank multiplies some of the input's features; the output is the sum over ranks."""

    def __init__(self, mesh: DeviceMesh, output_layout: Placement) -> None:
        self.group, self.layout = _Group(mesh), output_layout

    def sum(self, part: Tensor) -> Tensor:
        if not isinstance(self.layout, Shard):
            return _Sum.apply(part, self.group)  # type: ignore[no-any-return]
        dim = self.layout.dim % part.dim()
        if part.shape[dim] % self.group.size == 0:
            return _SumShard.apply(part, self.group, dim)  # type: ignore[no-any-return]
        whole = DTensor.from_local(part, self.group.mesh, [Partial()], run_check=False)
        return whole.redistribute(placements=[Shard(dim)]).to_local()

    def bias(self, bias: Tensor, dims: int) -> Tensor:
        """What this rank adds to its part of an output with so many dimensions."""
        if not isinstance(self.layout, Shard):
            return bias
        whole: Tensor = _Copy.apply(bias, self.group)  # a rank's gradient is that of its part alone
        if self.layout.dim % dims != dims - 1:
            return whole
        parts = whole.chunk(self.group.size)  # fewer than ranks, if the features do not suffice
        return parts[self.group.rank] if self.group.rank < len(parts) else whole[:0]

    def output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Shard(x.dim() - 1)]).to_local()
        out = self.sum(_product(layer)(x, _local(layer.weight), None))
        bias = _local(layer.bias)
        return out if bias is None else out + self.bias(bias, out.dim()).to(out.dtype)


def _forward(layer: Any, input: Tensor) -> Tensor:
    return getattr(layer, PARALLEL).output(layer, input)  # type: ignore[no-any-return]


def _cut(module: nn.Module, way: _Columns | _Rows) -> nn.Module:
    setattr(module, PARALLEL, way)
    module.forward = MethodType(_forward, module)
    return module


def _is_last(layout: Placement) -> bool:
    return isinstance(layout, Shard) and layout.dim == -1


def _is_plain_linear(module: nn.Module) -> bool:
    """Not a layer that is fused with its activation, nor a user's subclass."""
    return type(module).forward in (nn.Linear.forward, our_nn.Linear.forward)


class ColwiseParallel(TorchColwiseParallel):
    """``torch.distributed.tensor.parallel.ColwiseParallel`` with less work on the host.

    Arguments, parameters and results are those of torch's style. Its own form runs for an embedding,
    for ``use_local_output=False`` and for an ``output_layouts`` other than ``Shard(-1)``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (layout,) = self.input_layouts
        fits = _is_last(self.output_layouts[0]) and self.use_local_output
        if not (fits and isinstance(layout, Replicate | Shard) and _is_plain_linear(module)):
            return super()._apply(module, device_mesh)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _cut(module, _Columns(device_mesh, layout))


class RowwiseParallel(TorchRowwiseParallel):
    """``torch.distributed.tensor.parallel.RowwiseParallel`` with less work on the host.

    Arguments, parameters and results are those of torch's style. Its own form runs for an embedding,
    for ``use_local_output=False`` and for an ``input_layouts`` other than ``Shard(-1)``.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        (layout,) = self.output_layouts
        fits = _is_last(self.input_layouts[0]) and self.use_local_output
        if not (fits and isinstance(layout, Replicate | Shard) and _is_plain_linear(module)):
            return super()._apply(module, device_mesh)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        return _cut(module, _Rows(device_mesh, layout))
