"""A model's own errors, as sentences before anything is measured."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._arguments import shown
from .._user_errors import kind_of, module_of, require_function, sentence
from ..swap.plan import check_is_module
from .runs import Workload

OPTIMIZER = ("step", "zero_grad", "state_dict", "load_state_dict")


def require_types(
    model: Any,
    inputs: Any,
    target: Any,
    step: Any,
    loss: Any,
    optimizer: Any,
    runs: Any,
    out: Any,
    steps: Any,
    seconds: Any,
) -> None:
    """The arguments of :func:`warpwright.profile`, before anything runs."""
    check_is_module(model)
    if not isinstance(inputs, (Tensor, tuple, list, Mapping)):
        raise TypeError(
            "inputs: expected the model's inputs as a tensor, a tuple of arguments or a dict of keyword "
            f"arguments, got {kind_of(inputs)}"
        )
    require_function("step", step, "model", optional=True)
    taken = ("output",) if target is None else ("output", "target")
    require_function("loss", loss, *taken, optional=True)
    # A wrapper need not derive from torch's class.
    if isinstance(optimizer, type) or not (
        optimizer is None or all(hasattr(optimizer, name) for name in OPTIMIZER)
    ):
        raise TypeError(
            f"optimizer: expected a torch.optim.Optimizer or None, got {kind_of(optimizer)}"
        )
    if runs is not None and (isinstance(runs, Tensor) or not isinstance(runs, Iterable)):
        raise TypeError(f"runs: expected an iterable of names or None, got {kind_of(runs)}")
    if out is not None:
        if not isinstance(out, (str, os.PathLike)):
            raise TypeError(f"out: expected the path of a folder or None, got {kind_of(out)}")
        if Path(out).is_file():
            raise NotADirectoryError(f"out: expected a folder, got the file {out}")
    if not isinstance(steps, numbers.Integral) or int(steps) < 1:
        raise ValueError(f"steps: expected an integer of at least 1, got {shown(steps)}")
    if not (isinstance(seconds, numbers.Real) and float(seconds) > 0):
        raise ValueError(f"seconds: expected a positive number, got {shown(seconds)}")


def require_step(what: str, arguments: dict[str, Any], hint: str = "") -> None:
    """Runs one native step, so that a model's own error is a sentence and no measurement is in vain.

    ``hint``: what the error says last.

    Raises:
        ValueError: says what the step raised, and in which module.
    """
    keys = ("inputs", "target", "loss", "optimizer", "autocast", "step")
    unknown = sorted(arguments.keys() - {"model", *keys})
    if unknown:
        raise ValueError(
            f"{what}: expected a dict with model, {', '.join(keys)}; got {', '.join(unknown)} too"
        )
    workload = Workload(arguments["model"], **{k: arguments.get(k) for k in keys})
    require_native_step(what, workload, hint)


def require_native_step(what: str, workload: Workload, hint: str = "") -> None:
    """Runs one native step. Running out of memory is raised as it is."""
    try:
        with workload.unchanged(), workload.native():
            workload.run(workload.model)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{what}: a native step raises {sentence(error)}{module_of(error, workload.model)}{hint}"
        ) from error
