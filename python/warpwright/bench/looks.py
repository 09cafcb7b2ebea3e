"""How a picture looks: themes, sizes, the colour and marker of each implementation, and its files.

Colours are Okabe and Ito's, which differ for every kind of colour vision. Each implementation also
has its own marker.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "pictures need matplotlib: pip install 'warpwright[pages]'", name=error.name
    ) from error

matplotlib.use("Agg")
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[["Style"], "Figure"]


@dataclass(frozen=True)
class Theme:
    name: str
    text: str
    grid: str
    muted: str
    background: str


LIGHT = Theme("light", "#1f2328", "#d0d7de", "#59636e", "#ffffff")
DARK = Theme("dark", "#e6edf3", "#3d444d", "#9198a1", "#0d1117")


@dataclass(frozen=True)
class Style:
    theme: Theme = LIGHT
    narrow: bool = False

    @property
    def width(self) -> float:
        return 4.6 if self.narrow else 10.0

    def figure(self, height: float, **kwargs: Any) -> tuple[Figure, Any]:
        return plt.subplots(figsize=(self.width, height), layout="constrained", **kwargs)


# (light page, dark page, marker)
LOOKS = {
    "warpwright": ("#0072B2", "#56B4E9", "o"),
    "native": ("#E69F00", "#E69F00", "s"),
    "channels_last": ("#A6761D", "#F0E442", "D"),
    "compile": ("#009E73", "#00B386", "^"),
    "max-autotune": ("#00664B", "#7FD8BE", "v"),
    "cudagraph": ("#882255", "#DD88BB", "P"),
    "cudnn-graph": ("#CC79A7", "#CC79A7", "X"),
    "liger": ("#D55E00", "#FF7F2A", "*"),
}
# Variants of an implementation keep its hue and get a hatch of lines (dots take 150 KB of SVG).
BASE = {
    "warpwright_cudagraph": "warpwright",
    "warpwright_fused": "warpwright",
    "warpwright_fused_cudagraph": "warpwright",
    "warpwright_compile": "warpwright",
    "warpwright_compile_cudagraph": "warpwright",
    "compile_cudagraph": "compile",
    "swapped": "warpwright",
    "fused": "warpwright",
}
HATCHES = {
    "warpwright_cudagraph": "///",
    "warpwright_fused": "\\\\\\",
    "warpwright_fused_cudagraph": "xxx",
    "warpwright_compile": "---",
    "warpwright_compile_cudagraph": "+++",
    "compile_cudagraph": "///",
    "fused": "\\\\\\",
}
# One colour per op, for pictures that compare ops.
OP_COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#A6761D",
    "#882255",
)


def colour(impl: str, theme: Theme) -> str:
    light, dark, _ = LOOKS.get(BASE.get(impl, impl), ("#59636e", "#9198a1", "o"))
    return light if theme is LIGHT else dark


def marker(impl: str) -> str:
    return LOOKS.get(BASE.get(impl, impl), ("", "", "o"))[2]


def in_order(impls: set[str]) -> list[str]:
    """Ours and native first, and variants last."""
    return [i for i in LOOKS if i in impls] + sorted(impls - LOOKS.keys())


@contextmanager
def styled(style: Style) -> Iterator[None]:
    theme = style.theme
    settings: Any = {
        "font.family": "sans-serif",
        "font.size": 9 if style.narrow else 10,
        "svg.fonttype": "none",
        "svg.hashsalt": "warpwright",
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.muted,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "xtick.color": theme.text,
        "ytick.color": theme.text,
        "grid.color": theme.grid,
        "legend.frameon": False,
        "hatch.color": theme.background,
        "hatch.linewidth": 0.8,
    }
    with matplotlib.rc_context(settings):
        yield


def svg(draw: Draw, style: Style) -> str:
    """The picture as an SVG element, the same bytes for the same data."""
    with styled(style):
        figure = draw(style)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"\s*\n\s*", "\n", text)


def picture(draw: Draw, alt: str) -> str:
    """A <picture> that follows the page's colour scheme and the screen's width."""
    sources = []
    for narrow in (True, False):
        for theme in (DARK, LIGHT):
            data = base64.b64encode(svg(draw, Style(theme, narrow)).encode()).decode()
            uri = f"data:image/svg+xml;base64,{data}"
            media = [f"(prefers-color-scheme: {theme.name})"]
            if narrow:
                media.append("(max-width: 640px)")
            if theme is LIGHT and not narrow:
                sources.append(f'<img src="{uri}" alt="{alt}">')
            else:
                sources.append(f'<source media="{" and ".join(media)}" srcset="{uri}">')
    return "<picture>" + "".join(sources) + "</picture>"


def save_png(
    draw: Draw, path: Path, theme: Theme = LIGHT, dpi: int = 130, description: str = ""
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with styled(Style(theme)):
        figure = draw(Style(theme))
        figure.savefig(
            path,
            dpi=dpi,
            facecolor=theme.background,
            metadata={"Software": None, "Description": description},
        )
        plt.close(figure)
