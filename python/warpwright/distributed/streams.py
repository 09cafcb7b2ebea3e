"""A stream for `DistributedDataParallel`, so that a CUDA graph can hold its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def side_stream(device: torch.device | None = None) -> Iterator[None]:
    """Work inside of the block runs on a new stream, after what the current stream has. The current
    stream then waits for it.

    ``with side_stream(): model = DistributedDataParallel(model)``: the gradients are then accumulated on that
    stream. On the default stream, no CUDA graph could hold that work.

    Args:
        device: a GPU; None is the current one. On a CPU, or without a GPU, the block runs as it is.
    """
    is_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    if not is_gpu:
        yield
        return
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)
