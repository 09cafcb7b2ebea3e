"""A model's own errors, as sentences before anything is measured."""

from __future__ import annotations

from typing import Any

from .._user_errors import module_of, sentence
from .runs import Workload


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
    try:
        with workload.unchanged(), workload.native():
            workload.run(workload.model)
    except Exception as error:
        raise ValueError(
            f"{what}: a native step raises {sentence(error)}{module_of(error, workload.model)}{hint}"
        ) from error
