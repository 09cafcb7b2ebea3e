"""Where a training step's time goes, op by op, from torch's profiler."""

from __future__ import annotations

import os
from contextlib import ExitStack
from statistics import median

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from .train import Training

# op -> (the layer's class, parts of its autograd nodes' names in native and warpwright)
OPS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "conv2d": (nn.Conv2d, ("conv",)),
    "batch_norm": (nn.BatchNorm2d, ("batchnorm", "batch_norm")),
    "relu": (nn.ReLU, ("relu",)),
    "max_pool2d": (nn.MaxPool2d, ("maxpool", "max_pool")),
    "linear": (nn.Linear, ("addmm", "linear", "tbackward", "permutebackward")),
    "cross_entropy": (nn.CrossEntropyLoss, ("crossentropy", "nllloss", "logsoftmax")),
}
FORWARD = "demo forward: "
NODE = "autograd::engine::evaluate_function: "

Times = dict[str, dict[str, float]]  # op -> {"forward": ms per step, "backward": ms per step}


def measure(
    trainings: list[Training], images: Tensor, labels: Tensor, batch: int, rounds: int = 5
) -> dict[str, Times]:
    """Median time of each op over rounds of a few steps. The libraries take turns.

    On the GPU it is the kernels' time, else the CPU's. The networks are trained on by these steps:
    call it when the training is over.
    """
    rows = torch.arange(min(batch, len(images)))
    runs: dict[str, list[Times]] = {t.library: [] for t in trainings}
    for _ in range(rounds):
        for training in trainings:
            runs[training.library].append(_measure_once(training, images, labels, rows, steps=4))
    return {library: _median(times) for library, times in runs.items()}


def _median(runs: list[Times]) -> Times:
    return {
        op: {way: median(run[op][way] for run in runs) for way in ("forward", "backward")}
        for op in runs[0]
    }


def _measure_once(
    training: Training, images: Tensor, labels: Tensor, rows: Tensor, steps: int
) -> Times:
    layers = [*training.model, training.criterion]
    with ExitStack() as hooks:
        for layer in layers:
            op = next((op for op, (kind, _) in OPS.items() if isinstance(layer, kind)), None)
            if op is not None:
                _label_forward(layer, FORWARD + op, hooks)
        activities = [ProfilerActivity.CPU]
        if training.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        elif not torch.cuda.is_available():
            # Without a GPU the profiler would print an error.
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")
        saved = len(training.losses)
        training.step(images, labels, rows)  # warm up, with the hooks
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(steps):
                training.step(images, labels, rows)
        # They do not belong to the reported training.
        del training.losses[saved:], training.times[saved:]

    times: Times = {}
    for event in profiler.key_averages():
        if event.device_type.name != "CPU":
            continue  # the same ranges, on the GPU's time line
        place = _place(event.key)
        if place is None:
            continue
        op, direction = place
        on_gpu = training.device.type == "cuda"
        spent = event.device_time_total if on_gpu else event.cpu_time_total
        row = times.setdefault(op, {"forward": 0.0, "backward": 0.0})
        row[direction] += spent / 1e3 / steps
    return {op: times[op] for op in OPS if op in times}


def _label_forward(layer: nn.Module, label: str, hooks: ExitStack) -> None:
    ranges: list[record_function] = []

    def before(module: nn.Module, args: object) -> None:
        ranges.append(record_function(label))
        ranges[-1].__enter__()

    def after(module: nn.Module, args: object, output: object) -> None:
        ranges.pop().__exit__(None, None, None)

    hooks.callback(layer.register_forward_pre_hook(before).remove)
    hooks.callback(layer.register_forward_hook(after).remove)


def _place(key: str) -> tuple[str, str] | None:
    """(op, direction) that a profiler range belongs to."""
    if key.startswith(FORWARD):
        return key.removeprefix(FORWARD), "forward"
    if key.startswith(NODE):
        node = key.removeprefix(NODE).lower()
        for op, (_, parts) in OPS.items():
            if any(part in node for part in parts):
                return op, "backward"
    return None
