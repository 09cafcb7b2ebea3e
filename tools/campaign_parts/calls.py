"""Random malformed calls of the public functions and the raw ops, in child processes."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from .result import PROCESSES, ROOT, Options, Row

sys.path.insert(0, str(ROOT / "tests"))

AS_NATIVE = 0.99  # the share of public calls with native's outcome


def run_shards(campaign: Any) -> Any:
    """run_campaign, in several processes at once: a call depends on its number and the seed alone."""
    from malformed import Outcome, run_campaign

    size = -(-campaign.calls // PROCESSES)
    starts = range(campaign.first, campaign.first + campaign.calls, size)
    last = campaign.first + campaign.calls
    shards = [replace(campaign, first=n, calls=min(size, last - n)) for n in starts]
    whole = Outcome()
    with ThreadPoolExecutor(PROCESSES) as pool:
        for part in pool.map(run_campaign, shards):
            whole.calls.update(part.calls)
            whole.faults.update(part.faults)
            whole.results.update(part.results)
            whole.deaths += part.deaths
    return whole


def run(options: Options) -> list[Row]:
    from malformed import Campaign, unexplained

    rows = []
    for kind in ("public", "raw"):
        what = f"malformed calls of the {'public functions' if kind == 'public' else 'raw ops'}"
        if not re.search(options.only, kind):
            rows.append(Row(part="malformed", what=what, not_run="left out by --only"))
            continue
        campaign = Campaign(
            kind=kind, device=options.device, calls=options.cases, seed=options.seed
        )
        ours = run_shards(campaign)
        row = Row(
            part="malformed",
            what=what,
            cases=len(ours.calls),
            unit="calls",
            failures=list(ours.deaths),
            seed=options.seed,
            detail=f"{len(ours.deaths)} deaths",
        )
        if kind == "public":
            # Each call that ends native's process costs the start of another one.
            calls = options.cases if options.compared is None else options.compared
            native = run_shards(replace(campaign, native=True, calls=min(calls, options.cases)))
            compared = [n for n in ours.results if native.results.get(n, ("none",))[0] != "none"]
            different = unexplained(ours, native)
            for number, (call, mine, natives, *_) in sorted(different.items()):
                print(
                    f"malformed: call {number}: ours {mine}, native {natives}: {call}", flush=True
                )
            share = 1 - len(different) / max(1, len(compared))
            row.detail += (
                f", outcome as native's in {share:.2%} of {len(compared)} that native has; "
                f"native: {len(native.deaths)} deaths"
            )
            if share < AS_NATIVE:
                row.failures.append(f"only {share:.2%} have native's outcome")
        rows.append(row)
    return rows
