"""The reliability campaign: looks for the next fault, and records what was tried.

    python tools/campaign.py --list
    python tools/campaign.py malformed fuzz --cases 5000 --seed 1
    python tools/campaign.py --all --device cuda --out benchmarks/results/h200
    python tools/campaign.py --found "what was wrong" --part malformed --test tests/test_x.py::test_y

Each part alone replaces its own rows in OUT/reliability.json; `python -m warpwright report` then
writes docs/reliability.md and README.md's line from it. A part that needs something that is not here
(a GPU, a checkout of PyTorch) is recorded as not run. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "python")]
# As in tests/conftest.py: some virtual machines advertise AMX and do not grant it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from campaign_parts import (  # noqa: E402
    calls,
    injected,
    mutate_python,
    mutation,
    sanitizers,
    soak,
    suites,
)
from campaign_parts.result import Options, Row  # noqa: E402

from warpwright.bench import records, reliability, sources  # noqa: E402


@dataclass(frozen=True)
class Part:
    """A part of the campaign."""

    run: Callable[[Options], list[Row]]
    says: str
    device: str = ""  # runs for this one alone


PARTS = {
    "fuzz": Part(suites.fuzz, "random well-formed calls against native and float64"),
    "malformed": Part(calls.run, "random malformed calls, public and raw, in child processes"),
    "sanitizers": Part(sanitizers.run, "suite and calls under AddressSanitizer and UBSan", "cpu"),
    "mutation": Part(mutation.run, "small faults in the C++ sources, and who finds them", "cpu"),
    "kernel-mutation": Part(
        mutation.run_kernels, "small faults in the CUDA kernels, and who finds them", "cuda"
    ),
    "python-mutation": Part(
        mutate_python.run, "small faults in the Python sources, and who finds them", "cpu"
    ),
    "injected": Part(injected.run, "failing allocations, signals, forks, threads", "cpu"),
    "soak": Part(soak.run, "training steps with changing shapes, memory flat"),
    "upstream": Part(suites.upstream, "PyTorch's own test files (--pytorch)"),
    "compute-sanitizer": Part(suites.sanitized_cases, "memcheck, racecheck, synccheck, initcheck"),
    "gpu": Part(suites.gpu_suite, "bit-equal repeats, 2^31 elements, WARPWRIGHT_PATH=portable"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Options()
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--all", action="store_true", help="every part")
    parser.add_argument("--list", action="store_true", help="says what the parts do")
    parser.add_argument("--device", choices=["cpu", "cuda"], default=defaults.device)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--cases", type=int, default=defaults.cases, help="calls, or cases per op")
    parser.add_argument(
        "--compared", type=int, help="malformed public calls that native makes, too (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="at most, per part")
    parser.add_argument("--mutants", type=int, default=defaults.mutants)
    parser.add_argument(
        "--per-file", type=int, default=defaults.per_file, help="faults in each file of a build"
    )
    parser.add_argument(
        "--only", default=defaults.only, help="regular expression of files, or kinds"
    )
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch with its tests")
    parser.add_argument("--out", type=Path, help="the record's folder (default: that of the CPU)")
    parser.add_argument("--no-record", action="store_true", help="prints the rows alone")
    parser.add_argument("--found", help="adds a fault that was found and fixed to the record")
    parser.add_argument("--part", choices=list(PARTS), help="of --found")
    parser.add_argument("--test", help="of --found: the test that finds it")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"PART: expected one of {', '.join(PARTS)}, got {name!r}")
    if options.found and not (options.part and options.test):
        parser.error("--found: expected --part and --test with it")
    if not (options.parts or options.all or options.list or options.found):
        parser.error("expected a PART, --all or --list")
    return options


def open_record(path: Path, device: str) -> dict[str, Any]:
    """The record that is there, with this machine's header; or an empty one."""
    before = reliability.load(path) if path.exists() else {"rows": [], "found": []}
    return {**before, **records.environment(device), "source_hash": sources.source_hash(ROOT)}


def dated(rows: list[Row], source_hash: str, seconds: float) -> list[dict[str, Any]]:
    """The rows with the date and the sources that the part started from."""
    stamp = {
        "date": datetime.date.today().isoformat(),
        "source_hash": source_hash,
        "seconds": round(seconds, 1),
    }
    return [{**row.as_dict(), **stamp} for row in rows]


def run_part(name: str, options: Options) -> list[dict[str, Any]]:
    part, source_hash = PARTS[name], sources.source_hash(ROOT)
    if part.device not in ("", options.device):
        reason = f"runs on {part.device} alone"
        return dated([Row(part=name, what=part.says, not_run=reason)], source_hash, 0)
    print(f"== {name}: {part.says}", flush=True)
    begin = time.monotonic()
    found = part.run(options)
    rows = dated(found, source_hash, time.monotonic() - begin)
    for row in rows:
        said = row["not_run"] or f"{row['cases']} {row['unit']}, {len(row['failures'])} failed"
        print(f"{row['what']}: {said} {row['detail']}")
        for failure in row["failures"]:
            print(f"  {failure}")
    return rows


def main() -> int:
    given = parse()
    if given.list:
        for name, part in PARTS.items():
            print(f"{name:18} {part.says}")
        return 0
    options = Options(**{f.name: getattr(given, f.name) for f in dataclasses.fields(Options)})
    out = given.out or ROOT / records_folder(given.device)
    path = out / reliability.RESULT
    failed = False
    for name in PARTS if given.all else given.parts:
        rows = run_part(name, options)
        failed |= any(row["failures"] for row in rows)
        if not given.no_record:
            reliability.save(reliability.merge(open_record(path, given.device), rows), path)
    if given.found:
        record = open_record(path, given.device)
        fault = {"part": given.part, "fault": given.found, "test": given.test}
        record["found"].append({"date": datetime.date.today().isoformat(), **fault})
        reliability.save(record, path)
    return int(failed)


def records_folder(device: str) -> Path:
    return Path("benchmarks") / "results" / ("cpu" if device == "cpu" else "h200")


if __name__ == "__main__":
    sys.exit(main())
