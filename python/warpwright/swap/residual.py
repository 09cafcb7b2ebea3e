"""Residual blocks under autocast: what a norm writes, and the addition before it.

A norm in float32 is followed by a cast for each matrix product that reads it, and its backward by
the casts back. If only products read the norm, it writes autocast's dtype at once. An addition whose
sum a norm reads becomes part of the norm. Without autocast the block's own forward runs.

A block is recognised by the code of its forward. Before the first use of a class, results and
gradients under autocast are compared with its own forward's on a small example.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from .. import nn as ours
from .._arch import PLAIN
from .._ops import ops
from .blocks import (
    BASE,
    Path,
    all_layers_are_watched,
    at,
    copied_class,
    generated_class,
    is_hooked,
    why_no_block,
)
from .classes import forward_of
from .forms import binder
from .readers import Kind, native_of, products_that_read
from .sources import fingerprint_of
from .trace import undecorated

NARROW = (torch.bfloat16, torch.float16)
Dtype = torch.dtype | None
Branch = tuple[str, str]


@dataclass(frozen=True)
class Norm:
    """A norm's functions of the layer, of float32 rows (and what is added to them) and of a dtype."""

    alone: Callable[[Any, Tensor, Dtype], Tensor]
    added: Callable[[Any, Tensor, Tensor, Dtype], tuple[Tensor, Tensor]]
    # The rows again, for their other readers, and the norm: its backward adds both gradients.
    beside: Callable[[Any, Tensor, Dtype], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Step:
    """A norm of one block."""

    norm: Norm
    casts: bool  # whether only products read it

    def alone(self, layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.norm.alone(layer, x, dtype if self.casts else None)

    def beside(self, layer: nn.Module, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``x``, for its other readers, and its norm."""
        if torch.compiler.is_compiling():  # Inductor adds gradients in the passes that read them
            return x, self.alone(layer, x, dtype)
        return self.norm.beside(layer, x, dtype if self.casts else None)

    def added(
        self, layer: nn.Module, branch: Tensor, residual: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The sum and its norm."""
        if branch.dtype not in (torch.float32, *NARROW) or branch.shape != residual.shape:
            total = residual + branch
            return total, layer(total)
        return self.norm.added(layer, branch, residual, dtype if self.casts else None)


@dataclass(frozen=True)
class Block:
    """A class of blocks: ``x + f(norm(x))``, twice."""

    # The forward: (self, the steps of its norms, the dtype), and by name all of its own arguments.
    run: Callable[..., Any]
    norms: tuple[Branch, Branch]  # a norm's name and that of the layer that reads it
    # Returns a block and the arguments of a call, in float32 on the CPU.
    example: Callable[[], tuple[Any, ...]]
    # Whether `run` computes a call, by its arguments' names.
    takes: Callable[[dict[str, Any]], bool] = lambda named: True


# ---- norms, by the forward of the swapped layer ----


def _layer_norm(layer: Any, x: Tensor, dtype: Dtype) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps, dtype=dtype)


def _add_layer_norm(
    layer: Any, branch: Tensor, residual: Tensor, dtype: Dtype
) -> tuple[Tensor, Tensor]:
    vectors = layer.weight, layer.bias
    return F.add_layer_norm(
        branch, residual, layer.normalized_shape, *vectors, layer.eps, dtype=dtype
    )


def _layer_norm_beside(layer: Any, x: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor]:
    vectors = layer.weight, layer.bias
    return ops.norm_with_residual(x, layer.normalized_shape, *vectors, layer.eps, True, dtype)  # type: ignore[no-any-return]


def rms_norm(eps: str, weight: Callable[[Any], Any] = lambda layer: layer.weight) -> Norm:
    """An RMS norm whose result is rounded once if its weight is float32, by the names it uses."""

    def alone(layer: Any, x: Tensor, dtype: Dtype) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight(layer), getattr(layer, eps), dtype=dtype)

    def added(layer: Any, branch: Tensor, residual: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor]:
        return F.add_rms_norm(
            branch, residual, (residual.shape[-1],), weight(layer), getattr(layer, eps), dtype=dtype
        )

    def beside(layer: Any, x: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor]:
        shape, vectors = (x.shape[-1],), (weight(layer), None)
        return ops.norm_with_residual(x, shape, *vectors, getattr(layer, eps), False, dtype)  # type: ignore[no-any-return]

    return Norm(alone, added, beside)


def _rms_norm(layer: Any, x: Tensor, dtype: Dtype) -> Tensor:
    return F.rms_norm(x, layer.normalized_shape, layer.weight, layer.eps, dtype=dtype)


def _add_rms_norm(
    layer: Any, branch: Tensor, residual: Tensor, dtype: Dtype
) -> tuple[Tensor, Tensor]:
    return F.add_rms_norm(
        branch, residual, layer.normalized_shape, layer.weight, layer.eps, dtype=dtype
    )


def _rms_norm_beside(layer: Any, x: Tensor, dtype: Dtype) -> tuple[Tensor, Tensor]:
    shape = layer.normalized_shape
    return ops.norm_with_residual(x, shape, layer.weight, None, layer.eps, False, dtype)  # type: ignore[no-any-return]


LAYER_NORM = Norm(_layer_norm, _add_layer_norm, _layer_norm_beside)
RMS_NORM = Norm(_rms_norm, _add_rms_norm, _rms_norm_beside)
NORMS: dict[Any, Norm] = {ours.LayerNorm.forward: LAYER_NORM, ours.RMSNorm.forward: RMS_NORM}


# ---- blocks, by the fingerprint of the native class ----

_blocks: dict[str, Block] = {}
# What the behaviour check said of a class: "" if it may be used.
_checked: dict[type[nn.Module], str] = {}


def register_block(block: Block, *sources: str) -> None:
    for source in sources:
        _blocks[source] = block


@dataclass(frozen=True)
class _Found:
    """How the layers of one block run, and the facts that this rests on."""

    block: Block
    steps: tuple[Step, Step]
    layers: tuple[tuple[Path, type[nn.Module]], ...]  # and their classes

    def holds(self, module: nn.Module) -> bool:
        if all_layers_are_watched():
            return False
        for path, kind in self.layers:
            layer = at(module, path)
            if layer is None or is_hooked(layer):
                return False
            if copied_class(type(layer)) is not copied_class(kind):
                return False
        for name, _ in self.block.norms:
            for vector in getattr(module, name)._parameters.values():
                if vector is not None and vector.dtype != torch.float32:
                    return False
        return True


def block_of(kind: type[nn.Module]) -> Block | None:
    """The entry of a class that is known by its code."""
    return _blocks.get(fingerprint_of(kind, undecorated(kind)[0]) or "")


def _find(module: nn.Module, base: type[nn.Module], kind_of: Kind) -> _Found | None:
    """None if ``base`` is no known block, or its norms are not ours."""
    block = block_of(base)
    if block is None:
        return None
    steps: list[Step] = []
    layers: list[tuple[Path, type[nn.Module]]] = []
    for name, reader in block.norms:
        norm, reads = module._modules.get(name), module._modules.get(reader)
        if norm is None or reads is None or getattr(norm, "_fast_norm", False):
            return None
        known = NORMS.get(forward_of(kind_of(norm)))
        if known is None:
            return None
        products = products_that_read(reads, kind_of)
        steps.append(Step(known, products is not None))
        layers += [((name,), kind_of(norm)), ((reader,), kind_of(reads))]
        prefixes = {path[: i + 1] for path in products or () for i in range(len(path))}
        for path in sorted(prefixes):
            layer = at(reads, path)
            if layer is not None:
                layers.append(((reader, *path), kind_of(layer)))
    first, second = steps
    return _Found(block, (first, second), tuple(layers))


def dtype_of_products(x: Any, narrow: bool = False) -> Dtype:
    """Autocast's dtype, if it is on and ``x`` is float32; with ``narrow`` also if ``x`` has it."""
    if not isinstance(x, Tensor) or type(x) not in PLAIN:
        return None
    if not torch.is_autocast_enabled(x.device.type):
        return None
    dtype = torch.get_autocast_dtype(x.device.type)
    if dtype not in NARROW or not (x.dtype == torch.float32 or (narrow and x.dtype == dtype)):
        return None
    return dtype


_classes: dict[tuple[type[nn.Module], _Found], type[nn.Module]] = {}


def _residual_class(base: Any, found: _Found) -> type[nn.Module]:
    """``base`` with the block's forward; the same class for the same facts."""
    if (base, found) in _classes:
        return _classes[base, found]
    original, decorators = undecorated(base)
    run, steps, takes = found.block.run, found.steps, found.block.takes
    bind, _ = binder(base)
    names = tuple(inspect.signature(original).parameters)[1:]

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values, rest = bind(self, *args, **kwargs)
        dtype = dtype_of_products(values[0])
        if dtype is not None and found.holds(self):
            named = {**dict(zip(names, values, strict=False)), **rest}
            if takes(named):
                return run(self, steps, dtype, **named)
        return original(self, *args, **kwargs)

    made = generated_class(BASE, base, forward, decorators, _empty, base)
    _classes[base, found] = made
    return made


def _empty(base: Any) -> nn.Module:
    """For pickles and copies: the class follows when the layers are there."""

    def set_state(self: Any, state: Any) -> None:
        self.__class__ = base
        base.__setstate__(self, state)
        found = _find(self, base, type)
        if found is not None:
            self.__class__ = _residual_class(base, found)

    pending: Any = types.new_class(
        base.__name__, (base,), {}, lambda scope: scope.update(__setstate__=set_state)
    )
    made: nn.Module = pending.__new__(pending)
    return made


# ---- the check of a class ----


def _faults(base: type[nn.Module], block: Block) -> str:
    """How ``block`` differs from ``base`` on the example; "" if it does not."""
    from .check import bare, compare_module

    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        torch.device("cpu"),
    ):
        torch.manual_seed(0)
        layer, *args = block.example()
        layer = bare(layer, base)
        args = [a.requires_grad_() if isinstance(a, Tensor) else a for a in args]
        found = _find(layer, base, type)
        if found is None or not found.holds(layer) or not all(s.casts for s in found.steps):
            return "its example does not run on ours"
        made = _residual_class(base, found)
        _, lines = compare_module(layer, base, made, (tuple(args), {}))
    return "; ".join(lines)


def _why_not_trusted(base: Any) -> str:
    if base not in _checked:
        block = block_of(base)
        assert block is not None
        try:
            _checked[base] = _faults(base, block)
        except Exception as error:  # a class that needs more than the example has, ...
            _checked[base] = f"{type(error).__name__}: {error}"
    return _checked[base]


# ---- the plan ----

CASTS = "under autocast: writes the dtype of the products that read it"
ADDS = "under autocast: computes the addition before it, too"


def plan_blocks(
    model: nn.Module,
    chosen: Mapping[nn.Module, type[nn.Module]],
    why_left: Callable[[nn.Module, str], str | None],
) -> tuple[dict[nn.Module, type[nn.Module]], dict[nn.Module, str]]:
    """Classes for the residual blocks of ``model``, and a remark on each norm. Changes nothing.

    Args:
        chosen: the classes that layers get anyway.
        why_left: the user's reason to leave a module as it is, or None.
    """
    classes: dict[nn.Module, type[nn.Module]] = {}
    notes: dict[nn.Module, str] = {}

    def kind_of(layer: nn.Module) -> type[nn.Module]:
        return chosen.get(layer, type(layer))

    for name, module in model.named_modules():
        base = type(module)
        if isinstance(module, torch.jit.ScriptModule):  # its class has no code of a forward
            continue
        if module in chosen or native_of(base) is not base or block_of(base) is None:
            continue
        if why_no_block(module) or why_left(module, name) or _why_not_trusted(base):
            continue
        found = _find(module, base, kind_of)
        if found is None:
            continue
        classes[module] = _residual_class(base, found)
        for i, (norm, _) in enumerate(found.block.norms):
            said = [ADDS] if i else []
            said += [CASTS] if found.steps[i].casts else []
            if said:
                notes[getattr(module, norm)] = "; ".join(said)
    return classes, notes


# ---- torchvision's vision transformer ----


def _encoder_block(
    self: Any, steps: tuple[Step, Step], dtype: torch.dtype, input: Tensor
) -> Tensor:
    torch._assert(
        input.dim() == 3, f"Expected (batch_size, seq_length, hidden_dim) got {input.shape}"
    )
    first, second = steps
    input, x = first.beside(self.ln_1, input, dtype)
    x, _ = self.self_attention(x, x, x, need_weights=False)
    x, y = second.added(self.ln_2, self.dropout(x), input, dtype)
    return x + self.mlp(y)


def example_norm(kind: type[nn.Module], size: int = 16) -> nn.Module:
    layer = kind(size)
    for vector in layer.parameters():
        nn.init.normal_(vector)
    return layer


class ExampleAttention(nn.Module):
    """A product with the arguments of attention."""

    def __init__(self, returns_weights: bool) -> None:
        super().__init__()
        self.product = nn.Linear(16, 16)
        self.returns_weights = returns_weights

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self.product(hidden_states)
        return (output, None) if self.returns_weights else output


def example_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16))


def _encoder_block_example() -> tuple[Any, ...]:
    layer: Any = nn.Module()
    layer.ln_1, layer.ln_2 = example_norm(ours.LayerNorm), example_norm(ours.LayerNorm)
    layer.self_attention = ours.MultiheadAttention(16, 2, batch_first=True)
    layer.dropout = nn.Identity()
    layer.mlp = example_mlp()
    return layer, torch.randn(2, 5, 16)


register_block(
    Block(
        _encoder_block,
        (("ln_1", "self_attention"), ("ln_2", "mlp")),
        _encoder_block_example,
    ),
    "8ca4a21e05b4a94f",  # 0.26
)
