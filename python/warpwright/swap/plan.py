"""What a swap would change in a model, and why it leaves the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .. import integrations
from .._arch import why_no_kernel
from .._catalog import OPS as CATALOG
from .._user_errors import kind_of
from ..functional._pool import WHY_NOT_GLOBAL, is_one
from .candidates import names_in
from .classes import (
    CONTAINERS,
    MODULES,
    NATIVE_LAYERS,
    OPS,
    PARALLEL,
    check_ops,
    name_of,
    set_class,
    type_name,
)
from .fuse import Fusion, Graphs
from .fuse import plan as plan_fusions
from .patterns import KINDS
from .registry import UNKNOWN, find
from .report import (
    IS_OURS,
    NO_LAYER,
    NO_LAYER_BUT_CALLS,
    NOTHING,
    OTHER_NUMBERS,
    PART,
    REPLACED,
    SwapEntry,
)
from .residual import plan_blocks
from .rewrites import plan_rewrites
from .selection import Exclude, Filter, WhyLeft, selection

DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
WITHOUT_LAYER = (NO_LAYER, NO_LAYER_BUT_CALLS, OTHER_NUMBERS, NOTHING)

# What swap() intends: module -> the class that it gets.
Chosen = dict[nn.Module, type[nn.Module]]


@dataclass
class Plan:
    entries: list[SwapEntry]
    chosen: Chosen
    fusions: list[Fusion] = field(default_factory=list)
    graphs: Graphs = field(default_factory=dict)
    changes: list[integrations.Change] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.chosen and not self.changes

    def apply(self) -> None:
        for module, mine in self.chosen.items():
            set_class(module, mine)
        for change in self.changes:
            change.apply()


def plan_swap(
    model: nn.Module,
    ops: Iterable[str] | None,
    filter_fn: Filter | None,
    exclude: Exclude | None,
    fuse: bool,
) -> Plan:
    check_is_module(model)
    wanted = check_ops(ops, OPS)
    why_left = selection(model, exclude, filter_fn)
    libraries = [*integrations.loaded()]  # each registers its layers
    entries: dict[nn.Module, SwapEntry] = {}
    chosen: Chosen = {}
    parts: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if module in parts:
            entries[module] = SwapEntry(name, type_name(module), None, False, parts[module])
            continue
        why_unknown = _look_up(module)
        op = _op_of(module)
        if op is None and (type(module) in CONTAINERS or next(module.children(), None) is not None):
            continue  # its children have entries of their own
        reason = why_unknown or _why_not(module, name, op, wanted, why_left)
        if reason is None:
            chosen[module] = MODULES[type(module)][0]
        # What it computes itself: it reads the weights, or knows the activation.
        own = ["out_proj"] if isinstance(module, nn.MultiheadAttention) else []
        for part in (*own, *getattr(chosen.get(module), "_parts", ())):
            parts[getattr(module, part)] = f"{PART}{type(module).__name__}"
        entries[module] = SwapEntry(name, type_name(module), op, reason is None, reason or "")
    plans = [library.plan(model, wanted, why_left, chosen) for library in libraries]
    for plan in plans:
        chosen.update(plan.classes)
        for module, note in plan.notes.items():
            entries[module] = replace(entries[module], note=note)
    more = [entry for plan in plans for entry in plan.entries]
    changes = [change for plan in plans for change in plan.changes]
    if not fuse:
        return Plan([*entries.values(), *more], chosen, changes=changes)

    def why_not_fused(module: nn.Module) -> str | None:
        entry = entries.get(module)
        if entry is None:
            return "not a layer"
        if "forward" in vars(module):
            return REPLACED
        if entry.reason not in (IS_OURS, *WITHOUT_LAYER):
            return entry.reason or None
        if entry.reason in WITHOUT_LAYER and type(module) not in KINDS:
            return entry.reason
        if entry.op is not None and entry.op not in wanted:
            return f"{entry.op} is not in ops"
        return why_left(module, entry.name)

    # A layer that runs on an op of ours has no chain of its own, and needs no trace.
    whole = {m for m in entries if m in chosen or type(m) in NATIVE_LAYERS}
    found = plan_fusions(model, why_not_fused, wanted, whole)
    for module, kind in found.classes.items():
        chosen[module] = kind
        if kind in NATIVE_LAYERS:
            entry = entries[module]
            entries[module] = replace(entry, swapped=True, reason="", fused=kind.__name__)
    norms = plan_rewrites(model, chosen, found, wanted, why_left)
    for module, into in found.absorbed.items():
        if entries[module].reason in WITHOUT_LAYER:
            entries[module] = replace(entries[module], reason=f"{PART}{into}")
    chosen.update({m: kind for m, kind in found.classes.items() if m in found.blocks})
    blocks, notes = plan_blocks(model, chosen, why_left)
    chosen.update(blocks)
    for module, note in {**norms, **notes}.items():
        entries[module] = replace(entries[module], note=note)
    return Plan([*entries.values(), *more], chosen, found.fusions, found.graphs, changes)


def check_is_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {kind_of(model)}")


def _look_up(module: nn.Module) -> str:
    """Adds the class to ``MODULES`` if the registry knows it; or the reason why it is not trusted."""
    if nn.utils.parametrize.is_parametrized(module) or isinstance(module, torch.jit.ScriptModule):
        return ""
    found = find(type(module))
    return "" if found == UNKNOWN else found


def _op_of(module: nn.Module) -> str | None:
    kind = type(module)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        kind = module.cls_to_become or kind  # a lazy norm derives from another base
    return next((op for native, (_, op) in MODULES.items() if issubclass(kind, native)), None)


def _why_not(
    module: nn.Module,
    name: str,
    op: str | None,
    wanted: frozenset[str],
    why_left: WhyLeft,
) -> str | None:
    """The first reason to leave ``module`` native; None if it is to be swapped."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript module, its class is compiled in: swap before scripting"
    if op is None:
        if _computes_nothing(module):
            return NOTHING
        return _why_no_layer(type(module))
    if type(module) in NATIVE_LAYERS:
        return IS_OURS
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy, not initialised: swap after the first forward"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized, which makes it a subclass: swap before parametrizing"
    if type(module) not in MODULES:
        return _why_no_subclass(module)
    if "forward" in vars(module) and PARALLEL not in vars(module):
        return f"{REPLACED}: swap before it is replaced"
    if op not in wanted:
        return f"{op} is not in ops"
    if getattr(module, "sparse", False):  # of nn.Embedding
        return "sparse=True: native computes a sparse gradient"
    if isinstance(module, nn.AdaptiveAvgPool2d) and not is_one(module.output_size):
        return f"output_size={module.output_size}: {WHY_NOT_GLOBAL}"
    for key, tensor in (
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ):
        if tensor.is_floating_point() or tensor.is_complex():
            why = why_no_kernel(tensor)
            if why is not None:
                return f"{key}: {why}"
    return why_left(module, name)


def _why_no_layer(kind: type[nn.Module]) -> str:
    if kind is nn.Dropout:
        return OTHER_NUMBERS
    is_native = kind.__module__.startswith("torch.")
    return NO_LAYER if is_native or names_in(kind).isdisjoint(_routed()) else NO_LAYER_BUT_CALLS


@functools.cache
def _routed() -> frozenset[str]:
    """The names of the functions that ``patch()`` routes."""
    functions = (route.function for op in CATALOG.values() for route in op.routes)
    return frozenset(function.__name__ for function in functions)


def _computes_nothing(module: nn.Module) -> bool:
    if "forward" in vars(module):
        return False
    if type(module) in DROPOUTS:
        return not module.training or float(vars(module)["p"]) == 0
    return type(module) in (nn.Identity, nn.Flatten, nn.Unflatten)


def _why_no_subclass(module: nn.Module) -> str:
    what = f"a subclass of {_native_base(module)}"
    if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
        return f"{what} that fully_shard made: swap before fully_shard"
    if type(module).__module__.startswith("torch."):
        return f"{what}, which may compute something else"
    return f"{what}, which may compute something else; see warpwright.register_layer"


def _native_base(module: nn.Module) -> str:
    return name_of(next(native for native in MODULES if isinstance(module, native)))
