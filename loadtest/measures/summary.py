"""Numbers out of records: latencies, promises kept, rates, and whether the run may be believed. Pure functions.

The headline numbers are those of the steady window's requests; the warm-up's and the cool-down's stand beside them.
Latencies are those of complete requests; shares count every request.

Rates count what happened during the steady window's span, by whichever window's requests: ends of requests, arrivals
of tokens, first tokens for what was put in. The span goes from the first steady request's intended send to the first
cool-down request's; without a cool-down, to the last end of a steady request, the failed included. So an overloaded
server's rate is what it served, not what it was sent, and a drained queue after the last send dilutes nothing.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pdserve.loadtest.measures.bootstrap import Interval, num_resamples_for, percentile_intervals, wilson
from pdserve.loadtest.measures.distribution import Distribution, describe
from pdserve.loadtest.measures.failures import count_classes
from pdserve.loadtest.measures.kept import broken_promises, is_kept
from pdserve.loadtest.measures.latencies import LATENCIES, values_of
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.rates import Rates, measure_rates
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.measures.validity import CLIENT_LAG, LOOP_LAG, Validity, describe_lags, judge_lags, worst
from pdserve.loadtest.workload.window import Window

if TYPE_CHECKING:
    from pdserve.loadtest.report.report import Report

_WITH_INTERVALS = ("ttft", "second", "tpot", "max_gap", "e2e")


@dataclass(frozen=True, slots=True)
class PercentileIntervals:
    """Bootstrap intervals of a measure's percentiles, in seconds."""

    p50: Interval
    p90: Interval
    p99: Interval


@dataclass(frozen=True, slots=True)
class WindowSummary:
    """The warm-up or the cool-down: nothing to be quoted, but a server that got slower shows here."""

    num_requests: int
    num_complete: int
    num_kept: int
    latencies: dict[str, Distribution | None]


@dataclass(frozen=True, slots=True)
class Summary:
    """The steady window of one run, or of several pooled, in numbers.

    errors                  failed requests by exact kind
    error_classes           and by class (failures.py)
    broken                  requests that did not fail by promise they broke; one request may break several
    num_prompt_mismatches   requests whose prompt the server counted otherwise than planned
    duration_s              span of the window, that rates are over
    attainment_interval     Wilson's, at 95 %; None without requests
    latencies               by name; None where no request has the measure; lags are the least punctual process's
    intervals               of percentiles, for measures that have one value a request
    windows                 the other windows that have requests, by name
    num_abandoned           requests that had broken a promise and were open when the run was ended
    """

    num_requests: int
    num_complete: int
    num_kept: int
    errors: dict[str, int]
    error_classes: dict[str, int]
    broken: dict[str, int]
    num_prompt_mismatches: int
    duration_s: float
    slo_attainment: float
    attainment_interval: Interval | None
    goodput_per_s: float
    completed_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    output_tokens: int
    merged_tokens: int
    num_without_usage: int
    latencies: dict[str, Distribution | None]
    intervals: dict[str, PercentileIntervals | None]
    windows: dict[str, WindowSummary]
    validity: Validity
    num_abandoned: int = 0


def summarize(
    records: Sequence[Record], promises: Sequence[Promise], loop_lags_s: Sequence[Iterable[float]]
) -> Summary:
    """The numbers of a run; loop_lags_s are those of each client process."""
    return _summarize([records], promises, describe_lags(records, loop_lags_s))


def pool(reports: Sequence["Report"]) -> Summary:
    """The numbers of several runs of one load that differ in the seed, as if their requests were one run's.

    Rates are over the sum of the spans; lags are those of the least punctual run.
    """
    lags = {name: worst(report.summary.latencies[name] for report in reports) for name in (CLIENT_LAG, LOOP_LAG)}
    return _summarize([report.records for report in reports], reports[0].config.promises, lags)


def _summarize(
    runs: Sequence[Sequence[Record]], promises: Sequence[Promise], lags: dict[str, Distribution | None]
) -> Summary:
    every = [record for records in runs for record in records]
    steady = _of_window(every, Window.STEADY)
    complete = [record for record in steady if record.is_complete]
    num_kept = sum(is_kept(record, promises) for record in steady)
    rates = sum((measure_rates(records, promises) for records in runs), start=Rates())
    latencies = _latencies(complete) | lags
    errors = [record.error for record in steady if record.error is not None and record.has_failed]
    return Summary(
        num_requests=len(steady),
        num_complete=len(complete),
        num_kept=num_kept,
        errors=dict(Counter(errors).most_common()),
        error_classes=count_classes(errors),
        broken=_count_broken(steady, promises),
        num_prompt_mismatches=sum(record.has_other_prompt for record in steady),
        duration_s=rates.span_s,
        slo_attainment=num_kept / len(steady) if steady else 0.0,
        attainment_interval=wilson(num_kept, len(steady)) if steady else None,
        goodput_per_s=rates.per_s(rates.num_kept),
        completed_per_s=rates.per_s(rates.num_complete),
        input_tokens_per_s=rates.per_s(rates.input_tokens),
        output_tokens_per_s=rates.per_s(rates.output_tokens),
        output_tokens=sum(record.output_tokens for record in steady),
        merged_tokens=sum(record.merged_tokens for record in steady),
        num_without_usage=sum(not record.usage_is_given for record in complete),
        latencies=latencies,
        intervals={name: _intervals(name, runs) for name in _WITH_INTERVALS},
        windows=_other_windows(every, promises),
        validity=judge_lags(lags.values(), latencies["service_ttft"]),
        num_abandoned=sum(record.is_abandoned for record in steady),
    )


def _of_window(records: Iterable[Record], window: Window) -> list[Record]:
    return [record for record in records if record.window is window]


def _count_broken(records: Sequence[Record], promises: Sequence[Promise]) -> dict[str, int]:
    counts = {str(promise.measure): 0 for promise in promises}
    for record in records:
        for name in broken_promises(record, promises):
            counts[name] += 1
    return counts


def _latencies(complete: Sequence[Record]) -> dict[str, Distribution | None]:
    return {name: describe(values_of(name, complete)) for name in LATENCIES}


def _intervals(name: str, runs: Sequence[Sequence[Record]]) -> PercentileIntervals | None:
    values = [
        np.array(list(values_of(name, (record for record in _of_window(records, Window.STEADY) if record.is_complete))))
        for records in runs
    ]
    num_values = sum(map(len, values))
    if not num_values:
        return None
    return PercentileIntervals(*percentile_intervals(values, (50, 90, 99), num_resamples_for(num_values)))


def _other_windows(records: Sequence[Record], promises: Sequence[Promise]) -> dict[str, WindowSummary]:
    summaries = {}
    for window in (Window.WARM_UP, Window.COOL_DOWN):
        inside = _of_window(records, window)
        complete = [record for record in inside if record.is_complete]
        if inside:
            summaries[str(window)] = WindowSummary(
                num_requests=len(inside),
                num_complete=len(complete),
                num_kept=sum(is_kept(record, promises) for record in inside),
                latencies=_latencies(complete),
            )
    return summaries
