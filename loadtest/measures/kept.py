"""Whether a request kept what was promised, and what promises are about. Pure; called by summary.py and the search.

A request that was open when its run was ended has broken what no end of it could have kept any more.
"""

import math
from collections.abc import Callable, Sequence

from pdserve.loadtest.measures.promise import Measure, Promise
from pdserve.loadtest.measures.record import Record

_MEASURES: dict[Measure, Callable[[Record], float | None]] = {
    Measure.TTFT: lambda record: record.ttft_s,
    Measure.SECOND: lambda record: record.second_token_s,
    Measure.TPOT: lambda record: record.tpot_s,
    Measure.GAP: lambda record: max(record.gaps_s, default=None),
    Measure.E2E: lambda record: record.e2e_s,
}


def measure(record: Record, name: Measure) -> float | None:
    """What a promise is about, in seconds; None where the request is too short to have it.

    Of an abandoned request it is the least that it can have come to.
    """
    return _AT_LEAST[name](record) if record.is_abandoned else _MEASURES[name](record)


def latest_end_s(at_s: float, num_tokens: int, promises: Sequence[Promise]) -> float:
    """When the last token of a request must have come that keeps every promise; infinite where they set no such time.

    at_s        its intended send time, which the answer counts from, too
    num_tokens  that it is answered with
    """
    limits = dict.fromkeys(Measure, math.inf) | {promise.measure: promise.limit_s for promise in promises}
    if num_tokens < 2:
        return at_s + min(limits[Measure.E2E], limits[Measure.TTFT])
    first_s = min(limits[Measure.TTFT], limits[Measure.SECOND])
    token_s = min(limits[Measure.TPOT], limits[Measure.GAP])
    return at_s + min(limits[Measure.E2E], first_s + token_s * (num_tokens - 1))


def broken_promises(record: Record, promises: Sequence[Promise]) -> tuple[str, ...]:
    """The names of the promises that a request broke: none if it failed; one too short for a measure keeps it."""
    if record.has_failed:
        return ()
    broken = []
    for promise in promises:
        value = measure(record, promise.measure)
        if value is not None and value > promise.limit_s:
            broken.append(str(promise.measure))
    return tuple(broken)


def is_kept(record: Record, promises: Sequence[Promise]) -> bool:
    """Whether a request was answered in full and within every promise."""
    return record.is_complete and not broken_promises(record, promises)


def _second_at_least(record: Record) -> float | None:
    if record.planned_output_tokens < 2:
        return None
    return record.second_token_s if record.output_tokens > 1 else record.e2e_s


def _tpot_at_least(record: Record) -> float | None:
    if not record.token_times_s or record.planned_output_tokens < 2:
        return None
    return (record.ended_s - record.token_times_s[0]) / (record.planned_output_tokens - 1)


def _gap_at_least(record: Record) -> float | None:
    if not record.token_times_s:
        return None
    return max(*record.gaps_s, record.ended_s - record.token_times_s[-1], 0.0)


# While what is measured has not happened, it has taken until the end of the run.
_AT_LEAST: dict[Measure, Callable[[Record], float | None]] = {
    Measure.TTFT: lambda record: record.ttft_s if record.token_times_s else record.e2e_s,
    Measure.SECOND: _second_at_least,
    Measure.TPOT: _tpot_at_least,
    Measure.GAP: _gap_at_least,
    Measure.E2E: lambda record: record.e2e_s,
}
