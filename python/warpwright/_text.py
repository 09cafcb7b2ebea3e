"""Reports as plain text, from what rich prints to a terminal."""

from __future__ import annotations

import io
import re
import shutil
from typing import Any

WIDE = 120  # columns of text that goes to a file or a pipe


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS if that is set."""
    return shutil.get_terminal_size((WIDE, 24)).columns


def plain_text(renderable: Any, width: int) -> str:
    """Without colours and escape codes, wherever it is called: in a notebook or under FORCE_COLOR too."""
    from rich.console import Console  # imported when a report is printed

    out = io.StringIO()
    console = Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    )
    console.print(renderable)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def folded(text: str, width: int) -> list[str]:
    """``text`` in lines of ``width`` columns, broken at spaces.

    A word longer than a line begins a line and is broken before its dots, as module names are. Only a
    part that is still too long is cut anywhere. Nothing is left out.
    """
    from rich.cells import cell_len, chop_cells

    lines: list[str] = []
    for word in text.split(" "):
        pieces = [word]
        if cell_len(word) > width:
            parts = re.split(r"(?=\.)", word)
            pieces = [chunk for part in parts for chunk in chop_cells(part, width)]
        elif lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += " " + word
            continue
        lines.append("")
        for piece in pieces:
            if lines[-1] and cell_len(lines[-1]) + cell_len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return lines
