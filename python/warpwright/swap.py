"""Runs an existing model on warpwright: in place, reversible, with a report and a check.

A module is swapped by changing its ``__class__`` from the exact native type to the subclass in
:mod:`warpwright.nn`. Nothing is copied or rebuilt: parameters, buffers, hooks, optimizers that hold
the parameters, DDP wrappers, shared modules and ``state_dict`` keys all stay what they were. With
``fuse=True`` chains of layers run as one op; :mod:`warpwright._fuse` has how.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from . import integrations
from . import nn as ours
from ._arch import why_no_kernel
from ._blocks import base_of
from ._fuse import Fusion, Graphs
from ._fuse import plan as plan_fusions
from ._patterns import KINDS
from ._patterns import NATIVE as KEEPER_NATIVE

if TYPE_CHECKING:  # imported when a report is printed
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["Fusion", "SwapCheckError", "SwapEntry", "SwapReport", "swap", "swapped", "unswap"]

# native type -> (ours, the functional it runs on)
MODULES: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.Conv2d: (ours.Conv2d, "conv2d"),
    nn.BatchNorm1d: (ours.BatchNorm1d, "batch_norm"),
    nn.BatchNorm2d: (ours.BatchNorm2d, "batch_norm"),
    nn.BatchNorm3d: (ours.BatchNorm3d, "batch_norm"),
    nn.ReLU: (ours.ReLU, "relu"),
    nn.MaxPool2d: (ours.MaxPool2d, "max_pool2d"),
    nn.Linear: (ours.Linear, "linear"),
    nn.CrossEntropyLoss: (ours.CrossEntropyLoss, "cross_entropy"),
    nn.MultiheadAttention: (ours.MultiheadAttention, "scaled_dot_product_attention"),
}
NATIVE: dict[type[nn.Module], type[nn.Module]] = {
    **{mine: native for native, (mine, _) in MODULES.items()},
    **KEEPER_NATIVE,
}
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
OPS = (*dict.fromkeys(op for _, op in MODULES.values()), "scaled_dot_product_attention")

IS_OURS = "already warpwright's"
NO_LAYER = "warpwright has no such layer"
REPLACED = "its forward is replaced on the instance"
FILTERED = "filter_fn said no"
LEFT = "left"

Model = TypeVar("Model", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]


class SwapCheckError(AssertionError):
    """``swap(check=...)`` found a difference, and the model is native again.

    ``.lines`` has the numbers.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__(
            "warpwright and native differ; the swap is undone:\n  " + "\n  ".join(lines)
        )
        self.lines = lines


@dataclass(frozen=True)
class SwapEntry:
    name: str  # as in model.named_modules(); "" is the model itself
    type: str  # class before the swap
    op: str | None  # the functional, where the class is or derives from one we have
    swapped: bool
    reason: str  # why it was left; "" if swapped
    fused: str = ""  # the fused module's class, where it became one
    note: str = ""  # how it was swapped, if not by its class alone


@dataclass
class SwapReport:
    """What :func:`swap` did to every module that computes something itself."""

    entries: list[SwapEntry] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)  # with fuse=True: every chain found
    check: dict[str, Any] | None = None  # the numbers of check=, see warpwright._check

    @property
    def swapped(self) -> list[SwapEntry]:
        return [e for e in self.entries if e.swapped]

    @property
    def left(self) -> list[SwapEntry]:
        return [e for e in self.entries if not e.swapped]

    def to_dict(self) -> dict[str, Any]:
        return {
            "swapped": len(self.swapped),
            "left": len(self.left),
            "entries": [asdict(e) for e in self.entries],
            "fusions": [asdict(f) for f in self.fusions],
            "check": self.check,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [
            Text(f"swapped {len(self.swapped)} of {len(self.entries)} modules"),
            _grouped(
                "module",
                (
                    (e.type, e.name, "swapped" if e.swapped else LEFT, e.note or e.reason)
                    for e in self.entries
                ),
            ),
        ]
        if self.fusions:
            done = sum(not f.reason for f in self.fusions)
            rows = (
                (
                    f.chain or "its chains",
                    f.block,
                    LEFT if f.reason else f.into or "fused",
                    f.reason,
                )
                for f in self.fusions
            )
            parts += [
                Text(f"fused {done} of {len(self.fusions)} chains"),
                _grouped("chain", rows),
            ]
        if self.check is not None:
            parts.append(Text(self.check["summary"]))
        return Group(*parts)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120, no_color=True, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _grouped(title: str, rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """A line for all (what, where, result, why) that differ in where alone."""
    from rich.table import Table
    from rich.text import Text

    groups: dict[tuple[str, str, str], list[str]] = {}
    for what, where, result, why in rows:
        groups.setdefault((what, result, why), []).append(where or "(the model)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title, no_wrap=True)
    table.add_column("count", justify="right")
    table.add_column("result", no_wrap=True)
    table.add_column("why / where")
    for (what, result, why), names in groups.items():
        listed = ", ".join(names[:3]) + (f", … {names[-1]}" if len(names) > 3 else "")
        styled = Text(result, style="yellow" if result == LEFT else "green")
        table.add_row(what, str(len(names)), styled, Text(f"{why}: {listed}" if why else listed))
    return table


def swap(
    model: nn.Module,
    ops: Iterable[str] | None = None,
    filter_fn: Filter | None = None,
    check: Any = None,
    *,
    fuse: bool = False,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> SwapReport:
    """Runs ``model``'s layers on warpwright's kernels, in place.

    Args:
        model: any module. Instances of exactly ``nn.Conv2d``, ``nn.BatchNorm1d/2d/3d``,
            ``nn.ReLU``, ``nn.MaxPool2d``, ``nn.Linear``, ``nn.CrossEntropyLoss`` and
            ``nn.MultiheadAttention`` (with its projections) are swapped, and the attention of
            transformers' models (docs/integrations.md). The report says of every other module why
            it was left.
        ops: only these functionals, e.g. ``{"conv2d", "batch_norm"}``; None means all.
        filter_fn: called with (module, name); False leaves the module native.
        check: inputs for the model (a tensor, a tuple of arguments or a dict of keyword arguments).
            Runs native and swapped, forward and backward, from the same state, and compares by the
            error rule of :mod:`warpwright.testing`: every swapped module on the inputs that it gets
            inside the model, then the model's output and gradients. If they differ, the swap is
            undone. Buffers, ``.grad`` and the random state are as before the call either way.
        fuse: runs chains of layers as one op, BN → ReLU (→ max pool), BN → add → ReLU, ReLU → max
            pool and Linear → ReLU, GELU or SiLU, where a forward that ``torch.fx`` can read calls
            them so: an ``nn.Sequential``'s, a ResNet block's, a function's name in it. One layer becomes the fused module and stays at its place; the forward of the
            module that calls the chain is replaced. Should a hook be put on one of the layers
            later, or anything else change that the new forward was made from, the one before runs.
            The report says of every chain what happened.
        loss_fn: turns the model's output into the scalar that ``check`` differentiates; by default
            the mean square of all floating outputs.
    Raises:
        SwapCheckError: ``check`` found a difference; carries the numbers.
        TypeError, ValueError: ``model`` is not a module; an unknown name in ``ops``.
    Warns:
        UserWarning: nothing was swapped; says why.
    """
    plan = _plan(model, ops, filter_fn, fuse)
    report = SwapReport(plan.entries, plan.fusions)
    if plan.is_empty:
        warnings.warn(_nothing_to_swap(report), stacklevel=2)
        return report
    if check is not None:
        from ._check import compare_model

        report.check, failures = compare_model(
            model, plan.chosen, check, loss_fn, plan.graphs, plan.changes
        )
        if failures:
            raise SwapCheckError(failures)
    plan.apply()
    return report


def unswap(model: nn.Module) -> int:
    """Gives every warpwright module in ``model`` its exact native class back; returns how many.

    A module whose forward was replaced for the fusion of its layers gets its own back. A module that
    was parametrized after the swap stays parametrized.

    Warns:
        UserWarning: a class that something else derived from warpwright's, as ``fully_shard`` does:
            the modules of it are left.
    """
    _check_is_module(model)
    found = sum(library.undo(model) for library in integrations.loaded())
    left: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = _below_parametrizations(module)
        native = NATIVE.get(kind) or base_of(kind)
        if native is not None:
            set_class_below(module, native)
            found += kind in NATIVE
        elif isinstance(module, (*NATIVE,)):
            left.setdefault(type(module).__name__, []).append(name or "(the model)")
    if left:
        listed = "; ".join(f"{kind}: {', '.join(names[:5])}" for kind, names in left.items())
        warnings.warn(
            f"warpwright.unswap: left classes that derive from warpwright's ({listed})",
            stacklevel=2,
        )
    return found


@contextlib.contextmanager
def unswapped(model: nn.Module) -> Iterator[None]:
    """Inside the block ``model`` is native; after it every module has the class that it came with."""
    before = {module: type(module) for module in model.modules()}
    unswap(model)
    try:
        yield
    finally:
        for module, kind in before.items():
            if type(module) is not kind:
                set_class(module, kind)


@contextlib.contextmanager
def swapped(
    model: Model,
    ops: Iterable[str] | None = None,
    filter_fn: Filter | None = None,
    *,
    fuse: bool = False,
) -> Iterator[Model]:
    """``with swapped(model):`` runs it on warpwright inside the block, native again after.

    Only what the block swapped is restored: modules that were warpwright's before stay so. A model
    that checkpoints its activations needs the backward in the block, too: a recomputation calls the
    layers as they are then.
    """
    plan = _plan(model, ops, filter_fn, fuse)
    if plan.is_empty:
        warnings.warn(_nothing_to_swap(SwapReport(plan.entries)), stacklevel=3)
    before = {module: type(module) for module in plan.chosen}
    plan.apply()
    try:
        yield model
    finally:
        for change in plan.changes:
            change.undo()
        for module, kind in before.items():
            if _below_parametrizations(module) is plan.chosen[module]:
                set_class_below(module, kind)


# What swap() intends: module -> the class that it gets.
Chosen = dict[nn.Module, type[nn.Module]]


@dataclass
class _Plan:
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


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind
    # Compiled code skips its guard on the type while the module's dict is untouched: touch it, or
    # a torch.compile'd model would go on running what it was compiled for.
    vars(module)["_warpwright_class_changed"] = True
    del vars(module)["_warpwright_class_changed"]


def _below_parametrizations(module: nn.Module) -> type[nn.Module]:
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


def _check_is_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def check_ops(ops: Iterable[str] | None, known: Iterable[str]) -> frozenset[str]:
    """``ops`` as a set, every name of it known."""
    known = tuple(known)
    if ops is None:
        return frozenset(known)
    wanted = [ops] if isinstance(ops, str) else list(ops)
    for op in wanted:
        if op not in known:
            raise ValueError(f"ops: expected names out of {', '.join(known)}; got {op!r}")
    return frozenset(wanted)


def _plan(
    model: nn.Module, ops: Iterable[str] | None, filter_fn: Filter | None, fuse: bool
) -> _Plan:
    _check_is_module(model)
    wanted = check_ops(ops, OPS)
    entries: dict[nn.Module, SwapEntry] = {}
    chosen: Chosen = {}
    parts: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if module in parts:
            entries[module] = SwapEntry(name, type_name(module), None, False, parts[module])
            continue
        op = _op_of(module)
        if op is None and (type(module) in CONTAINERS or next(module.children(), None) is not None):
            continue  # its children have entries of their own
        reason = _why_not(module, name, op, wanted, filter_fn)
        if reason is None:
            chosen[module] = MODULES[type(module)][0]
        if isinstance(module, nn.MultiheadAttention):  # it reads this child's weights itself
            parts[module.out_proj] = f"runs as a part of {type(module).__name__}"
        entries[module] = SwapEntry(name, type_name(module), op, reason is None, reason or "")
    libraries = [library.plan(model, wanted, filter_fn) for library in integrations.loaded()]
    more = [entry for library in libraries for entry in library.entries]
    changes = [change for library in libraries for change in library.changes]
    if not fuse:
        return _Plan([*entries.values(), *more], chosen, changes=changes)

    def why_not_fused(module: nn.Module) -> str | None:
        entry = entries.get(module)
        if entry is None:
            return "not a layer"
        if entry.reason not in (IS_OURS, NO_LAYER):
            return entry.reason or None
        if "forward" in vars(module):
            return REPLACED
        if entry.reason == NO_LAYER and type(module) not in KINDS:
            return entry.reason
        if entry.op is not None and entry.op not in wanted:
            return f"{entry.op} is not in ops"
        if filter_fn is not None and not filter_fn(module, entry.name):
            return FILTERED
        return None

    found = plan_fusions(model, why_not_fused, wanted)
    for module, into in found.absorbed.items():
        if entries[module].reason == NO_LAYER:
            entries[module] = replace(entries[module], reason=f"runs as a part of {into}")
    for module, kind in found.classes.items():
        chosen[module] = kind
        if kind in NATIVE:
            entry = entries[module]
            entries[module] = replace(entry, swapped=True, reason="", fused=kind.__name__)
    return _Plan([*entries.values(), *more], chosen, found.fusions, found.graphs, changes)


def _op_of(module: nn.Module) -> str | None:
    kind = type(module)
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        kind = module.cls_to_become or kind  # a lazy norm derives from another base
    return next((op for native, (_, op) in MODULES.items() if issubclass(kind, native)), None)


def type_name(module: nn.Module) -> str:
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"nn.{kind.__name__}" if name.startswith("torch.nn.modules.") else name


def _why_not(
    module: nn.Module,
    name: str,
    op: str | None,
    wanted: frozenset[str],
    filter_fn: Filter | None,
) -> str | None:
    """The first reason to leave ``module`` native; None if it is to be swapped."""
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript module, its class is compiled in"
    if op is None:
        return NO_LAYER
    if type(module) in NATIVE:
        return IS_OURS
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy, not initialised: swap after the first forward"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized, which makes it a subclass: swap before parametrizing"
    if type(module) not in MODULES:
        return f"a subclass of nn.{_native_base(module).__name__}, which may compute something else"
    if "forward" in vars(module):
        return REPLACED
    if op not in wanted:
        return f"{op} is not in ops"
    for key, tensor in (
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ):
        if tensor.is_floating_point() or tensor.is_complex():
            why = why_no_kernel(tensor)
            if why is not None:
                return f"{key}: {why}"
    if filter_fn is not None and not filter_fn(module, name):
        return FILTERED
    return None


def _native_base(module: nn.Module) -> type[nn.Module]:
    return next(native for native in MODULES if isinstance(module, native))


def _nothing_to_swap(report: SwapReport) -> str:
    if not report.entries:
        return "warpwright.swap: nothing to swap: the model has no layers"
    counts: dict[str, int] = {}
    for e in report.left:
        counts[f"{e.type}: {e.reason}"] = counts.get(f"{e.type}: {e.reason}", 0) + 1
    listed = "; ".join(f"{n} x {what}" for what, n in list(counts.items())[:5])
    return f"warpwright.swap: nothing to swap ({listed})"
