"""How the latencies of a run are spread: one cumulative curve a measure. Pure functions of values; imports plotly."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from pdserve.loadtest.measures.distribution import percentile
from pdserve.loadtest.report.figure import LEGEND_ABOVE, PERCENT, Figure, mark_limit, new_plot, percent, plain
from pdserve.loadtest.report.palette import BLUE, line_of, translucent
from pdserve.loadtest.report.units import format_count, format_seconds, format_share

_HEIGHT = 290
# A curve of more points looks the same and makes the page large.
_MAX_POINTS = 600
# A tail longer than this many medians hides the body of the curve, unless the axis is logarithmic.
_LOG_FROM = 12
# Over more than so wide a logarithmic axis ticks at 2 and 5 have no room.
_MANY_TICKS = 60
_MARKED = (50, 90, 99)
_SHARES = (0, 25, 50, 75, 90, 100)
_SMALLEST_S = 1e-5


def draw_distribution(
    name: str, title: str, values_s: Sequence[float], limit_s: float | None, counted: str
) -> Figure | None:
    """The share of values up to each time, with percentiles and the promise marked; None without values.

    counted  what the values are of, in the plural: requests or gaps
    """
    values = np.sort(np.asarray(values_s, dtype=np.float64))
    if not values.size:
        return None
    plot = new_plot(_HEIGHT)
    times, shares = _curve(values)
    text = [f"{format_share(share)} within {format_seconds(time)}" for time, share in zip(times, shares, strict=True)]
    plot.add_scatter(
        x=times, y=percent(shares), mode="lines", line={"color": BLUE, "width": 2.5, "shape": "hv"}, fill="tozeroy",
        fillcolor=translucent(BLUE, 0.08), text=text, hovertemplate="%{text}<extra></extra>", showlegend=False,
    )  # fmt: skip
    _mark_percentiles(plot, values)
    _set_axes(plot, values, limit_s)
    caption = f"Share of {format_count(values.size)} {counted} within a time. Longest: {format_seconds(values[-1])}."
    if limit_s is not None:
        kept = float(np.searchsorted(values, limit_s, side="right")) / values.size
        caption += f" Within {format_seconds(limit_s)}: {format_share(kept)}."
    return Figure(name, title, caption, plot)


def draw_compared(
    name: str, title: str, values_s: Mapping[str, Sequence[float]], limit_s: float | None
) -> Figure | None:
    """The curves of several servers in one plot, told apart as in rate_figure; None where none has values."""
    sorted_values = {server: np.sort(np.asarray(values, dtype=np.float64)) for server, values in values_s.items()}
    if not any(values.size for values in sorted_values.values()):
        return None
    plot = new_plot(_HEIGHT + 30)
    # Above what is written at the promise.
    plot.update_layout(margin={"t": 66}, legend={**LEGEND_ABOVE, "y": 1.11})
    for place, (server, values) in enumerate(sorted_values.items()):
        if values.size:
            times, shares = _curve(values)
            label, pairs = plain(server), zip(times, shares, strict=True)
            plot.add_scatter(
                x=times, y=percent(shares), mode="lines", name=label,
                text=[f"{label}: {format_share(share)} within {format_seconds(time)}" for time, share in pairs],
                line={**line_of(place), "shape": "hv"},
                hovertemplate="%{text}<extra></extra>",
            )  # fmt: skip
    _set_axes(plot, np.sort(np.concatenate(list(sorted_values.values()))), limit_s)
    return Figure(name, title, "Share of requests within a time.", plot)


def _curve(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of the cumulative curve of sorted values from 0 on, all of the tail among them."""
    ranks = np.arange(1, values.size + 1)
    if values.size > _MAX_POINTS:
        body = np.linspace(0, values.size - 1, _MAX_POINTS - _MAX_POINTS // 4).astype(int)
        tail = np.arange(values.size - _MAX_POINTS // 4, values.size)
        ranks = np.unique(np.concatenate([body, tail])) + 1
    return np.concatenate([values[:1], values[ranks - 1]]), np.concatenate([[0.0], ranks / values.size])


def _mark_percentiles(plot: go.Figure, values: np.ndarray) -> None:
    times = [percentile(values, marked) for marked in _MARKED]
    plot.add_scatter(
        x=times,
        y=_MARKED,
        mode="markers+text",
        marker={"color": BLUE, "size": 9, "line": {"color": "#ffffff", "width": 1.5}},
        text=[f"p{marked} {format_seconds(time)}" for marked, time in zip(_MARKED, times, strict=True)],
        # Below and to the right of a rising curve there is always room.
        textposition="bottom right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )


def _set_axes(plot: go.Figure, values: np.ndarray, limit_s: float | None) -> None:
    longest = max(float(values[-1]), limit_s or 0.0, _SMALLEST_S)
    is_log = longest > _LOG_FROM * max(percentile(values, 50), _SMALLEST_S)
    if limit_s is not None:
        mark_limit(plot, limit_s, f"promise {format_seconds(limit_s)}", is_log)
    plot.update_yaxes(range=[0, 104], tickvals=_SHARES, ticktext=[f"{share} %" for share in _SHARES], **PERCENT)
    if not is_log:
        # The labels of p99 and of the promise need room to their right.
        high = max(longest * 1.03, percentile(values, 99) * 1.28, (limit_s or 0.0) * 1.15)
        plot.update_xaxes(range=[0, high], rangemode="tozero")
        _label_seconds(plot, high)
        return
    low = max(percentile(values, 1), _SMALLEST_S) * 0.8
    plot.update_xaxes(type="log", range=[np.log10(low), np.log10(longest) + 0.15])
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(longest))) + 1)
    digits = (1, 2, 5) if longest / low < _MANY_TICKS else (1,)
    ticks = [digit * 10.0**exponent for exponent in exponents for digit in digits]
    plot.update_xaxes(tickvals=ticks, ticktext=[_short_seconds(tick) for tick in ticks], tickangle=0)


def _label_seconds(plot: go.Figure, high: float) -> None:
    """Ticks in ms below a second or two, else in s."""
    steps = (base * 10.0**exponent for exponent in range(-6, 6) for base in (1, 2, 2.5, 5))
    step = next(step for step in steps if high / step <= 7)
    ticks = np.arange(0, high + step / 2, step)
    plot.update_xaxes(tickvals=ticks, ticktext=[_short_seconds(tick) for tick in ticks])


def _short_seconds(value: float) -> str:
    return "0" if value == 0 else f"{value * 1000:g} ms" if value < 0.9995 else f"{value:g} s"
