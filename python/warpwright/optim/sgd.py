"""torch.optim.SGD with a step of one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd as native_sgd

from .._ops import ops
from ._step import Batch, FusedStep, scalar_on


class SGD(FusedStep, torch.optim.SGD):
    """`torch.optim.SGD` in one pass over memory. :mod:`warpwright.optim` describes the extras."""

    _state_names = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        zero_grad_in_step: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        weight_copies: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self._set_extras(max_norm, zero_grad_in_step, state_dtype, master_weights, weight_copies)

    def _gather(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        self._init_group(group, params, grads, [])
        return params, grads

    def _has_state(self, group: dict[str, Any]) -> bool:
        return group["momentum"] != 0

    def _flags(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return group["differentiable"], group["momentum"] != 0

    def _key(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[bool, Any]:
        return group["momentum"] != 0 and state.get("momentum_buffer") is None, None

    def _new_buffers(self, batch: Batch, found_inf: Tensor | None) -> bool:
        """Buffers for the first step; false if that step must be skipped, so that none exist."""
        create = torch.empty_like
        if found_inf is not None:
            # A skipped first step leaves zeros, and momentum * 0 + g is the first step's g. With
            # dampening it is not: one wait for the verdict, in the first step only.
            if batch.group["dampening"] != 0 and bool(found_inf):
                return False
            create = torch.zeros_like
        for param, state in zip(batch.params, batch.states, strict=True):
            dtype = torch.float32 if self._wants_fp32_state(param) else param.dtype
            state["momentum_buffer"] = create(param, dtype=dtype, requires_grad=False)
        return True

    def _update(
        self,
        batch: Batch,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip: Tensor | None,
    ) -> None:
        group = batch.group
        momentum = float(group["momentum"])
        buffers: list[Tensor] = []
        if momentum != 0:
            if batch.first_step and not self._new_buffers(batch, found_inf):
                if self.zero_grad_in_step:
                    torch._foreach_zero_(batch.grads)
                return
            buffers = batch.values("momentum_buffer")
        lr, lr_tensor = scalar_on(group["lr"], batch.device)
        ops.sgd_step_(
            batch.operands(batch.params),
            batch.operands(batch.grads),
            batch.operands(buffers),
            self._masters(batch),
            batch.copies,
            lr,
            lr_tensor,
            momentum,
            float(group["dampening"]),
            float(group["weight_decay"]),
            group["nesterov"],
            group["maximize"],
            batch.first_step,
            self.zero_grad_in_step,
            grad_scale,
            found_inf,
            clip,
        )

    def _update_native(self, batch: Batch) -> None:
        group = batch.group
        buffers = [state.get("momentum_buffer") for state in batch.states]
        native_sgd(
            batch.params,
            batch.grads,
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            has_sparse_grad=any(grad.is_sparse for grad in batch.grads),
            foreach=group["foreach"],
            fused=group["fused"],
        )
        if group["momentum"] != 0:
            for state, buffer in zip(batch.states, buffers, strict=True):
                state["momentum_buffer"] = buffer
