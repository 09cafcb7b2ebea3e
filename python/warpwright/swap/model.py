"""Runs an existing model on warpwright: in place, reversible, with a report and a check.

A swap changes the ``__class__`` of a module from the exact native type to the subclass in
:mod:`warpwright.nn`. It copies and rebuilds nothing: parameters, buffers, hooks, optimizers, DDP
wrappers, shared modules and ``state_dict`` keys stay as they are. With ``fuse=True`` chains of layers
run as one op; :mod:`warpwright.swap.fuse` explains how.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

from .. import integrations
from .._user_errors import require_function
from .advice import layout_advice
from .blocks import base_of
from .classes import NATIVE_LAYERS, below_parametrizations, set_class, set_class_below
from .plan import check_is_module, plan_swap
from .report import SwapCheckError, SwapReport, nothing_to_swap
from .selection import Exclude, Filter

Model = TypeVar("Model", bound=nn.Module)


def swap(
    model: nn.Module,
    ops: Iterable[str] | None = None,
    filter_fn: Filter | None = None,
    check: Any = None,
    *,
    exclude: Exclude | None = None,
    fuse: bool = False,
    loss_fn: Callable[[Any], Tensor] | None = None,
    dry_run: bool = False,
) -> SwapReport:
    """Runs ``model``'s layers on warpwright's kernels, in place.

    Args:
        model: any module. Layers of ``torch.nn`` that warpwright has a layer for are swapped, such as
            ``nn.Conv2d``, ``nn.Linear``, ``nn.LayerNorm``, ``nn.Embedding`` and
            ``nn.MultiheadAttention`` (with its projections): instances of exactly these classes. So
            are layers that :func:`register_layer` added. Of transformers' models norms, ``Conv1D``,
            attention with its rotary embedding, and the head with its loss are swapped, too
            (docs/integrations.md). For every other module the report says why it was left.
        ops: only these functionals, e.g. ``{"conv2d", "batch_norm"}``; None means all.
        filter_fn: called with (module, name); False leaves the module native.
        check: inputs for the model: a tensor, a tuple of arguments or a dict of keyword arguments.
            The native and the swapped model run forward and backward from the same state and are
            compared by the error rule of :mod:`warpwright.testing`. First each swapped module, on
            its inputs inside the model; then the model's output and gradients. A difference undoes
            the swap. The call restores buffers, ``.grad`` and the random state.
        exclude: what stays native, with everything inside of it: names as in ``model.named_modules()``, globs
            over names (``"layer1.*"``, ``"*.downsample"``) and module classes with their subclasses. One
            of them or several.
        fuse: run chains of layers as one op: BN → ReLU (→ max pool), SiLU or Hardswish, BN → add →
            ReLU, ReLU → max pool, and Linear → ReLU, GELU or SiLU (→ Linear). Under autocast norms
            of known residual blocks write the dtype of the products that read them, and add before
            they normalise. ``F.scaled_dot_product_attention`` runs as ours. ``torch.fx`` must be able
            to read the forward that calls them, such as that of an ``nn.Sequential`` or a ResNet
            block. One layer becomes the fused module and keeps its place; the calling module gets a
            generated forward. If anything changes that this forward was made from, such as a new hook
            on a layer, the original forward runs. The report names every chain and its result.
        loss_fn: turns the model's output into the scalar that ``check`` differentiates; by default
            the mean square of all floating outputs.
        dry_run: change nothing; the report says what would be swapped. Not with ``check``.
    Returns:
        An entry per module and, with ``fuse``, per chain; and advice on the memory format.
    Raises:
        SwapCheckError: ``check`` found a difference; carries the numbers.
        TypeError: ``model`` is no module, ``ops`` is no iterable, ``exclude`` has something else than
            names and classes, ``check`` is no tensor, tuple or dict, ``loss_fn`` or ``filter_fn`` can't
            be called so, or ``loss_fn`` returns no tensor.
        ValueError: ``ops`` has an unknown name, a name or glob of ``exclude`` matches no module,
            ``dry_run`` comes with ``check``, or the native model raises on ``check``.
    Warns:
        UserWarning: nothing was swapped; says why.
    """
    if dry_run and check is not None:
        raise ValueError(
            "dry_run: expected False together with check, which swaps the model; got True"
        )
    require_function("loss_fn", loss_fn, "output", words="the model's output", optional=True)
    plan = plan_swap(model, ops, filter_fn, exclude, fuse)
    advice = layout_advice(model)
    report = SwapReport(plan.entries, plan.fusions, dry_run=dry_run, advice=advice)
    if dry_run:
        return report
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
    """Gives every warpwright module in ``model`` its exact native class back.

    A module with a generated forward gets its own forward back. A module that was parametrized after
    the swap stays parametrized.

    Returns:
        How many layers were swapped back.
    Raises:
        TypeError: ``model`` is no module.
    Warns:
        UserWarning: modules were left whose class something else derived from warpwright's, as
            ``fully_shard`` does.
    """
    check_is_module(model)
    found = sum(library.undo(model) for library in integrations.loaded())
    left: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        kind = below_parametrizations(module)
        native = NATIVE_LAYERS.get(kind) or base_of(kind)
        if native is not None:
            set_class_below(module, native)
            found += kind in NATIVE_LAYERS
        elif isinstance(module, (*NATIVE_LAYERS,)):
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
    """Inside the block ``model`` is native; afterwards every module has its previous class."""
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
    exclude: Exclude | None = None,
    fuse: bool = False,
) -> Iterator[Model]:
    """``with swapped(model):`` runs the model on warpwright inside the block and natively afterwards.

    The block restores only the modules that it swapped. If the model checkpoints its activations,
    the backward must run inside the block too: a recomputation calls the layers as they are then.

    The arguments and errors are :func:`swap`'s.
    """
    plan = plan_swap(model, ops, filter_fn, exclude, fuse)
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
