"""What a run says in numbers: tables of cells that a person can read, the same for all writers. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.loadtest.measures.bootstrap import Interval
from pdserve.loadtest.measures.distribution import Distribution
from pdserve.loadtest.measures.failures import classify
from pdserve.loadtest.measures.ledger import Reconciliation, first_token, reconcile, second_token
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.measures.summary import Summary
from pdserve.loadtest.report.report import Report
from pdserve.loadtest.report.units import format_count, format_seconds, format_share
from pdserve.loadtest.workload.window import Window

LATENCY_TITLES = {
    "ttft": "time to first token",
    "second": "time to second token",
    "tpot": "time per output token",
    "gap": "gap between tokens",
    "max_gap": "longest gap of a request",
    "e2e": "end to end",
    "queue": "queues, by the server",
    "service_ttft": "first token, from actual send",
    "service_e2e": "end to end, from actual send",
    "client_lag": "client lag",
    "loop_lag": "client loop lag",
}
MISSING = "-"


@dataclass(frozen=True, slots=True)
class Table:
    """header and rows have the same number of cells. The first column names the row, the others hold numbers.

    ends_in_words  the last column is a sentence
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    ends_in_words: bool = False


def gather_tables(report: Report) -> tuple[Table, ...]:
    """Every table that has something to say of the run."""
    tables = (
        tabulate_latencies(report.summary),
        tabulate_intervals(report.summary),
        tabulate_windows(report.summary),
        *(tabulate_stages(title, account) for title, account in reconcile_steady(report.records).items()),
        tabulate_errors(report.records),
    )
    return tuple(table for table in tables if table.rows)


def tabulate_latencies(summary: Summary) -> Table:
    """What no request has is left out."""
    rows = ((title, summary.latencies.get(name)) for name, title in LATENCY_TITLES.items())
    return Table(
        "Latencies",
        ("", "p50", "p90", "p99", "p99.9", "max", "mean"),
        tuple((title, *_describe(values)) for title, values in rows if values is not None),
    )


def tabulate_intervals(summary: Summary) -> Table:
    """How far the percentiles could be off."""
    rows = ((LATENCY_TITLES[name], intervals) for name, intervals in summary.intervals.items())
    return Table(
        "95 % intervals of the percentiles",
        ("", "p50", "p90", "p99"),
        tuple(
            (title, *(_span(interval) for interval in (intervals.p50, intervals.p90, intervals.p99)))
            for title, intervals in rows
            if intervals is not None
        ),
    )


def tabulate_windows(summary: Summary) -> Table:
    """The steady window and what was before and after it; nothing where there is no other."""
    steady = (Window.STEADY, summary.num_requests, summary.num_complete, summary.num_kept, summary.latencies)
    windows = [
        (name, other.num_requests, other.num_complete, other.num_kept, other.latencies)
        for name, other in summary.windows.items()
    ]
    if windows:
        windows.insert(Window.WARM_UP in summary.windows, steady)
    return Table(
        "Windows",
        ("", "requests", "complete", "kept", "ttft p50", "ttft p99", "tpot p50", "tpot p99"),
        tuple(
            (
                str(name),
                format_count(num_requests),
                format_count(num_complete),
                format_share(num_kept / num_requests) if num_requests else MISSING,
                *median_and_p99(latencies["ttft"]),
                *median_and_p99(latencies["tpot"]),
            )
            for name, num_requests, num_complete, num_kept, latencies in windows
        ),
    )


def reconcile_steady(records: Sequence[Record]) -> dict[str, Reconciliation]:
    """The server's accounts of the first and of the second token over the steady window, where it gives them."""
    steady = [record for record in records if record.window is Window.STEADY]
    tokens = (("first token", first_token), ("second token", second_token))
    return {title: found for title, account in tokens if (found := reconcile(steady, account)) is not None}


def tabulate_stages(title: str, account: Reconciliation) -> Table:
    """The stages of the time to a token; shares are of the time of all."""
    return Table(
        f"Stages to the {title}",
        ("", "kind", "mean", "p50", "p90", "p99", "share"),
        tuple(
            (
                name_stage(stage.name),
                str(stage.kind),
                *(_signed_seconds(value) for value in (stage.mean_s, stage.p50_s, stage.p90_s, stage.p99_s)),
                format_share(stage.share),
            )
            for stage in account.stages
        ),
    )


def name_stage(name: str) -> str:
    """A stage as people say it: "prefill queue" for prefill_queue_s."""
    return name.removesuffix("_s").replace("_", " ")


def tabulate_errors(records: Sequence[Record]) -> Table:
    """Failed requests of all windows by kind, with the words of the first of each."""
    failed = [record for record in records if record.has_failed]
    first = {record.error: record for record in reversed(failed)}
    counts = Counter(record.error for record in failed if record.error is not None)
    steady = Counter(record.error for record in failed if record.window is Window.STEADY)
    return Table(
        "Errors",
        ("kind", "class", "requests", "steady", "the first of them"),
        tuple(
            (
                kind,
                classify(kind),
                format_count(count),
                format_count(steady[kind]),
                f"request {first[kind].index}: {first[kind].detail or MISSING}",
            )
            for kind, count in counts.most_common()
        ),
        ends_in_words=True,
    )


def _describe(values: Distribution) -> tuple[str, ...]:
    cells = (values.p50, values.p90, values.p99, values.p99_9, values.max, values.mean)
    return tuple(format_seconds(cell) for cell in cells)


def median_and_p99(values: Distribution | None) -> tuple[str, str]:
    return (MISSING, MISSING) if values is None else (format_seconds(values.p50), format_seconds(values.p99))


def _signed_seconds(value: float) -> str:
    """What is unexplained is below 0 where an account has more than there was."""
    return f"-{format_seconds(-value)}" if value < 0 else format_seconds(value)


def _span(interval: Interval) -> str:
    return f"{format_seconds(interval.low)} to {format_seconds(interval.high)}"
