"""The report of :func:`warpwright.swap`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from .._text import folded, plain_text, terminal_width
from .fuse import Fusion

if TYPE_CHECKING:  # imported when a report is printed
    from rich.console import Console, ConsoleOptions, RenderableType

IS_OURS = "already warpwright's"
NO_LAYER = "warpwright has no such layer"
# Of a class that is not torch's, whose code calls functions that warpwright has.
NO_LAYER_BUT_CALLS = f"{NO_LAYER}, but patch() routes the functions that it calls"
# Of nn.Dropout in training.
OTHER_NUMBERS = "on purpose: with the same seed, warpwright.nn.Dropout drops other elements"
NOTHING = "computes nothing"  # Identity, Dropout in evaluation, Flatten
PART = "runs as a part of "  # with the name of the module that computes it
REPLACED = "its forward is replaced on the instance"
FILTERED = "filter_fn said no"
LEFT = "left"
IN_PART = "part"
ROOM = 36  # columns for reasons and names that a table has at least
INDENT = 4


class SwapCheckError(AssertionError):
    """``swap(check=...)`` found a difference, and the model is native again.

    ``.lines`` has the numbers.
    """

    def __init__(self, lines: list[str]) -> None:
        super().__init__(
            "warpwright and native differ; the swap is undone:\n  " + "\n  ".join(lines)
        )
        self.lines = lines


@dataclass(frozen=True)
class SwapEntry:
    name: str  # as in model.named_modules(); "" is the model itself
    type: str  # class before the swap
    op: str | None  # the functional, where the class is or derives from one we have
    swapped: bool
    reason: str  # why it was left; "" if swapped
    fused: str = ""  # the fused module's class, where it became one
    note: str = ""  # how it was swapped, if not by its class alone


@dataclass
class SwapReport:
    """What :func:`swap` did to each module that computes something itself."""

    entries: list[SwapEntry] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)  # with fuse=True: every chain found
    check: dict[str, Any] | None = None  # the numbers of check=, see warpwright.swap.check
    dry_run: bool = False  # nothing was changed: the entries say what would be
    advice: list[str] = field(default_factory=list)  # what would make the model faster

    VERB: ClassVar[str] = "swap"
    DONE: ClassVar[str] = "swapped"

    @property
    def swapped(self) -> list[SwapEntry]:
        return [e for e in self.entries if e.swapped]

    @property
    def left(self) -> list[SwapEntry]:
        """What runs natively and computes something."""
        return [e for e in self.entries if not e.swapped and not _is_apart(e.reason)]

    @property
    def parts(self) -> list[SwapEntry]:
        """Layers that another swapped module computes with its own, as batch norm its activation."""
        return [e for e in self.entries if e.reason.startswith(PART)]

    @property
    def computes_nothing(self) -> list[SwapEntry]:
        """Layers that hand their input on: Identity, Dropout in evaluation, Flatten."""
        return [e for e in self.entries if e.reason == NOTHING]

    def to_dict(self) -> dict[str, Any]:
        return {
            "swapped": len(self.swapped),
            "left": len(self.left),
            "parts": len(self.parts),
            "computes_nothing": len(self.computes_nothing),
            "entries": [asdict(e) for e in self.entries],
            "fusions": [asdict(f) for f in self.fusions],
            "check": self.check,
            "dry_run": self.dry_run,
            "advice": self.advice,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def _tables(self) -> Iterator[tuple[str, str, list[Line]]]:
        """A sentence, the first column's title and the lines, for modules and for chains."""
        swapped = f"would be {self.DONE}" if self.dry_run else self.DONE
        computing = [e for e in self.entries if not _is_apart(e.reason)]
        # A module with two ops has two entries.
        names = {e.name for e in computing}
        done_names = {e.name for e in self.swapped}
        parts, idle = self.parts, self.computes_nothing
        more = f"; {len(parts)} more run inside one of these (part)" if parts else ""
        more += f"; {len(idle)} more compute nothing" if idle else ""
        yield (
            f"{f'would {self.VERB}' if self.dry_run else self.DONE} {len(done_names)} of {len(names)} modules"
            + more,
            "module",
            [
                *_grouped(
                    (e.type, e.name, swapped if e.swapped else LEFT, why)
                    for e, why in zip(computing, _reasons(computing), strict=True)
                ),
                *_grouped((e.type, e.name, IN_PART, e.reason) for e in parts),
                *_grouped((e.type, e.name, NOTHING, "") for e in idle),
            ],
        )
        if self.fusions:
            done = sum(not f.reason for f in self.fusions)
            yield (
                f"{'would fuse' if self.dry_run else 'fused'} {done} of {len(self.fusions)} chains",
                "chain",
                _grouped(
                    (
                        f.chain or "its chains",
                        f.block,
                        LEFT if f.reason else f.into or "fused",
                        f.reason,
                    )
                    for f in self.fusions
                ),
            )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from rich.text import Text

        width = options.max_width
        for sentence, title, lines in self._tables():
            yield Text(sentence)
            yield _table(title, lines, width)
        more = self.advice if self.check is None else [self.check["summary"], *self.advice]
        for sentence in more:
            yield Text("\n".join(folded(sentence, width)))

    def to_html(self) -> str:
        """The printed report as tables; names are escaped."""
        parts = []
        for sentence, title, lines in self._tables():
            rows = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>"
                for line in lines
            )
            heads = "".join(f"<th>{h}</th>" for h in (title, "count", "result", "why / where"))
            parts.append(f"<p>{escape(sentence)}</p><table><tr>{heads}</tr>{rows}</table>")
        if self.check is not None:
            parts.append(f"<p>{escape(self.check['summary'])}</p>")
        parts += [f"<p>{escape(sentence)}</p>" for sentence in self.advice]
        return "".join(parts)

    def _repr_html_(self) -> str:  # for notebooks
        return self.to_html()

    def __str__(self) -> str:
        """For the width of the terminal."""
        return plain_text(self, terminal_width())


def _reasons(entries: list[SwapEntry]) -> Iterator[str]:
    """Of each entry how it was swapped, or why not; of a further one of the same module its op."""
    seen = set()
    for entry in entries:
        again = entry.name in seen
        seen.add(entry.name)
        why = (entry.note, entry.reason) if entry.swapped else (entry.reason, entry.note)
        yield why[0] or why[1] or (entry.op if again and entry.op else "")


def _is_apart(reason: str) -> bool:
    """Whether the report lists the module neither as swapped nor as left."""
    return reason == NOTHING or reason.startswith(PART)


Line = tuple[str, str, str, str]


def _grouped(rows: Iterable[Line]) -> list[Line]:
    """Merges all (what, where, result, why) that differ in ``where`` alone: (what, count, result, why
    and where)."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for what, where, result, why in rows:
        groups.setdefault((what, result, why), []).append(where or "(the model)")
    lines = []
    for (what, result, why), names in groups.items():
        listed = ", ".join(names[:3]) + (f", … {names[-1]}" if len(names) > 3 else "")
        lines.append((what, str(len(names)), result, f"{why}: {listed}" if why else listed))
    return lines


def _table(title: str, lines: list[Line], width: int) -> RenderableType:
    """The lines as a table, or as a list if the table would leave little room for the last column."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    heads: Line = (title, "count", "result", "why / where")
    others = sum(max(cell_len(line[i]) for line in (heads, *lines)) + 2 for i in range(3))
    room = width - others
    reasons = [line[3] for line in lines]
    longest_name = max((cell_len(word) for why in reasons for word in why.split(" ")), default=0)
    if room < longest_name or room < min(ROOM, max(map(cell_len, reasons), default=0)):
        return _listed(lines, width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, justify="right" if head == "count" else "left", no_wrap=True)
    for what, count, result, why in lines:
        reason = "\n".join(folded(why, room))
        table.add_row(Text(what), count, Text(result, style=_style(result)), Text(reason))
    return table


def _listed(lines: list[Line], width: int) -> RenderableType:
    """A sentence per line of the table, and under it the reasons and names."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = []
    for what, count, result, why in lines:
        sentence = Text("\n".join(folded(f"{what} × {count}: {result}", width)))
        sentence.stylize(_style(result), len(sentence) - len(result))
        parts.append(sentence)
        parts.append(Padding(Text("\n".join(folded(why, width - INDENT))), (0, 0, 0, INDENT)))
    return Group(*parts)


def _style(result: str) -> str:
    return {LEFT: "yellow", IN_PART: "dim", NOTHING: "dim"}.get(result, "green")


def nothing_to_swap(report: SwapReport) -> str:
    if not report.entries:
        return "warpwright.swap: nothing to swap: the model has no layers"
    if not report.left:
        return "warpwright.swap: nothing to swap: the model's layers compute nothing"
    counts: dict[str, int] = {}
    for e in report.left:
        counts[f"{e.type}: {e.reason}"] = counts.get(f"{e.type}: {e.reason}", 0) + 1
    listed = "; ".join(f"{n} x {what}" for what, n in list(counts.items())[:5])
    again = any(e.reason == IS_OURS for e in report.left)
    way_out = "; call warpwright.unswap(model) before other options" if again else ""
    return f"warpwright.swap: nothing to swap ({listed}){way_out}"
