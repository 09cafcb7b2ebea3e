"""What :func:`warpwright.quantize` can make of a linear layer. A scheme is one entry of `SCHEMES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from .._arguments import shown
from .._quantized_layers import QuantizedLinear
from ._quantizers import Codes, check_method, int4, int8


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`warpwright.quantize` that schemes read."""

    group: int = 128
    symmetric: bool = True
    method: str = "absmax"

    def __post_init__(self) -> None:
        if not isinstance(self.group, int) or self.group <= 0 or self.group % 2:
            got = shown(self.group)
            raise ValueError(f"quantize: group: expected a positive even number, got {got}")
        check_method("quantize", self.method)


@dataclass(frozen=True)
class Scheme:
    op: str  # the functional that the layer becomes
    # The reason to leave a layer as it is; None: none.
    why_not: Callable[[nn.Linear, Options], str | None]
    # Changes the layer in place: its class, and its weight to the scheme's tensors.
    convert: Callable[[nn.Linear, Options], None]
    describe: Callable[[Options], str]


def become_quantized(layer: nn.Linear, codes: Codes) -> None:
    """`layer` as a QuantizedLinear of `codes`; bias, hooks, names and mode stay."""
    del layer._parameters["weight"]
    layer.__class__ = QuantizedLinear
    assert isinstance(layer, QuantizedLinear)
    layer._set_codes(*codes)


def _why_not_int4(layer: nn.Linear, options: Options) -> str | None:
    if layer.in_features % options.group:
        return f"in_features {layer.in_features} is no multiple of the group {options.group}"
    return None


def _to_int4(layer: nn.Linear, options: Options) -> None:
    weight, group = layer.weight, options.group
    codes = int4(weight, group, symmetric=options.symmetric, method=options.method)
    become_quantized(layer, codes)


def _to_int8(layer: nn.Linear, options: Options) -> None:
    become_quantized(layer, int8(layer.weight, method=options.method))


def _describe_int4(options: Options) -> str:
    kind = "symmetric" if options.symmetric else "zero points"
    return f"int4, group {options.group}, {kind}, {options.method}"


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(
        "linear_quantized",
        lambda layer, options: None,
        _to_int8,
        lambda options: f"int8 per channel, {options.method}",
    ),
    "int4": Scheme("linear_quantized", _why_not_int4, _to_int4, _describe_int4),
}
