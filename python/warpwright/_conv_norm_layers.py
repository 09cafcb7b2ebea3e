"""The convolutions and the batch norms of :mod:`warpwright.nn`, and the two as one layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import functional as F
from ._running_statistics import RunningStatistics, normalize_convolved
from ._tools import Named


class Conv2d(Named, nn.Conv2d):
    """``torch.nn.Conv2d`` on :func:`warpwright.functional.conv2d`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding: str | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            input = nn.functional.pad(
                input, self._reversed_padding_repeated_twice, mode=self.padding_mode
            )
            padding = (0, 0)
        return F.conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight, self.bias)


class ConvTranspose2d(Named, nn.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` on :func:`warpwright.functional.conv_transpose2d`."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        layer: Any = self  # typed as a layer that may also pad by a word
        stride, padding, dilation = layer.stride, layer.padding, layer.dilation
        more = layer._output_padding(
            input, output_size, stride, padding, layer.kernel_size, 2, dilation
        )
        return F.conv_transpose2d(
            input, self.weight, self.bias, stride, padding, more, self.groups, dilation
        )


class _BatchNorm(Named, RunningStatistics):
    pass


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` on :func:`warpwright.functional.batch_norm`."""


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` on :func:`warpwright.functional.batch_norm`."""


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` on :func:`warpwright.functional.batch_norm`."""


class SyncBatchNorm(_BatchNorm, nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm``: statistics of all ranks, one collective per direction.

    It needs no GPU: native's refuses CPUs. In evaluation, or with one rank, it is batch norm.
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_non_zero_input_channels(input)
        group = self._group()
        if group is None:
            return self._normalize(input)
        from .distributed.sync_batch_norm import sync_batch_norm

        return self._normalize(input, functional=sync_batch_norm, group=group)

    def _group(self) -> Any:
        """The ranks that share the batch; None if this one needs no other."""
        distributed = torch.distributed
        if not (self.training and distributed.is_available() and distributed.is_initialized()):
            return None
        group = self.process_group or distributed.group.WORLD
        return group if distributed.get_world_size(group) > 1 else None


class BatchNormReLU2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` and the ReLU after it, as one op.

    Parameters, buffers and ``state_dict`` are those of ``nn.BatchNorm2d``; see
    :func:`warpwright.functional.batch_norm_relu`.
    """

    _functional = "batch_norm_relu"


class BatchNormAddReLU2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, the addition of a residual and the ReLU after it, as one op.

    Called with two tensors: ``module(input, residual)``. Parameters, buffers and ``state_dict`` are
    those of ``nn.BatchNorm2d``; see :func:`warpwright.functional.batch_norm_add_relu`.
    """

    _functional = "batch_norm_add_relu"

    def forward(self, input: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return self._normalize(input, residual)


class BatchNormSiLU2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` and the SiLU after it, as one op.

    Parameters, buffers and ``state_dict`` are those of ``nn.BatchNorm2d``; see
    :func:`warpwright.functional.batch_norm_silu`.
    """

    _functional = "batch_norm_silu"


class BatchNormHardswish2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` and the Hardswish after it, as one op.

    Parameters, buffers and ``state_dict`` are those of ``nn.BatchNorm2d``; see
    :func:`warpwright.functional.batch_norm_hardswish`.
    """

    _functional = "batch_norm_hardswish"


class BatchNormReLUMaxPool2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, the ReLU and the ``torch.nn.MaxPool2d`` after it, as one op.

    The arguments are those of ``nn.MaxPool2d`` after the number of features, then those of
    ``nn.BatchNorm2d``, by name. Parameters, buffers and ``state_dict`` are those of
    ``nn.BatchNorm2d``; see :func:`warpwright.functional.batch_norm_relu_max_pool2d`.
    """

    _functional = "batch_norm_relu_max_pool2d"

    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int]
    padding: int | tuple[int, int]
    dilation: int | tuple[int, int]
    ceil_mode: bool

    def __init__(
        self,
        num_features: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] | None = None,
        padding: int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        ceil_mode: bool = False,
        **batch_norm: Any,
    ) -> None:
        super().__init__(num_features, **batch_norm)
        self.kernel_size = kernel_size
        self.stride = kernel_size if stride is None else stride
        self.padding = padding
        self.dilation = dilation
        self.ceil_mode = ceil_mode

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize(input, **self._window())

    def _window(self) -> dict[str, Any]:
        return {
            "kernel_size": self.kernel_size,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "ceil_mode": self.ceil_mode,
        }

    def extra_repr(self) -> str:
        window = ", ".join(f"{name}={value}" for name, value in self._window().items())
        return f"{super().extra_repr()}, {window}"


class Conv2dBatchNorm2d(Named, nn.Module):
    """A convolution and the batch norm after it, as one op in training.

    The arguments are those of ``nn.Conv2d``, without a bias unless asked, and by name those of
    ``nn.BatchNorm2d``. The layers are children, ``conv`` and ``norm``; see
    :func:`warpwright.functional.conv2d_batch_norm`.
    """

    _after_norm = "batch_norm"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | str | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = False,
        **batch_norm: Any,
    ) -> None:
        super().__init__()
        window = (kernel_size, stride, padding, dilation, groups)
        self.conv = Conv2d(in_channels, out_channels, *window, bias)  # type: ignore[arg-type]
        self.norm = BatchNorm2d(out_channels, **batch_norm)

    def forward(self, input: Tensor) -> Tensor:
        return normalize_convolved(self.norm, self.conv, self._after_norm, input)


class Conv2dBatchNormReLU2d(Conv2dBatchNorm2d):
    """A convolution, the batch norm and the ReLU after it, as one op in training.

    As :class:`Conv2dBatchNorm2d`; see :func:`warpwright.functional.conv2d_batch_norm_relu`.
    """

    _after_norm = "batch_norm_relu"


class Conv2dBatchNormSiLU2d(Conv2dBatchNorm2d):
    """A convolution, the batch norm and the SiLU after it, as one op in training.

    As :class:`Conv2dBatchNorm2d`; see :func:`warpwright.functional.conv2d_batch_norm_silu`.
    """

    _after_norm = "batch_norm_silu"


class Conv2dBatchNormHardswish2d(Conv2dBatchNorm2d):
    """A convolution, the batch norm and the Hardswish after it, as one op in training.

    As :class:`Conv2dBatchNorm2d`; see :func:`warpwright.functional.conv2d_batch_norm_hardswish`.
    """

    _after_norm = "batch_norm_hardswish"


class Conv2dBatchNormAddReLU2d(Conv2dBatchNorm2d):
    """A convolution, batch norm, the addition of a residual and the ReLU, as one op in training.

    Called with two tensors: ``module(input, residual)``. As :class:`Conv2dBatchNorm2d`; see
    :func:`warpwright.functional.conv2d_batch_norm_add_relu`.
    """

    _after_norm = "batch_norm_add_relu"

    def forward(self, input: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return normalize_convolved(self.norm, self.conv, self._after_norm, input, residual)


class Conv2dBatchNormReLUMaxPool2d(Conv2dBatchNorm2d):
    """A convolution, the batch norm, the ReLU and the max pooling after it, as one op.

    As :class:`Conv2dBatchNorm2d`, and by name the arguments of ``nn.MaxPool2d``; see
    :func:`warpwright.functional.conv2d_batch_norm_relu_max_pool2d`.
    """

    def __init__(
        self,
        *convolution: Any,
        pool_kernel_size: int | tuple[int, int],
        pool_stride: int | tuple[int, int] | None = None,
        pool_padding: int | tuple[int, int] = 0,
        pool_dilation: int | tuple[int, int] = 1,
        ceil_mode: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*convolution, **options)
        self.pool = {
            "kernel_size": pool_kernel_size,
            "stride": pool_stride,
            "padding": pool_padding,
            "dilation": pool_dilation,
            "ceil_mode": ceil_mode,
        }

    def forward(self, input: Tensor) -> Tensor:
        after = "batch_norm_relu_max_pool2d"
        return normalize_convolved(self.norm, self.conv, after, input, **self.pool)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.pool.items())
