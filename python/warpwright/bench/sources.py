"""Which C++ and CUDA files an op is made of, so that a record knows when its figures are stale.

A file counts with its code alone: an edited comment or another indentation changes no figure.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._catalog import OPS

SUFFIXES = {".h", ".cuh", ".cu", ".cpp"}
# A literal, which may hold what looks like a comment, or a comment.
_COMMENT = re.compile(
    r""" ("(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])') | //[^\n]* | /\*.*?\*/ """,
    re.VERBOSE | re.DOTALL,
)
_INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)


def source_root() -> Path | None:
    """The repository that this package runs from; None for an installed copy."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "csrc" / "ops").is_dir() else None


def files_in(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES}


@functools.cache
def _code(text: str) -> str:
    """`text` without comments, each run of white space as one blank."""
    return " ".join(_COMMENT.sub(lambda found: found[1] or " ", text).split())


def digest_of_files(files: Iterable[Path], root: Path) -> str:
    """Identifies the files by path and code."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(_code(path.read_text()).encode())
    return digest.hexdigest()[:16]


def folders_of(op: str) -> tuple[str, ...]:
    """The folders of csrc/ops/ with the op's kernels; for a training step one that does not exist."""
    return OPS[op].sources if op in OPS else (op,)


def _parts_behind(header: Path, csrc: Path) -> set[Path]:
    """The header and the files that define what it declares."""
    if header.is_relative_to(csrc / "gemm"):  # launch.h stands for all instances
        return files_in(csrc / "gemm")
    beside = (header.with_suffix(suffix) for suffix in (".cu", ".cpp"))
    return {header, *(path for path in beside if path.exists())}


def with_includes(files: Iterable[Path], csrc: Path) -> set[Path]:
    """`files`, and what they include from csrc/, however indirectly."""
    found: set[Path] = set()
    left = set(files)
    while left:
        found |= left
        named = {csrc / name for path in left for name in _INCLUDE.findall(path.read_text())}
        headers = (header for header in named if header.exists())
        left = set[Path]().union(*(_parts_behind(header, csrc) for header in headers)) - found
    return found


def runs_on(path: Path, device: str) -> bool:
    """Whether a file of the repository can be part of a call on the device."""
    if device == "cpu":
        return path.suffix not in {".cu", ".cuh"} and "cuda" not in path.parts
    return "cpu" not in path.parts and not path.stem.endswith("_cpu")


def op_hash(op: str, root: Path, device: str) -> str:
    """Identifies the op's sources on a device: its folders, and what they include from below."""
    csrc = root / "csrc"
    folders = [csrc / "ops" / name for name in folders_of(op)]
    if not all(folder.is_dir() for folder in folders):  # a training step, made of many ops
        folders = [csrc / "ops"]

    def kept(files: set[Path]) -> set[Path]:
        return {path for path in files if runs_on(path.relative_to(root), device)}

    return digest_of_files(kept(with_includes(kept(files_in(*folders)), csrc)), root)


def source_hash(root: Path) -> str:
    """As setup.py: over all of csrc/ and python/."""
    digest = hashlib.sha256()
    for folder in ("csrc", "python"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {*SUFFIXES, ".py"} and path.name != "_version.py":
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def stale_ops(record: dict[str, Any], root: Path) -> set[str]:
    """Ops whose sources are not those that were measured."""
    hashes = record.get("op_hashes", {})
    ops = {row["op"] for row in record["rows"]}
    if record["source_hash"] == source_hash(root):
        return set()
    return {op for op in ops if hashes.get(op) != op_hash(op, root, record["device"])}
