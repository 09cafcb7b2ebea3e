"""What DistributedDataParallel needs around a capture. FSDP2 needs nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .capture import OUTSIDE

WARM_UP = 3  # eager steps before a capture: they make state, compile, and tune
# DDP reads timers of the GPU on the host in its first ten steps, and then in every hundredth.
WARM_UP_DDP = 11
NEVER = 2**31 - 1


class Replicas:
    """The DDP wrappers of a model, if there are any."""

    def __init__(self, model: nn.Module) -> None:
        self._wrappers = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        self.warm_up = WARM_UP_DDP if self._wrappers else WARM_UP

    @property
    def why_legacy_stream(self) -> str:
        """Why a backward would use the default stream: DDP makes the nodes that accumulate gradients, and
        a node runs on the stream on which it was made."""
        if not self._wrappers:
            return OUTSIDE
        return (
            "DistributedDataParallel was made on the default stream; make it inside of "
            "`with warpwright.distributed.side_stream():`"
        )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """For warm-up and capture. DDP reads no timers afterwards, also in eager steps."""
        for wrapper in self._wrappers:
            wrapper._set_ddp_runtime_logging_sample_rate(NEVER)
        with warnings.catch_warnings():
            if self._wrappers:  # which were made on another stream, as they have to be
                warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            yield
