"""Training on several GPUs or hosts, on top of ``torch.distributed``.

DDP, FSDP2 and tensor parallelism are PyTorch's. This package adds:

- :mod:`.sharding`: our operators' rules for DTensor;
- :mod:`.sync_batch_norm`: batch norm over the batches of all ranks;
- :mod:`.tensor_parallel`: column- and row-parallel linear layers without a DTensor per call;
- :mod:`.sequence`: attention over a sequence that ranks share;
- :mod:`.failures`: errors that name the rank that failed;
- :mod:`.streams`: a stream on which DDP can be captured.

The guide is docs/distributed.md.
"""

from __future__ import annotations

from typing import Any

FAILURES = ("RankFailed", "guard")
SEQUENCE = ("context_parallel", "positions", "ring_attention", "shard", "unshard")
STREAMS = ("side_stream",)
TENSOR_PARALLEL = ("ColwiseParallel", "RowwiseParallel")


def __getattr__(name: str) -> Any:
    """Imports at the first use: a process without ranks needs none of it."""
    if name in FAILURES:
        from . import failures

        return getattr(failures, name)
    if name in SEQUENCE:
        from . import sequence

        return getattr(sequence, name)
    if name in STREAMS:
        from . import streams

        return getattr(streams, name)
    if name in TENSOR_PARALLEL:
        from . import tensor_parallel

        return getattr(tensor_parallel, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
