"""The site's pages: every public name has an entry and an example, and every example runs."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = {
    "warpwright": "top",
    "warpwright.functional": "functional",
    "warpwright.nn": "nn",
    "warpwright.optim": "optim",
    "warpwright.testing": "testing",
}
# Modules have pages of their own.
NO_ENTRY = {"functional", "nn", "optim", "__version__"}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WITH_EXAMPLES = sorted(
    path.relative_to(DOCS).as_posix()
    for path in DOCS.rglob("*.md")
    if ">>> " in path.read_text() and "learn" not in path.parts
)


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples(page):
    torch.manual_seed(0)
    text = re.sub(r"^```.*$", "", (DOCS / page).read_text(), flags=re.M)  # ends expected output
    examples = doctest.DocTestParser().get_doctest(text, {}, page, str(DOCS / page), 0)
    assert examples.examples
    assert doctest.DocTestRunner(optionflags=FLAGS).run(examples).failed == 0


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_has_an_entry_and_an_example(module):
    text = (DOCS / "api" / f"{PAGES[module]}.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    public = set(import_module(module).__all__) - NO_ENTRY
    assert public == sections.keys()
    for name, section in sections.items():
        assert re.search(rf"^\.\. auto(function|class|exception|data):: {name}$", section, re.M)
        assert ">>> " in section, f"no example: {name}"


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_has_a_docstring_of_its_own(module):
    found = import_module(module)
    for name in set(found.__all__) - NO_ENTRY:
        value = getattr(found, name)
        if callable(value):
            assert value.__dict__.get("__doc__") or value.__doc__, name


@pytest.mark.parametrize("module", ["quantization", "distributed.sequence"])
def test_every_name_of_other_public_modules_has_an_entry(module):
    text = "".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    entries = set(re.findall(r"^\.\. (?:autofunction|autoclass|py:data):: (\w+)$", text, re.M))
    for members in re.findall(r"^   :members: (.+)$", text, re.M):
        entries.update(members.split(", "))
    assert set(import_module(f"warpwright.{module}").__all__) <= entries


KERNEL_PAGES = sorted(
    path
    for path in (DOCS / "kernels").glob("*.md")
    if path.stem not in {"README", "constants", "mnist_step"}
)


@pytest.mark.parametrize("page", KERNEL_PAGES, ids=lambda page: page.stem)
def test_kernel_pages_have_the_four_parts(page):
    parts = re.findall(r"^## (.+)$", page.read_text(), re.M)
    assert parts == ["Algorithm", "Bound", "Measured choices", "Tried and dropped"]
