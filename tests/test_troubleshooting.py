"""docs/troubleshooting.md quotes messages as the code has them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def words(text):
    """Without quotes and line breaks, by which the sources cut a sentence."""
    return re.sub(r'[\s"]+f?"?|\\', " ", re.sub(r'"\s*\n\s*f?"', "", text))


def test_every_message_is_in_the_sources():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = [ROOT / "setup.py", *(ROOT / "python" / "warpwright").rglob("*.py")]
    text = words("\n".join(path.read_text() for path in sources))
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    quoted = [
        message
        for cell in cells
        if cell.strip().startswith("`")
        for message in re.findall("`([^`]+)`", cell)
    ]
    assert len(quoted) > 15
    missing = [message for message in quoted if words(message).strip() not in text]
    assert not missing
