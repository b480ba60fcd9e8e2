"""A run over time, on one axis: requests by stage, queues, KV use, tokens. Imports plotly; called by run_page."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdserve.loadtest.client.gauges import GaugeSample
from pdserve.loadtest.measures.ledger import Kind, Span
from pdserve.loadtest.measures.rates import steady_span
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.report.figure import Figure, new_plot, percent, plain
from pdserve.loadtest.report.lanes import Lane, gather_lanes
from pdserve.loadtest.report.palette import BLUE, DASHES, GREEN, GREY, OCHRE, PURPLE, VERMILION, translucent
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.stage_figure import KIND_COLOURS
from pdserve.loadtest.report.tables import name_stage
from pdserve.loadtest.report.units import format_count, format_seconds
from pdserve.loadtest.workload.window import Window

_MAX_LANES = 400
_LANE_PX = 6
_LANES_PX = (240, 620)
_ROW_PX = 170
_GAP_PX = 62
_MAX_BINS = 150
_MAX_SAMPLES = 1000
_BINS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, float("inf"))
_ROLES = {"prefill": BLUE, "decode": GREEN, "both": OCHRE}


@dataclass(frozen=True, slots=True)
class _Row:
    """One plot above the shared axis of time."""

    title: str
    height: int
    axis: str
    tickformat: str
    traces: tuple[go.Scatter | go.Bar, ...]


def draw_over_time(report: Report) -> Figure:
    lanes = gather_lanes(report.records, report.config.promises, _MAX_LANES)
    rows = [_draw_lanes(lanes), _draw_queues(report.records, report.gauges)]
    if _roles_of(report.gauges):
        rows.append(_draw_kv(report.gauges))
    rows.append(_draw_tokens(report.records))
    plot = _stack(rows)
    # The first request on top; of many, those of a few seconds can be looked at alone.
    downwards = {"range": [lanes[-1].index + 0.7, lanes[0].index - 0.7], "fixedrange": False, "showgrid": False}
    plot.update_yaxes(downwards, row=1, col=1)
    plot.update_xaxes(range=[0, 1.01 * max(record.ended_s for record in report.records)])
    _mark_windows(plot, report.records)
    return Figure("over-time", "Over time", _caption(report, lanes), plot, is_wide=True)


def _caption(report: Report, lanes: Sequence[Lane]) -> str:
    text = "Each line is a request, from the time at which it was due. Drag to zoom into a time, double-click to leave."
    if len(lanes) < len(report.records):
        text += f" Shown are {format_count(len(lanes))} of {format_count(len(report.records))} requests, evenly picked."
    return text


def _stack(rows: Sequence[_Row]) -> go.Figure:
    """The rows above each other with a title and a legend each."""
    heights = [row.height for row in rows]
    total = sum(heights) + _GAP_PX * (len(rows) - 1)
    plot = make_subplots(
        rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=_GAP_PX / total, row_heights=heights,
        figure=new_plot(total + 100),
    )  # fmt: skip
    plot.update_layout(margin={"t": 56, "b": 44}, barmode="overlay", bargap=0.15)
    for number, row in enumerate(rows, start=1):
        legend = "legend" if number == 1 else f"legend{number}"
        top = plot.get_subplot(number, 1).yaxis.domain[1]
        for trace in row.traces:
            plot.add_trace(trace.update(legend=legend), row=number, col=1)
        above = {"xref": "paper", "yref": "paper", "x": 0, "y": top, "xanchor": "left", "yanchor": "bottom"}
        plot.add_annotation(text=f"<b>{row.title}</b>", showarrow=False, yshift=22, xshift=-2, **above)
        plot.update_layout({legend: {"orientation": "h", "x": 0, "y": top, "yanchor": "bottom", "xanchor": "left"}})
        plot.update_yaxes(
            title_text=row.axis, tickformat=row.tickformat, rangemode="tozero", fixedrange=True, row=number, col=1
        )
    plot.update_xaxes(showticklabels=True, ticksuffix=" s")
    return plot


def _draw_lanes(lanes: Sequence[Lane]) -> _Row:
    spans: dict[Kind, list[tuple[Lane, Span]]] = defaultdict(list)
    for lane in lanes:
        for span in lane.spans:
            spans[span.kind].append((lane, span))
    traces = [_draw_spans(kind, spans[kind]) for kind in KIND_COLOURS if spans[kind]]
    flaws = ((False, "broke a promise", "diamond-open", PURPLE), (True, "failed", "x", VERMILION))
    for has_failed, name, symbol, colour in flaws:
        flawed = [lane for lane in lanes if lane.flaw is not None and lane.has_failed is has_failed]
        if flawed:
            traces.append(_mark_flaws(flawed, name, symbol, colour))
    low, high = _LANES_PX
    return _Row("Requests by stage", max(low, min(high, _LANE_PX * len(lanes))), "request", ",d", tuple(traces))


def _draw_spans(kind: Kind, spans: Sequence[tuple[Lane, Span]]) -> go.Bar:
    return go.Bar(
        orientation="h",
        name=str(kind),
        y=[lane.index for lane, _ in spans],
        base=[span.start_s for _, span in spans],
        x=[span.end_s - span.start_s for _, span in spans],
        marker={"color": KIND_COLOURS[kind], "line": {"width": 0}},
        customdata=[
            f"request {lane.index}, {name_stage(span.name)}: {format_seconds(span.end_s - span.start_s)}"
            f"<br>{span.start_s:.2f} to {span.end_s:.2f} s"
            for lane, span in spans
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _mark_flaws(lanes: Sequence[Lane], name: str, symbol: str, colour: str) -> go.Scatter:
    return go.Scatter(
        mode="markers", name=name, x=[lane.ended_s for lane in lanes], y=[lane.index for lane in lanes],
        marker={"symbol": symbol, "color": colour, "size": 7, "line": {"width": 1.5}},
        customdata=[f"request {lane.index}: {plain(lane.flaw or '')}" for lane in lanes],
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip


def _draw_queues(records: Sequence[Record], gauges: Sequence[GaugeSample]) -> _Row:
    """What the client has under way; of every role what waits and what runs; of the router what it holds back."""
    times = [sample.at_s for sample in gauges]
    traces = [_line("in flight, by the client", *_in_flight(records), GREY, "dot")]
    if gauges:
        traces.append(_line("router, queued", times, [sample.num_queued for sample in gauges], PURPLE))
    for role in _roles_of(gauges):
        nodes = [[node for node in sample.nodes if node.role == role] for sample in gauges]
        waiting = [sum(node.num_waiting for node in group) for group in nodes]
        running = [sum(node.num_running for node in group) for group in nodes]
        traces.append(_line(f"{role}, running", times, running, _ROLES.get(role, OCHRE)))
        traces.append(_line(f"{role}, waiting", times, waiting, _ROLES.get(role, OCHRE), "dash"))
    return _Row("Requests in flight and queued", _ROW_PX, "requests", ",", tuple(traces))


def _in_flight(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Times at which a request was sent or ended, and how many were then under way."""
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    return [time for time, _ in changes], list(itertools.accumulate(change for _, change in changes))


def _draw_kv(gauges: Sequence[GaugeSample]) -> _Row:
    """Of every node the share of its KV pool that is in use; nodes of one role differ in dashes."""
    traces = []
    for role in _roles_of(gauges):
        names = sorted({node.node for sample in gauges for node in sample.nodes if node.role == role})
        for name, dash in zip(names, itertools.cycle(DASHES)):
            points = [
                (s.at_s, node.kv_use) for s in gauges for node in s.nodes if (node.role, node.node) == (role, name)
            ]
            times, uses = zip(*points, strict=True)
            traces.append(_line(f"{name}, {role}", times, percent(uses), _ROLES.get(role, OCHRE), dash, "%{y:.1f} %"))
    return _Row("KV memory in use", _ROW_PX, "% of the pool", ",", tuple(traces))


def _roles_of(gauges: Sequence[GaugeSample]) -> list[str]:
    """The roles that were seen, in the order of a request's way."""
    known = list(_ROLES)
    roles = {node.role for sample in gauges for node in sample.nodes}
    return sorted(roles, key=lambda role: (known.index(role) if role in known else len(known), role))


def _draw_tokens(records: Sequence[Record]) -> _Row:
    """Output tokens a second in equal bins of a round length; tokens that came in one event count at its time."""
    end = max(record.ended_s for record in records)
    bin_s = next(step for step in _BINS_S if end / step <= _MAX_BINS)
    counts = [0.0] * (int(end / bin_s) + 2)
    for record in records:
        for time in record.token_times_s:
            counts[int(time / bin_s)] += record.output_tokens / len(record.token_times_s)
    edges = [i * bin_s for i in range(len(counts))]
    tokens = _line("output tokens/s", edges, [count / bin_s for count in counts], GREEN, value="%{y:.4g}")
    tokens.update(fill="tozeroy", fillcolor=translucent(GREEN, 0.12), showlegend=False)
    return _Row(f"Output tokens a second, over {bin_s:g} s each", _ROW_PX, "tokens/s", ",", (tokens,))


def _line(
    name: str,
    times: Sequence[float],
    values: Sequence[float],
    colour: str,
    dash: str = "solid",
    value: str = "%{y:.3g}",
) -> go.Scatter:
    group = -(-len(times) // _MAX_SAMPLES)
    return go.Scatter(
        mode="lines",
        name=plain(name),
        x=times[::group],
        # Of neighbours in a long run the highest: queues that were full must not vanish.
        y=[max(values[i : i + group]) for i in range(0, len(values), group)],
        line={"color": colour, "width": 2, "dash": dash, "shape": "hv"},
        hovertemplate=f"{plain(name)}: {value} at %{{x:.1f}} s<extra></extra>",
    )


def _mark_windows(plot: go.Figure, records: Sequence[Record]) -> None:
    """Shade what is not judged: the warm-up and the cool-down, by the times at which their requests were due."""
    span = steady_span(records)
    if span is None:
        return
    start, end = span
    last = max(record.ended_s for record in records)
    # The corner of the time line that no request reaches.
    outside = ((Window.WARM_UP, 0.0, start, 0, "bottom"), (Window.COOL_DOWN, end, last, 1, "top"))
    for window, low, high, y, anchor in outside:
        if high > low and any(record.window is window for record in records):
            plot.add_vrect(
                x0=low, x1=high, fillcolor=translucent(GREY, 0.16), line_width=0, layer="below", row="all", col=1
            )
            plot.add_annotation(
                text=str(window), textangle=-90 if anchor == "bottom" else 0, showarrow=False,
                x=(low + high) / 2, xref="x", y=y, yref="y domain", yanchor=anchor,
            )  # fmt: skip
