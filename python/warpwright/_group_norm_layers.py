"""The group norm and the instance norms of :mod:`warpwright.nn`."""

from __future__ import annotations

from torch import Tensor, nn

from . import functional as F
from ._tools import Named


class GroupNorm(Named, nn.GroupNorm):
    """``torch.nn.GroupNorm`` on :func:`warpwright.functional.group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class _InstanceNorm(Named):
    """Native's ``forward`` checks the input and calls this method."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        layer: nn.InstanceNorm1d = self  # type: ignore[assignment]
        return F.instance_norm(
            input,
            layer.running_mean,
            layer.running_var,
            layer.weight,
            layer.bias,
            layer.training or not layer.track_running_stats,
            layer.momentum if layer.momentum is not None else 0.0,
            layer.eps,
        )


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` on :func:`warpwright.functional.instance_norm`."""


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` on :func:`warpwright.functional.instance_norm`."""


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` on :func:`warpwright.functional.instance_norm`."""
