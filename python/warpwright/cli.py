"""``python -m warpwright <command>``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    from . import demo, doctor
    from ._version import __version__
    from .bench import compare, overhead, report, run
    from .info import run as run_info
    from .profile import command as profile_command

    parser = argparse.ArgumentParser(
        prog="python -m warpwright",
        description="The layers of a neural network as hand-written kernels for PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"warpwright {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    command = commands.add_parser("info", help="what was built, and what this machine will run")
    command.add_argument("--json", action="store_true", help="as JSON")
    command.set_defaults(run=run_info)
    command = commands.add_parser(
        "doctor", help="tests each op here against native torch, says what runs, and advises"
    )
    doctor.add_arguments(command)
    command.set_defaults(run=doctor.run)
    command = commands.add_parser(
        "demo",
        help="trains a digit reader on warpwright and on native torch, side by side",
        description=demo.__doc__,
    )
    demo.add_arguments(command)
    command.set_defaults(run=demo.run)
    command = commands.add_parser("bench", help="every op compared with native, interleaved")
    run.add_arguments(command)
    command.set_defaults(run=run.main)
    command = commands.add_parser("compare", help="what differs between two of bench's records")
    compare.add_arguments(command)
    command.set_defaults(run=compare.main)
    command = commands.add_parser("overhead", help="host time of a call, ours and native's")
    overhead.add_arguments(command)
    command.set_defaults(run=overhead.main)
    command = commands.add_parser(
        "profile", help="a model's step by op: native and warpwright, as a page"
    )
    profile_command.add_arguments(command)
    command.set_defaults(run=profile_command.main)
    command = commands.add_parser("report", help="rewrites the tables of README.md and docs/")
    report.add_arguments(command)
    command.set_defaults(run=report.run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))
