"""Runs an existing model on warpwright: in place, reversible, with a report and a check.

A module is swapped by changing its ``__class__`` from the exact native type to the subclass in
:mod:`warpwright.nn`. Nothing is copied or rebuilt: parameters, buffers, hooks, optimizers that hold
the parameters, DDP wrappers, shared modules and ``state_dict`` keys all stay what they were. With
``fuse=True`` chains of layers run as one op; :mod:`warpwright.swap.fuse` has how.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from .. import integrations
from .blocks import base_of
from .classes import NATIVE, below_parametrizations, set_class, set_class_below
from .plan import Filter, check_is_module, plan_swap
from .report import SwapCheckError, SwapReport, nothing_to_swap

Model = TypeVar("Model", bound=nn.Module)


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
    plan = plan_swap(model, ops, filter_fn, fuse)
    report = SwapReport(plan.entries, plan.fusions)
    if plan.is_empty:
        warnings.warn(nothing_to_swap(report), stacklevel=2)
        return report
    if check is not None:
        from .check import compare_model

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
    check_is_module(model)
    found = sum(library.undo(model) for library in integrations.loaded())
    left: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = below_parametrizations(module)
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
    plan = plan_swap(model, ops, filter_fn, fuse)
    if plan.is_empty:
        warnings.warn(nothing_to_swap(SwapReport(plan.entries)), stacklevel=3)
    before = {module: type(module) for module in plan.chosen}
    plan.apply()
    try:
        yield model
    finally:
        for change in plan.changes:
            change.undo()
        for module, kind in before.items():
            if below_parametrizations(module) is plan.chosen[module]:
                set_class_below(module, kind)
