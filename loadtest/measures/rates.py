"""What a server did during the steady window: requests it finished, tokens it took in and gave out. Pure.

Called by summary.py, whose docstring says what is counted; several runs add up.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pdserve.loadtest.measures.kept import is_kept
from pdserve.loadtest.measures.promise import Promise
from pdserve.loadtest.measures.record import Record
from pdserve.loadtest.workload.window import Window


@dataclass(frozen=True, slots=True)
class Rates:
    """Counts within span_s seconds. output_tokens is a fraction where events cut by the span carried several."""

    span_s: float = 0.0
    num_complete: int = 0
    num_kept: int = 0
    input_tokens: int = 0
    output_tokens: float = 0.0

    def __add__(self, other: Self) -> "Rates":
        return Rates(
            self.span_s + other.span_s,
            self.num_complete + other.num_complete,
            self.num_kept + other.num_kept,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
        )

    def per_s(self, count: float) -> float:
        """0 for a span of nothing."""
        return count / self.span_s if self.span_s else 0.0


def steady_span(records: Sequence[Record]) -> tuple[float, float] | None:
    """From when to when the steady window was, in seconds of the run; None where no request is steady."""
    steady = [record for record in records if record.window is Window.STEADY]
    if not steady:
        return None
    start = min(record.intended_s for record in steady)
    after = [record.intended_s for record in records if record.window is Window.COOL_DOWN]
    # Requests sent all at once have windows without length.
    if after and min(after) > start:
        return start, min(after)
    return start, max(record.ended_s for record in steady)


def measure_rates(records: Sequence[Record], promises: Sequence[Promise]) -> Rates:
    """The counts of one run. A request counts when it ends, its prompt with its first token."""
    span = steady_span(records)
    if span is None:
        return Rates()
    start, end = span
    finished = [record for record in records if record.is_complete and start <= record.ended_s <= end]
    return Rates(
        span_s=end - start,
        num_complete=len(finished),
        num_kept=sum(is_kept(record, promises) for record in finished),
        input_tokens=sum(
            _num_input_tokens(record)
            for record in records
            if record.token_times_s and start <= record.token_times_s[0] <= end
        ),
        output_tokens=sum(_num_output_tokens(record, start, end) for record in records),
    )


def _num_input_tokens(record: Record) -> int:
    return record.planned_input_tokens if record.prompt_tokens is None else record.prompt_tokens


def _num_output_tokens(record: Record, start: float, end: float) -> float:
    """Tokens that came within the span; which event carried those that share one is not known, so all did alike."""
    times = record.token_times_s
    if not times:
        return 0.0
    num_events = bisect.bisect_right(times, end) - bisect.bisect_left(times, start)
    return record.output_tokens * num_events / len(times)
