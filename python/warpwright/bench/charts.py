"""Live charts of a page: Vega-Lite, embedded, with a still picture for readers without JavaScript."""

from __future__ import annotations

import base64
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import vl_convert
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pages need vl-convert-python: pip install 'warpwright[pages]'", name=error.name
    ) from error

from markupsafe import Markup

from .looks import DARK, LIGHT, Theme

WIDTHS = {"narrow": 420, "wide": 1180}  # pixels of the still pictures
ZOOM: dict[str, Any] = {
    "name": "zoom",
    "select": {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"},
    "bind": "scales",
}


@dataclass(frozen=True)
class Chart:
    """A Vega-Lite specification for each theme, over the same values."""

    name: str
    values: list[dict[str, Any]]
    light: dict[str, Any]
    dark: dict[str, Any]

    def still(self, theme: Theme, width: int) -> dict[str, Any]:
        """The specification with its data, in fixed colours and width."""
        axis = {
            "labelColor": theme.text,
            "titleColor": theme.text,
            "domainColor": theme.muted,
            "tickColor": theme.muted,
            "gridColor": theme.grid,
            "titleFontWeight": "normal",
        }
        legend = {"labelColor": theme.text, "titleColor": theme.text}
        config = {"view": {"stroke": None}, "axis": axis, "legend": legend}
        spec = self.light if theme is LIGHT else self.dark
        return {
            **spec,
            "data": {"values": self.values},
            "width": width,
            "background": theme.background,
            "config": config,
        }

    def picture(self, alt: str) -> Markup:
        """A <picture> that follows the page's colour scheme and the screen's width."""
        parts = []
        for size, width in WIDTHS.items():
            for theme in (DARK, LIGHT):
                drawn = vl_convert.vegalite_to_svg(self.still(theme, width))
                uri = "data:image/svg+xml;base64," + base64.b64encode(drawn.encode()).decode()
                media = f"(prefers-color-scheme: {theme.name})"
                if size == "narrow":
                    media += " and (max-width: 640px)"
                if size == "wide" and theme is LIGHT:
                    parts.append(Markup('<img src="{}" alt="{}">').format(uri, alt))
                else:
                    parts.append(Markup('<source media="{}" srcset="{}">').format(media, uri))
        return Markup("<picture>") + Markup("").join(parts) + Markup("</picture>")

    def script(self) -> Markup:
        """The data and both specifications, for the page's code."""
        content = json.dumps({"values": self.values, "light": self.light, "dark": self.dark})
        # JSON inside of a <script>: no "<" may end it.
        content = content.replace("<", "\\u003c")
        return Markup('<script type="application/json" id="{}">{}</script>').format(
            self.name, Markup(content)
        )

    def save_png(self, path: Path, theme: Theme = LIGHT) -> None:
        path.write_bytes(vl_convert.vegalite_to_png(self.still(theme, WIDTHS["wide"]), scale=1.3))


@functools.cache
def library() -> Markup:
    """Vega, Vega-Lite and their embedding as one script, 0.9 MB; no network is needed."""
    bundle = vl_convert.javascript_bundle("window.warpwrightEmbed = vegaEmbed;")
    return Markup(bundle.replace("</script", "<\\/script"))
