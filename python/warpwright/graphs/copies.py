"""The optimizer's 16-bit copies of weights, which a graph may read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _C
from ..optim._step import FusedStep


class WeightCopies:
    """Brings the copies up to date before a replay, which can't look at version counters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer if isinstance(optimizer, FusedStep) else None
        self._versions: dict[Tensor, int] = {}

    def refresh(self) -> None:
        """Casts the weights again that something else than a replay has written."""
        if self._optimizer is None:
            return
        for param, copy in self._optimizer._copied():
            if self._versions.get(param) != param._version:
                copy.copy_(param.detach())
                self._versions[param] = param._version


@contextlib.contextmanager
def read_in_capture() -> Iterator[None]:
    """Products that are captured meanwhile may read copies."""
    before = _C.allow_weight_copies_in_capture(True)
    try:
        yield
    finally:
        _C.allow_weight_copies_in_capture(before)
