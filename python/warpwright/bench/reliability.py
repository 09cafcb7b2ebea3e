"""The reliability campaign's results: docs/reliability.md, README.md's line, and the record.

tools/campaign.py writes one record per machine. A row says what was tried, how often, and what
failed. `found` lists the faults that campaigns have found, with the test that keeps each away.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from .records import write

Record = dict[str, Any]
RESULT = "reliability.json"
# Their failures are gaps of the tests, not faults.
MUTATION = ("kernel-mutation", "mutation", "python-mutation")
HEADER = ("schema", "device", "gpu", "torch", "date", "source_hash", "rows", "found")
TRIED = ("part", "what", "cases", "unit", "failures", "seed", "detail", "not_run", "seconds")
ROW = (*TRIED, "date", "source_hash")
FOUND = ("date", "part", "fault", "test")


def load(path: Path) -> Record:
    """Raises ValueError if the file holds no such record."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a record of tools/campaign.py: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(record).__name__}")
    _require(record, HEADER, str(path))
    for name, fields in (("rows", ROW), ("found", FOUND)):
        for i, row in enumerate(record[name]):
            _require(row, fields, f"{path}: {name}[{i}]")
    return record


def _require(value: dict[str, Any], fields: tuple[str, ...], where: str) -> None:
    for field in fields:
        if field not in value:
            raise ValueError(f"{where}: field {field!r} is missing")


def save(record: Record, path: Path) -> None:
    """All or nothing: an interrupted write leaves the file as it was."""
    write(path, json.dumps(record, indent=1) + "\n")


def merge(record: Record, rows: list[dict[str, Any]]) -> Record:
    """The record with `rows` in place of those of the same parts. What did not run replaces no run."""
    parts = {row["part"] for row in rows}
    kept = [row for row in record["rows"] if row["part"] not in parts]
    ran = {(row["part"], row["what"]): row for row in record["rows"] if not row["not_run"]}
    new = [ran.get((row["part"], row["what"]), row) if row["not_run"] else row for row in rows]
    return {**record, "rows": [*kept, *new]}


def _is_open(row: dict[str, Any], record: Record, records: list[Record]) -> bool:
    """Whether no later run of the same part, on any machine of the kind, took the row's place."""
    later = (
        other
        for r in records
        if r["device"] == record["device"]
        for other in r["rows"]
        if (other["part"], other["what"]) == (row["part"], row["what"]) and not other["not_run"]
    )
    return all(other["date"] <= row["date"] for other in later)


def _machine(record: Record) -> str:
    """Its name; a CPU's without the threads, which say nothing about faults."""
    return re.sub(r", \d+ threads?$", "", record["gpu"])


def summary(records: list[Record]) -> str:
    """README.md's line."""
    if not records:
        return "Not yet run."
    rows = [row for record in records for row in record["rows"] if not row["not_run"]]
    found = [fault for record in records for fault in record["found"]]
    still_open = sum(
        len(row["failures"])
        for record in records
        for row in record["rows"]
        if row["part"] not in MUTATION and _is_open(row, record, records)
    )
    # A step of the soak repeats one workload: it is time under load, not another trial.
    cases = sum(row["cases"] for row in rows if row["part"] != "soak")
    dates = sorted(row["date"] for row in rows) or [records[0]["date"]]
    machines = ", ".join(dict.fromkeys(_machine(record) for record in records))
    return (
        f"**{cases:,} trials** of the reliability campaign, {dates[-1]}: {_count(len(found), 'fault')} "
        f"found and fixed, {still_open} open ({machines}; [docs/reliability.md](docs/reliability.md))."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _tried(record: Record) -> list[str]:
    titles = ["part", "what was tried", "number", "failed", "detail", "seed", "date", "source"]
    lines = [_line(titles), "|" + "---|" * len(titles)]
    for row in record["rows"]:
        if not row["not_run"]:
            seed = "" if row["seed"] is None else row["seed"]
            cells = [row["part"], row["what"], f"{row['cases']:,} {row['unit']}"]
            cells += [len(row["failures"]), row["detail"], seed, row["date"]]
            lines.append(_line([*cells, f"`{row['source_hash']}`"]))
    return lines


def _failures(record: Record, records: list[Record]) -> list[str]:
    lines = []
    for row in record["rows"]:
        if row["failures"]:
            is_open = _is_open(row, record, records)
            title = "Open" if is_open else "Not in the later run"
            if row["part"] in MUTATION:
                title = "Survivors"
            lines += ["", f"{title}: {row['part']}, {row['what']}", ""]
            lines += [f"- `{_cell(failure)[:300].replace('`', '')}`" for failure in row["failures"]]
    return lines


def page(records: dict[str, Record]) -> str:
    """The text of docs/reliability.md; the keys are the records' paths."""
    lines = [
        "# Reliability",
        "",
        "Generated by `python -m warpwright report` from the records of `tools/campaign.py`, which says "
        "how each part works. A failure is open until a later run of the same part on a device of the same "
        "kind (CPU or GPU) is without it.",
    ]
    for path, record in records.items():
        lines += ["", f"## {_machine(record)}", "", f"`{path}`, torch {record['torch']}.", ""]
        lines += [*_tried(record), *_failures(record, list(records.values()))]
        skipped = [row for row in record["rows"] if row["not_run"]]
        if skipped:
            lines += ["", "Not run:", ""]
            lines += [f"- {row['part']}: {row['what']}: {row['not_run']}" for row in skipped]
        if record["found"]:
            titles = ["date", "part", "fault found and fixed", "the test that finds it"]
            lines += ["", _line(titles), "|" + "---|" * len(titles)]
            lines += [
                _line([f["date"], f["part"], f["fault"], f"`{f['test']}`"]) for f in record["found"]
            ]
    return "\n".join(lines) + "\n"
