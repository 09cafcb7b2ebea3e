"""The chains of ops that one op of ours computes, and their modules in a model.

A *keeper* is the layer of a chain that becomes the fused module by a change of its class: the one
with the parameters. It computes the fused op if a forward passes ``fused=``, the options of the other
layers. For any other caller it is a plain layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import functional as F
from .. import nn as ours
from .._catalog import OPS

native = nn.functional
POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


@dataclass(frozen=True)
class Pattern:
    """A chain of ops, and our module and functional that compute it as one op."""

    ops: tuple[str, ...]
    module: str
    functional: str
    keeper: int = 0  # which of the ops' layers becomes that module


# A longer chain precedes a shorter one that it begins with.
PATTERNS = tuple(
    Pattern(op.chain.ops, op.chain.module, op.name, op.chain.keeper)
    for op in sorted(OPS.values(), key=lambda op: -len(op.chain.ops) if op.chain else 0)
    if op.chain
)

# Layers of a chain: (native, ours, op, attributes that are options of the op). "" is no op.
LAYERS: tuple[tuple[type[nn.Module], type[nn.Module], str, tuple[str, ...]], ...] = (
    (nn.BatchNorm2d, ours.BatchNorm2d, "batch_norm", ()),
    (nn.Linear, ours.Linear, "linear", ()),
    (nn.ReLU, ours.ReLU, "relu", ()),
    (nn.GELU, nn.GELU, "gelu", ("approximate",)),
    (nn.SiLU, nn.SiLU, "silu", ()),
    (nn.MaxPool2d, ours.MaxPool2d, "max_pool2d", POOL),
    (nn.Identity, nn.Identity, "", ()),
)
KINDS = {kind: layer for layer in LAYERS for kind in layer[:2]}
OPTIONS = {op: names for _, _, op, names in LAYERS}
ONLY_FUSED = ("gelu", "silu")  # ops that swap() has no layer for

# Functions of a chain: the op, and the names of the arguments after the first.
FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    native.relu: ("relu", ("inplace",)),
    torch.relu: ("relu", ()),
    torch.relu_: ("relu", ()),
    native.gelu: ("gelu", ("approximate",)),
    native.silu: ("silu", ("inplace",)),
    native.max_pool2d: ("max_pool2d", POOL),
    torch.max_pool2d: ("max_pool2d", POOL),
    operator.add: ("add", ("other",)),
    operator.iadd: ("add", ("other",)),
    torch.add: ("add", ("other", "alpha")),
}
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "relu": ("relu", ()),
    "relu_": ("relu", ()),
    "add": ("add", ("other", "alpha")),
    "add_": ("add", ("other", "alpha")),
}
MAKES_NEW = (nn.Conv2d, nn.Linear, nn.BatchNorm2d)  # no other tensor shares their outputs' memory
NAMES = {getattr(f, "__name__", f): op for f, (op, _) in (*FUNCTIONS.items(), *METHODS.items())}


# ---- the keepers ----


class _BatchNormKeeper(ours._BatchNorm):
    extra_repr = nn.BatchNorm2d.extra_repr

    def forward(  # type: ignore[override]
        self, input: Tensor, *residual: Tensor, fused: dict[str, Any] | None = None
    ) -> Tensor:
        if fused is None:
            return self._normalize(input, functional="batch_norm")
        if residual:
            (other,), in_place = residual, fused["in_place"]
            if in_place and (other.dtype, other.shape) != (input.dtype, input.shape):
                return F.relu(self._normalize(input, functional="batch_norm").add_(other))
            return self._normalize(input, other)
        return self._normalize(input, **fused)


class _LinearKeeper(ours.Linear):
    _functional: ClassVar[str]
    extra_repr = nn.Linear.extra_repr

    def forward(self, input: Tensor, fused: dict[str, Any] | None = None) -> Tensor:
        if fused is None:
            return super().forward(input)
        return getattr(F, self._functional)(input, self.weight, self.bias, **fused)


class _MaxPoolKeeper(ours.MaxPool2d):
    _functional: ClassVar[str]

    def forward(self, input: Tensor, fused: dict[str, Any] | None = None) -> Any:
        if fused is None:
            return super().forward(input)
        window = (self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)
        return getattr(F, self._functional)(input, *window)


_KEEPS: dict[str, type[nn.Module]] = {
    "batch_norm": _BatchNormKeeper,
    "linear": _LinearKeeper,
    "max_pool2d": _MaxPoolKeeper,
}
_STEPS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "relu": torch.relu,
    "gelu": native.gelu,
    "silu": native.silu,
    "max_pool2d": native.max_pool2d,
}


class _Chain:
    """The native chain as one module, with which ``check=`` compares the fused op."""

    _pattern: ClassVar[Pattern]

    def forward(self, x: Tensor, *residual: Tensor, fused: dict[str, Any] | None = None) -> Tensor:
        if fused is None:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        for i, op in enumerate(self._pattern.ops):
            if i == self._pattern.keeper:
                x = super().forward(x)  # type: ignore[misc]
            else:
                options = {name: fused[name] for name in OPTIONS.get(op, ()) if name in fused}
                x = _STEPS[op](x, *(residual if op == "add" else ()), **options)
        return x


def _make_keepers() -> Iterator[tuple[Pattern, type[nn.Module], type[nn.Module], type[nn.Module]]]:
    """Per pattern: the layer's native class, the keeper (a fused module) and the native chain."""
    for pattern in PATTERNS:
        op, name = pattern.ops[pattern.keeper], pattern.module
        theirs = next(layer[0] for layer in LAYERS if layer[2] == op)
        body = {"__module__": __name__, "_functional": pattern.functional, "_pattern": pattern}
        keeper = type(name, (_KEEPS[op], getattr(ours, name)), dict(body))
        yield pattern, theirs, keeper, type(f"Native{name}", (_Chain, theirs), dict(body))


KEEPERS: dict[Pattern, type[nn.Module]] = {}
NATIVE: dict[type[nn.Module], type[nn.Module]] = {}  # keeper -> the layer's native class
CHAINS: dict[type[nn.Module], type[nn.Module]] = {}  # keeper -> the native chain
for _pattern, _theirs, _keeper, _chain in _make_keepers():
    KEEPERS[_pattern] = _keeper
    NATIVE[_keeper], CHAINS[_keeper] = _theirs, _chain
    globals()[_keeper.__name__] = _keeper  # pickles find it by its name
