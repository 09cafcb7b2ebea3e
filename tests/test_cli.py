"""The command line: quick, complete, and with the names and exit codes that it documents."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import warpwright
import warpwright_cli
from warpwright.bench.peers import PEERS
from warpwright.bench.run import SUITES
from warpwright.profile.runs import RUNS
from warpwright_cli import commands, names

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "import sys; from warpwright_cli import main; sys.exit(main())"


def call(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python"), **environment},
        check=False,
    )


def test_names():
    assert tuple(PEERS) == names.PEERS
    assert names.RUNS == RUNS
    assert names.SUITES == SUITES


def test_version():
    done = call("--version")
    assert done.stdout == f"warpwright {warpwright.__version__}\n", done.stderr


def test_completion():
    words = {"COMP_WORDS": "warpwright bench --peer native,cud", "COMP_CWORD": "3"}
    done = call(_WARPWRIGHT_COMPLETE="bash_complete", **words)
    assert done.stdout.split() == ["plain,native,cudagraph", "plain,native,cudnn-graph"]
    for shell in commands.COMPLETION:
        line = call("completion", shell).stdout
        assert f"_WARPWRIGHT_COMPLETE={shell}_source" in line


@pytest.mark.parametrize("name", sorted(commands.warpwright.commands))
def test_every_option_has_a_help(name, capsys):
    assert warpwright_cli.main([name, "--help"]) == 0
    assert f"Usage: warpwright {name}" in capsys.readouterr().out
    command = commands.warpwright.commands[name]
    assert command.help.splitlines()[0].endswith(".")
    chooses = (click.Choice, commands.Positive, click.types.IntParamType)
    for option in command.params:
        if isinstance(option, click.Option) and not isinstance(option.type, chooses):
            assert option.help or option.show_default, f"{name} {option.name}: no help"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profil"], "No such command 'profil'"),
        (["bench", "--suite", "x"], "Invalid value for '--suite'"),
        (["profile"], "Missing argument 'SCRIPT_OR_MODULE:FACTORY'"),
        (["demo", "--lr", "nan"], "expected number above 0, got nan"),
        (["demo", "--lr", "inf"], "expected number above 0, got inf"),
        (["profile", "a:b", "--steps", "0"], "expected integer above 0, got 0"),
    ],
)
def test_wrong_calls(arguments, says, capsys):
    assert warpwright_cli.main(arguments) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("--html needs jinja2: pip install x"), 2, "--html needs jinja2"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, says):
    def fails(options):
        raise error

    monkeypatch.setattr(commands, "version", lambda: fails(None))
    assert warpwright_cli.main(["--version"]) == code
    assert says in capsys.readouterr().err


def test_a_reader_that_closes_the_pipe():
    command = f"{sys.executable} -m warpwright info | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment, check=False
    )
    assert "warpwright" in done.stdout
    assert "Traceback" not in done.stderr
