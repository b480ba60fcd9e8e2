"""Promises kept over the rate of requests, a curve a server, and the rates that were found. Imports plotly.

Plain results in, figures out: who searched and how is none of its business.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from pdserve.loadtest.measures.distribution import Distribution
from pdserve.loadtest.report.figure import PERCENT, Figure, new_plot, percent, plain
from pdserve.loadtest.report.palette import LIMIT, SERIES, SYMBOLS, line_of, translucent
from pdserve.loadtest.report.units import format_count, format_rate, format_seconds, format_share
from pdserve.loadtest.search.answer import CurvePoint, GoodputRate, GoodputResult

_HEIGHT = 400
_ROW_PX = 46


@dataclass(frozen=True, slots=True)
class Curve:
    """One server over rates; its colour, dashes and symbol follow from its place among the others."""

    name: str
    result: GoodputResult


def draw_attainment(curves: Sequence[Curve], share: float) -> Figure:
    """share: the one that is wanted, drawn as a line; the rate that keeps it stands at the axis of each curve."""
    plot = new_plot(_HEIGHT)
    for i, curve in enumerate(curves):
        _add_curve(plot, curve, i)
    plot.add_hline(
        y=100 * share,
        line={"color": LIMIT, "width": 2, "dash": "dash"},
        annotation={"text": f"wanted {100 * share:g} %", "font": {"color": LIMIT}},
        annotation_position="top right",
    )
    points = [point for curve in curves for point in curve.result.curve]
    lowest = min((point.interval.low for point in points), default=0.0)
    floor = max(0.0, math.floor(10 * min(lowest, share - 0.1)) / 10)
    found = False
    for i, curve in enumerate(curves):
        found = _mark_rate(plot, curve, share, floor, SERIES[i % len(SERIES)], len(curves) == 1) or found
    plot.update_yaxes(range=[100 * floor - 2, 103], **PERCENT)
    highest = max((point.rate_per_s for point in points), default=1.0)
    plot.update_xaxes(title_text="requests a second", range=[0, 1.06 * highest], tickformat=",")
    caption = "Share of requests that kept every promise at each rate that was tried; bands: 95 % intervals."
    if found:
        caption += f" Triangles: the highest rate found at which {100 * share:g} % do."
    return Figure("attainment", "Promises kept over rate", caption, plot, is_wide=True)


def draw_rates(curves: Sequence[Curve], share: float) -> Figure | None:
    """The rate found for each server with its interval, as a dot; None where there is nothing to compare."""
    rates = [_rate_of(curve.result, share) for curve in curves]
    num_known = sum(rate is not None and rate.rate_per_s is not None for rate in rates)
    if len(curves) < 2 or not num_known:
        return None
    plot = new_plot(110 + _ROW_PX * len(curves))
    for place, curve in enumerate(curves):
        rate = _rate_of(curve.result, share)
        if rate is not None and rate.rate_per_s is not None:
            _add_dot(plot, curve.name, rate, rate.rate_per_s, place)
    names = [plain(curve.name) for curve in curves]
    # The first server on top.
    plot.update_yaxes(categoryorder="array", categoryarray=names[::-1], range=[-0.6, len(names) - 0.4])
    plot.update_xaxes(title_text="requests a second", rangemode="tozero", tickformat=",")
    caption = f"The highest rate at which {100 * share:g} % of the requests kept every promise; lines: 95 % intervals."
    if num_known < len(curves):
        caption += " A server without one kept it at no rate that was tried, or too few requests were sent to tell."
    return Figure("rates", "Highest rate that can be promised", caption, plot, is_wide=True)


def draw_latency(
    name: str, title: str, curves: Mapping[str, Sequence[tuple[float, Distribution]]], limit_s: float | None
) -> Figure | None:
    """A latency's median and p99 over the rate; None where no server has it at two rates.

    curves  of every server, by name: rates and the latency there, ascending
    """
    if all(len(points) < 2 for points in curves.values()):
        return None
    plot = new_plot(_HEIGHT - 80)
    for place, (server, points) in enumerate(curves.items()):
        if not points:
            continue
        prefix = f"{plain(server)}, " if len(curves) > 1 else ""
        for label, dash, values in (
            ("median", "solid", [values.p50 for _, values in points]),
            ("p99", "dot", [values.p99 for _, values in points]),
        ):
            text = [f"{prefix}{label} {format_seconds(value)}" for value in values]
            plot.add_scatter(
                x=[rate for rate, _ in points], y=values, mode="lines+markers", name=prefix + label, text=text,
                line={"color": SERIES[place % len(SERIES)], "width": 2.5, "dash": dash},
                marker={"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8},
                hovertemplate="%{text} at %{x:.3g}/s<extra></extra>",
            )  # fmt: skip
    if limit_s is not None:
        words = f"promise {format_seconds(limit_s)}"
        plot.add_hline(
            y=limit_s,
            line={"color": LIMIT, "width": 2, "dash": "dash"},
            annotation={"text": words, "font": {"color": LIMIT}},
            annotation_position="top left",
        )
    plot.update_yaxes(rangemode="tozero", tickformat="~s", ticksuffix="s", fixedrange=True)
    plot.update_xaxes(title_text="requests a second", rangemode="tozero", tickformat=",")
    return Figure(name, title, "Of all runs at a rate together.", plot)


def _add_curve(plot: go.Figure, curve: Curve, place: int) -> None:
    colour = SERIES[place % len(SERIES)]
    points = sorted(curve.result.curve, key=lambda point: point.rate_per_s)
    rates = [point.rate_per_s for point in points]
    name = plain(curve.name)
    plot.add_scatter(
        x=rates + rates[::-1],
        y=percent([point.interval.high for point in points] + [point.interval.low for point in reversed(points)]),
        mode="lines", line={"width": 0}, fill="toself", fillcolor=translucent(colour, 0.13), legendgroup=name,
        showlegend=False, hoverinfo="skip",
    )  # fmt: skip
    plot.add_scatter(
        x=rates, y=percent([point.attainment for point in points]), mode="lines+markers", name=name, legendgroup=name,
        line=line_of(place),
        marker={"color": colour, "size": 9, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        customdata=[_describe(point) for point in points], hovertemplate=f"{name}<br>%{{customdata}}<extra></extra>",
        error_y=_error_bar(points[0]) if len(points) == 1 else None,
    )  # fmt: skip


def _mark_rate(plot: go.Figure, curve: Curve, share: float, floor: float, colour: str, is_alone: bool) -> bool:
    """A line down to the axis where the curve is said to cross, of one alone with its number, which several would
    write over each other; returns whether there is one."""
    rate = _rate_of(curve.result, share)
    if rate is None or rate.rate_per_s is None:
        return False
    name = plain(curve.name)
    words = f"  {format_rate(rate.rate_per_s)}/s" if is_alone else ""
    plot.add_scatter(
        x=[rate.rate_per_s, rate.rate_per_s], y=percent([share, floor]), mode="lines+markers+text", legendgroup=name,
        line={"color": colour, "width": 1.5, "dash": "dot"}, showlegend=False, cliponaxis=False,
        marker={"color": colour, "size": [0, 13], "symbol": "triangle-up", "opacity": 1},
        text=["", words], textposition="middle right",
        hovertemplate=f"{name}: {format_rate(rate.rate_per_s)}/s<extra></extra>",
    )  # fmt: skip
    return True


def _error_bar(point: CurvePoint) -> dict[str, object]:
    """The interval of a single point, which no band can show."""
    above, below = point.interval.high - point.attainment, point.attainment - point.interval.low
    return {"type": "data", "symmetric": False, "array": percent([above]), "arrayminus": percent([below])}


def _rate_of(result: GoodputResult, share: float) -> GoodputRate | None:
    return next((rate for rate in result.rates if math.isclose(rate.share, share)), None)


def _add_dot(plot: go.Figure, name: str, rate: GoodputRate, value: float, place: int) -> None:
    """The rate, its number above it, and a line over its interval; an end that nothing bounds is left open."""
    colour = SERIES[place % len(SERIES)]
    high = rate.interval.high - value if math.isfinite(rate.interval.high) else 0.0
    plot.add_scatter(
        x=[value],
        y=[plain(name)],
        mode="markers+text",
        marker={"color": colour, "size": 13, "symbol": SYMBOLS[place % len(SYMBOLS)]},
        error_x={
            "type": "data", "symmetric": False, "array": [high], "arrayminus": [value - rate.interval.low],
            "color": colour, "thickness": 3, "width": 7,
        },
        text=[f"<b>{format_rate(value)}</b>"],
        textposition="top center",
        cliponaxis=False,
        showlegend=False,
        hovertemplate=f"{plain(name)}: {format_rate(value)}/s<extra></extra>",
    )  # fmt: skip


def _describe(point: CurvePoint) -> str:
    return (
        f"{format_rate(point.rate_per_s)}/s: {format_share(point.attainment)} ({format_share(point.interval.low)} to "
        f"{format_share(point.interval.high)}) of {format_count(point.num_requests)} requests"
    )
