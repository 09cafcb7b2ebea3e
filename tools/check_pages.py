"""Opens pages in headless Chromium and reports what axe-core finds, scripts' errors and network requests.

    pip install playwright axe-playwright-python && playwright install chromium
    python tools/check_pages.py build/docs [profile-out/report.html …] [--shots FOLDER]

Light and dark, 500 and 1400 pixels wide. It exits with 1 if a finding is serious or critical, a page is
wider than the window, a script fails, or a page asks the network for anything.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, sync_playwright

SCHEMES = ("light", "dark")
WIDTHS = (500, 1400)
SERIOUS = ("serious", "critical")


def pages(given: list[Path]) -> list[Path]:
    """The HTML files among the arguments and in their folders."""
    found = []
    for path in given:
        if not path.exists():
            sys.exit(f"{path}: no such file or folder")
        found += sorted(path.rglob("*.html")) if path.is_dir() else [path]
    return found


def check(browser: Browser, path: Path, scheme: Any, width: int, shots: Path | None) -> list[str]:
    """What is wrong with one page in one colour scheme and width."""
    page = browser.new_page(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(f"script: {error}"))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("file:", "data:", "blob:"))
            else found.append(request.url)
        ),
    )
    page.on("requestfailed", lambda request: found.append(f"missing: {request.url[:200]}"))
    page.goto(path.resolve().as_uri())
    page.wait_for_load_state("networkidle")
    if page.evaluate("document.documentElement.scrollWidth") > width:
        found.append("wider than the window")
    wrong = list(found)  # without the requests that axe-core makes itself
    for violation in Axe().run(page).response["violations"]:
        if violation["impact"] in SERIOUS:
            node = violation["nodes"][0]
            wrong.append(f"{violation['impact']}: {violation['id']}: {node['html'][:120]}")
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=shots / f"{path.stem}_{scheme}_{width}.png", full_page=True)
    page.close()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, nargs="+", help="HTML files, or folders of them")
    parser.add_argument("--shots", type=Path, default=None, help="folder for screenshots")
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM"), help="its executable")
    options = parser.parse_args()
    failures, checked = 0, pages(options.path)
    with sync_playwright() as playwright:
        # A container's root user has no sandbox.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=options.chromium, args=arguments)
        for path in checked:
            for scheme in SCHEMES:
                for width in WIDTHS:
                    found = check(browser, path, scheme, width, options.shots)
                    failures += len(found)
                    for line in found:
                        print(f"{path} ({scheme}, {width}): {line}")
        browser.close()
    print(f"{len(checked)} pages, {failures} findings")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
