"""Whole training steps: load, forward, loss, backward, optimizer; native, compiled, swapped, captured.

Every implementation starts from the same weights and gets the same batch. Its first loss is compared
with native's before anything is timed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import optim
from ..graphs import graph_step, prefetched, record
from ..patch import patch
from ..swap import swap
from .attention_calls import flop_formulas
from .guards import Clocks, Refused
from .measure import Timing, interleaved, peak_mib, tf32_allowed

Row = dict[str, Any]
Step = Callable[[], Tensor]
NCHW, NHWC, ROWS = "nchw", "nhwc", "rows"
# Two right implementations of a first step may differ by this much of the loss.
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2, "float16": 3e-2}


@dataclass(frozen=True)
class Workload:
    """A training step of one model at one size; `model`, `batch` and `loss` are native torch."""

    op: str
    case: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]  # on the host; the last one is the target
    # Takes (the loss module, the model's output, the target).
    loss: Callable[[nn.Module, Any, Tensor], Tensor] = lambda criterion, out, y: criterion(out, y)
    # Takes (the model, maybe compiled; its inputs; the target), for a model that computes its loss.
    call: Callable[[Any, list[Tensor], Tensor], Any] = lambda forward, inputs, y: forward(*inputs)
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(
        p, lr=0.01, fused=True
    )
    dtype: torch.dtype = torch.float32  # what autocast computes in; float32: no autocast, TF32
    layouts: tuple[str, ...] = (ROWS,)
    # The implementations in place of the usual ones: (peers asked for, device) to variants.
    variants: Callable[[Sequence[str], str], list[Variant]] | None = None
    # The next batch is copied on a stream of its own while a step runs; for every implementation.
    prefetch: bool = False
    # One process per implementation, so that each row's peak memory is that implementation's alone.
    separate: bool = False
    source: Path | None = None  # the file that makes this workload, for another process

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass
class Variant:
    """One implementation of a workload, in one memory format."""

    impl: str
    layout: str
    prepare: Callable[[nn.Module, nn.Module], None] = lambda model, criterion: None
    compiled: bool = False
    patched: bool = False
    captured: bool = False
    our_optimizer: bool = False  # warpwright.optim's class of the same name
    peer: str | None = None  # the name in PEERS that selects it; None: it is ours
    notes: list[str] = field(default_factory=list)


def swap_both(model: nn.Module, criterion: nn.Module, fuse: bool = False) -> None:
    swap(model, fuse=fuse)
    swap(criterion)


swap_and_fuse = functools.partial(swap_both, fuse=True)


def ours_of(optimizer: torch.optim.Optimizer, autocast: bool = False) -> torch.optim.Optimizer:
    """``warpwright.optim``'s optimizer with the same options; the same one if there is none.

    Under autocast it keeps 16-bit copies of the weights.
    """
    kind: Any = getattr(optim, type(optimizer).__name__, None)
    if kind is None:
        return optimizer
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [{k: v for k, v in g.items() if k in known} for g in optimizer.param_groups]
    if autocast:
        options["weight_copies"] = True
    return kind(groups, **options)  # type: ignore[no-any-return]


def fused_variant(layout: str, captured: bool = False) -> Variant:
    """All that the package has: fused layers and its optimizer; under a CUDA graph."""
    return Variant(
        "warpwright_fused_cudagraph" if captured else "warpwright_fused",
        layout,
        swap_and_fuse,
        patched=True,
        captured=captured,
        our_optimizer=True,
    )


def variants(workload: Workload, peers: Sequence[str], device: str) -> list[Variant]:
    """Ours first. A peer that needs one memory format only gets the better one: channels_last."""
    if workload.variants is not None:
        return workload.variants(peers, device)
    best = NHWC if NHWC in workload.layouts else workload.layouts[-1]
    found = []
    for layout in workload.layouts:
        found.append(Variant("warpwright", layout, swap_both, patched=True))
        if layout != NHWC or "channels_last" in peers or len(workload.layouts) == 1:
            found.append(Variant("native", layout, peer="native"))
    found += [fused_variant(layout) for layout in workload.layouts]
    captures = device == "cuda" and "cudagraph" in peers
    if captures:
        found.append(Variant("warpwright_cudagraph", best, swap_both, patched=True, captured=True))
        found += [fused_variant(layout, captured=True) for layout in workload.layouts]
        found.append(Variant("cudagraph", best, captured=True, peer="cudagraph"))
    if "compile" in peers:
        compiled = Variant("compile", best, compiled=True, peer="compile")
        ours_compiled = replace(fused_variant(best), impl="warpwright_compile", compiled=True)
        found += [compiled, ours_compiled]
        if captures:
            found.append(replace(compiled, impl="compile_cudagraph", captured=True))
            found.append(replace(ours_compiled, impl="warpwright_compile_cudagraph", captured=True))
    if "max-autotune" in peers:
        found.append(Variant("max-autotune", best, compiled=True, peer="max-autotune"))
    return found


@dataclass
class TrainingStep:
    """One training step per call; the call returns the loss."""

    workload: Workload
    variant: Variant
    device: str
    criterion: nn.Module
    forward: Callable[..., Any]  # the model, or the model compiled
    optimizer: torch.optim.Optimizer
    host: tuple[Tensor, ...]
    batches: Iterator[Any]  # the batch again and again, as each step gets it

    def __call__(self) -> Tensor:
        *inputs, target = (x.to(self.device, non_blocking=True) for x in next(self.batches))
        self.optimizer.zero_grad()
        amp = self.workload.dtype != torch.float32
        with (
            torch.autocast(self.device, self.workload.dtype, enabled=amp),
            patch() if self.variant.patched else contextlib.nullcontext(),
        ):
            output = self.workload.call(self.forward, inputs, target)
            value = self.workload.loss(self.criterion, output, target)
        value.backward()
        self.optimizer.step()
        return value.detach()

    def release(self) -> None:
        """Frees what the next step makes again: the gradients and the optimizer's state."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()


def build_step(
    workload: Workload, variant: Variant, state: dict[str, Any] | None, device: str
) -> TrainingStep:
    """The training step of a variant, starting from the weights in `state`.

    Without `state` the weights are drawn on the device from one seed.
    """
    memory_format = torch.channels_last if variant.layout == NHWC else torch.contiguous_format

    def on_host(x: Tensor) -> Tensor:
        """As a loader that knows the model's layout would hand it out."""
        x = x.contiguous(memory_format=memory_format) if x.dim() == 4 else x
        return x.pin_memory() if device == "cuda" else x

    if state is None:
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = workload.model()
    else:
        model = workload.model()
        model.load_state_dict(copy.deepcopy(state))
        model = model.to(device)
    if variant.layout == NHWC:
        model = model.to(memory_format=torch.channels_last)
    criterion: Any = nn.CrossEntropyLoss()
    variant.prepare(model, criterion)
    model.train()
    optimizer = workload.optimizer(model.parameters())
    if variant.our_optimizer:
        optimizer = ours_of(optimizer, autocast=workload.dtype != torch.float32)
    forward: Any = model
    if variant.compiled:
        mode = "max-autotune-no-cudagraphs" if variant.peer == "max-autotune" else None
        forward = torch.compile(model, mode=mode)
    host = tuple(on_host(x) for x in _generate(workload.batch))
    batches: Iterator[Any] = itertools.repeat(host)
    if workload.prefetch:
        batches = prefetched(batches, torch.device(device))
    return TrainingStep(workload, variant, device, criterion, forward, optimizer, host, batches)


def _generate(batch: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The same batch for everybody, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return batch()


class _Loss(nn.Module):
    """A training step's forward, from its batch to the loss."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.model, self.criterion = step.forward, step.criterion
        self.workload, self.patched = step.workload, step.variant.patched

    def forward(self, *batch: Tensor) -> Tensor:
        *inputs, target = batch
        with patch() if self.patched else contextlib.nullcontext():
            output = self.workload.call(self.model, inputs, target)
            return self.workload.loss(self.criterion, output, target)


def graphed(step: TrainingStep, pool: Any = None, check: bool = True) -> Step:
    """The step under ``warpwright.graph_step``, its batch in pinned memory.

    `pool` may be shared by graphs that never run at the same time. The steps of `check` hold copies of
    the parameters: without it for a row whose peak memory counts.
    """
    amp = None if step.workload.dtype == torch.float32 else step.workload.dtype
    captured = graph_step(
        _Loss(step),
        lambda value: value,
        step.optimizer,
        (step.host,),
        autocast=amp,
        pool=pool,
        check=check,
    )
    return lambda: captured(next(step.batches))


def capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """A step without inputs as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, result = record(step, stream=stream)

    def replay() -> Any:
        graph.replay()
        return result, step  # which own the memory

    return replay


def step_rows(
    workload: Workload,
    device: str,
    ceilings: dict[str, Any],
    seconds: float,
    peers: Sequence[str] = ("native",),
    failures: list[Row] | None = None,
    clocks: Clocks | None = None,
) -> list[Row]:
    """The rows of one workload, TF32 allowed for all. A variant that raises goes into `failures`."""
    failures = [] if failures is None else failures
    torch.manual_seed(0)
    state = workload.model().state_dict()
    steps: dict[str, tuple[Variant, Step]] = {}
    first: dict[str, float] = {}
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    with tf32_allowed():
        for variant in variants(workload, peers, device):
            name = f"{variant.impl} {variant.layout}"
            try:
                torch._dynamo.reset()
                built = build_step(workload, variant, state, device)
                first[name] = float(built())
                steps[name] = variant, graphed(built, pool) if variant.captured else built
            except KeyboardInterrupt:
                raise
            except Exception as error:
                failures.append(failed(workload, variant, error))
        _refuse(workload, steps, first, failures)
        if not steps:
            return []
        start = time.monotonic()
        timings = interleaved(
            {name: step for name, (_, step) in steps.items()},
            device,
            2 * seconds * len(steps),
            hide_host=False,
        )
        seen = clocks.since(start) if clocks else {}
        native = build_step(workload, Variant("native", workload.layouts[0]), state, device)
        flops = count_flops(native)
        del native
        rows = []
        for name, (variant, step) in steps.items():
            ours = timings.get(f"warpwright {variant.layout}")
            peak = None if variant.captured else peak_mib(step, device)
            row = row_of(workload, variant, timings[name], ours, flops, ceilings, peak)
            notes = {"notes": variant.notes} if variant.notes else {}
            rows.append({**row, **seen, **notes})
    return rows


def row_of(
    workload: Workload,
    variant: Variant,
    timing: Timing,
    ours: Timing | None,
    flops: int,
    ceilings: dict[str, Any],
    peak: float | None,
) -> Row:
    """The record of one implementation; `ours` is warpwright's timing, `peak` in MiB."""
    return {
        "op": workload.op,
        "case": workload.case,
        "dtype": workload.dtype_name,
        "layout": variant.layout,
        "pass": "step",
        "impl": variant.impl,
        **timing.fields(ours, variant.impl == "warpwright"),
        "bytes": 0,
        "flops": flops,
        "floor_ms": round(flops / ceilings["matmul_tflops"] / 1e9, 5),
        "peak_mib": peak,
        "err": None,
        "err_native": None,
        "agrees": not variant.notes,
    }


def _refuse(
    workload: Workload,
    steps: dict[str, tuple[Variant, Step]],
    first: dict[str, float],
    failures: list[Row],
) -> None:
    """Marks a variant whose first loss is not native's; drops one whose loss is not a number."""
    native = next((v for n, v in first.items() if n.startswith("native ")), None)
    for name, (variant, _) in [*steps.items()]:
        loss = first[name]
        if loss != loss or loss in (0.0, float("inf")):
            failures.append(failed(workload, variant, Refused(f"the first loss is {loss}")))
            del steps[name]
        elif native is not None:
            allowed = LOSS_TOLERANCE[workload.dtype_name] * abs(native)
            if abs(loss - native) > allowed:
                variant.notes.append(f"first loss {loss:.5f}, native's {native:.5f}")


def failed(workload: Workload, variant: Variant, error: BaseException) -> Row:
    return {
        "op": workload.op,
        "case": workload.case,
        "dtype": workload.dtype_name,
        "layout": variant.layout,
        "impl": variant.impl,
        "error": f"{type(error).__name__}: {error}"[:2000],
    }


def count_flops(step: Callable[[], Any]) -> int:
    """FLOPs of the matrix products, convolutions and attention of one native step."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as counter:
        step()
    return int(counter.get_total_flops())


def mnist_cnn() -> nn.Sequential:
    """conv-bn-relu-pool twice, then two linears: 28x28 grey images to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(3136, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mnist_workload(batch: int, prefetch: bool = False) -> Workload:
    return Workload(
        "mnist_prefetch_step" if prefetch else "mnist_step",
        f"b{batch}",
        mnist_cnn,
        lambda: (torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))),
        layouts=(NCHW, NHWC),
        prefetch=prefetch,
    )


def mnist_workloads(device: str, prefetch: bool = False) -> list[Workload]:
    sizes = (64, 256, 1024, 4096) if device == "cuda" else (64, 256)
    return [mnist_workload(batch, prefetch) for batch in sizes]
