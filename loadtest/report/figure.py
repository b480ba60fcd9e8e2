"""What all figures of a page share: a plot with its words, and axes that look alike. Imports plotly.

Colours of text, grid and ground are the page's own (page.js): they follow the reader's light or dark.
"""

import html
from dataclasses import dataclass

import plotly.graph_objects as go


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot on the page.

    name     of its element, unique on a page
    caption  how to read it, a sentence or two
    is_wide  takes the whole width, not half of it
    """

    name: str
    title: str
    caption: str
    plot: go.Figure
    is_wide: bool = False


def new_plot(height: int) -> go.Figure:
    """An empty plot of that height in pixels with our margins; the page decides the width."""
    return go.Figure(
        layout={
            "template": None,
            "height": height,
            "margin": {"l": 58, "r": 18, "t": 30, "b": 44},
            "hovermode": "closest",
            "legend": LEGEND_ABOVE,
        }
    )


LEGEND_ABOVE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}


def plain(text: str) -> str:
    """Text that a plot shows as it is: plots take some HTML for markup, and a server's words could be any."""
    return html.escape(text)
