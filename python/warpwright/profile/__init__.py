"""A model's training step, op by op: native beside warpwright and torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .summary import ProfileReport

__all__ = ["profile"]


def profile(
    model: nn.Module,
    inputs: Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any],
    target: Any = None,
    step: Callable[[Any], Any] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: torch.dtype | None = None,
    runs: Iterable[str] | None = None,
    out: str | Path | None = None,
    steps: int = 5,
    seconds: float = 1.0,
    title: str | None = None,
) -> ProfileReport:
    """Runs one training step natively, swapped, swapped and fused, and compiled, and compares.

    The model, the optimizer, gradients and the random state are afterwards what they were; a model
    that came swapped is swapped again.

    Args:
        model: any module, native or swapped; in training mode, or in evaluation mode for inference.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        target: what ``loss`` compares the output with.
        step: ``step(model)`` does a whole step itself; then ``target``, ``loss`` and ``optimizer``
            only serve the comparison and the restoring.
        loss: ``loss(output, target)``; cross-entropy where only a target is given, the mean square
            of the output where neither is.
        optimizer: steps after each backward, if given.
        autocast: the dtype of autocast; None leaves it off.
        runs: out of ``native``, ``swapped``, ``fused``, ``compiled``; the default leaves
            ``compiled`` out on the CPU.
        out: a folder for the page (report.html), pictures, CSV, JSON and Chrome traces. Needs
            ``warpwright[bench]``.
        steps: how many steps are traced.
        seconds: timing of each run takes about this long.
    Returns:
        The numbers; ``print`` shows a summary.
    Raises:
        ValueError: an unknown name in ``runs``.
        TypeError: ``model`` is not a module.
    """
    from ..bench.records import ceilings, environment
    from . import runs as running
    from .summary import summarise

    workload = running.Workload(model, inputs, target, loss, optimizer, autocast, step)
    device = workload.device
    names = tuple(dict.fromkeys(["native", *(runs or running.default_runs(device))]))
    for name in names:
        if name not in running.RUNS:
            raise ValueError(f"runs: expected names out of {', '.join(running.RUNS)}; got {name!r}")
    folder = Path(out) if out is not None else None
    if folder is not None:
        from . import page  # says which package is missing before anything is measured
    where = {**environment(device), **ceilings(device)}
    with workload.native():
        measured = running.time_runs(workload, names, seconds)
        for run in measured.values():
            if run.error is None:
                running.trace_run(workload, run, folder, steps)
        report = summarise(
            title or type(model).__name__,
            workload,
            measured,
            running.count_work(workload),
            where,
            *running.check_modules(workload, "fused" in names),
        )
    if folder is not None:
        page.write_all(report, folder)
    return report
