"""tools/compare_sass.py on made-up listings: which kernels it calls equal, changed, gone and new."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "compare_sass.py"


def listing(**kernels):
    """As cuobjdump -sass prints them; a kernel is a list of instructions, each a number."""
    lines = ["arch = sm_90a"]
    for name, code in kernels.items():
        lines.append(f"\t\tFunction : {name}")
        for i, word in enumerate(code):
            lines.append(f"        /*{16 * i:04x}*/   OP R{word} ;   /* 0x{word:016x} */")
            lines.append(f"                                   /* 0x{word + 1:016x} */")
    return "\n".join(lines) + "\n"


@pytest.fixture
def compare(tmp_path, monkeypatch):
    program = tmp_path / "cuobjdump"
    program.write_text('#!/bin/sh\ncat "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("CUOBJDUMP", str(program))

    def run(before, after, *options):
        for name, text in (("before", before), ("after", after)):
            (tmp_path / name).write_text(text)
        command = [sys.executable, TOOL, tmp_path / "before", tmp_path / "after", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()

    return run


def test_equal_code_is_equal_under_another_name(compare):
    before = listing(_Z1fv=[1, 2, 3], _Z1gv=[4, 5])
    assert compare(before, before) == (
        0,
        ["2 kernels have the same code, 0 more under another name; 0 changed, 0 gone, 0 new"],
    )
    moved = listing(_Z1gv=[4, 5], _Z7renamedv=[1, 2, 3])
    code, lines = compare(before, moved)
    assert code == 0
    assert lines == [
        "1 kernels have the same code, 1 more under another name; 0 changed, 0 gone, 0 new"
    ]


def test_other_code_is_listed(compare):
    before = listing(_Z1fv=[1, 2, 3], _Z1gv=[4, 5])
    code, lines = compare(before, listing(_Z1fv=[1, 3, 2], _Z1hv=[4, 6]))
    assert code == 1
    assert lines[0] == "changed  sm_90a f()  (3 -> 3 instructions)"
    assert lines[1:3] == ["gone     sm_90a g()", "new      sm_90a h()"]


def test_a_rename_pairs_what_changed(compare):
    before, after = listing(_Z1gv=[4, 5]), listing(_Z1hv=[4, 6])
    code, lines = compare(before, after, "--rename", r"\bg\(=>h(")
    assert code == 1
    assert lines[0] == "changed  sm_90a h()  (2 -> 2 instructions)"


def test_copies_of_a_kernel_are_counted(compare):
    one = listing(_Z1fv=[1])
    code, lines = compare(one + one, one)
    assert code == 1
    assert lines[0].startswith("changed  sm_90a f() (copies: 1 fewer)")
