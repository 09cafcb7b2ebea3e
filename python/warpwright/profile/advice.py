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
WITHOUT_FUSING = "warpwright.swap(model)"
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
    fusion = _fusion(report)
    ours = report.ours
    if any(found.code == WITHOUT_FUSING for found in fusion):
        ours = report.run("swapped")  # the other suggestions are for the run that this one leads to
    found = [*_native_layers(report, ours), *fusion, *_launches(report), *_layout(report)]
    return sorted(found, key=lambda a: a.ms if a.ms is not None else 0.0)


def losses(report: ProfileReport, ours: Row | None) -> dict[str, float]:
    """{module: how many ms it is slower than native}, of the swapped modules that lost in a run of ours.

    A block whose layers run fused is compared as a whole: an op's time stands with one of its layers.
    """
    if ours is None or report.run("native") is None:
        return {}
    blocks = _fused_blocks(report, ours)
    times: dict[str, list[float]] = {}
    ran_ours: set[str] = set()  # the others ran native's kernels in both runs
    for row in report.modules:
        name = _block_of(row["module"], blocks)
        if name is None and row.get("swap") == "swapped":
            name = row["module"]
        if name:  # the whole model's time is the step's
            for i, run in enumerate(("native", ours["name"])):
                times.setdefault(name, [0.0, 0.0])[i] += row[run]["ms"] or 0.0
            if row[ours["name"]].get("own_share") != 0:
                ran_ours.add(name)
    found = {
        name: mine - native
        for name, (native, mine) in times.items()
        if native and mine > SLOWER * native and name in ran_ours
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _fused_blocks(report: ProfileReport, ours: Row) -> set[str]:
    if ours["name"] != "fused":
        return set()
    return {fusion["block"] for fusion in report.swap["fusions"] if not fusion["reason"]}


def _block_of(module: str, blocks: set[str]) -> str | None:
    """The innermost of the blocks that ``module`` is in."""
    holding = [b for b in blocks if not b or module == b or module.startswith(f"{b}.")]
    return max(holding, key=len, default=None)


def _native_layers(report: ProfileReport, ours: Row | None) -> list[Advice]:
    slower, native = losses(report, ours), report.run("native")
    if ours is None or native is None or not (ours["steady"] and native["steady"]):
        return []
    if sum(slower.values()) < max(WORTH, _noise(report)) * ours["ms"]:
        return []
    names = list(slower)[:MOST]
    saved = sum(slower[name] for name in names)
    what = "layer" if len(names) == 1 else "layers"
    count = f"the slowest {len(names)} of {len(slower)}" if len(slower) > len(names) else len(names)
    # exclude= leaves the layers inside of a module native too: right for blocks alone.
    swapped = [entry["name"] for entry in report.swap["entries"] if entry["swapped"]]
    blocks = _fused_blocks(report, ours)
    alone = [
        name
        for name in names
        if name not in blocks and any(other.startswith(f"{name}.") for other in swapped)
    ]
    whole = [name for name in names if name not in alone]
    options = [f"exclude=[{', '.join(map(repr, whole))}]"] if whole else []
    options += ["filter_fn=lambda module, name: name not in leave"] if alone else []
    options += ["fuse=True"] if ours["name"] == "fused" else []
    code = f"leave = {{{', '.join(map(repr, alone))}}}\n" if alone else ""
    code += f"warpwright.swap(model, {', '.join(options)})"
    return [Advice(f"Leave {count} swapped {what} native: slower than native here.", code, -saved)]


def _noise(report: ProfileReport) -> float:
    """Half the width of the speed-up's interval, as a share of the step."""
    bounds = report.speedup_lo, report.speedup_hi
    if not report.speedup or None in bounds:
        return 0.0
    return (report.speedup_hi - report.speedup_lo) / (2 * report.speedup)  # type: ignore[operator]


def _fusion(report: ProfileReport) -> list[Advice]:
    fused, swapped = report.run("fused"), report.run("swapped")
    if not fused or not swapped or fused["ms"] is None or swapped["ms"] is None:
        return []
    if not (fused["steady"] and swapped["steady"]):
        return []
    change = fused["ms"] - swapped["ms"]
    if abs(change) < max(FASTER, _noise(report)) * swapped["ms"]:
        return []
    if change < 0:
        return [
            Advice("Run chains of layers as one op.", "warpwright.swap(model, fuse=True)", change)
        ]
    return [Advice("Here the step is faster without fusing.", WITHOUT_FUSING, -change)]


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
    steady = report.ours is not None and report.ours["steady"]
    if not steady or after > (1 - max(FASTER, _noise(report))) * before:
        return []
    return [
        Advice("Bring the model and its images to channels_last.", TO_CHANNELS_LAST, after - before)
    ]
