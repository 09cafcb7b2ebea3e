"""A training step, as a user would write it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from .._running_statistics import batches_counted_together
from ..optim._shards import local
from .state import changed_tensors

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Phase:
    """The place of a batch among those whose gradients add up to one step of the optimizer."""

    first: bool
    last: bool


class Body:
    """The step as a user would write it."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        autocast: torch.dtype | None,
        scaler: Any,
        clip_grad_norm: float | None,
        accumulate: int,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.autocast, self.clip_grad_norm = autocast, clip_grad_norm
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.accumulate = accumulate
        self.params = [p for group in optimizer.param_groups for p in group["params"]]
        self.device = _device_of(self.params)
        self.grad_norm: Tensor | None = None
        # The gradients that all graphs add into, and that none owns; with accumulate > 1.
        self.sums: list[Tensor | None] | None = None
        last = accumulate - 1
        self.phases = [Phase(i == 0, i == last) for i in range(accumulate)]

    def __call__(self, batch: tuple[Any, ...], phase: Phase) -> Any:
        if phase.first:
            self._clear_gradients()
        else:
            self._point_to_sums()
        with self._exchange(phase), batches_counted_together():
            result = self._gradients(*batch)
        if phase.last:
            self._update()
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)

    def _exchange(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        """DDP adds the ranks' gradients in the last phase alone, and sends buffers in the first.

        It sends them after a forward that was not under ``no_sync``. A capture runs each phase twice, so
        the forward before is not always that of the phase before.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        self.model.require_forward_param_sync = phase.first
        return contextlib.nullcontext() if phase.last else self.model.no_sync()

    def _gradients(self, inputs: Any, *targets: Any) -> Any:
        """Forward and backward; what ``loss`` has returned."""
        with torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        ):
            if isinstance(inputs, dict):
                output = self.model(**inputs)
            elif isinstance(inputs, (tuple, list)):
                output = self.model(*inputs)
            else:
                output = self.model(inputs)
            result = self.loss(output, *targets)
        value = result[0] if isinstance(result, (tuple, list)) else result
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"loss: expected a tensor of one element, got {got}")
        if self.accumulate > 1:
            value = value / self.accumulate
        (value if self.scaler is None else self.scaler.scale(value)).backward()
        return result

    def whole(self, batch: tuple[Any, ...]) -> Any:
        """All phases with the same batch; the result of the last."""
        for phase in self.phases:
            result = self(batch, phase)
        return result

    def _clear_gradients(self) -> None:
        if self.sums is None:
            self.optimizer.zero_grad(set_to_none=True)
            return
        self._point_to_sums()
        torch._foreach_zero_([total for total in self.sums if total is not None])

    def _point_to_sums(self) -> None:
        """DDP's buckets take the place of gradients in the last phase."""
        if self.sums is None:
            return
        for param, total in zip(self.params, self.sums, strict=True):
            param.grad = total

    def _update(self) -> None:
        if self.clip_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            self.grad_norm = nn.utils.clip_grad_norm_(self.params, self.clip_grad_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def scaling(self) -> list[Tensor]:
        """The scaler's tensors."""
        if self.scaler is None:
            return []
        if self.scaler._scale is None:
            self.scaler._lazy_init_scale_growth_tracker(self.device)
        return [self.scaler._scale, self.scaler._growth_tracker]

    def generators(self) -> list[torch.Generator]:
        """Those that are attributes of the model's layers, on the device."""
        values = [v for m in self.model.modules() for v in vars(m).values()]
        found = [v for v in values if isinstance(v, torch.Generator)]
        return [g for g in found if g.device.type == self.device.type]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers that a step may change, by name."""
        found = changed_tensors([m for m in (self.model, self.loss) if isinstance(m, nn.Module)])
        known = {id(t) for t in found.values()}
        more = (p for p in map(local, self.params) if id(p) not in known)
        return {**found, **{f"parameter {i} of the optimizer": p for i, p in enumerate(more)}}


def _device_of(params: list[Tensor]) -> torch.device:
    devices = {p.device for p in params}
    if len(devices) != 1:
        raise ValueError(
            f"optimizer: expected parameters on one device, got {sorted(map(str, devices)) or 'none'}"
        )
    return devices.pop()
