"""The tree of commands. A command imports what it runs when it is called, never before."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from .kinds import FILE, FOLDER, Names, Positive
from .names import PEERS, RUNS, SUITES

SPEC = "SHAPE[:DTYPE[:HIGH]], random integers below HIGH, e.g. 8x3x224x224, 8x1024:int64:50257."
LABELS = (
    "Likewise, e.g. 64:int64:1000: labels of 1000 classes. Without it: the output's mean square."
)


def version() -> str:
    """The version of the package that `import warpwright` would load, without loading it."""
    spec = find_spec("warpwright")
    if spec is None or spec.origin is None:
        return "unknown"
    return str(runpy.run_path(str(Path(spec.origin).with_name("_version.py")))["__version__"])


def print_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"warpwright {version()}")
        context.exit()


def command(
    help: str, *options: Callable[[Any], Any]
) -> Callable[[Callable[[SimpleNamespace], int]], click.Command]:
    """A command of the group whose function gets all options as one object."""

    def register(function: Callable[[SimpleNamespace], int]) -> click.Command:
        def run(**given: Any) -> int:
            return function(SimpleNamespace(**given))

        for option in reversed(options):
            run = option(run)
        return warpwright.command(function.__name__, help=help, short_help=help.splitlines()[0])(
            run
        )

    return register


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version,
    help="Show the version and exit.",
)  # fmt: skip
def warpwright() -> None:
    """The layers of a neural network as hand-written kernels for PyTorch.

    Exit codes: 0 done, 1 a check failed, 2 the call cannot be carried out, 130 interrupted.
    """


DEVICE = click.option("--device", type=click.Choice(("cpu", "cuda")), help="Default: the GPU.")
JSON = click.option("--json", type=FILE, help="Write the record here.")


@command(
    "What was built, and what this machine will run.",
    click.option("--json", is_flag=True, help="Print JSON."),
)
def info(options: SimpleNamespace) -> int:
    from warpwright.info import run

    return run(options)


@command(
    "Test each op here against native torch, say what runs, and advise.",
    click.option(
        "--device", type=click.Choice(("cpu", "cuda")), help="Default: both, if there is a GPU."
    ),
)
def doctor(options: SimpleNamespace) -> int:
    from warpwright.doctor import run

    return run(options)


@command(
    "Train a digit reader on warpwright and on native torch, side by side.",
    click.option("--model", type=click.Choice(("cnn", "mlp")), default="cnn", show_default=True),
    click.option(
        "--data", type=FOLDER, metavar="DIR",
        help="Folder with the four IDX files of MNIST or FashionMNIST, plain or .gz (default: "
        "scikit-learn's digits).",
    ),
    click.option(
        "--epochs", type=Positive(int), help="Default: 12 for the embedded digits, 2 for files."
    ),
    click.option("--batch", type=Positive(int), help="Default: 64; 32 for mlp."),
    click.option("--lr", type=Positive(float), default=0.01, show_default=True),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--out", type=FOLDER, metavar="DIR", default=Path("demo-out"), show_default=True),
    click.option(
        "--channels-last/--no-channels-last", default=None,
        help="Memory format of both networks (default: what is faster for native here).",
    ),
    click.option(
        "--min-accuracy", type=float, default=0.95, metavar="SHARE", show_default=True,
        help="Of held-out images read right, for exit code 0.",
    ),
)  # fmt: skip
def demo(options: SimpleNamespace) -> int:
    from warpwright.demo import run

    return run(options)


@command(
    "Compare every op with native, interleaved.",
    click.argument("op", nargs=-1),
    click.option("--suite", type=click.Choice(SUITES), help="Default: quick on a CPU, else full."),
    click.option(
        "--peer", type=Names(*PEERS, "all"),
        help=f"Comma-separated, out of {', '.join(PEERS)}; or 'all'.",
    ),
    click.option("--dtype", help="Comma-separated, e.g. bfloat16,float32."),
    DEVICE,
    click.option("--seconds", type=Positive(float), help="Measuring time a row."),
    click.option("--limit", type=Positive(float), help="Aim at this many minutes."),
    click.option("--models", type=FOLDER, help="Folder of --suite model."),
    JSON,
    click.option("--csv", type=FILE, help="Write the rows here."),
    click.option("--html", type=FILE, help="Write the page here, and its pictures next to it."),
)  # fmt: skip
def bench(options: SimpleNamespace) -> int:
    from warpwright.bench.run import main

    return main(options)


@command(
    """Show what differs between two records of bench, or two profiles.

    BEFORE and AFTER are files of bench --json, or the report.json of two profiles.
    """,
    click.argument("before", type=FILE),
    click.argument("after", type=FILE),
    click.option(
        "--tolerance", type=float, default=0.03, show_default=True,
        help="Rows differ if their times do by more than this part.",
    ),
    click.option(
        "--above", type=float, default=0.05, show_default=True,
        help="Only rows of at least this many ms.",
    ),
    click.option("--impl", help="Only this implementation's rows; for records of bench."),
    click.option("--html", type=FILE, help="Write a page here; for profiles."),
)  # fmt: skip
def compare(options: SimpleNamespace) -> int:
    from warpwright.bench.compare import main

    return main(options)


@command(
    "Measure the host time of a call, ours and native's.",
    click.option("--rounds", type=Positive(int), default=200, show_default=True),
    JSON,
)
def overhead(options: SimpleNamespace) -> int:
    from warpwright.bench.overhead import main

    return main(options)


@command(
    """Show a model's step by op: native and warpwright, as a page.

    FACTORY is a function of a script (train.py:build) or module (package.module:build). It returns
    a model; or (model, inputs[, target]); or a dict with model, inputs, target, loss, optimizer,
    autocast, step.
    """,
    click.argument("what", metavar="SCRIPT_OR_MODULE:FACTORY"),
    click.option("--input", multiple=True, metavar="SPEC", help=SPEC),
    click.option("--target", metavar="SPEC", help=LABELS),
    click.option(
        "--arg", multiple=True, metavar="NAME=VALUE", help="Keyword argument for the factory."
    ),
    click.option("--autocast", type=click.Choice(("bfloat16", "float16"))),
    click.option("--runs", type=Names(*RUNS), help=f"Comma-separated, out of {', '.join(RUNS)}."),
    DEVICE,
    click.option(
        "--steps", type=Positive(int), default=5, show_default=True, help="Steps in each trace."
    ),
    click.option(
        "--seconds", type=Positive(float), default=1.0, show_default=True,
        help="Measuring time of each run.",
    ),
    click.option(
        "--out", type=FOLDER, default=Path("profile-out"), show_default=True, help="Folder to write."
    ),
    click.option(
        "--fail-below", type=float, metavar="SPEEDUP",
        help="Exit with 1 if native's step over ours is below this.",
    ),
)  # fmt: skip
def profile(options: SimpleNamespace) -> int:
    from warpwright.profile.command import main

    return main(options)


@command(
    "Rewrite the tables of README.md and docs/ from the records.",
    click.option(
        "--root", type=FOLDER, default=Path("."), show_default=True, help="The repository."
    ),
    click.option("--check", is_flag=True, help="Only say what is out of date."),
)  # fmt: skip
def report(options: SimpleNamespace) -> int:
    from warpwright.bench.report import run

    return run(options)


COMPLETION = {
    "bash": 'eval "$(_WARPWRIGHT_COMPLETE=bash_source warpwright)"',
    "zsh": 'eval "$(_WARPWRIGHT_COMPLETE=zsh_source warpwright)"',
    "fish": "_WARPWRIGHT_COMPLETE=fish_source warpwright | source",
}


@command(
    "Print the line that switches completion on.",
    click.argument("shell", type=click.Choice(tuple(COMPLETION))),
)
def completion(options: SimpleNamespace) -> int:
    click.echo(COMPLETION[options.shell])
    return 0
