"""The capture itself, and what the optimizer needs for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .watch import CaptureError, Watch, no_draws_on_the_host

PLAIN = (bool, int, float, str, type(None))
OUTSIDE = "a tensor outside of it leads to a parameter: delete or detach it"
# What schedulers keep in a group; no step reads it.
UNUSED = {"params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


def record(
    step: Callable[[], Any],
    *,
    stream: Any,
    pool: Any = None,
    generators: Sequence[torch.Generator] = (),
    watch: Watch | None = None,
    why_legacy_stream: str = OUTSIDE,
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """``step`` as a CUDA graph, and its result. Nothing runs; the caller has warmed the step up.

    Args:
        stream: the stream of the warm-up.
        pool: may be shared by graphs that never run at the same time.
        generators: besides the default one, those that the step draws from.
        watch: raises by name for what the graph can't hold. Under a dispatch mode torch and our ops
            take the paths that show every op, such as attention by its formula. So it watches a
            capture that is dropped.
        why_legacy_stream: the reason, if work of the backward would run on the default stream.
    Raises:
        CaptureError: the step can't be captured.
    """
    pool = pool if pool is not None else torch.cuda.graph_pool_handle()
    capture = functools.partial(_capture, step, stream, pool, generators, why_legacy_stream)
    # Its graph keeps the pool alive. Its result goes, so that the second capture takes its memory.
    rehearsed = capture(watch)[0] if watch is not None else None
    graph, result = capture(contextlib.nullcontext())
    del rehearsed
    return graph, result


def _capture(
    step: Callable[[], Any],
    stream: Any,
    pool: Any,
    generators: Sequence[torch.Generator],
    why_legacy_stream: str,
    watch: contextlib.AbstractContextManager[Any],
) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        # The outer block: torch's own does not leave its stream if the capture ends badly.
        # thread_local: a loader's thread may pin memory meanwhile.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
            watch,
            no_draws_on_the_host(),
        ):
            result = step()
    except CaptureError:
        raise
    except RuntimeError as error:
        _leave_broken(stream, pool, generators)
        # An error inside of the block ends the capture, and the end of a broken capture raises too.
        first: BaseException = error
        while isinstance(first.__context__, RuntimeError):
            first = first.__context__
        if isinstance(first, CaptureError):
            raise first from None
        line = (str(first).splitlines() or [""])[0]
        if "legacy stream" in line:
            line = f"{why_legacy_stream} ({line})"
        raise CaptureError(f"a CUDA graph can't hold the step: {line}") from error
    return graph, result


def _leave_broken(stream: Any, pool: Any, generators: Sequence[torch.Generator]) -> None:
    """After a capture that CUDA did not end: torch leaves its pool open and its generators captured.

    Random numbers would raise from then on. A generator is free again when a capture ends well.
    """
    device = stream.device.index
    with contextlib.suppress(RuntimeError):  # raises if the capture did end
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with (
        contextlib.suppress(RuntimeError),  # the caller raises what came first
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        torch.zeros(1, device=stream.device)


class Rates:
    """The learning rates of an optimizer as tensors that a graph reads, one per group.

    The groups keep their numbers, so that schedulers and ``state_dict`` see no tensors.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.tensors: list[Tensor | None] = []
        self._loaded: list[Any] = []
        for group in optimizer.param_groups:
            fits = "capturable" in group or isinstance(optimizer, torch.optim.SGD)
            lr = group["lr"]
            on_device = isinstance(lr, Tensor) and lr.device == device
            self.tensors.append(
                None if on_device or not fits else torch.tensor(float(lr), device=device)
            )
            self._loaded.append(None if self.tensors[-1] is None else float(lr))

    def load(self) -> None:
        """Takes over what a scheduler has changed. Does not wait for the GPU."""
        for i, (tensor, group) in enumerate(
            zip(self.tensors, self.optimizer.param_groups, strict=True)
        ):
            if tensor is not None and self._loaded[i] != group["lr"]:
                self._loaded[i] = float(group["lr"])
                tensor.fill_(self._loaded[i])

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """Inside, the groups have the tensors, and their step counts may be on the GPU."""
        groups = self.optimizer.param_groups
        before = [(group["lr"], group.get("capturable")) for group in groups]
        for tensor, group in zip(self.tensors, groups, strict=True):
            group["lr"] = group["lr"] if tensor is None else tensor
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for (lr, capturable), group in zip(before, groups, strict=True):
                group["lr"] = lr
                if capturable is not None:
                    group["capturable"] = capturable

    def frozen(self) -> tuple[tuple[str, Any], ...]:
        """All other options of the groups, which a graph holds as numbers."""
        found = []
        for tensor, group in zip(self.tensors, self.optimizer.param_groups, strict=True):
            for name, value in group.items():
                if name == "lr":
                    if tensor is None and not isinstance(value, Tensor):
                        found.append((name, value))
                elif name not in UNUSED and _is_plain(value):
                    found.append((name, value))
        return tuple(found)


def _is_plain(value: Any) -> bool:
    if type(value) is tuple:
        return all(type(v) in PLAIN for v in value)
    return type(value) in PLAIN


def move_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Step counts on the CPU move to their parameter: a graph counts on the GPU."""
    for param, state in optimizer.state.items():
        count = state.get("step")
        if isinstance(count, Tensor) and count.device != param.device:
            state["step"] = count.to(param.device, torch.float32)


def why_not_scaled(optimizer: torch.optim.Optimizer) -> str:
    """Why GradScaler would wait for the GPU in this optimizer's step; "" if it does not."""
    takes = "grad_scaler" in inspect.signature(optimizer.step).parameters
    if takes or getattr(optimizer, "_step_supports_amp_scaling", False):
        return ""
    kind = type(optimizer).__name__
    return (
        f"scaler: {kind}'s step asks on the host whether a gradient was infinite; expected an optimizer "
        "that skips the step on the GPU, such as torch.optim's with fused=True or warpwright.optim's"
    )
