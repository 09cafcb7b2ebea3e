"""What a ladder's rungs compute: operands, the exact result, the least work, and native's call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Size = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """One call. A rung gets ``(*inputs, *results)`` and writes the results."""

    extents: Size
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    native: Callable[[], Sequence[Tensor]]  # returns results of its own, or these
    exact: Callable[[], Sequence[Tensor]]  # in float64
    bytes: int  # the fewest that the operation can move
    flops: int


class Task(ABC):
    """An operation at any size. ``exact_bits``: native's bits are expected for integers."""

    op: str
    dtype: str
    direction = "fwd"
    exact_bits = True
    names: tuple[str, ...]  # of the extents
    sizes: tuple[Size, ...]  # measured
    checked: tuple[Size, ...]
    probe: Size  # tells how long a call of a large size would take

    @abstractmethod
    def draw(self, size: Size, device: str, integers_only: bool = False) -> Problem:
        """Random operands; small integers, whose sums have no rounding, for the check."""

    def work(self, size: Size) -> int:
        """Grows as the time of a simple kernel does."""
        return math.prod(size)

    def parse(self, text: str) -> Size:
        try:
            size = tuple(int(part) for part in text.split("x"))
        except ValueError:
            size = ()
        if len(size) != len(self.names):
            raise ValueError(f"{text!r}: expected {'x'.join(self.names)}")
        return size


def case_of(size: Size) -> str:
    return "x".join(map(str, size))


def integers(shape: Size, device: str, limit: int = 3) -> Tensor:
    return torch.randint(-limit, limit + 1, shape, device=device)
