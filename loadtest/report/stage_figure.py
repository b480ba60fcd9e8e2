"""Where the time to the first and to the second token goes, stage by stage, on average. Imports plotly."""

from collections.abc import Mapping

import plotly.graph_objects as go

from pdserve.loadtest.measures.ledger import UNEXPLAINED, Kind, Reconciliation, StageSummary
from pdserve.loadtest.report.figure import Figure, new_plot
from pdserve.loadtest.report.palette import BLUE, GREEN, GREY, VERMILION, translucent
from pdserve.loadtest.report.tables import name_stage
from pdserve.loadtest.report.units import format_seconds, format_share

KIND_COLOURS: dict[Kind, str] = {
    Kind.QUEUE: GREY,
    Kind.PREFILL: BLUE,
    Kind.TRANSFER: VERMILION,
    Kind.DECODE: GREEN,
    Kind.OTHER: translucent(GREY, 0.4),
}
_ROW_PX = 62
# Narrower than this share of the longest bar a stage has no room for its name.
_MIN_NAMED = 0.08


def draw_stages(accounts: Mapping[str, Reconciliation]) -> Figure | None:
    """A bar an account, of its stages' means in the order in which they follow each other; None for no account."""
    if not accounts:
        return None
    plot = new_plot(100 + _ROW_PX * len(accounts))
    plot.update_layout(barmode="stack", bargap=0.35, legend={"traceorder": "normal"})
    longest = max(sum(max(0.0, stage.mean_s) for stage in account.stages) for account in accounts.values())
    shown: set[Kind] = set()
    for title, account in accounts.items():
        for stage in account.stages:
            plot.add_trace(_draw_stage(title, stage, longest, stage.kind not in shown))
            shown.add(stage.kind)
    names = list(accounts)
    plot.update_yaxes(categoryorder="array", categoryarray=names[::-1], fixedrange=True)
    plot.update_xaxes(ticksuffix=" s", rangemode="tozero")
    caption = "Means over the steady window, by the server's ledger; hatched: what no stage explains."
    return Figure("stages", "Where the time goes", caption, plot, is_wide=True)


def _draw_stage(title: str, stage: StageSummary, longest_s: float, is_first: bool) -> go.Bar:
    name = name_stage(stage.name)
    # An account may hold more than there was; a bar cannot go back.
    mean_s = max(0.0, stage.mean_s)
    return go.Bar(
        orientation="h",
        x=[mean_s],
        y=[title],
        name=str(stage.kind),
        legendgroup=str(stage.kind),
        showlegend=is_first,
        legendrank=list(Kind).index(stage.kind),
        marker={
            "color": KIND_COLOURS[stage.kind],
            "line": {"width": 1, "color": "rgba(255,255,255,0.6)"},
            "pattern": {"shape": "/" if stage.name == UNEXPLAINED else "", "solidity": 0.3},
        },
        text=[name if mean_s > _MIN_NAMED * longest_s else ""],
        textposition="inside",
        insidetextanchor="middle",
        hovertemplate=f"{name}: {format_seconds(mean_s)} of {title}, {format_share(stage.share)}<extra></extra>",
    )
