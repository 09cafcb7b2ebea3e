"""Runs one training step natively, swapped, swapped and fused, and compiled; times and profiles it.

Every run starts from the same parameters, buffers, optimizer state and random state, and restores
them. The step is timed without profiler and ranges, and the runs take turns. The traces come last.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from torch.utils._pytree import tree_leaves, tree_map

from ..bench.guards import quiet_profiler
from ..bench.measure import Timing, interleaved
from ..patch import patch
from ..swap import SwapCheckError, SwapReport, swap, swapped, unswap, unswapped
from ..swap.check import mean_square
from . import ranks, trace
from .ranges import Amounts, Ranges, named

RUNS = ("native", "swapped", "fused", "compiled")
CHECK_BATCH = 4


@dataclass
class Workload:
    """The user's model and step."""

    model: nn.Module
    inputs: Any
    target: Any = None
    loss: Any = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None
    step: Callable[[Any], Any] | None = None
    compiled: Any = None  # torch.compile(model), once made

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Mapping):  # tree_map needs a dict; a tokenizer's result is none
            self.inputs = dict(self.inputs)
        if self.loss is None and self.target is not None and self.step is None:
            self.loss = nn.CrossEntropyLoss()

    @property
    def device(self) -> str:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return tensors[0].device.type if tensors else "cpu"

    @property
    def trains(self) -> bool:
        return self.target is not None or self.loss is not None or self.model.training

    def run(self, model: Any) -> Any:
        """One step with `model` instead of the user's."""
        if self.step is not None:
            return self.step(model)
        if not self.trains:
            with torch.no_grad(), self._amp():
                return self._forward(model)
        with named(trace.phase_range("zero_grad")):
            self._zero_grad()
        with self._amp():
            output = self._forward(model)
            with named(trace.phase_range("loss")):
                value = self._loss(output)
        value.backward()
        if self.optimizer is not None:
            with named(trace.phase_range("optimizer")):
                self.optimizer.step()
        return value.detach()

    def _amp(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.autocast)

    def _forward(self, model: Any) -> Any:
        if isinstance(self.inputs, Mapping):
            return model(**self.inputs)
        return model(*self.inputs) if isinstance(self.inputs, (tuple, list)) else model(self.inputs)

    def _loss(self, output: Any) -> Tensor:
        if self.loss is None:
            return mean_square(output)
        value = self.loss(output) if self.target is None else self.loss(output, self.target)
        if not isinstance(value, Tensor):
            got = type(value).__name__
            raise TypeError(f"loss: expected it to return a tensor of one element, got {got}")
        return value

    def _zero_grad(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()

    def roots(self) -> dict[str, nn.Module]:
        found = {"": self.model}
        if isinstance(self.loss, nn.Module):
            found["loss"] = self.loss
        return found

    @contextlib.contextmanager
    def native(self) -> Iterator[None]:
        """Inside the block nothing is swapped; afterwards swapped modules are swapped again."""
        with contextlib.ExitStack() as stack:
            for module in self.roots().values():
                stack.enter_context(unswapped(module))
            yield

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restores parameters, buffers, gradients, optimizer and random state after the block."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        saved = [t.detach().clone() for t in tensors]
        grads = [(p, p.grad) for p in self.model.parameters()]
        state = copy.deepcopy(self.optimizer.state_dict()) if self.optimizer else None
        devices = [torch.cuda.current_device()] if self.device == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            try:
                yield
            finally:
                with torch.no_grad():
                    for t, value in zip(tensors, saved, strict=True):
                        t.copy_(value)
                for p, grad in grads:
                    p.grad = grad
                if self.optimizer is not None and state is not None:
                    self.optimizer.load_state_dict(state)


@dataclass
class Run:
    """One way to run the step, measured."""

    name: str
    timing: Timing | None = None
    joined: trace.Joined | None = None
    memory: list[tuple[float, int, trace.Label]] = field(default_factory=list)
    peak_mib: float | None = None
    trace_path: Path | None = None
    error: str | None = None
    output: Tensor | None = None  # of the first step


# Lends the workload in a memory format.
Layout = Callable[[Workload], contextlib.AbstractContextManager[Workload]]


def default_runs(device: str) -> tuple[str, ...]:
    names = ["native", "swapped", "fused"]
    if device == "cuda":
        names.append("compiled")
    return tuple(names)


@contextlib.contextmanager
def prepared(workload: Workload, name: str) -> Iterator[Any]:
    """Puts the model into the state that the run needs, and back to native after the block."""
    if name == "native":
        yield workload.model
        return
    if name == "compiled":
        if workload.compiled is None:
            torch._dynamo.reset()
            workload.compiled = torch.compile(workload.model)
        yield workload.compiled
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_warnings())
        stack.enter_context(swapped(workload.model, fuse=name == "fused"))
        if isinstance(workload.loss, nn.Module):
            stack.enter_context(swapped(workload.loss))
        yield workload.model


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Hides the warning of a model without a layer to swap: patch() routes its functions."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _callable(workload: Workload, model: Any, name: str) -> Callable[[], Any]:
    def step() -> Any:
        with patch() if name in ("swapped", "fused") else contextlib.nullcontext():
            return workload.run(model)

    return step


def time_runs(workload: Workload, names: tuple[str, ...], seconds: float) -> dict[str, Run]:
    """Times all runs in turns. Each turn prepares its own state of the one model.

    Changing the classes takes microseconds per layer. So a turn is a block of several steps, and the
    change is outside of the measured time.
    """
    runs = {name: Run(name) for name in names}
    samples: dict[str, list[Timing]] = {name: [] for name in names}
    blocks = 4
    for _ in range(blocks):
        for name, run in runs.items():
            if run.error is not None:
                continue
            try:
                with workload.unchanged(), prepared(workload, name) as model:
                    step = _callable(workload, model, name)
                    first = step()
                    if run.output is None and isinstance(first, Tensor):
                        run.output = first.detach().clone()
                    samples[name].append(_timed(step, workload.device, seconds / blocks))
            except (KeyboardInterrupt, SwapCheckError):
                raise
            except Exception as error:
                run.error = f"{type(error).__name__}: {error}"[:2000]
    for name, timings in samples.items():
        if runs[name].error is None:
            runs[name].timing = _merged(timings)
    return runs


def time_layouts(workload: Workload, name: str, seconds: float) -> tuple[float, float] | None:
    """(ms per step as it is, ms in channels_last) of a run; the two take turns.

    None: the model has no images or convolutions that channels_last changes, the model cannot run in
    it, or a step of the user's own makes the images.
    """
    if workload.step is not None or ranks.count() > 1 or not _changes_with_layout(workload):
        return None
    layouts: tuple[Layout, ...] = (contextlib.nullcontext, _channels_last)
    samples: tuple[list[Timing], ...] = ([], [])
    try:
        for _ in range(2):
            for timings, layout in zip(samples, layouts, strict=True):
                with (
                    workload.unchanged(),
                    layout(workload) as found,
                    prepared(found, name) as model,
                ):
                    step = _callable(found, model, name)
                    step()
                    timings.append(_timed(step, workload.device, seconds / 4))
    except Exception:  # such as a view() of an image, which channels_last does not allow
        return None
    before, after = map(_merged, samples)
    return (before.ms, after.ms) if before.steady and after.steady else None


def _changes_with_layout(workload: Workload) -> bool:
    images = (t for t in tree_leaves(workload.inputs) if isinstance(t, Tensor) and t.dim() == 4)
    convolutions = (m.weight for m in workload.model.modules() if isinstance(m, nn.Conv2d))
    return any(map(torch.is_floating_point, images)) and any(map(_is_nchw, convolutions))


def _is_nchw(value: Any) -> bool:
    """Whether it is a tensor of images or windows that channels_last stores in another order."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    return not value.is_contiguous(memory_format=torch.channels_last)


@contextlib.contextmanager
def _channels_last(workload: Workload) -> Iterator[Workload]:
    """The workload with images and weights in channels_last. Afterwards the weights are the same tensors."""

    def changed(value: Any) -> Any:
        return value.to(memory_format=torch.channels_last) if _is_nchw(value) else value

    before = [(p, p.data) for p in workload.model.parameters() if _is_nchw(p)]
    try:
        for parameter, data in before:
            parameter.data = changed(data)
        yield replace(workload, inputs=tree_map(changed, workload.inputs), compiled=None)
    finally:
        for parameter, data in before:
            parameter.data = data


def _timed(step: Callable[[], Any], device: str, seconds: float) -> Timing:
    if ranks.count() > 1:
        return ranks.timed(step, device, seconds)
    return interleaved({"step": step}, device, seconds, hide_host=False)["step"]


def _merged(timings: list[Timing]) -> Timing:
    from ..bench.measure import _summary

    fewest = min(t.rounds for t in timings)
    samples = [s for t in timings for s in t.samples[:fewest]]
    return _summary(samples, 0.05)


def trace_run(workload: Workload, run: Run, folder: Path | None, steps: int) -> None:
    """Traces a few steps with named ops, and one more step for the memory."""
    activities = [ProfilerActivity.CPU]
    on_gpu = workload.device == "cuda"
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    import tempfile

    with (
        tempfile.TemporaryDirectory() as scratch,
        workload.unchanged(),
        prepared(workload, run.name) as model,
    ):
        place = Path(folder or scratch) / f"trace_{run.name}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        step = _callable(workload, model, run.name)

        def one() -> None:
            # Ranges are innermost: they see a call before patch() routes it.
            nothing = contextlib.nullcontext()
            routed = patch() if run.name in ("swapped", "fused") else nothing
            ranges = nothing if run.name == "compiled" else Ranges(workload.roots())
            with trace_step(on_gpu), routed, ranges:
                workload.run(model)

        for _ in range(2):
            step()
        one()
        with quiet_profiler(), torch_profile(activities=activities, acc_events=True) as profiler:
            for _ in range(steps):
                one()
        profiler.export_chrome_trace(str(place))
        run.joined = trace.join(trace.load(place))
        run.trace_path = place if folder is not None else None
        with (
            quiet_profiler(),
            torch_profile(
                activities=activities[:1], profile_memory=True, acc_events=True
            ) as profiler,
        ):
            one()
        memory_place = Path(scratch) / "memory.json"
        profiler.export_chrome_trace(str(memory_place))
        run.memory = trace.join(trace.load(memory_place)).memory
        if not on_gpu and run.memory:
            # The CPU's count has an arbitrary start: it does not know earlier allocations.
            least = min(b for _, b, _ in run.memory)
            run.memory = [(t, b - least, label) for t, b, label in run.memory]
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            run.peak_mib = torch.cuda.max_memory_allocated() / 2**20


@contextlib.contextmanager
def trace_step(on_gpu: bool) -> Iterator[None]:
    """One step, from an idle GPU to an idle GPU."""
    if on_gpu:
        torch.cuda.synchronize()
    with named(trace.STEP):
        yield
        if on_gpu:
            torch.cuda.synchronize()


def count_work(workload: Workload) -> Amounts:
    """Bytes and FLOPs of every op in the catalog, from one native step."""
    with workload.unchanged(), Ranges(workload.roots(), count=True) as ranges:
        workload.run(workload.model)
    return ranges.amounts


def check_modules(
    workload: Workload, fuse: bool
) -> tuple[SwapReport, dict[str, dict[str, float]], list[str]]:
    """swap(check=) on a few samples: the report, {module: errors}, and the failures."""

    def part(x: Any) -> Any:
        return x[:CHECK_BATCH] if isinstance(x, Tensor) and x.dim() > 0 else x

    inputs = tree_map(part, workload.inputs)
    failures: list[str] = []
    errors: dict[str, dict[str, float]] = {}
    with workload.unchanged(), workload._amp(), _no_warnings():
        try:
            report = swap(workload.model, check=inputs, fuse=fuse)
            if report.check is not None:
                errors = {row["module"]: row for row in report.check["modules"]}
        except SwapCheckError as error:
            failures = error.lines
            report = swap(workload.model, fuse=fuse)
        finally:
            unswap(workload.model)
    return report, errors, failures
