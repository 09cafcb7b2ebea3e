"""Batch dimensions, folded into a dimension of the operator and taken out of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Dims = Sequence[int | None]
Rule = Callable[..., tuple[Any, Any]]


def front(x: Any, dim: int | None, samples: int) -> Any:
    """The batch dimension first; a tensor without one is expanded."""
    if x is None:
        return None
    return x.movedim(dim, 0) if dim is not None else x.expand(samples, *x.shape)


def into(x: Any, dim: int | None, samples: int, at: int) -> Any:
    """The batch dimension folded into dimension ``at`` of a sample, samples outermost."""
    if x is None:
        return None
    return front(x, dim, samples).movedim(0, at).flatten(at, at + 1)


def out_of(x: Tensor | None, samples: int, at: int) -> tuple[Tensor | None, int | None]:
    """`into` undone, and where the batch dimension then is."""
    return (None, None) if x is None else (x.unflatten(at, (samples, -1)), at)


def images(x: Tensor, dim: int | None, samples: int) -> Tensor:
    """(samples, C, H, W) of samples without N, else (samples * N, C, H, W)."""
    x = front(x, dim, samples)
    return x if x.dim() == 4 else x.flatten(0, 1)


def per_sample(y: Tensor, single: bool, samples: int) -> Tensor:
    return y if single else y.unflatten(0, (samples, -1))


def results(*pairs: tuple[Tensor | None, int | None]) -> tuple[Any, Any]:
    values, dims = zip(*pairs, strict=True)
    return values, dims


def shifted(indices: Tensor, rows: int, bad: int) -> Tensor:
    """Indices (samples, ...) into the rows of all samples; one out of range becomes ``bad``."""
    samples = indices.shape[0]
    first = torch.arange(samples, device=indices.device).mul_(rows)
    first = first.view(samples, *(1,) * (indices.dim() - 1))
    return torch.where((indices >= 0) & (indices < rows), indices + first, bad)


def check_randomness(randomness: str) -> None:
    if randomness == "error":
        raise RuntimeError(
            "vmap: called random operation while in randomness error mode. Please either use the "
            "'same' or 'different' randomness flags on vmap or perform the randomness operation out "
            "of vmap"
        )


def one_by_one(op: Any, samples: int, dims: Dims, args: Sequence[Any]) -> tuple[Any, Any]:
    """One call per sample."""
    calls = [
        op(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(args, dims, strict=True)))
        for i in range(samples)
    ]
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    stacked = [None if r[0] is None else torch.stack(r) for r in zip(*calls, strict=True)]
    return tuple(stacked), tuple(None if r is None else 0 for r in stacked)
