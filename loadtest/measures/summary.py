"""Numbers out of records: percentiles, promises kept, goodput, and whether the run may be believed.

Pure functions. Latencies are those of complete requests; shares and rates count every request.

Percentiles are values that were observed (numpy's "inverted_cdf": the smallest value that at least the
given share of values does not exceed), so "p90 <= limit" says exactly that 90 % kept the limit.
The duration of a run goes from the first intended send to the last end of a request, failed ones included.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.record import Record

# A run is believed while the client's p99 lag is below the larger of these.
MAX_LAG_S = 0.005
MAX_LAG_SHARE_OF_TTFT = 0.05

_MEASURES: dict[Measure, Callable[[Record], float | None]] = {
    Measure.TTFT: lambda record: record.ttft_s,
    Measure.SECOND: lambda record: record.second_token_s,
    Measure.TPOT: lambda record: record.tpot_s,
    Measure.GAP: lambda record: max(record.gaps_s, default=None),
    Measure.E2E: lambda record: record.e2e_s,
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a measure over requests (or over gaps), in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Validity:
    """Whether the client was punctual enough: its p99 lag against what is allowed."""

    lag_p99_s: float
    max_lag_s: float

    @property
    def is_valid(self) -> bool:
        return self.lag_p99_s <= self.max_lag_s


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers.

    errors      failed requests by class
    broken      complete requests by promise they broke; one request may break several
    latencies   by name; None where no request has the measure
    """

    num_requests: int
    num_complete: int
    num_kept: int
    errors: dict[str, int]
    broken: dict[str, int]
    duration_s: float
    slo_attainment: float
    goodput_per_s: float
    completed_per_s: float
    output_tokens_per_s: float
    output_tokens: int
    merged_tokens: int
    num_without_usage: int
    latencies: dict[str, Distribution | None]
    validity: Validity


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """The smallest observed value that at least `percent` % of the values do not exceed; values is not empty."""
    return float(np.percentile(values, percent, method="inverted_cdf"))


def describe(values: Iterable[float]) -> Distribution | None:
    """The distribution of values, None for no values."""
    observed = np.fromiter(values, dtype=np.float64)
    if not observed.size:
        return None
    return Distribution(
        count=int(observed.size),
        mean=float(observed.mean()),
        p50=percentile(observed, 50),
        p90=percentile(observed, 90),
        p99=percentile(observed, 99),
        max=float(observed.max()),
    )


def measure(record: Record, name: Measure) -> float | None:
    """What a promise is about, in seconds; None where the request is too short to have it."""
    return _MEASURES[name](record)


def broken_promises(record: Record, promises: Sequence[Promise]) -> tuple[str, ...]:
    """The names of the promises that a complete request broke; one too short for a measure keeps it."""
    broken = []
    for promise in promises:
        value = measure(record, promise.measure)
        if value is not None and value > promise.limit_s:
            broken.append(str(promise.measure))
    return tuple(broken)


def is_kept(record: Record, promises: Sequence[Promise]) -> bool:
    """Whether a request was answered in full and within every promise."""
    return record.is_complete and not broken_promises(record, promises)


def duration_s(records: Sequence[Record]) -> float:
    return max(record.ended_s for record in records) - min(record.intended_s for record in records)


def summarize(records: Sequence[Record], promises: Sequence[Promise], loop_lags_s: Iterable[float]) -> Summary:
    """The numbers of a run of at least one request."""
    complete = [record for record in records if record.is_complete]
    num_kept = sum(is_kept(record, promises) for record in records)
    duration = duration_s(records)
    output_tokens = sum(record.output_tokens for record in records)
    latencies = _latencies(records, complete)
    latencies["loop_lag"] = describe(loop_lags_s)
    return Summary(
        num_requests=len(records),
        num_complete=len(complete),
        num_kept=num_kept,
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
        broken=_count_broken(complete, promises),
        duration_s=duration,
        slo_attainment=num_kept / len(records),
        goodput_per_s=num_kept / duration,
        completed_per_s=len(complete) / duration,
        output_tokens_per_s=output_tokens / duration,
        output_tokens=output_tokens,
        merged_tokens=sum(record.merged_tokens for record in records),
        num_without_usage=sum(not record.usage_is_given for record in complete),
        latencies=latencies,
        validity=_judge(latencies),
    )


def _count_broken(complete: Sequence[Record], promises: Sequence[Promise]) -> dict[str, int]:
    counts = {str(promise.measure): 0 for promise in promises}
    for record in complete:
        for name in broken_promises(record, promises):
            counts[name] += 1
    return counts


def _latencies(records: Sequence[Record], complete: Sequence[Record]) -> dict[str, Distribution | None]:
    return {
        "ttft": describe(_given(record.ttft_s for record in complete)),
        "second": describe(_given(record.second_token_s for record in complete)),
        "tpot": describe(_given(record.tpot_s for record in complete)),
        "gap": describe(gap for record in complete for gap in record.gaps_s),
        "e2e": describe(record.e2e_s for record in complete),
        "service_ttft": describe(_given(record.service_ttft_s for record in complete)),
        "service_e2e": describe(record.service_e2e_s for record in complete),
        "client_lag": describe(record.lag_s for record in records),
    }


def _given(values: Iterable[float | None]) -> Iterable[float]:
    return (value for value in values if value is not None)


def _judge(latencies: dict[str, Distribution | None]) -> Validity:
    lags = [latencies[name] for name in ("client_lag", "loop_lag")]
    ttft = latencies["ttft"]
    return Validity(
        lag_p99_s=max((lag.p99 for lag in lags if lag is not None), default=0.0),
        max_lag_s=max(MAX_LAG_S, MAX_LAG_SHARE_OF_TTFT * ttft.p50 if ttft is not None else 0.0),
    )
