"""``warpwright demo``: two small networks learn to read digits, ours and native's."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from .._precision import conv_allows_tf32, matmul_allows_tf32
from ..bench.records import require_writable
from . import data, op_times, report
from .train import LIBRARIES, Training, native_step_ms, train_side_by_side

# How much the loss curves may differ, relative to (loss + 1). The two sum in different orders, so they
# differ by rounding from the first step. A ReLU or a max pool may flip, and the difference then jumps.
# Native differs from itself in the other memory format by up to 7e-4 in the same 130 float32 steps.
# TF32 rounds to 11 bits instead of 24. The bound is about ten times the difference.
CURVE_TOLERANCE = {"fp32": 0.01, "tf32": 0.05}
EMBEDDED_EPOCHS = 12
FILE_EPOCHS = 2


def run(arguments: SimpleNamespace) -> int:
    """Returns 0 if it learnt and the curves agree, 1 if not, 2 for bad data or device, 130 if
    interrupted."""
    console = Console()
    try:
        device = choose_device(arguments.device)
        digits = data.load(arguments.data)
        batch = arguments.batch or (32 if arguments.model == "mlp" else 64)
        if batch > len(digits.train_images):
            raise data.DataError(
                f"--batch: expected at most {len(digits.train_images)}, the number of training "
                f"images, got {batch}"
            )
        require_writable(arguments.out / "demo.json")
    except (data.DataError, OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    epochs = arguments.epochs or (FILE_EPOCHS if arguments.data else EMBEDDED_EPOCHS)
    result = None
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # native at its best
    try:
        result = prepare(arguments, device, digits, batch, epochs, console)
        train(result, epochs, arguments.seed, console)
    except KeyboardInterrupt:
        if result is None:
            console.print("interrupted before the training")
            return 130
        result.interrupted = True
        if all(t.times for t in result.trainings):
            report.print_result(console, result)
        console.print("interrupted: these are the steps until then; no accuracy, no picture")
        report.write_json(result, arguments.out / "demo.json")
        return 130
    finally:
        torch.backends.cudnn.benchmark = benchmark
    return finish(result, arguments, console)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise data.DataError(f"--device: expected auto, cpu, cuda or cuda:N, got {name}")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise data.DataError(f"--device: got {name}, but there are {count} CUDA devices")
    return device


def prepare(
    arguments: SimpleNamespace,
    device: torch.device,
    digits: data.Digits,
    batch: int,
    epochs: int,
    console: Console,
) -> report.Result:
    """Both networks from the same seed, in native's fastest memory format."""
    formats = {"nchw": torch.contiguous_format, "channels_last": torch.channels_last}
    chosen = {None: None, False: "nchw", True: "channels_last"}[arguments.channels_last]
    if arguments.model == "mlp":
        chosen = "nchw"
    if chosen is None:
        tried = {
            name: native_step_ms(arguments.model, digits, batch, device, layout)
            for name, layout in formats.items()
        }
        chosen = min(tried, key=lambda name: tried[name])
        console.print(
            f"Memory format of both: {chosen}, native's best here ("
            + ", ".join(f"{name} {ms:.3g} ms" for name, ms in tried.items())
            + " a step)."
        )
    tf32 = device.type == "cuda" and (conv_allows_tf32() or matmul_allows_tf32())
    trainings = [
        Training.start(
            library, arguments.model, arguments.lr, arguments.seed, device, formats[chosen]
        )
        for library in LIBRARIES
    ]
    config = {
        "model": arguments.model,
        "batch": batch,
        "epochs": epochs,
        "lr": arguments.lr,
        "seed": arguments.seed,
        "memory_format": chosen,
        "precision": "tf32" if tf32 else "fp32",
        "cudnn_benchmark": True,
        "min_accuracy": arguments.min_accuracy,
    }
    return report.Result(config, report.environment(device), digits, trainings)


def train(result: report.Result, epochs: int, seed: int, console: Console) -> None:
    digits, batch = result.digits, result.batch
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        steps = len(digits.train_images) // batch * epochs
        tasks = {
            t.library: progress.add_task(t.library, total=steps, loss=float("nan"))
            for t in result.trainings
        }
        train_side_by_side(
            result.trainings,
            digits,
            batch,
            epochs,
            seed,
            lambda t, done, loss: progress.update(tasks[t.library], completed=done, loss=loss),
        )
    result.op_times = op_times.measure(
        result.trainings, digits.train_images, digits.train_labels, batch
    )


def finish(result: report.Result, arguments: SimpleNamespace, console: Console) -> int:
    ours, native = result.trainings
    result.curve = report.compare_curves(
        ours.losses, native.losses, CURVE_TOLERANCE[result.config["precision"]]
    )
    for training in result.trainings:
        if not training.accuracy >= arguments.min_accuracy:
            result.failures.append(
                f"{training.library} reads {training.accuracy:.2%} of the held-out images right, "
                f"expected at least {arguments.min_accuracy:.2%}"
            )
    if not result.curve["agree"]:
        result.failures.append(
            f"the loss curves part at step {result.curve['at_step']}: "
            f"{result.curve['share_of_allowed']:.3g} times the tolerance"
        )
    report.print_result(console, result)
    report.write_json(result, arguments.out / "demo.json")
    written = str(arguments.out / "demo.json")
    try:
        report.draw(result, arguments.out / "demo.png")
        report.draw(result, arguments.out / "demo_dark.png", dark=True)
        written += f" and {arguments.out / 'demo.png'}"
    except ImportError:
        console.print("No picture: `pip install matplotlib` for one.")
    console.print(f"Written: {written}")
    for failure in result.failures:
        print(f"demo: failed: {failure}", file=sys.stderr)
    return 1 if result.failures else 0
