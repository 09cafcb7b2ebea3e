"""Reports as plain text, from what rich prints to a terminal."""

from __future__ import annotations

import io
from typing import Any


def plain_text(renderable: Any, width: int) -> str:
    """Without colours and escape codes, wherever it is called: in a notebook or under FORCE_COLOR too."""
    from rich.console import Console  # imported when a report is printed

    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
