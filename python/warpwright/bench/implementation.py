"""A peer's form of a case: callables to time, and results to compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Call = Callable[[], object]


class Missing(Exception):
    """The peer cannot run on this machine or does not have this case. The message says why."""


@dataclass
class Implementation:
    """`calls` has a callable per pass; `results(cotangent)` gives the output and the gradients."""

    calls: dict[str, Call]
    results: Callable[[Tensor], tuple[Tensor, list[Tensor | None]]]
