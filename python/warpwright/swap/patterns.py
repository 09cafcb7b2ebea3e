"""The chains of ops that one op of ours computes, and their modules in a model.

A *keeper* is the layer of a chain that becomes the fused module by a change of its class: the one
with the parameters. It computes the fused op if a forward passes ``fused=``, the options of the other
layers. For any other caller it is a plain layer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional as F
from .. import nn as ours
from .._catalog import OPS
from .._conv_norm_layers import _BatchNorm
from .._running_statistics import convolve_and_normalize, normalize_as_one, runs_as_one

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


# A batch norm after a convolution, if no longer chain begins with it.
ALONE = Pattern(("batch_norm",), "Conv2dBatchNorm2d", "batch_norm")


class Kind(NamedTuple):
    """A layer that a chain may contain."""

    theirs: type[nn.Module]
    mine: type[nn.Module]  # the same class if swap() has no layer for it
    op: str  # "" is no op
    names: tuple[str, ...] = ()  # attributes that are options of the op
    constants: Mapping[str, Any] = {}  # options that the class implies


CONVOLUTIONS = (nn.Conv2d, ours.Conv2d)
LAYERS = (
    Kind(nn.BatchNorm2d, ours.BatchNorm2d, "batch_norm"),
    Kind(nn.Linear, ours.Linear, "linear"),
    Kind(nn.ReLU, ours.ReLU, "relu"),
    Kind(nn.GELU, ours.GELU, "gelu", ("approximate",)),
    Kind(nn.SiLU, ours.SiLU, "silu"),
    Kind(nn.Hardswish, nn.Hardswish, "hardswish"),
    Kind(nn.MaxPool2d, ours.MaxPool2d, "max_pool2d", POOL),
    Kind(nn.Identity, nn.Identity, ""),
    Kind(nn.Dropout, nn.Dropout, "", ("p",)),  # with p = 0
)
# Both classes of each; the registry adds layers of other libraries.
KINDS: dict[type[nn.Module], Kind] = {kind: layer for layer in LAYERS for kind in layer[:2]}
OPTIONS = {layer.op: layer.names for layer in LAYERS}
ONLY_FUSED = ("gelu", "silu", "hardswish")  # ops that swap() has no layer for

# The weight and bias of a linear layer, as a functional takes them. The registry adds others.
OPERANDS: dict[type[nn.Module], Callable[[Any], tuple[Tensor, Tensor | None]]] = {
    nn.Linear: lambda layer: (layer.weight, layer.bias),
    ours.Linear: lambda layer: (layer.weight, layer.bias),
}

# Functions of a chain: the op, and the names of the arguments after the first.
FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    native.relu: ("relu", ("inplace",)),
    torch.relu: ("relu", ()),
    torch.relu_: ("relu", ()),
    native.gelu: ("gelu", ("approximate",)),
    native.silu: ("silu", ("inplace",)),
    native.hardswish: ("hardswish", ("inplace",)),
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


class _BatchNormKeeper(_BatchNorm):
    extra_repr = nn.BatchNorm2d.extra_repr

    def forward(  # type: ignore[override]
        self, input: Tensor, *residual: Tensor, fused: dict[str, Any] | None = None
    ) -> Tensor:
        if fused is None:
            return self._normalize(input, functional="batch_norm")
        if "conv" in fused:
            fused = dict(fused)
            conv = fused.pop("conv")
            pool = {} if residual else fused
            if runs_as_one(self, conv, input, *residual, **pool):
                return normalize_as_one(self, conv, self._functional, input, *residual, **pool)
            if not residual:
                return convolve_and_normalize(self, conv, input, **fused)
            input = conv(input)
        if residual:
            (other,), in_place = residual, fused["in_place"]
            if in_place and (other.dtype, other.shape) != (input.dtype, input.shape):
                return F.relu(self._normalize(input, functional="batch_norm").add_(other))
            return self._normalize(input, other)
        return self._normalize(input, **fused)


def flattened(input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A flattened image as rows, and the weight of a linear layer in the order of their columns.

    The rows of a channels-last image have another order than flatten gives them, which would copy
    the image, and its gradient back. If the image is larger than the weight, the weight is copied.
    """
    channels_last = input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last)
    if not channels_last or input.is_contiguous() or input.shape[0] <= weight.shape[0]:
        return input.flatten(1), weight
    columns = weight.unflatten(1, input.shape[1:]).permute(0, 2, 3, 1)
    return input.permute(0, 2, 3, 1).flatten(1), columns.flatten(1)


def run_product(
    functional: str, input: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
) -> Tensor:
    """A product and the activation after it; with ``then``, a linear layer, also that one."""
    if options.pop("flatten", False):
        input, weight = flattened(input, weight)
    then = options.pop("then", None)
    if then is None:
        return getattr(F, functional)(input, weight, bias, **options)  # type: ignore[no-any-return]
    if type(then) not in OPERANDS:  # of another process, that the registry has not seen
        return then(run_product(functional, input, weight, bias, **options))  # type: ignore[no-any-return]
    activation = functional.removeprefix("linear_")
    if options.get("approximate") == "tanh":
        activation += "_tanh"
    return F.mlp(input, weight, bias, *OPERANDS[type(then)](then), activation)


class _LinearKeeper(ours.Linear):
    _functional: ClassVar[str]
    extra_repr = nn.Linear.extra_repr

    def forward(self, input: Tensor, fused: dict[str, Any] | None = None) -> Tensor:
        if fused is None:
            return super().forward(input)
        return run_product(self._functional, input, self.weight, self.bias, **fused)


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
STEPS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "relu": torch.relu,
    "gelu": native.gelu,
    "silu": native.silu,
    "hardswish": native.hardswish,
    "max_pool2d": native.max_pool2d,
}


class _Chain:
    """The native chain as one module, with which ``check=`` compares the fused op."""

    _pattern: ClassVar[Pattern]

    def forward(self, x: Tensor, *residual: Tensor, fused: dict[str, Any] | None = None) -> Tensor:
        if fused is None:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        if "conv" in fused:  # a layer of the caller: `check=` may ask in another dtype
            conv = fused["conv"]
            bias = None if conv.bias is None else conv.bias.to(x.dtype)
            x = nn.Conv2d._conv_forward(conv, x, conv.weight.to(x.dtype), bias)
        if "flatten" in fused:
            x = x.flatten(1)
        for i, op in enumerate(self._pattern.ops):
            if i == self._pattern.keeper:
                x = super().forward(x)  # type: ignore[misc]
            else:
                options = {name: fused[name] for name in OPTIONS.get(op, ()) if name in fused}
                x = STEPS[op](x, *(residual if op == "add" else ()), **options)
        if "then" in fused:
            weight, bias = OPERANDS[type(fused["then"])](fused["then"])
            x = native.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        return x


# (chain, the keeper's native class) -> the keeper. Then keeper -> the native layer, the native chain.
KEEPERS: dict[tuple[Pattern, type[nn.Module]], type[nn.Module]] = {}
KEEPER_LAYERS: dict[type[nn.Module], type[nn.Module]] = {}
CHAINS: dict[type[nn.Module], type[nn.Module]] = {}


def add_keeper(pattern: Pattern, theirs: type[nn.Module], keeper: type[nn.Module]) -> None:
    """Makes ``keeper`` the fused module of ``pattern`` for layers of the class ``theirs``."""
    body = {"__module__": __name__, "_pattern": pattern}
    KEEPERS[pattern, theirs] = keeper
    KEEPER_LAYERS[keeper] = theirs
    CHAINS[keeper] = type(f"Native{keeper.__name__}", (_Chain, theirs), body)


for _pattern in PATTERNS:
    _op, _name = _pattern.ops[_pattern.keeper], _pattern.module
    _body = {"__module__": __name__, "_functional": _pattern.functional}
    _keeper = type(_name, (_KEEPS[_op], getattr(ours, _name)), _body)
    add_keeper(_pattern, next(layer.theirs for layer in LAYERS if layer.op == _op), _keeper)
    globals()[_name] = _keeper  # pickles find it by its name


class Conv2dBatchNorm2d(_BatchNormKeeper, ours.BatchNorm2d):
    """A batch norm that is called with the convolution before it."""

    __module__ = __name__
    _functional = "batch_norm"


add_keeper(ALONE, nn.BatchNorm2d, Conv2dBatchNorm2d)
