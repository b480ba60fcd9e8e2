"""What all figures of a page share: a plot with its words, and axes that look alike. Imports plotly.

Colours of text, grid and ground are the page's own (page.js): they follow the reader's light or dark.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from pdserve.loadtest.report.palette import LIMIT

LEGEND_ABOVE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
# Of an axis of shares; numbers and units are set apart everywhere.
PERCENT = {"ticksuffix": " %", "fixedrange": True}


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


def percent(shares: Sequence[float] | np.ndarray) -> list[float]:
    """Shares as an axis with `PERCENT` takes them."""
    return [100 * float(share) for share in shares]


def mark_limit(plot: go.Figure, limit: float, text: str, is_log: bool) -> None:
    """A line from bottom to top where a promise ends, with its words above; is_log: of the x axis."""
    plot.add_vline(x=limit, line={"color": LIMIT, "width": 2, "dash": "dash"})
    plot.add_annotation(
        text=text, font={"color": LIMIT}, showarrow=False,
        x=math.log10(limit) if is_log else limit, xanchor="center", y=1, yref="y domain", yanchor="bottom",
    )  # fmt: skip


def plain(text: str) -> str:
    """Text that a plot shows as it is: plots take some HTML for markup, and a server's words could be any."""
    return html.escape(text)
