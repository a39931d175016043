"""How pictures look: colours that colour-blind people can tell apart, text that follows the page's colour, two formats."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, SKY, GREEN, YELLOW, ORANGE, RED, PINK = "#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7"
"""Okabe and Ito (2008), without black, which would vanish on a dark page."""

SERIES = (BLUE, ORANGE, GREEN, PINK, SKY, RED)
DASHES = ("-", (0, (6, 2)), (0, (2.5, 1.2)), (0, (6, 1, 1, 1)))
"""Neighbouring lines differ in dashes as well; colour and dashes together repeat after 12 lines. Dots are for ideals."""
GREY = "#8c8c8c"

_INK = "#1a1a1b"
"""Text and axes; becomes ``currentColor`` in SVG, so that the page decides."""

STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#b5b5b5",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
    # Text stays text: it can be searched and read aloud, takes the page's font, and makes the file smaller.
    "svg.fonttype": "none",
    # Fixed, so that the same sweep gives the same file again: ids are random else.
    "svg.hashsalt": "harness",
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}

WIDTH = 8.0
"""Of every picture, in inches."""


@dataclass(frozen=True)
class Drawing:
    """A picture that is not yet a file; see :class:`harness.report.pictures.Picture`."""

    name: str
    title: str
    alt: str
    figure: Figure

    def save(self, folder: Path) -> None:
        """Write ``NAME.svg`` and ``NAME.png``."""
        # SVG for the page, as it takes the page's colours; PNG for Markdown and TensorBoard, which show no SVG everywhere.
        path = folder / f"{self.name}.svg"
        with styled():
            self.figure.savefig(folder / f"{self.name}.png", metadata={"Title": self.title})
            # After the PNG, which keeps its paper: in a dark page dark text on nothing would not be seen.
            self.figure.patch.set_alpha(0)
            self.figure.savefig(path, metadata={"Date": None, "Title": self.title})
        path.write_text(for_page(path.read_text(), self.name))


def styled() -> AbstractContextManager[None]:
    """Return a context in which pictures look like this."""
    return rc_context(STYLE)


def for_page(svg: str, name: str) -> str:
    """Return an SVG to be put into an HTML page: in the page's text colour, as wide as its place, with ids of its own."""
    # An XML declaration and a doctype have no place inside a page.
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    # Pictures share one page, and matplotlib gives all of them the same ids, such as figure_1.
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'xlink:href="#', f'xlink:href="#{name}-', svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Without a size of its own the picture takes that of its place, in the proportions of its viewBox.
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1)


def figure(height: float, columns: int = 1, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of ``height`` inches, and its axes from left to right."""
    # Not by pyplot, which would choose a window system and keep every figure in memory.
    made = Figure(figsize=(WIDTH, height), dpi=110, layout="constrained")
    axes = made.subplots(1, columns, squeeze=False, **grid)
    return made, list(axes[0])


def line(number: int) -> dict[str, Any]:
    """Return colour and dashes of the line of that number, counted from 0."""
    return {"color": SERIES[number % len(SERIES)], "linestyle": DASHES[number % len(DASHES)]}


def shorten(text: str, length: int = 40) -> str:
    """Return a label that leaves room for the picture."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
