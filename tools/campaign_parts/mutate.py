"""Small faults in the C++ sources: where they can stand, and the sources with all of them in.

Every fault stands in one build, switched off. The environment variable WARPWRIGHT_MUTANT switches
one on, so that a fault costs a run of the tests and no build. mutant.h has the switches.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SPACE = "warpwright_mutants::"
INCLUDE = '#include "mutant.h"\n'
OPERATORS = {
    "<": ("Less", "<="),
    "<=": ("LessEqual", "<"),
    ">": ("Greater", ">="),
    ">=": ("GreaterEqual", ">"),
    "==": ("Equal", "!="),
    "!=": ("NotEqual", "=="),
    "+": ("Plus", "-"),
    "-": ("Minus", "+"),
}
# Text that the compiler evaluates itself, or that is no expression; and how work is split, which
# changes no result.
FIXED = re.compile(
    r"^\s*(#|//|using |template|typedef|static_assert|enum |case |namespace|struct |class |m\.|friend )"
    r"|constexpr|static const |operator|\bthrow\b|\bWARPWRIGHT_|\basm\b|[gG]rain\b|kCpuGrain|\\\\$"
)


@dataclass(frozen=True)
class Mutant:
    """One fault: in `file` (relative to csrc/) at `line`."""

    id: int
    file: str
    line: int
    kind: str
    text: str  # the source line
    change: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Site:
    """A place in a file's text, and the edits that put a fault there."""

    at: int
    kind: str
    change: str
    edits: tuple[tuple[int, int, str], ...]  # (begin, end, text with {id})


def masked(text: str) -> str:
    """The text with comments and string literals as spaces, so that positions stay."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.S
    )


def _closing(text: str, begin: int, stop: str = "") -> int:
    """The position of the bracket that closes the one before `begin`, or of `stop` on that level."""
    depth = 0
    for i in range(begin, len(text)):
        if depth == 0 and (text[i] in ")}]" or text[i] == stop):
            return i
        depth += (text[i] in "([{") - (text[i] in ")]}")
    return len(text)


def _parts_without_faults(text: str) -> list[tuple[int, int]]:
    """Ranges without faults: constant expressions, template arguments, the texts of messages."""
    parts = []
    for match in re.finditer(r"\bconstexpr\b(?!\s*\()", text):
        end = re.compile(r"[;{]").search(text, match.end())
        if end is not None:
            last = _closing(text, end.end()) if end[0] == "{" else end.end()
            parts.append((match.start(), last))
    brackets = r"\bif constexpr \(|\bstatic_assert\(|\bnoexcept\(|\b__launch_bounds__\("
    for match in re.finditer(brackets, text):
        parts.append((match.start(), _closing(text, match.end())))
    for match in re.finditer(r"\w<([^<>;{}()]*)>", text):  # template arguments
        parts.append(match.span(1))
    # A CPU build leaves these out; kernels are in files of their own.
    for match in re.finditer(
        r"^#ifdef WARPWRIGHT_WITH_CUDA$.*?^#(?:else|endif)", text, re.M | re.S
    ):
        parts.append(match.span())
    for match in re.finditer(r"\bTORCH_CHECK\w*\(", text):  # the message
        parts.append((_closing(text, match.end(), ","), _closing(text, match.end())))
    return parts


def _statement_starts(text: str, at: int) -> bool:
    return text[:at].rstrip()[-1:] in (";", "{", "}")


def _operator_sites(text: str) -> list[Site]:
    sites = []
    for match in re.finditer(r"(?<=[\w)\]]) (<=|>=|==|!=|<|>|\+|-) (?=[\w(*&!])", text):
        name, wrong = OPERATORS[match[1]]
        new = f" {match[1]} {SPACE}{name}<{{id}}>() {match[1]} "
        change = f"{match[1]} becomes {wrong}"
        sites.append(Site(match.start(), "operator", change, ((*match.span(), new),)))
    return sites


def _constant_sites(text: str) -> list[Site]:
    sites = []
    for match in re.finditer(r"(?<![\w.<\[])(\d+|\d+\.\d+f?)(?![\w.>\]])", text):
        before = text[: match.start()].rstrip()[-1:]
        if before in ("<", ">") and text[match.start() - 1] != " ":
            continue
        new = f"{SPACE}constant<{{id}}>({match[1]})"
        change = f"{match[1]} becomes {match[1]} + 1"
        sites.append(Site(match.start(), "constant", change, ((*match.span(), new),)))
    return sites


def _condition_sites(text: str) -> list[Site]:
    sites = []
    for match in re.finditer(r"\bif \(", text):
        end = _closing(text, match.end())
        condition = text[match.end() : end]
        if ";" in condition or re.search(r"[^=!<>]=[^=]", condition):
            continue
        edits = (
            (match.end(), match.end(), f"{SPACE}negated<{{id}}>(static_cast<bool>("),
            (end, end, "))"),
        )
        sites.append(Site(match.start(), "condition", "the condition is negated", edits))
    return sites


def _check_sites(text: str) -> list[Site]:
    sites = []
    for match in re.finditer(r"\bTORCH_CHECK\w*\(", text):
        end = _closing(text, match.end(), ",")
        edits = ((match.end(), match.end(), f"{SPACE}on<{{id}}>() || ("), (end, end, ")"))
        sites.append(Site(match.start(), "check", "the check is dropped", edits))
    for match in re.finditer(r"(?<=\n)[ ]*(check_\w+\()", text):
        at = match.start(1)
        if _statement_starts(text, at):
            edit = (at, at, f"if (!{SPACE}on<{{id}}>()) ")
            sites.append(Site(at, "check", "the check is dropped", (edit,)))
    return sites


def _sum_sites(text: str) -> list[Site]:
    sites = []
    for match in re.finditer(r"(?<=\n)[ ]*([\w.\[\]>()-]+ \+= [^;{}\n]*;)(?=\n)", text):
        at = match.start(1)
        if _statement_starts(text, at):
            wrong = match[1].replace("+=", "-=", 1)
            new = f"if ({SPACE}on<{{id}}>()) {{{{ {wrong} }}}} else {{{{ {match[1]} }}}}"
            sites.append(Site(at, "sum", "+= becomes -=", ((*match.span(1), new),)))
    return sites


def _barrier_sites(text: str) -> list[Site]:
    """Statements of a kernel that wait for other threads or for memory."""
    sites = []
    call = (
        r"(?<=\n)[ ]*((?:\w+(?:\(\))?(?:\.|->|::))*(?:__sync|\w*(?:wait|fence|barrier_sync))\w*\()"
    )
    for match in re.finditer(call, text):
        at = match.start(1)
        if _statement_starts(text, at):
            edit = (at, at, f"if (!{SPACE}on<{{id}}>()) ")
            sites.append(Site(at, "barrier", "the call is dropped", (edit,)))
    return sites


def _bound_sites(text: str) -> list[Site]:
    sites = []
    for match in re.finditer(r"(?<![\w.>:])(?:std::)?(min|max)(<([\w:]+)>)?\((?!\{)", text):
        name = {"min": "least", "max": "most"}[match[1]]
        kind = f", {match[3]}" if match[3] else ""
        new = f"{SPACE}{name}<{{id}}{kind}>("
        change = f"{match[1]} takes the other argument"
        sites.append(Site(match.start(), "bound", change, ((*match.span(), new),)))
    return sites


def sites_of(text: str) -> list[Site]:
    """Every place of a file where a fault can stand, in the order of the text."""
    plain = masked(text)
    constant = _parts_without_faults(plain)
    found = []
    for finder in (
        _operator_sites,
        _constant_sites,
        _condition_sites,
        _check_sites,
        _sum_sites,
        _barrier_sites,
        _bound_sites,
    ):
        for site in finder(plain):
            line = plain[plain.rfind("\n", 0, site.at) + 1 :].split("\n", 1)[0]
            inside = any(begin <= site.at < end for begin, end in constant)
            if not inside and not FIXED.search(line):
                found.append(site)
    return sorted(found, key=lambda s: s.at)


def without_overlap(sites: list[Site]) -> list[Site]:
    """Sites whose edits change text of their own: a replaced range holds no other edit."""
    kept: list[Site] = []
    for site in sites:
        ranges = [(b, e) for b, e, _ in site.edits]
        others = [(b, e) for k in kept for b, e, _ in k.edits]
        if all(e <= b2 or e2 <= b for b, e in ranges for b2, e2 in others):
            kept.append(site)
    return kept


def mixed(sites: list[Site], rng: random.Random) -> list[Site]:
    """Each kind in turn, so that the first few are of different kinds."""
    kinds: dict[str, list[Site]] = {}
    for site in sites:
        kinds.setdefault(site.kind, []).append(site)
    queues = list(kinds.values())
    for queue in (*queues, queues):
        rng.shuffle(queue)
    turns = itertools.zip_longest(*queues)
    return [site for turn in turns for site in turn if site is not None]


def mutated(text: str, sites: list[tuple[int, Site]]) -> str:
    """The text with the faults of these numbers in."""
    edits = [(*edit[:2], edit[2].format(id=n)) for n, site in sites for edit in site.edits]
    # Of two insertions at one place, the later closes first: a stable order from the end.
    for begin, end, new in sorted(edits, key=lambda e: (e[0], e[1]), reverse=True):
        text = text[:begin] + new + text[end:]
    return INCLUDE + text


@dataclass
class Choice:
    """The faults of one build."""

    mutants: list[Mutant]
    sites: dict[str, list[tuple[int, Site]]]  # by file

    @classmethod
    def of(cls, csrc: Path, files: list[str], per_file: int, seed: int) -> Choice:
        """Up to `per_file` faults in each file, the same ones for the same seed and sources."""
        rng = random.Random(seed)
        mutants: list[Mutant] = []
        chosen: dict[str, list[tuple[int, Site]]] = {}
        for file in files:
            text = (csrc / file).read_text()
            sites = mixed(sites_of(text), rng)
            for site in without_overlap(sites)[:per_file]:
                number = len(mutants) + 1
                line = text.count("\n", 0, site.at + 1) + 1
                source = text.split("\n")[line - 1].strip()
                mutants.append(Mutant(number, file, line, site.kind, source, site.change))
                chosen.setdefault(file, []).append((number, site))
        return cls(mutants, chosen)

    def drop(self, numbers: set[int]) -> None:
        """Leaves out faults that do not compile."""
        self.mutants = [m for m in self.mutants if m.id not in numbers]
        self.sites = {
            file: [(n, s) for n, s in found if n not in numbers]
            for file, found in self.sites.items()
        }

    def write(self, csrc: Path, target: Path) -> None:
        """Writes the files with their faults below `target`; those that stay keep their times."""
        for file, found in self.sites.items():
            text = (csrc / file).read_text()
            text = mutated(text, found) if found else text
            if (target / file).read_text() != text:
                (target / file).write_text(text)


NOT_IN_CPU_BUILD = {"cuda", "device", "gemm", "host", "tile"}


def files_of_cpu(csrc: Path) -> list[str]:
    """The CPU kernels, the bindings, and their headers. Those of an op itself plan CUDA kernels, too."""
    found = _files(csrc, (".cpp", ".h"), NOT_IN_CPU_BUILD)
    return [f for f in found if f.endswith(".cpp") or re.search("(^|/)(cpu|torch)/", f)]


def files_of_kernels(csrc: Path) -> list[str]:
    """The CUDA kernels, and the functions that launch them."""
    return _files(csrc, (".cu", ".cuh"), set())


def _files(csrc: Path, suffixes: tuple[str, ...], without: set[str]) -> list[str]:
    found = [p.relative_to(csrc) for p in csrc.rglob("*") if p.suffix in suffixes]
    return sorted(p.as_posix() for p in found if not {"python", *without} & {*p.parts})
