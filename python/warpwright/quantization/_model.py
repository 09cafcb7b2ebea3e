"""`quantize` and its undoing: a model's linear layers, in place."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import nn

from .. import nn as ours
from .._arguments import shown
from .._quantized_layers import QuantizedLinear
from ..swap.classes import name_of
from ..swap.report import REPLACED, SwapEntry, SwapReport
from ..swap.selection import Exclude, Filter, selection
from ._schemes import SCHEMES, Options

LINEAR = (nn.Linear, ours.Linear)


class QuantizeReport(SwapReport):
    """What :func:`quantize` did to each linear layer; the form of :class:`warpwright.SwapReport`."""

    VERB: ClassVar[str] = "quantize"
    DONE: ClassVar[str] = "quantized"

    @property
    def quantized(self) -> list[SwapEntry]:
        return self.swapped


def quantize(
    model: nn.Module,
    scheme: str = "int4",
    *,
    group: int = 128,
    symmetric: bool = True,
    method: str = "absmax",
    filter_fn: Filter | None = None,
    exclude: Exclude | None = None,
    dry_run: bool = False,
) -> QuantizeReport:
    """Stores the weights of a model's linear layers in few bits, in place.

    Each ``torch.nn.Linear`` (or ours) becomes a :class:`warpwright.nn.QuantizedLinear`; names, hooks,
    biases and the rest of the model stay. The exact weights are lost: keep a copy of the model or its
    ``state_dict`` to go back. :func:`unquantize` makes ordinary layers of the rounded weights.

    Args:
        model: any module, on any device.
        scheme: ``"int4"``, in groups of input features, or ``"int8"``, per output feature.
        group: input features per scale, for int4.
        symmetric: False gives each int4 group a zero point.
        method: ``"absmax"`` or ``"mse"``, see :func:`warpwright.quantization.int4`.
        filter_fn: called with ``(module, name)``; False leaves the layer as it is.
        exclude: names, globs over names or classes of modules to leave, as for
            :func:`warpwright.swap`. Often this is the last layer, because its rounding matters most.
        dry_run: changes nothing, and reports what would be.
    Returns:
        A report with an entry per linear layer, and the bytes before and after.
    Raises:
        ValueError: an unknown scheme, method or name in ``exclude``, or an odd group.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize: model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(scheme, str) or scheme not in SCHEMES:
        raise ValueError(f"quantize: scheme: expected one of {list(SCHEMES)}, got {scheme!r}")
    chosen, options = SCHEMES[scheme], Options(group, symmetric, method)
    why_left = selection(model, exclude, filter_fn)
    users = Counter(
        id(p) for module in model.modules() for p in module._parameters.values() if p is not None
    )
    report = QuantizeReport(dry_run=dry_run)
    before = _bytes(model)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        reason = why_left(module, name) or _why_not(module, users)
        reason = reason or chosen.why_not(module, options) or ""
        kind = name_of(type(module))
        if not reason and not dry_run:
            with torch.no_grad():
                chosen.convert(module, options)
        note = "" if reason else chosen.describe(options)
        report.entries.append(SwapEntry(name, kind, chosen.op, not reason, reason, note=note))
    if not dry_run:
        after = _bytes(model)
        report.advice.append(f"parameters and buffers: {before:,} bytes before, {after:,} after")
    return report


def _why_not(module: nn.Linear, users: Counter[int]) -> str | None:
    if isinstance(module, QuantizedLinear):
        return "already quantized"
    if type(module) not in LINEAR:
        return "a class of its own, whose code may read the weight"
    if "forward" in vars(module):
        return REPLACED
    if users[id(module.weight)] > 1:
        return "its weight is another module's, too"
    if not module.weight.is_floating_point():
        return f"its weight is {module.weight.dtype}"
    return None


def _bytes(model: nn.Module) -> int:
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def unquantize(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Makes ``torch.nn.Linear`` layers of all quantized ones, with the rounded weights as parameters.

    Args:
        model: changed in place.
        dtype: of the weights; None: the scales'.
    Returns:
        How many layers were changed.
    """
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(f"unquantize: model: expected a torch.nn.Module, got {got}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"unquantize: dtype: expected a torch.dtype or None, got {shown(dtype)}")
    changed = 0
    for module in model.modules():
        if type(module) is not QuantizedLinear:
            continue
        weight = module.weight
        for name in ("codes", "scales", "zeros"):
            del module._buffers[name]
        del module.fragments
        layer: Any = module
        layer.__class__ = nn.Linear
        layer.weight = nn.Parameter(weight if dtype is None else weight.to(dtype))
        changed += 1
    return changed
