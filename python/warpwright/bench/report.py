"""Writes the results of README.md and docs/ from benchmarks/results/**.

README.md, docs/architecture.md and docs/ladder.md have tables between `<!-- results:NAME -->` and
`<!-- /results -->`. Everything between the two lines is generated. docs/results.md and docs/results/
are generated whole: a picture that belongs to no record is deleted. docs/reliability.md is generated
whole from the records of tools/campaign.py.

Rows of an op whose sources have changed since it was measured carry a dagger. Whether they have
depends on the tree, not on the results, so `--check` looks past daggers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import ladder, machines, overhead, reliability
from .records import grouped, is_training_step, load_records, stale_ops, write

Row = dict[str, Any]
Record = dict[str, Any]
RESULTS = Path("benchmarks/results")
MAIN = Path("h200/full.json")  # what README.md shows
NEWEST = "newest"  # no file: the newest rows of the folder of MAIN
PICTURES = Path("docs/results")
OVERHEAD = "overhead.json"
STALE = "†"
STALE_LINE = f"{STALE} measured before the op's sources last changed."
DRIFTING_LINE = (
    '"n of m" workloads: in the others our time or native\'s drifted during the run; the full table '
    "has them, marked."
)
_BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def _geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def provenance(record: Record) -> str:
    precision = "bf16" if record["device"] == "cuda" else "fp32"
    cudnn = f", cuDNN {record['cudnn']}" if record["cudnn"] else ""
    rates = [
        f"copy {record['copy_tbs']:.3g} TB/s",
        f"{precision} matmul {record['matmul_tflops']:.3g} TFLOP/s",
    ]
    if "tf32_tflops" in record:
        rates.append(f"TF32 matmul {record['tf32_tflops']:.3g} TFLOP/s")
    return (
        f"{record['gpu']}, torch {record['torch']}{cudnn}, {record['date']}, "
        f"source {record['source_hash']}; {', '.join(rates)}, measured in the same run"
    )


def _mark(op: str, stale: set[str]) -> str:
    return f"`{op}`{STALE if op in stale else ''}"


def _footnotes(record: Record, stale: set[str]) -> list[str]:
    lines = ["", provenance(record) + "."]
    if stale:
        lines += ["", STALE_LINE]
    return lines


def _peer_ms(impls: dict[str, Row]) -> list[float]:
    """Times of all implementations but ours."""
    return [row["ms"] for name, row in impls.items() if not name.startswith("warpwright")]


def summary_table(record: Record, stale: set[str]) -> str:
    """One record's :func:`op_lines` and where they come from."""
    return "\n".join([*op_lines(record, stale), *_footnotes(record, stale)])


def op_lines(record: Record, stale: set[str]) -> list[str]:
    """One line per op and pass: the number of workloads, and the range of native time over ours.

    Counts workloads with steady times only; the full table has the others.
    """
    groups: dict[tuple[str, str], list[dict[str, Row]]] = {}
    for key, impls in grouped(record).items():
        if {"warpwright", "native"} <= impls.keys():
            groups.setdefault((key[0], key[-1]), []).append(impls)
    others = any(len(_peer_ms(impls)) > 1 for rows in groups.values() for impls in rows)
    drifting = False
    titles = ["op", "pass", "workloads", "native time / ours: geometric mean"]
    titles += ["slowest row", "fastest row"]
    if others:
        titles.append("fastest of all peers / ours")
    titles.append("share of the floor's speed")
    lines = [_line(titles), "|" + "---|" * len(titles)]
    for (op, which), every in groups.items():
        rows = [r for r in every if _held_still(r)]
        drifting |= len(rows) < len(every)
        count = str(len(every)) if len(rows) == len(every) else f"{len(rows)} of {len(every)}"
        cells = [_mark(op, stale), which, count]
        if not rows:
            lines.append(_line([*cells, *[""] * (len(titles) - len(cells))]))
            continue
        ratios = [r["native"]["ms"] / r["warpwright"]["ms"] for r in rows]
        cells.append(f"**{_geomean(ratios):.2f}×**")
        cells += [f"{min(ratios):.2f}×", f"{max(ratios):.2f}×"]
        if others:
            best = [min(_peer_ms(r)) / r["warpwright"]["ms"] for r in rows]
            cells.append(f"{_geomean(best):.2f}×")
        ours = [r["warpwright"] for r in rows]
        floors = [row["floor_ms"] / row["ms"] for row in ours if row["floor_ms"]]
        cells.append(f"{_geomean(floors):.0%}" if floors and not is_training_step(op) else "")
        lines.append(_line(cells))
    if drifting:
        lines += ["", DRIFTING_LINE]
    return lines


def step_lines(record: Record, stale: set[str]) -> list[str]:
    """One line per training step and layout: native, its fastest other form, ours."""
    titles = ["training step, ms", "workload", "layout", "native", "fastest other peer"]
    titles += ["ours, swapped", "ours at its fastest", "fastest of all peers / ours at its fastest"]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    for (op, case, _, layout, _), impls in grouped(record).items():
        ours = {n: r["ms"] for n, r in impls.items() if n.startswith("warpwright")}
        peers = {n: r["ms"] for n, r in impls.items() if n not in ours}
        if not ours or not peers:
            continue
        others = {n: ms for n, ms in peers.items() if n != "native"}
        cells = [_mark(op, stale), case, layout]
        cells.append(_ms(peers["native"]) if "native" in peers else "")
        cells.append(_fastest(others))
        cells.append(_ms(ours["warpwright"]) if "warpwright" in ours else "")
        cells.append(_fastest(ours))
        cells.append(f"**{min(peers.values()) / min(ours.values()):.2f}×**")
        lines.append(_line(cells))
    return lines


def _fastest(ms: dict[str, float]) -> str:
    if not ms:
        return ""
    name = min(ms, key=lambda n: ms[n])
    return f"{_ms(ms[name])} ({name.removeprefix('warpwright_')})"


def _ms(ms: float) -> str:
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _held_still(impls: dict[str, Row]) -> bool:
    return all(impls[name].get("steady", True) for name in ("warpwright", "native"))


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _interval(native: Row, ours: Row) -> str:
    text = f"{native['ms'] / ours['ms']:.2f}×"
    if "ratio_lo" in native:
        text += f" [{native['ratio_lo']:.2f}, {native['ratio_hi']:.2f}]"
    return text


def full_table(record: Record, stale: set[str]) -> str:
    """Every row; the other peers' times share a column."""
    from .screen import notes_of

    titles = ["op", "workload", "dtype", "layout", "pass", "ours ms", "native ms"]
    titles += ["native / ours [95 %]", "other ms", "floor / ours", "peak MiB ours (native's)"]
    titles += ["max rel. error ours (native's)", "notes"]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    for key, impls in grouped(record).items():
        if not {"warpwright", "native"} <= impls.keys():
            continue
        ours, native = impls["warpwright"], impls["native"]
        rest = {n: r for n, r in impls.items() if n not in ("warpwright", "native")}
        notes = notes_of(ours) + [
            f"{n}: {x}" for n, r in impls.items() if r is not ours for x in notes_of(r)
        ]
        cells = [_mark(key[0], stale), *key[1:], f"{ours['ms']:.4f}", f"{native['ms']:.4f}"]
        cells.append(_interval(native, ours))
        cells.append(", ".join(f"{name} {row['ms']:.4f}" for name, row in rest.items()))
        cells.append(f"{ours['floor_ms'] / ours['ms']:.0%}" if ours["floor_ms"] else "")
        memory = ours["peak_mib"] is not None and native["peak_mib"] is not None
        cells.append(f"{ours['peak_mib']:.0f} ({native['peak_mib']:.0f})" if memory else "")
        exact = ours["err"] is not None
        cells.append(f"{ours['err']:.1e} ({native['err']:.1e})" if exact else "")
        cells.append("; ".join(notes).replace("|", "/"))
        lines.append(_line(cells))
    return "\n".join([*lines, *_footnotes(record, stale)])


def picture_html(name: str, alt: str, folder: str) -> str:
    """A picture that follows the reader's colour scheme, as GitHub renders it."""
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{folder}{name}_dark.png">'
        f'<img alt="{alt}" src="{folder}{name}.png"></picture>'
    )


def stem(path: Path, root: Path) -> str:
    return "_".join(path.relative_to(root / RESULTS).with_suffix("").parts)


def newest_by_op(main: Path, records: dict[Path, Record]) -> list[tuple[Path, Record]]:
    """The records of main's folder with the ops alone that no newer one has, main's ops first.

    Any other record counts as newer than the whole suite's.
    """
    paths = sorted(
        (p for p in records if p.parent == main.parent),
        key=lambda p: (p != main, records[p]["date"], p.name),
    )
    owner = {row["op"]: path for path in paths for row in records[path]["rows"]}
    parts = []
    for path in paths:
        rows = [row for row in records[path]["rows"] if owner[row["op"]] == path]
        if rows:
            parts.append((path, {**records[path], "rows": rows}))
    return parts


def newest_record(main: Path, records: dict[Path, Record]) -> Record:
    """Main's record with the newest rows of each op, for README.md's picture."""
    parts = [record for _, record in newest_by_op(main, records)] or [records[main]]
    dates = sorted({record["date"] for record in parts})
    sources = {record["source_hash"] for record in parts}
    return {
        **records[main],
        "suite": NEWEST,
        "rows": [row for record in parts for row in record["rows"]],
        "date": " to ".join(dict.fromkeys([dates[0], dates[-1]])),
        "source_hash": sources.pop() if len(sources) == 1 else "of each record",
    }


def summary_block(
    main: Path, records: dict[Path, Record], stale: dict[Path, set[str]], root: Path
) -> str:
    """README.md's tables of one GPU: ops, then training steps, each from its newest record."""
    parts = newest_by_op(main, records)
    marked = {row["op"] for path, part in parts for row in part["rows"] if row["op"] in stale[path]}
    rows = [row for _, part in parts for row in part["rows"]]
    tables = []
    for lines, wanted in ((op_lines, False), (step_lines, True)):
        chosen = [row for row in rows if is_training_step(row["op"]) == wanted]
        if chosen:
            tables.append("\n".join(lines({"rows": chosen}, marked)))
    notes = [f"- {provenance(part)} (`{path.relative_to(root)}`)." for path, part in parts]
    tables.append("\n".join(notes))
    if marked:
        tables.append(STALE_LINE)
    name = f"{stem(main.with_stem(NEWEST), root)}_bars"
    shown = picture_html(name, PICTURE_TEXT["bars"], "docs/results/")
    return "\n\n".join([*tables, shown])


def machines_block(records: dict[Path, Record]) -> str:
    """README.md's columns of several GPUs; empty with one."""
    folders: dict[Path, list[Record]] = {}
    for path, record in records.items():
        if record["device"] == "cuda":
            whole_first = 0 if path.name == MAIN.name else len(folders.get(path.parent, ()))
            folders.setdefault(path.parent, []).insert(whole_first, record)
    if len(folders) < 2:
        return ""
    rows = {
        found[0]["gpu"]: machines.newest_rows(found[0], found[1:]) for found in folders.values()
    }
    return (
        "Native time over ours on each GPU, against its own native: the geometric mean of the workloads "
        f"that all of them measured.\n\n{machines.machines_table(rows)}"
    )


def render(text: str, blocks: dict[str, str]) -> str:
    """`text` with all results blocks replaced. Raises KeyError for an unknown name."""
    return _BLOCK.sub(lambda m: f"{m[1]}{blocks[m[2]]}\n{m[3]}", text)


def results_page(records: dict[Path, Record], stale: dict[Path, set[str]], root: Path) -> str:
    """The text of docs/results.md."""
    lines = [
        "# Results",
        "",
        "Generated by `python -m warpwright report` from `benchmarks/results/`: medians of runs "
        "interleaved in one process, on random normal data, L2 flushed on GPUs. *Floor* is the "
        "larger of (fewest bytes / measured copy rate) and (FLOPs / measured matmul rate). *Error* "
        "is the largest difference from the same computation in float64 over the largest value.",
    ]
    for path, record in records.items():
        name = stem(path, root)
        lines += ["", f"## {record['gpu']}: {path.stem}", "", f"`{path.relative_to(root)}`", ""]
        for kind, alt in PICTURE_TEXT.items():
            if kind in _drawable(record):
                lines += [picture_html(f"{name}_{kind}", alt, "results/"), ""]
        lines += [
            summary_table(record, stale[path]),
            "",
            "<details><summary>Every row</summary>",
            "",
        ]
        lines += [full_table(record, stale[path]), "", "</details>"]
        if record.get("missing") or record.get("failures") or record.get("skipped"):
            lines += ["", "Not measured:", ""]
            lines += [f"- {n}: {why}" for n, why in record.get("missing", {}).items()]
            for name, why in record.get("skipped", {}).items():
                lines += [f"- {name}: {reason} ({op})" for op, reason in why.items()]
            for f in record.get("failures", []):
                what = " ".join(filter(None, (f["op"], f["case"], f.get("impl"))))
                lines.append(f"- {what}: {_first_line(f['error'])}")
    return "\n".join(lines) + "\n"


def ladder_block(records: dict[Path, Record], root: Path) -> str:
    """docs/ladder.md's blocks: each machine's tables and picture."""
    parts = []
    for path, record in records.items():
        parts.append(picture_html(f"{stem(path, root)}_rungs", PICTURE_TEXT["rungs"], "results/"))
        parts.append(ladder.block(record))
        mark = STALE if ladder.is_stale(record, root) else ""
        parts.append(f"{provenance(record)}{mark}.")
        if mark:
            parts.append(STALE_LINE)
    return "\n\n".join(parts) or ladder.not_measured()


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:200] if text.strip() else ""


PICTURE_TEXT = {
    "bars": "Time of every implementation against eager PyTorch",
    "roofline": "Roofline scatter of every measured row",
    "ladder": "Training steps from the slowest to the fastest implementation",
    "rungs": "Each rung's rate beside cuBLAS and the peak, on a logarithmic axis",
}


def _drawable(record: Record) -> list[str]:
    if record.get("suite") == ladder.SUITE:
        return ["rungs"]
    if record.get("suite") == NEWEST:
        return ["bars"]
    steps = [r for r in record["rows"] if is_training_step(r["op"])]
    single = len(steps) < len(record["rows"])
    return [*(("bars", "roofline") if single else ()), *(("ladder",) if steps else ())]


def digest(record: Record) -> str:
    """Identifies a record's content. A picture contains the digest of its record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def _picture_name(name: str, kind: str, dark: bool) -> str:
    return f"{name}_{kind}{'_dark' if dark else ''}.png"


def picture_names(record: Record, name: str) -> list[str]:
    return [_picture_name(name, kind, dark) for kind in _drawable(record) for dark in (False, True)]


def draw_pictures(record: Record, name: str, folder: Path) -> None:
    from . import plots

    functions = {
        "bars": plots.bars,
        "roofline": plots.roofline,
        "ladder": plots.ladder,
        "rungs": plots.rungs,
    }
    for kind in _drawable(record):
        for dark in (False, True):
            plots.save_png(
                functools.partial(functions[kind], record),
                folder / _picture_name(name, kind, dark),
                plots.DARK if dark else plots.LIGHT,
                description=digest(record),
            )


def outdated_pictures(record: Record, name: str, folder: Path) -> list[str]:
    """Pictures that are missing or show another record."""
    wanted = digest(record).encode()
    return [
        n
        for n in picture_names(record, name)
        if not (folder / n).is_file() or wanted not in (folder / n).read_bytes()
    ]


def _without_stale(text: str) -> str:
    text = text.replace(f"\n\n{STALE_LINE}", "").replace(STALE, "")
    return re.sub(r", \*\*stale\*\*[^)]*\)", ")", text)


def run(options: SimpleNamespace) -> int:
    """Rewrites the documents. With --check: names those that differ from the results."""
    root: Path = options.root
    paths = sorted((root / RESULTS).rglob("*.json"))
    found = {path: load_records(path) for path in paths if path.name != reliability.RESULT}
    tried = {
        str(path.relative_to(root)): reliability.load(path)
        for path in paths
        if path.name == reliability.RESULT
    }
    # The host time of calls and the ladder have tables of their own.
    host = [record for path, record in found.items() if path.name == OVERHEAD]
    ladders = {path: record for path, record in found.items() if path.name == ladder.RESULT}
    records = {p: r for p, r in found.items() if p.name not in (OVERHEAD, ladder.RESULT)}
    if not records:
        print(f"{root / RESULTS}: no results")
        return 2
    stale = {path: stale_ops(record, root) for path, record in records.items()}
    main = root / RESULTS / MAIN
    main = main if main in records else next(iter(records))
    readme = root / "README.md"
    summary = summary_block(main, records, stale, root)
    blocks = {
        "summary": "\n\n".join(filter(None, (machines_block(records), summary))),
        "full": full_table(records[main], stale[main]),
        "reliability": reliability.summary(list(tried.values())),
    }
    wanted = {
        readme: render(readme.read_text(), blocks),
        root / "docs" / "results.md": results_page(records, stale, root),
    }
    if tried:
        wanted[root / "docs" / "reliability.md"] = reliability.page(tried)
    if host:
        path = root / "docs" / "architecture.md"
        wanted[path] = render(path.read_text(), {"overhead": overhead.table(host[0])})
    path = root / "docs" / "ladder.md"
    if path.exists():
        wanted[path] = render(path.read_text(), {"ladder": ladder_block(ladders, root)})
    differing = []
    for path, text in wanted.items():
        before = path.read_text() if path.exists() else ""
        same = _without_stale(before) == _without_stale(text) if options.check else before == text
        if not same:
            differing.append(str(path.relative_to(root)))
            if not options.check:
                write(path, text)
    of_no_record = {picture.name for picture in (root / PICTURES).glob("*.png")}
    newest = {main.with_stem(NEWEST): newest_record(main, records)}
    for path, record in {**records, **ladders, **newest}.items():
        name = stem(path, root)
        of_no_record.difference_update(picture_names(record, name))
        old = outdated_pictures(record, name, root / PICTURES)
        differing += [str(PICTURES / n) for n in old]
        if old and not options.check:
            draw_pictures(record, name, root / PICTURES)
    for name in differing:
        print(f"{name}: {'not what the results say' if options.check else 'rewritten'}")
    for name in sorted(of_no_record):
        print(f"{PICTURES / name}: {'of no record' if options.check else 'deleted: of no record'}")
        if not options.check:
            (root / PICTURES / name).unlink()
    for path, ops in stale.items():
        if ops:
            print(f"{path.relative_to(root)}: stale: {', '.join(sorted(ops))}")
    for path, record in ladders.items():
        if ladder.is_stale(record, root):
            print(f"{path.relative_to(root)}: stale")
    return 1 if options.check and (differing or of_no_record) else 0
