"""The results of the demo: a table, a picture and a JSON file."""

from __future__ import annotations

import datetime
import json
import math
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from .._version import __version__
from .data import Digits
from .op_times import Times
from .train import PHASES, Training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which differ for every kind of colour vision. Ours is lighter on a dark page.
COLOURS = {"warpwright": ("#0072B2", "#56B4E9"), "native": ("#E69F00", "#E69F00")}
BACKGROUNDS = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
DARK = "#0d1117"  # GitHub's dark background
MAX_MISREAD = 24
MISREAD_COLUMNS = MAX_MISREAD // 2


@dataclass
class Result:
    """The data of all outputs."""

    config: dict[str, Any]
    environment: dict[str, Any]
    digits: Digits
    trainings: list[Training]  # warpwright, native
    op_times: dict[str, Times] = field(default_factory=dict)
    curve: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    failures: list[str] = field(default_factory=list)

    @property
    def batch(self) -> int:
        return int(self.config["batch"])


def environment(device: torch.device) -> dict[str, Any]:

    info: dict[str, Any] = {
        "device": device_name(device),
        "warpwright": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        info["cuda"] = torch.version.cuda
        info["cudnn"] = torch.backends.cudnn.version()
    else:
        info["threads"] = torch.get_num_threads()
    return info


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as cpus:
            name = next(line.split(":")[1].strip() for line in cpus if "model name" in line)
    except (OSError, StopIteration):
        name = platform.processor() or "CPU"
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def compare_curves(ours: list[float], native: list[float], relative: float) -> dict[str, Any]:
    """Largest |ours - native| as a share of the bound, ``relative`` x (loss + 1)."""
    worst, where = 0.0, 0
    for i, (a, b) in enumerate(zip(ours, native, strict=False)):
        share = abs(a - b) / (relative * (abs(b) + 1))
        if share > worst or math.isnan(share):
            worst, where = share, i
        if math.isnan(share):
            break
    return {
        "tolerance": relative,
        "largest_difference": abs(ours[where] - native[where]) if ours and native else 0.0,
        "at_step": where + 1,
        "share_of_allowed": worst,
        "agree": worst <= 1,
    }


def table(result: Result) -> Table:
    ours, native = result.trainings
    times = {t.library: t.phase_ms() for t in result.trainings}
    shown = Table(
        title=f"{result.digits.name}, {result.config['model']}, batch {result.batch}, "
        f"{len(ours.times)} steps on {result.environment['device']}",
        title_justify="left",
    )
    shown.add_column("")
    for training in result.trainings:
        shown.add_column(training.library, justify="right")
    shown.add_column("native / ours", justify="right")
    if not result.interrupted:
        shown.add_row("test accuracy", *(f"{t.accuracy:.2%}" for t in result.trainings), "")
        shown.add_row("test loss", *(f"{t.test_loss:.4f}" for t in result.trainings), "")
    last = [sum(t.losses[-20:]) / len(t.losses[-20:]) for t in result.trainings]
    shown.add_row("training loss, last 20 steps", *(f"{x:.4f}" for x in last), "", end_section=True)
    for phase in (*PHASES, "step"):
        a, b = times["warpwright"][phase], times["native"][phase]
        shown.add_row(
            f"{phase}, ms" if phase != "step" else "whole step, ms",
            f"{a:.3f}",
            f"{b:.3f}",
            f"{b / a:.2f}x" if a > 0 else "",
            style="bold" if phase == "step" else None,
        )
    rates = [result.batch / times[t.library]["step"] * 1e3 for t in (ours, native)]
    shown.add_row("images/s", *(f"{r:,.0f}" for r in rates), f"{rates[0] / rates[1]:.2f}x")
    return shown


def op_table(result: Result) -> Table:
    """Each op inside of the step, and at the end the step of the table above it.

    The row "rest" is the time of the whole step less the sum of the ops. The profiler slows each op a
    little, above all on a CPU. If the ops alone took longer than the step, the row is left out.
    """
    shown = Table(
        title="Each op inside of the step, by the profiler, ms per step (forward + backward)",
        title_justify="left",
    )
    shown.add_column("")
    for training in result.trainings:
        shown.add_column(training.library, justify="right")
    shown.add_column("native / ours", justify="right")
    mine, native = result.op_times["warpwright"], result.op_times["native"]

    def add(name: str, a: float, b: float, style: str | None = None) -> None:
        shown.add_row(name, f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}x" if a > 0 else "", style=style)

    for op, row in mine.items():
        add(op, sum(row.values()), sum(native[op].values()))
    shown.add_section()
    sums = [sum(sum(row.values()) for row in ops.values()) for ops in (mine, native)]
    times = {t.library: t.phase_ms()["step"] for t in result.trainings}
    steps = [times["warpwright"], times["native"]]
    add("sum of the ops", sums[0], sums[1])
    rest = [step - total for step, total in zip(steps, sums, strict=True)]
    if min(rest) >= 0:
        add("rest: update, launches, Python", rest[0], rest[1])
    add("whole step, without the profiler", steps[0], steps[1], "bold")
    return shown


def write_json(result: Result, path: Path) -> None:
    runs = {}
    for t in result.trainings:
        runs[t.library] = {
            "test_accuracy": None if result.interrupted else t.accuracy,
            "test_loss": None if result.interrupted else t.test_loss,
            "ms": t.phase_ms() if t.times else None,
            "images_per_s": result.batch / t.phase_ms()["step"] * 1e3 if t.times else None,
            "op_ms": result.op_times.get(t.library),
            "losses": t.losses,
        }
    content = {
        "schema": 1,
        "config": result.config,
        "environment": result.environment,
        "data": result.digits.name,
        "interrupted": result.interrupted,
        "curves": result.curve,
        "failures": result.failures,
        "runs": runs,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def draw(result: Result, path: Path, dark: bool = False) -> None:
    """Loss curves, time of each op, misread digits; for a light or a dark page."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.style.context("dark_background" if dark else "default"):
        if dark:
            settings: Any = dict.fromkeys(BACKGROUNDS, DARK)
            plt.rcParams.update(settings)
        figure = _figure(result, dark)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def _figure(result: Result, dark: bool) -> Figure:
    from matplotlib import pyplot as plt

    wrong = _misread(result)
    rows = -(-min(max(1, len(wrong)), MAX_MISREAD) // MISREAD_COLUMNS)
    figure = plt.figure(figsize=(12, 4.6 + 1.8 * rows), layout="constrained")
    panels: Any = figure.subfigures(2, 1, height_ratios=[4.6, 1.8 * rows])
    top, bottom = panels
    curves, bars = top.subplots(1, 2, width_ratios=[1.15, 1])
    _draw_curves(curves, result, dark)
    _draw_op_times(bars, result, dark)
    _draw_misread(bottom, result, wrong, rows, dark)
    env = result.environment
    versions = f"warpwright {env['warpwright']}, torch {env['torch']}"
    if "cuda" in env:
        versions += f", CUDA {env['cuda']}, cuDNN {env['cudnn']}"
    config = result.config
    layout = "" if config["model"] == "mlp" else f", {config['memory_format']}"
    figure.suptitle(
        f"{result.digits.name}: {config['model'].upper()} trained with warpwright and native torch"
        f"\n{env['device']} · {versions} · {env['date'][:10]} · batch {result.batch}, "
        f"{config['precision']}{layout}",
        fontsize=12,
    )
    return figure


def _draw_curves(axes: Axes, result: Result, dark: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ours, native = result.trainings
    steps = range(1, len(native.losses) + 1)
    # Ours is a thin line over native's broad one, so that both show where they agree.
    axes.plot(
        steps,
        native.losses,
        color=COLOURS["native"][dark],
        lw=4.5,
        alpha=0.75,
        label="native torch",
    )
    axes.plot(steps, ours.losses, color=COLOURS["warpwright"][dark], lw=1.2, label="warpwright")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training step")
    axes.set_ylabel("training loss (log scale)")
    axes.set_title("Loss: same seed, same batches")
    axes.grid(alpha=0.25)
    accuracies = " / ".join(f"{t.accuracy:.1%}" for t in result.trainings)
    axes.legend(
        loc="upper right",
        title=f"test accuracy {accuracies}\n"
        f"largest difference {result.curve['largest_difference']:.1e}",
        alignment="left",
    )


def _draw_op_times(axes: Axes, result: Result, dark: bool) -> None:
    ops = [*result.op_times["warpwright"]]
    height = 0.38
    longest = 0.0
    for library, offset in (("warpwright", -height / 2), ("native", height / 2)):
        rows = result.op_times[library]
        y = [i + offset for i in range(len(ops))]
        forward = [rows[op]["forward"] for op in ops]
        backward = [rows[op]["backward"] for op in ops]
        name = "native torch" if library == "native" else library
        colour = COLOURS[library][dark]
        axes.barh(y, forward, height, color=colour, label=f"{name}, forward")
        axes.barh(
            y,
            backward,
            height,
            left=forward,
            color=colour,
            alpha=0.45,
            hatch="///",
            edgecolor=DARK if dark else "white",
            linewidth=0,
            label=f"{name}, backward",
        )
        for at, f, b in zip(y, forward, backward, strict=True):
            axes.text(f + b, at, f" {f + b:.3g}", va="center", fontsize=8)
            longest = max(longest, f + b)
    axes.set_xlim(0, longest * 1.15)
    axes.set_yticks(range(len(ops)), ops)
    axes.invert_yaxis()
    where = "GPU" if "cuda" in result.environment else "CPU"
    axes.set_xlabel(f"{where} time, ms per step")
    step = {t.library: t.phase_ms()["step"] for t in result.trainings}
    axes.set_title(
        f"Each op inside of the step ({step['warpwright']:.3g} ms, native {step['native']:.3g})"
    )
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(axis="x", alpha=0.25)


def _misread(result: Result) -> list[int]:
    ours, _ = result.trainings
    assert ours.predictions is not None
    wrong = ours.predictions != result.digits.test_labels
    return [int(i) for i in wrong.nonzero().flatten()]


def _draw_misread(panel: Any, result: Result, wrong: list[int], rows: int, dark: bool) -> None:
    ours, native = result.trainings
    labels, images = result.digits.test_labels, result.digits.test_images
    assert ours.predictions is not None
    assert native.predictions is not None
    title = f"Misread by warpwright's network: {len(wrong)} of {len(labels)} held-out digits"
    if len(wrong) > MAX_MISREAD:
        title += f" (the first {MAX_MISREAD})"
    panel.suptitle(title, fontsize=12)
    grid = panel.subplots(rows, MISREAD_COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, i in zip(grid.flat, wrong[:MAX_MISREAD], strict=False):
        axes.imshow(images[i, 0], cmap="gray" if dark else "gray_r")
        text = f"is {labels[i]}, read {ours.predictions[i]}"
        if native.predictions[i] != ours.predictions[i]:
            text += f"\nnative: {native.predictions[i]}"
        axes.set_title(text, fontsize=8)


def print_result(console: Console, result: Result) -> None:
    console.print(table(result))
    if len(result.op_times) == len(result.trainings):
        console.print(op_table(result))
    if result.curve:
        c = result.curve
        console.print(
            f"Loss curves: largest difference {c['largest_difference']:.2e} (step {c['at_step']}), "
            f"{c['share_of_allowed']:.0%} of what is allowed, "
            f"{c['tolerance']:g} x (loss + 1)."
        )
