"""One matplotlib figure becomes a PNG for a README and an SVG that takes the page's colours.

A figure is drawn in the light palette. In its SVG, every colour of the palette becomes a CSS variable. So one drawing
serves light, dark and print.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

# name: (light, dark). Contrast against the paper is at least 3:1 for lines and 4.5:1 for words. Colour-blind readers
# can distinguish the hues. No two light colours are equal, because a colour identifies its variable.
PALETTE = {
    "paper": ("#fdfdfc", "#14181c"),
    "panel": ("#f3f4f3", "#1d2328"),
    "ink": ("#1b2530", "#e4e8ec"),
    "muted": ("#55616d", "#a6b0ba"),
    "grid": ("#dde1e5", "#353e47"),
    "accent": ("#0a5c99", "#7cbcf0"),
    "fixed": ("#0b66a8", "#6cb4ee"),
    "rule0": ("#c24a00", "#f59a5b"),
    "rule1": ("#007a5a", "#45c79f"),
    "rule2": ("#8a3f8f", "#d79be0"),
    "rule3": ("#7a6200", "#d8bf4e"),
    "rule4": ("#4d4fb8", "#a9abff"),
    "depth0": ("#3b1f7a", "#bda9ff"),
    "depth1": ("#2b5fa3", "#7fb4f6"),
    "depth2": ("#1b8583", "#55cfc6"),
    "depth3": ("#4e8a1e", "#95d86f"),
    "depth4": ("#8c7a00", "#e3d04f"),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
SETTINGS: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.labelsize": 11,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.fontsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.edgecolor": LIGHT["muted"],
    "xtick.color": LIGHT["muted"],
    "ytick.color": LIGHT["muted"],
    "axes.facecolor": "none",
    "text.parse_math": False,  # a policy may have $ in its name
    "svg.fonttype": "none",  # words stay words, in the reader's font
}
WIDTH = 5.6  # inches; words stay legible when a telephone shows the figure at 60 %


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A finished plot. name: of its PNG file. alt: text for readers who cannot see it. svg: for direct use in HTML."""

    name: str
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes


@contextmanager
def figure_style() -> Iterator[None]:
    """A context to draw in. rcParams are global, so they are restored afterwards."""
    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names may use any script
        yield


def new_figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=LIGHT["paper"])
    FigureCanvasAgg(figure)
    return figure


def line_label(axes: Axes, y: float, text: str) -> None:
    """Draw a horizontal line with a label."""
    axes.axhline(y, color=LIGHT["muted"], linewidth=1.1, linestyle=(0, (5, 3)), zorder=1)
    axes.annotate(
        text,
        (1, y),
        xycoords=("axes fraction", "data"),
        xytext=(0, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=LIGHT["muted"],
        bbox={"facecolor": LIGHT["paper"], "edgecolor": "none", "pad": 0.5, "alpha": 0.85},
        zorder=1.5,  # under the curves
    )


def legend_above(axes: Axes, columns: int) -> None:
    """Draw a legend above the axes, where it covers no curve."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderpad=0, handlelength=2.2, columnspacing=1.2
    )


def log_counts(axes: Axes) -> None:
    """Make the axis of counts logarithmic, with plain numbers. Matplotlib's powers would need its math text."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def finish(figure: Figure, *, name: str, title: str, caption: str, alt: str) -> Plot:
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=144, metadata={"Software": None})
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same data gives the same file
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    return Plot(
        name=name, title=title, caption=caption, alt=alt, svg=_for_page(svg.getvalue(), name, alt), png=png.getvalue()
    )


def _for_page(svg: str, name: str, alt: str) -> str:
    """The SVG for HTML: without prologue, metadata and style, and with ids that no other figure has."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # use the page's font
    for variable, colour in LIGHT.items():
        svg = svg.replace(colour, f"var(--{variable})")
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    head = f'<svg class="plot" role="img" aria-label="{escape(alt)}" {box[0]}>'
    return re.sub(r"\n\s*", "\n", head + svg[svg.index(">") + 1 :])
