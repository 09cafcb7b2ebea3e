"""The command ``warpwright``: its options, exit codes and completion.

It is a package of its own because importing ``warpwright`` loads torch, which takes seconds.
``--help``, ``--version`` and completion load click alone; a command loads what it runs.

Exit codes:
    0: done, and every check passed.
    1: a check failed: a wrong result, a step below ``--fail-below``, an outdated document.
    2: the call cannot be carried out: an unknown option, a file that is missing, a package that is
       not installed, a model that raises. One sentence on stderr says which.
    130: interrupted by Ctrl-C. Files written until then are complete.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from .commands import warpwright

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, prog: str = "warpwright") -> int:
    """Runs a command.

    Args:
        argv: the arguments without the program's name; by default those of the process.
        prog: the program's name in the help.
    Returns:
        The exit code.
    """
    try:
        code = warpwright.main(
            None if argv is None else list(argv), prog_name=prog, standalone_mode=False
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        # Messages of our own say which extra has the package; others only name it.
        print(f"warpwright: {error}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0
