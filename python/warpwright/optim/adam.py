"""torch.optim.Adam and AdamW with a step of one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as native_adam
from torch.optim.optimizer import ParamsT, _get_capturable_supported_devices

from .._ops import ops
from ._step import Batch, FusedStep, scalar_on


class _AdamStep(FusedStep):
    _state_names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def _check_capture(self) -> None:
        self._accelerator_graph_capture_health_check()

    def _scales_in_step(self, group: dict[str, Any]) -> bool:
        # A skipped step must not count, but step counts on the host cannot see that.
        return super()._scales_in_step(group) and bool(group["fused"] or group["capturable"])

    def _gather(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        self._init_group(group, params, grads, [], [], [], [])  # type: ignore[attr-defined]
        return params, grads

    def _flags(self, group: dict[str, Any]) -> tuple[Any, ...]:
        return (
            group["differentiable"],
            group["amsgrad"],
            group["capturable"],
            group["fused"],
            group["foreach"],
            isinstance(group["lr"], Tensor),
        )

    def _key(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[bool, Any]:
        return False, (state["step"].device, state["step"].dtype)

    def _update(
        self,
        batch: Batch,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        clip: Tensor | None,
    ) -> None:
        group = batch.group
        device = batch.device
        steps = batch.values("step")
        on_host = steps[0].device.type == "cpu"
        if group["capturable"] and not group["fused"] and on_host:
            raise AssertionError(
                "If capturable=True, params and state_steps must be on supported devices: "
                f"{_get_capturable_supported_devices()}."
            )
        if device.type == "cuda" and on_host and found_inf is not None:
            # Steps loaded from elsewhere: they move to where the verdict is.
            for state in batch.states:
                state["step"] = state["step"].to(device)
            steps = batch.values("step")
            on_host = False
        lr, lr_tensor = scalar_on(group["lr"], device)
        betas_device = torch.device("cpu") if on_host else device
        beta1, beta1_tensor = scalar_on(group["betas"][0], betas_device)
        beta2, beta2_tensor = scalar_on(group["betas"][1], betas_device)
        ops.adam_step_(
            batch.operands(batch.params),
            batch.operands(batch.grads),
            batch.operands(batch.values("exp_avg")),
            batch.operands(batch.values("exp_avg_sq")),
            batch.operands(batch.values("max_exp_avg_sq")) if group["amsgrad"] else [],
            steps,
            self._masters(batch),
            batch.copies,
            self._counter(device),
            lr,
            lr_tensor,
            beta1,
            beta1_tensor,
            beta2,
            beta2_tensor,
            float(group["weight_decay"]),
            float(group["eps"]),
            group["decoupled_weight_decay"],
            group["maximize"],
            self.zero_grad_in_step,
            grad_scale,
            found_inf,
            clip,
        )

    def _update_native(self, batch: Batch) -> None:
        group = batch.group
        native_adam(
            batch.params,
            batch.grads,
            batch.values("exp_avg"),
            batch.values("exp_avg_sq"),
            batch.values("max_exp_avg_sq") if group["amsgrad"] else [],
            batch.values("step"),
            amsgrad=group["amsgrad"],
            has_complex=any(param.is_complex() for param in batch.params),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=group["foreach"],
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )


class Adam(_AdamStep, torch.optim.Adam):
    """`torch.optim.Adam`, one pass over memory; the extras are those of `warpwright.optim`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        zero_grad_in_step: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        weight_copies: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self._set_extras(max_norm, zero_grad_in_step, state_dtype, master_weights, weight_copies)


class AdamW(_AdamStep, torch.optim.AdamW):
    """`torch.optim.AdamW`, one pass over memory; the extras are those of `warpwright.optim`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
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
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self._set_extras(max_norm, zero_grad_in_step, state_dtype, master_weights, weight_copies)
