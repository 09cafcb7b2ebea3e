"""The losses of :mod:`warpwright.nn`, and the one that ends in a linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import functional as F
from ._tools import Named


class CrossEntropyLoss(Named, nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` on :func:`warpwright.functional.cross_entropy`.

    The extra keyword arguments are that function's. They are class attributes until the constructor
    sets them, so a swapped module has none of its own.
    """

    z_loss: float = 0.0
    softcap: float = 0.0
    return_lse: bool = False
    return_argmax: bool = False
    inplace_backward: bool = False

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        return_lse: bool = False,
        return_argmax: bool = False,
        inplace_backward: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss = z_loss
        self.softcap = softcap
        self.return_lse = return_lse
        self.return_argmax = return_argmax
        self.inplace_backward = inplace_backward

    def forward(self, input: Tensor, target: Tensor) -> Any:
        return F.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            return_lse=self.return_lse,
            return_argmax=self.return_argmax,
            inplace_backward=self.inplace_backward,
        )


class LinearCrossEntropy(Named, nn.Linear):
    """A linear layer and its cross entropy as one op: ``forward(input, target)`` is the loss.

    ``weight`` and ``bias`` are ``torch.nn.Linear``'s, by name, shape and initial values; the other
    arguments are :func:`warpwright.functional.linear_cross_entropy`'s. ``class_weight`` is a
    buffer.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        class_weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        return_lse: bool = False,
        return_argmax: bool = False,
        chunk_rows: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.register_buffer("class_weight", class_weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.return_lse = return_lse
        self.return_argmax = return_argmax
        self.chunk_rows = chunk_rows

    def forward(self, input: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        return F.linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            class_weight=self.class_weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            return_lse=self.return_lse,
            return_argmax=self.return_argmax,
            chunk_rows=self.chunk_rows,
        )
