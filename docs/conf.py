"""Sphinx: `make docs` builds the site from these pages and from the docstrings."""

import json
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

from sphinx.errors import ExtensionError

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
html_favicon = "favicon.svg"
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
        for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
            source[0] += f"\n{page_of(notebook)}\n"


def page_of(path):
    """A notebook as Markdown: its text one level down, its code, and its outputs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^(#+ )", r"#\1", text, flags=re.M))
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                alt = re.search(r'alt="(.+?)"', text)
                image = (
                    f'<img alt="{alt[1]}" src="data:image/png;base64,{data["image/png"].strip()}">'
                )
                parts.append(f"```{{raw}} html\n{image}\n```")
            elif "text/html" in data:
                table = "".join(data["text/html"])
                parts.append(f'```{{raw}} html\n<div class="table-wrapper">{table}</div>\n```')
            else:
                shown = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts)


def help_keyboards(app, pagename, templatename, context, doctree):
    """Blocks that scroll can be reached by the keyboard, and the menu's headings have a level."""
    for name in ("body", "furo_navigation_tree"):
        if isinstance(context.get(name), str):
            text = re.sub(r"<pre(?! tabindex)", '<pre tabindex="0"', context[name])
            text = re.sub(
                r'<div class="table-wrapper', '<div tabindex="0" class="table-wrapper', text
            )
            context[name] = text.replace(' role="heading">', ' role="heading" aria-level="2">')


def finish(app, exception):
    """Copies the pictures that pages name in HTML, and fails on a local link without a target."""
    if exception is not None or app.builder.name != "html":
        return
    out = Path(app.outdir)
    shutil.copytree(ROOT / "docs" / "results", out / "results", dirs_exist_ok=True)
    (out / "docs").mkdir(exist_ok=True)  # README, a part of the first page, names its pictures so
    for picture in (ROOT / "docs").glob("demo*.png"):
        shutil.copy(picture, out / "docs")
    dead = set()
    for page in out.rglob("*.html"):
        text = re.sub(r"<(script|style)\b.*?</\1>", "", page.read_text(), flags=re.S)
        for link in re.findall(r'\b(?:src|srcset|href)="([^"#?]+)', text):
            if not re.match(r"[a-z+]+:|//", link) and not (page.parent / unquote(link)).exists():
                dead.add(f"{page.relative_to(out)}: {link}")
    if dead:
        raise ExtensionError("dead links:\n" + "\n".join(sorted(dead)))


def setup(app):
    app.connect("build-finished", finish)
    app.connect("source-read", add_sources)
    app.connect("html-page-context", help_keyboards, priority=900)  # after the theme's
