"""Promises kept over the rate of requests: a curve a server, with intervals and the rate that was found.

Plain data in, a figure out: what searched for the rate and how is none of its business. Imports plotly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.report.figure import Figure, new_plot, plain
from pdserve.loadtest.report.palette import DASHES, LIMIT, SERIES, SYMBOLS, translucent
from pdserve.loadtest.report.units import format_count, format_rate, format_share

_HEIGHT = 400


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate that was tried: the share of requests that kept every promise, and its interval where known."""

    rate_per_s: float
    attainment: float
    interval: Interval | None
    num_requests: int


@dataclass(frozen=True, slots=True)
class Curve:
    """One server over rates. best_rate_per_s: the highest rate found to keep the threshold, None where none does."""

    name: str
    points: tuple[RatePoint, ...]
    best_rate_per_s: float | None = None


def draw_attainment(curves: Sequence[Curve], threshold: float, is_wide: bool = True) -> Figure:
    plot = new_plot(_HEIGHT)
    for i, curve in enumerate(curves):
        _add_curve(plot, curve, SERIES[i % len(SERIES)], DASHES[i % len(DASHES)], SYMBOLS[i % len(SYMBOLS)])
    plot.add_hline(
        y=threshold, line={"color": LIMIT, "width": 2, "dash": "dash"},
        annotation={"text": f"wanted {threshold:.0%}", "font": {"color": LIMIT}, "xref": "paper", "x": 1,
                    "xanchor": "right", "yanchor": "bottom", "showarrow": False},
    )  # fmt: skip
    lowest = min((_low(point) for curve in curves for point in curve.points), default=0.0)
    plot.update_yaxes(range=[max(-0.02, min(lowest, threshold) - 0.08), 1.03], tickformat=".0%", fixedrange=True)
    plot.update_xaxes(title_text="requests a second", rangemode="tozero")
    caption = "Share of requests that kept every promise at each rate that was tried, with its 95 % interval."
    if any(curve.best_rate_per_s is not None for curve in curves):
        caption += " Vertical lines: the highest rate found that keeps what is wanted."
    return Figure("attainment", "Promises kept over rate", caption, plot, is_wide=is_wide)


def _add_curve(plot: go.Figure, curve: Curve, colour: str, dash: str, symbol: str) -> None:
    points = sorted(curve.points, key=lambda point: point.rate_per_s)
    rates = [point.rate_per_s for point in points]
    banded = [(point.rate_per_s, point.interval) for point in points if point.interval is not None]
    name = plain(curve.name)
    if banded:
        plot.add_scatter(
            x=[rate for rate, _ in banded] + [rate for rate, _ in reversed(banded)],
            y=[interval.high for _, interval in banded] + [interval.low for _, interval in reversed(banded)],
            mode="lines", line={"width": 0}, fill="toself", fillcolor=translucent(colour, 0.14), legendgroup=name,
            showlegend=False, hoverinfo="skip",
        )  # fmt: skip
    plot.add_scatter(
        x=rates, y=[point.attainment for point in points], mode="lines+markers", name=name, legendgroup=name,
        line={"color": colour, "width": 2.5, "dash": dash}, marker={"color": colour, "size": 9, "symbol": symbol},
        customdata=[_describe(point) for point in points], hovertemplate=f"{name}<br>%{{customdata}}<extra></extra>",
    )  # fmt: skip
    best = curve.best_rate_per_s
    if best is not None:
        plot.add_scatter(
            x=[best, best], y=[0, 1], mode="lines", line={"color": colour, "width": 1.5, "dash": dash},
            legendgroup=name, showlegend=False, hovertemplate=f"{name}: {format_rate(best)}/s<extra></extra>",
        )  # fmt: skip


def _low(point: RatePoint) -> float:
    return point.attainment if point.interval is None else point.interval.low


def _describe(point: RatePoint) -> str:
    text = f"{format_rate(point.rate_per_s)}/s: {format_share(point.attainment)}"
    if point.interval is not None:
        text += f" ({format_share(point.interval.low)} to {format_share(point.interval.high)})"
    return f"{text} of {format_count(point.num_requests)} requests"
