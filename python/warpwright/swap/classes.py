"""A layer's native class and ours, and how an instance changes from one to the other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .. import _catalog
from .. import nn as ours
from .._user_errors import kind_of
from .patterns import KEEPER_LAYERS

# native type -> (ours, the functional it runs on). The registry adds classes of other libraries.
MODULES: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    theirs: (getattr(ours, name), op.name)
    for op in _catalog.OPS.values()
    for theirs, name in op.modules
}
NATIVE_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    **{mine: native for native, (mine, _) in MODULES.items()},
    **KEEPER_LAYERS,
}

# An attribute of the linear layers that distributed/tensor_parallel.py cut over ranks. Their forward is
# replaced on the instance, but calls the product of their class.
PARALLEL = "_warpwright_parallel"

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# What layers of other libraries run on (integrations/), though torch has no such layer.
OF_LIBRARIES = ("swiglu", "rotary_embedding", "linear_cross_entropy", "squeeze_excitation")
OPS = (*(op.name for op in _catalog.OPS.values() if op.modules), *OF_LIBRARIES)


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind
    # Compiled code skips its guard on the type while the module's dict is unchanged. Changing the dict
    # makes it check, and a compiled model runs the new class.
    vars(module)["_warpwright_class_changed"] = True
    del vars(module)["_warpwright_class_changed"]


def below_parametrizations(module: nn.Module) -> type[nn.Module]:
    """The class of ``module``, or the one that ``torch.nn.utils.parametrize`` derived it from."""
    kind = type(module)
    return kind.__bases__[0] if nn.utils.parametrize.is_parametrized(module) else kind


def set_class_below(module: nn.Module, kind: type[nn.Module]) -> None:
    """:func:`set_class`; a parametrized module stays so, its class then derives from ``kind``."""
    if nn.utils.parametrize.is_parametrized(module):
        # A class of its own: deep copies of the module share the present one.
        body = {k: v for k, v in vars(type(module)).items() if k not in ("__dict__", "__weakref__")}
        kind = type(f"Parametrized{kind.__name__}", (kind,), body)
    set_class(module, kind)


def check_ops(ops: Iterable[str] | None, known: Iterable[str]) -> frozenset[str]:
    """``ops`` as a set; None means all. Raises ValueError for a name that is not ``known``."""
    known = tuple(known)
    if ops is None:
        return frozenset(known)
    if isinstance(ops, nn.Module):  # a Sequential is iterable
        got = type(ops).__name__
        raise TypeError(
            f"ops: expected names of ops, got a {got}; swap() takes the model, patch() none"
        )
    if not isinstance(ops, Iterable):
        raise TypeError(f"ops: expected names of ops or None, got {kind_of(ops)}")
    wanted = [ops] if isinstance(ops, str) else list(ops)
    for op in wanted:
        if op not in known:
            raise ValueError(f"ops: expected names out of {', '.join(known)}; got {op!r}")
    return frozenset(wanted)


def type_name(module: nn.Module) -> str:
    return name_of(type(module))


def name_of(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"nn.{kind.__name__}" if name.startswith("torch.nn.modules.") else name


def forward_of(kind: type[nn.Module]) -> Any:
    """The forward of a class of modules; None of a scripted one, which raises if it is asked."""
    return None if issubclass(kind, torch.jit.ScriptModule) else kind.forward
