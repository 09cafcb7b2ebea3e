"""Compares the machine code of two builds, kernel by kernel.

    python tools/compare_sass.py BEFORE AFTER [--rename 'REGEX=>TEXT' ...] [--renames FILE]

BEFORE and AFTER are libraries or object files with device code; `cuobjdump` extracts their SASS.
A kernel's code is its sequence of encoded instructions, which holds no absolute address. Kernels
are matched by demangled name after the renames (FILE: one REGEX=>TEXT per line, # comments),
which rewrite the names of BEFORE. Kernels whose names match nothing are matched by equal code.

Prints the kernels whose code differs, the new ones and those that are gone. Exits with 1 if there
are any, 0 if every kernel of one side has its equal on the other. CUOBJDUMP names the program.
"""

import argparse
import collections
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

ARCH = re.compile(r"^\s*arch = (\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
# Each instruction takes two lines; both end with eight bytes of its encoding.
ENCODING = re.compile(r"/\* 0x([0-9a-f]{16}) \*/\s*$")
ANONYMOUS = re.compile(r"\(anonymous namespace\)|_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_[0-9a-f]{8}")


class Code(NamedTuple):
    digest: str
    instructions: int


Kernels = dict[str, "collections.Counter[Code]"]  # by name; several files may have one each


def parse(lines: Iterable[str]) -> Iterator[tuple[str, str, Code]]:
    """(architecture, mangled name, code) of each function that cuobjdump printed."""
    arch, name, words, digest = "", "", 0, hashlib.sha256()
    for line in lines:
        encoding = ENCODING.search(line)
        if encoding:
            digest.update(encoding[1].encode())
            words += 1
            continue
        found = FUNCTION.match(line)
        if found is None and not ARCH.match(line):
            continue
        if name:
            yield arch, name, Code(digest.hexdigest(), words // 2)
        name, words, digest = "", 0, hashlib.sha256()
        if found:
            name = found[1]
        else:
            arch = line.split()[-1]
    if name:
        yield arch, name, Code(digest.hexdigest(), words // 2)


def demangle(names: list[str]) -> list[str]:
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def collect(functions: Iterable[tuple[str, str, Code]], renames: list[tuple[str, str]]) -> Kernels:
    found = list(functions)
    kernels: Kernels = collections.defaultdict(collections.Counter)
    names = demangle([name for _, name, _ in found])
    for (arch, _, code), name in zip(found, names, strict=True):
        name = ANONYMOUS.sub("{anonymous}", name)
        for pattern, text in renames:
            name = re.sub(pattern, text, name)
        kernels[f"{arch} {name}"][code] += 1
    return kernels


def dump(program: str, path: str, renames: list[tuple[str, str]]) -> Kernels:
    if not os.path.exists(path):
        sys.exit(f"compare_sass.py: no such file: {path}")
    process = subprocess.Popen(
        [program, "-sass", path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    kernels = collect(parse(process.stdout), renames)
    if process.wait() != 0 or not kernels:
        sys.exit(f"compare_sass.py: {program} found no device code in {path}")
    return kernels


class Difference(NamedTuple):
    same: int
    renamed: list[tuple[str, str]]  # other name, equal code
    changed: list[tuple[str, int, int]]  # name, instructions before and after
    gone: list[str]
    new: list[str]


def compare(before: Kernels, after: Kernels) -> Difference:
    same, changed = 0, []
    for name in before.keys() & after.keys():
        left, right = before[name] - after[name], after[name] - before[name]
        same += (before[name] & after[name]).total()
        for a, b in zip(sorted(left.elements()), sorted(right.elements()), strict=False):
            changed.append((name, a.instructions, b.instructions))
        extra = left.total() - right.total()
        if extra:
            changed.append((f"{name} (copies: {extra} fewer)", 0, 0))

    by_code = collections.defaultdict(list)
    for name in before.keys() - after.keys():
        for code in before[name].elements():
            by_code[code].append(name)
    renamed, new = [], []
    for name in sorted(after.keys() - before.keys()):
        for code in after[name].elements():
            if by_code[code]:
                renamed.append((by_code[code].pop(), name))
            else:
                new.append(name)
    gone = sorted(name for names in by_code.values() for name in names)
    return Difference(same, sorted(renamed), sorted(changed), gone, new)


def parse_rename(line: str) -> tuple[str, str]:
    pattern, arrow, text = line.partition("=>")
    if not arrow:
        sys.exit(f"compare_sass.py: --rename: expected REGEX=>TEXT, got {line!r}")
    return pattern.strip(), text.strip()


def find_cuobjdump() -> str:
    program = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    if program is None:
        sys.exit("compare_sass.py: cuobjdump is not on PATH; set CUOBJDUMP")
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rename", action="append", default=[], metavar="REGEX=>TEXT")
    parser.add_argument("--renames", metavar="FILE", help="one REGEX=>TEXT per line")
    arguments = parser.parse_args()
    lines = list(arguments.rename)
    if arguments.renames:
        with open(arguments.renames) as file:
            lines += [line for line in file if line.strip() and not line.startswith("#")]
    renames = [parse_rename(line) for line in lines]
    program = find_cuobjdump()
    before = dump(program, arguments.before, renames)
    found = compare(before, dump(program, arguments.after, []))
    for name, old, new in found.changed:
        print(f"changed  {name}  ({old} -> {new} instructions)")
    for name in found.gone:
        print(f"gone     {name}")
    for name in found.new:
        print(f"new      {name}")
    print(
        f"{found.same} kernels have the same code, {len(found.renamed)} more under another name; "
        f"{len(found.changed)} changed, {len(found.gone)} gone, {len(found.new)} new"
    )
    return 1 if found.changed or found.gone or found.new else 0


if __name__ == "__main__":
    sys.exit(main())
