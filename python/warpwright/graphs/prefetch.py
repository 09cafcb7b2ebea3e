"""The next batch on its way to the GPU while a step runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def prefetched(loader: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches of ``loader`` on ``device``. On a CPU they pass through."""
    if device.type != "cuda":
        yield from loader
        return
    stream = torch.cuda.Stream(device)

    def send(batch: Any) -> Any:
        with torch.cuda.stream(stream):
            return tree_map(
                lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, batch
            )

    batches = iter(loader)
    try:
        following = send(next(batches))
    except StopIteration:
        return
    while True:
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)  # for this batch; the next copy starts after this line
        batch = following
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                leaf.record_stream(current)
        try:
            following = send(next(batches))
        except StopIteration:
            yield batch
            return
        yield batch
