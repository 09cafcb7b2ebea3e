"""What all batch norm layers share: which statistics a call uses, and which it updates."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import functional as F
from .functional._conv_norm import takes_statistics, writes_maxima_alone

_noted = threading.local()


@contextmanager
def batches_counted_together() -> Iterator[None]:
    """Counts the batches of the layers that run inside at the end: one kernel in place of many."""
    _noted.counters = counters = Counter[Tensor]()
    try:
        yield
    finally:
        del _noted.counters
        for count in set(counters.values()):
            torch._foreach_add_([c for c, seen in counters.items() if seen == count], count)


def _count_batch(counter: Tensor) -> None:
    together = None if torch.compiler.is_compiling() else getattr(_noted, "counters", None)
    if together is None:
        counter.add_(1)
    else:
        together[counter] += 1


class RunningStatistics(nn.modules.batchnorm._BatchNorm):
    """Calls a function with batch_norm's arguments, as the layer's state and options want it."""

    # The name of a functional with batch_norm's arguments, further tensors after the input.
    _functional: ClassVar[str] = "batch_norm"

    def forward(self, input: Tensor) -> Tensor:
        return self._normalize(input)

    def _normalize(
        self,
        *tensors: Tensor,
        functional: str | Callable[..., Tensor] | None = None,
        left_out: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Calls ``functional``, by default the class's own, with ``options`` as further keywords.

        ``left_out``: the bias that the convolution before did not add (``_leaves_out_bias``).
        """
        if functional is None:  # Dynamo cannot take a nested function's truth value
            functional = self._functional
        function = getattr(F, functional) if isinstance(functional, str) else functional
        self._check_input_dim(tensors[0])
        tracks = self.training and self.track_running_stats
        counter = self.num_batches_tracked if tracks else None
        if counter is not None and self.momentum is not None:
            _count_batch(counter)
        # Running statistics count only where they are updated or used to normalise.
        use_running = not self.training or self.track_running_stats
        running_mean = self.running_mean if use_running else None
        running_var = self.running_var if use_running else None
        batch_statistics = self.training or (running_mean is None and running_var is None)
        if counter is not None and self.momentum is None:
            return self._forward_cumulative(function, *tensors, **options)
        momentum = 0.0 if self.momentum is None else self.momentum
        bias: Tensor | None = self.bias
        if left_out is not None and bias is not None:
            bias = torch.add(bias, left_out, alpha=0)  # its gradient is zero, not None
        output = function(
            *tensors,
            running_mean,
            running_var,
            self.weight,
            bias,
            batch_statistics,
            momentum,
            self.eps,
            **options,
        )
        if left_out is not None and running_mean is not None:
            with torch.no_grad():
                running_mean.add_(left_out, alpha=momentum)
        return output

    def _forward_cumulative(
        self, function: Callable[..., Tensor], *tensors: Tensor, **options: Any
    ) -> Tensor:
        """Running statistics as plain averages over the batches: a step of 1/num_batches_tracked.

        Native reads the counter on the host. Here it stays on the device: nothing waits for the GPU
        or breaks a graph. Batch norm with momentum 1 writes the batch's statistics into scratch
        buffers, which then enter the averages.
        """
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        running = [r for r in (self.running_mean, self.running_var) if r is not None]
        batch = [torch.zeros_like(r) for r in running]
        scratch = iter(batch)
        output = function(
            *tensors,
            None if self.running_mean is None else next(scratch),
            None if self.running_var is None else next(scratch),
            *(self.weight, self.bias, True, 1.0, self.eps),
            **options,
        )
        step = self.num_batches_tracked.double().reciprocal()
        with torch.no_grad():
            for average, value in zip(running, batch, strict=True):
                average.copy_(average * (1 - step) + value * step)
        return output


# Of a pool after a batch norm, and what conv2d_batch_norm_relu_max_pool2d calls them.
_POOL = {
    "kernel_size": "pool_kernel_size",
    "stride": "pool_stride",
    "padding": "pool_padding",
    "dilation": "pool_dilation",
    "ceil_mode": "ceil_mode",
}


def runs_as_one(
    norm: RunningStatistics, conv: nn.Conv2d, input: Tensor, *residual: Tensor, **pool: Any
) -> bool:
    """Whether one op should run the convolution and the batch norm after it."""
    if not (norm.training or norm.running_mean is None) or conv.padding_mode != "zeros":
        return False
    windows = (conv.stride, conv.padding, conv.dilation)
    if pool:
        of_pool = tuple(pool[name] for name in _POOL)
        return conv.groups == 1 and writes_maxima_alone(input, conv.weight, *windows, of_pool)
    return takes_statistics(input, conv.weight, *windows, *residual)


def _leaves_out_bias(norm: RunningStatistics, conv: nn.Conv2d) -> bool:
    """Whether the convolution need not add its bias, because the batch's mean takes it away again.

    Only the running mean has it. The bias' gradient is zero: the sum of what a batch norm returns
    over the batch. So no kernel reads the convolution's gradient to sum it.
    """
    return (
        norm.training
        and conv.bias is not None
        and norm.bias is not None
        and conv.bias.dtype == norm.bias.dtype
        and norm.momentum is not None
    )


def convolve_and_normalize(
    norm: RunningStatistics, conv: nn.Conv2d, input: Tensor, *residual: Tensor, **options: Any
) -> Tensor:
    """``norm._normalize(conv(input), ...)``."""
    if not _leaves_out_bias(norm, conv):
        return norm._normalize(conv(input), *residual, **options)
    convolved = conv._conv_forward(input, conv.weight, None)
    return norm._normalize(convolved, *residual, left_out=conv.bias, **options)


def normalize_convolved(
    norm: RunningStatistics,
    conv: nn.Conv2d,
    after: str,
    input: Tensor,
    *residual: Tensor,
    **pool: Any,
) -> Tensor:
    """Calls ``norm`` as the functional ``after`` on what ``conv`` makes of ``input``.

    In one op if ``runs_as_one``, else one layer after the other. ``pool``: the further arguments of
    ``after`` if it ends in a pool.
    """
    if not runs_as_one(norm, conv, input, *residual, **pool):
        return convolve_and_normalize(norm, conv, input, *residual, functional=after, **pool)
    return normalize_as_one(norm, conv, after, input, *residual, **pool)


def normalize_as_one(
    norm: RunningStatistics,
    conv: nn.Conv2d,
    after: str,
    input: Tensor,
    *residual: Tensor,
    **pool: Any,
) -> Tensor:
    """`normalize_convolved` of a call that ``runs_as_one``."""

    def fused(input: Tensor, *rest: Any) -> Tensor:
        *added, running_mean, running_var, weight, bias, training, momentum, eps = rest
        return getattr(F, f"conv2d_{after}")(  # type: ignore[no-any-return]
            input,
            *added,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
            **{_POOL[name]: value for name, value in pool.items()},
            running_mean=running_mean,
            running_var=running_var,
            norm_weight=weight,
            norm_bias=bias,
            training=training,
            momentum=momentum,
            eps=eps,
        )

    return norm._normalize(input, *residual, functional=fused)
