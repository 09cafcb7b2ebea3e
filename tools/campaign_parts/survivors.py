"""Why a fault survives: what a person found by reading. A fault that is not here is a gap of the tests."""

from __future__ import annotations

from .mutate import Mutant

GRAIN = "changes how work is split among threads, not a result"
CUDA = "runs for CUDA tensors alone"
AGAIN = "a later check says the same"
EQUIVALENT = "computes the same"

# By file, and the beginning of the source line.
REASONS: dict[tuple[str, str], str] = {}


def reason(mutant: Mutant) -> str:
    """Empty if none is known."""
    for (file, text), why in REASONS.items():
        if mutant.file == file and mutant.text.startswith(text):
            return why
    return ""
