"""Sphinx: `make docs` builds the site from these pages and from the docstrings."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import warpwright  # noqa: E402

project = "warpwright"
author = "the warpwright authors"
release = version = warpwright.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
]
source_suffix = {".md": "markdown"}
html_theme = "furo"  # light and dark, and readable without JavaScript
html_copy_source = False
html_title = f"warpwright {release}"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them

# Chapters that the table of contents names, each left out while its page is not there.
CHAPTERS = ("reliability", "learn/index")


def add_sources(app, docname, source):
    """The programs of examples/ for their page, with what the folder's README says of each."""
    if docname == "index":
        for chapter in CHAPTERS:
            if not (ROOT / "docs" / f"{chapter}.md").exists():
                source[0] = source[0].replace(f"\n{chapter}\n", "\n")
    if docname == "examples":
        listed = (ROOT / "examples" / "README.md").read_text()
        for name, what in re.findall(r"^\| \[(\w+\.py)\]\(.+?\) \| (.+?) \|", listed, re.M):
            what = what[0].upper() + what[1:]
            code = f"```{{literalinclude}} ../examples/{name}\n```"
            source[0] += f"\n## {name}\n\n{what}.\n\n{code}\n"


def setup(app):
    app.connect("source-read", add_sources)
