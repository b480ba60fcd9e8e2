"""What is read off a run of an ablation, and how two runs become a gain. Pure.

Rates are those while the server was busy: what comes before is the server filling up, what comes after it running
empty. A gain above 1 says that a technique pays, for rates and for times alike. Called by ablation.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pdserve.loadtest.measures.distribution import percentile
from pdserve.loadtest.measures.record import Record

# Of all token events, at each end: outside of them the server is not taken for busy.
EDGE_SHARE = 0.1
# Above this share of failures a run says nothing.
MAX_FAILED = 0.05
# Prompts of the loads are either much shorter than this or much longer.
SHORT_PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Seen:
    """What is left of a run. num_kv_tokens: those that the decode nodes' memory holds, 0 where they did not say."""

    records: Sequence[Record]
    num_kv_tokens: int = 0


class Unit(StrEnum):
    RATE = "rate"
    SECONDS = "seconds"
    COUNT = "count"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Contrast:
    """One reading of two runs of the same schedule, with a technique and without it."""

    now: float
    before: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What a technique brings by one reading: means over pairs of runs, and the gain's range among them."""

    now: float
    before: float
    factor: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Reading:
    """read: its value of one run, None where there is none. A gain is more of it, or, of seconds, less."""

    title: str
    unit: Unit
    read: Callable[[Seen], float | None]

    def gain_of(self, contrasts: Sequence[Contrast]) -> Gain | None:
        """Geometric means, so that a gain and its reverse are each other's inverse.

        Contrasts with a value that is not above 0 have no ratio and are left out; None where none is left.
        """
        pairs = [pair for pair in contrasts if pair.now > 0 and pair.before > 0]
        if not pairs:
            return None
        factors = [self._factor(pair) for pair in pairs]
        now, before, factor = (
            math.exp(sum(map(math.log, values)) / len(pairs))
            for values in ([pair.now for pair in pairs], [pair.before for pair in pairs], factors)
        )
        return Gain(now, before, factor, min(factors), max(factors))

    def _factor(self, pair: Contrast) -> float:
        return pair.before / pair.now if self.unit is Unit.SECONDS else pair.now / pair.before


def too_many_failures(records: Sequence[Record]) -> str | None:
    """What went wrong, where so much did that the run says nothing."""
    failed = [record for record in records if not record.is_complete]
    if len(failed) <= MAX_FAILED * len(records):
        return None
    first = failed[0]
    return (
        f"{len(failed)} of {len(records)} requests failed; the first: request {first.index}, {first.error}: "
        f"{first.detail}"
    )


def busy_span(records: Sequence[Record]) -> tuple[float, float] | None:
    """From when to when the middle token events came, in seconds of the run; None without two different times."""
    times = np.sort([at for record in records for at in record.token_times_s])
    if not len(times):
        return None
    first, last = (float(times[round(share * (len(times) - 1))]) for share in (EDGE_SHARE, 1 - EDGE_SHARE))
    return (first, last) if last > first else None


def tokens_per_s(seen: Seen) -> float | None:
    """Output tokens a second while the server was busy; those of a request are spread evenly over its events."""
    span = busy_span(seen.records)
    if span is None:
        return None
    start, end = span
    num_tokens = sum(
        sum(start < at <= end for at in record.token_times_s) * record.output_tokens / len(record.token_times_s)
        for record in seen.records
        if record.token_times_s
    )
    return num_tokens / (end - start)


def num_at_once(seen: Seen) -> float | None:
    """How many requests were between their first and their last token, on average, while the server was busy."""
    return _mean_while_busy(seen.records, lambda record: np.ones(len(record.token_times_s)))


def kv_share(seen: Seen) -> float | None:
    """Share of the memory that holds a token of a running request, on average, while the server was busy."""
    held = _mean_while_busy(seen.records, _tokens_held)
    return None if held is None or not seen.num_kv_tokens else held / seen.num_kv_tokens


def _tokens_held(record: Record) -> np.ndarray:
    """From each token event to the next: the prompt and what has come, the newest token not yet, [num_token_events]."""
    num_events = len(record.token_times_s)
    return record.planned_input_tokens + np.arange(num_events) * record.output_tokens / num_events


def _mean_while_busy(records: Sequence[Record], weigh: Callable[[Record], np.ndarray]) -> float | None:
    """The mean of a sum over requests. weigh: what one adds from each token event to the next, [num_token_events]."""
    span = busy_span(records)
    if span is None:
        return None
    total = 0.0
    for record in records:
        if record.token_times_s:
            total += float(weigh(record)[:-1] @ np.diff(np.clip(record.token_times_s, *span)))
    return total / (span[1] - span[0])


def first_token_s(
    seen: Seen, share: float = 50, is_asked: Callable[[Record], bool] = lambda record: True
) -> float | None:
    """A percentile of the time to first token, of requests that were sent while the server was busy.

    It counts from the actual send: with few in flight, the others are not sent yet. The first ones come all at once
    and to an empty cache, which is another question.
    """
    span = busy_span(seen.records)
    if span is None:
        return None
    values = [
        record.service_ttft_s
        for record in seen.records
        if record.service_ttft_s is not None and record.sent_s >= span[0] and is_asked(record)
    ]
    return percentile(values, share) if values else None


def short_first_token_s(seen: Seen) -> float | None:
    """p90 among short prompts: most have no long one before them on their node."""
    return first_token_s(seen, 90, lambda record: record.planned_input_tokens <= SHORT_PROMPT_TOKENS)


def long_first_token_s(seen: Seen) -> float | None:
    return first_token_s(seen, 50, lambda record: record.planned_input_tokens > SHORT_PROMPT_TOKENS)


def late_gap_s(seen: Seen) -> float | None:
    """p99 of all gaps between two tokens of a request."""
    values = [gap for record in seen.records for gap in record.gaps_s]
    return percentile(values, 99) if values else None


TOKENS = Reading("output tokens/s", Unit.RATE, tokens_per_s)
AT_ONCE = Reading("requests at once", Unit.COUNT, num_at_once)
KV_SHARE = Reading("KV memory in use", Unit.SHARE, kv_share)
FIRST_TOKEN = Reading("first token, p50", Unit.SECONDS, first_token_s)
SHORT_FIRST_TOKEN = Reading("first token, short, p90", Unit.SECONDS, short_first_token_s)
LONG_FIRST_TOKEN = Reading("first token, long, p50", Unit.SECONDS, long_first_token_s)
GAP = Reading("gap, p99", Unit.SECONDS, late_gap_s)
