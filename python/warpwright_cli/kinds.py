"""Types of options that click does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem


class Positive(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A finite number above zero."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind
        self.name = {int: "integer", float: "number"}[kind]

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | float:
        try:
            number = self.kind(value)
        except (TypeError, ValueError):
            number = self.kind(0)
        if not 0 < number < float("inf"):
            self.fail(f"expected {self.name} above 0, got {value}", param, ctx)
        return number


class Names(click.ParamType):  # type: ignore[type-arg]
    """Comma-separated names; the command itself checks them. Completes the last one."""

    name = "names"

    def __init__(self, *known: str) -> None:
        self.known = known

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        before, comma, last = incomplete.rpartition(",")
        return [
            CompletionItem(before + comma + name) for name in self.known if name.startswith(last)
        ]


FILE = click.Path(path_type=Path, dir_okay=True)
FOLDER = click.Path(path_type=Path, file_okay=True)
