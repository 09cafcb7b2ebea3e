"""A model's training step, op by op: native compared with warpwright and torch.compile."""

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
    """Runs one training step natively, swapped, swapped and fused, and compiled, and compares them.

    Afterwards the model, the optimizer, gradients and the random state are restored. A model that was
    swapped is swapped again.

    Args:
        model: any module, native or swapped; in training mode, or in evaluation mode for inference.
        inputs: a tensor, a tuple of arguments or a dict of keyword arguments.
        target: the second argument of ``loss``.
        step: ``step(model)`` runs a whole step; ``target``, ``loss`` and ``optimizer`` then only
            serve the comparison and the restoring.
        loss: ``loss(output, target)``; by default cross entropy with a target, and the mean square
            of the output without one.
        optimizer: if given, steps after each backward.
        autocast: the dtype of autocast; None leaves it off.
        runs: any of ``native``, ``swapped``, ``fused``, ``compiled``; the default leaves
            ``compiled`` out on the CPU.
        out: a folder for the page (report.html), pictures, CSV, JSON and Chrome traces. Needs
            ``warpwright[pages]``.
        steps: number of traced steps.
        seconds: approximate measuring time per run.
        title: of the page.
    Every rank of a program with ``torch.distributed`` makes the same call, for example with a model in
    ``DistributedDataParallel``. Rank 0 writes, and the page also has communication and compute on one
    time axis.

    Returns:
        The numbers; ``print`` shows a summary.
    Raises:
        ValueError: ``runs`` has an unknown name, ``steps`` or ``seconds`` is not positive, or a native
            step raises; the message says in which module.
        TypeError: another argument is not of the kind above.
    """
    if isinstance(runs, str):
        raise TypeError(f"runs: expected an iterable of names, got the string {runs!r}")
    if autocast is not None and not isinstance(autocast, torch.dtype):
        raise TypeError(f"autocast: expected a torch.dtype or None, got {autocast!r}")
    from .mistakes import require_native_step, require_types

    require_types(model, inputs, target, step, loss, optimizer, runs, out, steps, seconds)
    from ..bench.records import ceilings, environment
    from . import ranks
    from . import runs as running
    from .summary import summarise

    workload = running.Workload(model, inputs, target, loss, optimizer, autocast, step)
    device = workload.device
    names = tuple(dict.fromkeys(["native", *(runs or running.default_runs(device))]))
    for name in names:
        if name not in running.RUNS:
            raise ValueError(f"runs: expected names out of {', '.join(running.RUNS)}; got {name!r}")
    folder = Path(out) if out is not None and ranks.is_first() else None
    if folder is not None:
        from . import page  # says which package is missing before anything is measured
    require_native_step("profile", workload)
    where = {**environment(device), **ceilings(device)}
    if ranks.count() > 1:
        where["ranks"] = ranks.count()
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
        if workload.trains and workload.loss is None and step is None:
            report.notes.append("loss: the mean square of the output; a target gives cross entropy")
        if report.ours is not None:
            report.layouts = running.time_layouts(workload, report.ours["name"], seconds)
    if folder is not None:
        page.write_all(report, folder)
    return report
