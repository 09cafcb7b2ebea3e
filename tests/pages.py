"""A page in headless Chromium: it closes its tags, fetches nothing, and its console is empty."""

import shutil
import subprocess
from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags that balance, and everything that a browser would fetch."""

    VOID = frozenset({"meta", "link", "img", "source", "br", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.fetched, self.scripts = [], [], 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.fetched += [attrs[k] for k in ("src", "srcset") if k in attrs]
        if tag == "link":
            self.fetched.append(attrs["href"])
        self.scripts += tag == "script"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def browser():
    return shutil.which("chromium") or shutil.which("google-chrome")


def open_page(path, tmp_path, width=1200):
    """Loads the page in headless Chromium; the size of the screenshot and what the console said."""
    shot = tmp_path / f"{width}.png"
    result = subprocess.run(
        [
            browser(),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={width},1000",
            f"--screenshot={shot}",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return (shot.stat().st_size if shot.exists() else 0), console


def check_page(path, tmp_path):
    parsed = Page(path.read_text())
    assert parsed.fetched
    assert all(uri.startswith("data:") for uri in parsed.fetched)
    if browser() is None:
        return
    size, console = open_page(path, tmp_path)
    assert size > 20_000
    assert not console
