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
ADDITIONS = ("add", "add_")  # of a block, which batch norm's chain runs
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

    A module that runs a chain of layers is compared with all layers of the chain.
    """
    if ours is None or report.run("native") is None:
        return {}
    chains = _chains(report) if ours["name"] == "fused" else {}
    found = {}
    for name in dict.fromkeys(r["module"] for r in report.modules if r.get("swap") == "swapped"):
        rows = [row for row in report.modules if row["module"] == name]
        native, mine = (
            sum(row[run]["ms"] or 0.0 for row in rows) for run in ("native", ours["name"])
        )
        if not native or not mine:
            continue
        for row in report.modules:
            if (row["module"], row["op"]) in chains.get(name, ()):
                native += row["native"]["ms"] or 0.0
                mine += row[ours["name"]]["ms"] or 0.0
        if mine > SLOWER * native:
            found[name] = mine - native
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _chains(report: ProfileReport) -> dict[str, set[tuple[str, str]]]:
    """{the module that runs a chain: (module, op) of the other rows that the chain replaces}."""
    keepers = {entry["name"] for entry in report.swap["entries"] if entry["fused"]}
    found: dict[str, set[tuple[str, str]]] = {}
    for fusion in report.swap["fusions"]:
        if fusion["reason"]:
            continue
        block, steps = fusion["block"], fusion["chain"].split(" → ")
        names = [f"{block}.{step}" if block else step for step in steps]
        for keeper in keepers.intersection(names):
            found[keeper] = {
                (row["module"], row["op"])
                for row in report.modules
                if (row["module"] in names and row["module"] != keeper)
                or (row["module"] == block and row["op"] in ADDITIONS and "add" in steps)
            }
    return found


def _native_layers(report: ProfileReport, ours: Row | None) -> list[Advice]:
    slower, native = losses(report, ours), report.run("native")
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
    if after > (1 - FASTER) * before:
        return []
    return [
        Advice("Bring the model and its images to channels_last.", TO_CHANNELS_LAST, after - before)
    ]
