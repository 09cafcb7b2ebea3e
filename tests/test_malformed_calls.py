"""Malformed calls raise; the process lives. tests/malformed.py makes them, in child processes.

`WARPWRIGHT_MALFORMED_CALLS` calls of each kind and device; the same ones in each run.
"""

import os

import pytest
from malformed import Campaign, run_campaign, unexplained
from malformed_calls import public_calls, raw_calls

CALLS = int(os.environ.get("WARPWRIGHT_MALFORMED_CALLS", "200"))
pytestmark = pytest.mark.timeout(7200)


def summary(outcome):
    return f"{len(outcome.deaths)} of {len(outcome.calls)} calls died:\n" + "\n".join(
        outcome.deaths
    )


@pytest.mark.parametrize("kind", ["raw", "public"])
def test_process_lives(device, kind, record_property):
    ours = run_campaign(Campaign(kind=kind, device=device, calls=CALLS))
    assert len(ours.calls) == CALLS
    assert not ours.deaths, summary(ours)
    if kind == "public":
        native = run_campaign(Campaign(kind=kind, device=device, calls=CALLS, native=True))
        left = unexplained(ours, native)
        record_property("outcome_as_native", f"{CALLS - len(left)} of {CALLS}")
        if device == "cpu":
            assert len(left) <= 0.01 * CALLS, left


def test_every_function_has_calls():
    from warpwright import functional

    assert set(public_calls("cpu", 0)) == set(functional.__all__)


def test_a_death_is_named():
    """A call that ends the process, and one that hangs or leaves a CUDA fault, would be seen."""
    outcome = run_campaign(Campaign(calls=3, only="relu_backward", fatal=1))
    assert len(outcome.calls) == 3
    assert set(outcome.results) == {0, 2}
    (death,) = outcome.deaths
    assert death.startswith("relu_backward(")
    assert "exit code -6" in death


def test_calls_are_valid_without_a_fault(device):
    """What the campaign spoils works as it is, or an error would hide others."""
    import torch

    from warpwright import functional

    for name, (args, kwargs) in public_calls(device, 0).items():
        getattr(functional, name)(*args, **kwargs)
    raw = raw_calls(device)
    with torch.no_grad():
        for name, calls in raw.items():
            for args in calls:
                getattr(torch.ops.warpwright, name).default(*args)
