"""Sphinx: `make docs` builds the site from these pages and from the docstrings."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

import warpwright  # noqa: E402

project = "warpwright"
author = "the warpwright authors"
release = version = warpwright.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"  # light and dark, and readable without JavaScript
html_copy_source = False
html_title = f"warpwright {release}"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the signature has them
