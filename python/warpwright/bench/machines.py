"""Records of several GPUs: ratios to native, which a slower GPU does not change by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from .records import grouped

Record = dict[str, Any]
Key = tuple[str, ...]
Rows = dict[Key, dict[str, dict[str, Any]]]


def native_ratio(impls: Mapping[str, dict[str, Any]], impl: str = "warpwright") -> float | None:
    """Native's time over `impl`'s in the same run; None if either is missing."""
    if impl not in impls or "native" not in impls:
        return None
    return float(impls["native"]["ms"] / impls[impl]["ms"])


def newest_rows(whole: Record, again: Iterable[Record]) -> Rows:
    """The rows of a GPU. An op that was measured again replaces its rows of the whole suite."""
    rows = grouped(whole)
    for record in again:
        later = grouped(record)
        ops = {key[0] for key in later}
        rows = {key: impls for key, impls in rows.items() if key[0] not in ops} | later
    return rows


def _steady_ratio(impls: Mapping[str, dict[str, Any]]) -> float | None:
    steady = all(
        impls[name].get("steady", True) for name in ("warpwright", "native") if name in impls
    )
    return native_ratio(impls) if steady else None


def machines_table(machines: Mapping[str, Rows]) -> str:
    """A line per op and pass, a column per GPU: the geometric mean of native time over ours.

    Only workloads count that every GPU measured and on which none drifted.
    """
    ratios = {
        name: {key: r for key, impls in rows.items() if (r := _steady_ratio(impls)) is not None}
        for name, rows in machines.items()
    }
    first, *others = ratios.values()
    shared = [key for key in first if all(key in other for other in others)]
    groups: dict[tuple[str, str], list[Key]] = {}
    for key in shared:
        groups.setdefault((key[0], key[-1]), []).append(key)
    lines = [_line(["op", "pass", "workloads", *machines]), "|" + "---|" * (3 + len(machines))]
    for (op, which), keys in groups.items():
        means = [
            math.exp(sum(math.log(found[key]) for key in keys) / len(keys))
            for found in ratios.values()
        ]
        lines.append(_line([f"`{op}`", which, str(len(keys)), *(f"{m:.2f}×" for m in means)]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
