"""What a profile suggests: sentences with the code to copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .summary import ProfileReport

Row = dict[str, Any]
SLOWER = 1.05  # of native's time: modules beyond are named
WORTH = 0.005  # of the step, for all of them together
FASTER = 0.02  # of the step: a smaller saving is not advised
MOST = 12  # names in one line of code
TO_CHANNELS_LAST = (
    "model.to(memory_format=torch.channels_last)\n"
    "images = images.to(memory_format=torch.channels_last)"
)


@dataclass(frozen=True)
class Advice:
    """Why, what it is worth (ms per step, negative saves; None if unknown), and the code."""

    why: str
    code: str
    ms: float | None = None


def advice(report: ProfileReport) -> list[Advice]:
    """The suggestions, the largest saving first."""
    found = [*_native_layers(report), *_fusion(report), *_launches(report), *_layout(report)]
    return sorted(found, key=lambda a: a.ms if a.ms is not None else 0.0)


def losses(report: ProfileReport) -> dict[str, float]:
    """{module: how many ms it is slower than native}, of the swapped modules that lost."""
    ours = report.ours
    if ours is None or report.run("native") is None:
        return {}
    times: dict[str, tuple[float, float]] = {}
    for row in report.modules:
        if row.get("swap") == "swapped" and row["native"]["ms"] and row[ours["name"]]["ms"]:
            native, mine = times.get(row["module"], (0.0, 0.0))
            times[row["module"]] = native + row["native"]["ms"], mine + row[ours["name"]]["ms"]
    found = {name: b - a for name, (a, b) in times.items() if b > SLOWER * a}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _native_layers(report: ProfileReport) -> list[Advice]:
    slower, ours, native = losses(report), report.ours, report.run("native")
    if ours is None or native is None or not (ours["steady"] and native["steady"]):
        return []
    if sum(slower.values()) < WORTH * ours["ms"]:
        return []
    names = list(slower)[:MOST]
    saved = sum(slower[name] for name in names)
    fuse = ", fuse=True" if ours["name"] == "fused" else ""
    what = "layer" if len(names) == 1 else "layers"
    count = f"the slowest {len(names)} of {len(slower)}" if len(slower) > len(names) else len(names)
    listed = ", ".join(map(repr, names))
    swapped = [entry["name"] for entry in report.swap["entries"] if entry["swapped"]]
    if any(other.startswith(f"{name}.") for name in names for other in swapped):
        # exclude= would leave the layers inside of these native too.
        code = (
            f"leave = {{{listed}}}\n"
            f"warpwright.swap(model, filter_fn=lambda module, name: name not in leave{fuse})"
        )
    else:
        code = f"warpwright.swap(model, exclude=[{listed}]{fuse})"
    return [Advice(f"Leave {count} swapped {what} native: slower than native here.", code, -saved)]


def _fusion(report: ProfileReport) -> list[Advice]:
    fused, swapped = report.run("fused"), report.run("swapped")
    if not fused or not swapped or fused["ms"] is None or swapped["ms"] is None:
        return []
    if not (fused["steady"] and swapped["steady"]):
        return []
    change = fused["ms"] - swapped["ms"]
    if abs(change) < FASTER * swapped["ms"]:
        return []
    if change < 0:
        return [
            Advice("Run chains of layers as one op.", "warpwright.swap(model, fuse=True)", change)
        ]
    return [Advice("Here the step is faster without fusing.", "warpwright.swap(model)", -change)]


def _launches(report: ProfileReport) -> list[Advice]:
    on_gpu = report.environment["device"] == "cuda"
    if not on_gpu or report.bound.get("launch", 0.0) < 0.25:
        return []
    share = report.bound["launch"]
    return [
        Advice(
            f"The GPU waits for launches during {share:.0%} of the step. Let it replay a graph.",
            'model = torch.compile(model, mode="reduce-overhead")',
        )
    ]


def _layout(report: ProfileReport) -> list[Advice]:
    """What channels_last saves if it was measured, else what swap advises."""
    if report.layouts is None:
        return [Advice(sentence, TO_CHANNELS_LAST) for sentence in report.swap["advice"]]
    before, after = report.layouts
    if after > (1 - FASTER) * before:
        return []
    return [
        Advice("Bring the model and its images to channels_last.", TO_CHANNELS_LAST, after - before)
    ]
