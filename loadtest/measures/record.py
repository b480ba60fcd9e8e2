"""What one request amounted to: token times, counts, the server's ledger, and why it failed if it did.

`read_exchange` turns raw bytes into a Record after the run. The server is not trusted: whatever it sent
becomes a Record, never an exception.

Which events are tokens: an event of the stream with text is one; one without text is one too (an id whose
text is empty or still incomplete), unless it only opens the message (a chat role) or only closes it (a
finish reason). A closing event without text is the last token where the usage counts one more than was seen,
or where it is all that was seen.
Counts come from the server's usage: an event may carry several tokens when the client or the text is slow,
and those beyond the first of an event are counted in `merged_tokens`, with gaps of 0.
"""

import itertools
import json
import math
from dataclasses import dataclass
from typing import Any

from pdserve.loadtest.client.exchange import ABANDONED, Exchange, Failure
from pdserve.loadtest.measures.http import Response, read_response
from pdserve.loadtest.measures.sse import Event, split_events
from pdserve.loadtest.workload.lengths import MAX_TOKENS
from pdserve.loadtest.workload.schedule import PlannedRequest
from pdserve.loadtest.workload.window import Window

_MAX_DETAIL = 300
# The names in the server's ledger of the waits before a prompt is computed: at the router, at the node.
_QUEUES = ("queue_s", "prefill_queue_s")
_MAX_S = 1e9
# Of the server's ledger; ours has 3. What is nested deeper than Python recurses could be read but not be written.
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a finished run. Times are seconds since the start of the run.

    token_times_s    arrival of each event that carried tokens, [num_token_events]
    output_tokens    from the server's usage, else the number of token events
    usage_is_given   whether the server sent a usage that could be read
    prompt_tokens    the server's count, None where it gave none
    server_metrics   the server's own ledger of this request, as it came; None for one that is nested too deeply
    error, detail    None for a request answered in full; else its class and the words. A request that was open when its
                     run was ended is not complete and has not failed: its times and counts are those of what had come
    """

    index: int
    intended_s: float
    woke_s: float
    sent_s: float
    ended_s: float
    planned_input_tokens: int
    planned_output_tokens: int
    token_times_s: tuple[float, ...] = ()
    output_tokens: int = 0
    usage_is_given: bool = False
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    status: int | None = None
    error: str | None = None
    detail: str | None = None
    server_metrics: dict[str, Any] | None = None
    window: Window = Window.STEADY
    conversation: int | None = None
    turn: int = 0

    @property
    def is_complete(self) -> bool:
        return self.error is None

    @property
    def is_abandoned(self) -> bool:
        """Whether it was open when its run was ended."""
        return self.error == ABANDONED

    @property
    def has_failed(self) -> bool:
        return not (self.is_complete or self.is_abandoned)

    @property
    def lag_s(self) -> float:
        """How late the client itself was."""
        return self.woke_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.intended_s if self.token_times_s else None

    @property
    def service_ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def second_token_s(self) -> float | None:
        """Time to the second token; the first one's where they came in one event."""
        if self.output_tokens < 2 or not self.token_times_s:
            return None
        return self.token_times_s[min(1, len(self.token_times_s) - 1)] - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1); None for fewer than two tokens."""
        if self.output_tokens < 2 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """The time between each two neighbouring tokens; 0 for those that came in one event."""
        times = self.token_times_s
        between_events = tuple(later - earlier for earlier, later in itertools.pairwise(times))
        return between_events + (0.0,) * self.merged_tokens

    @property
    def merged_tokens(self) -> int:
        return max(0, self.output_tokens - len(self.token_times_s)) if self.token_times_s else 0

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.intended_s

    @property
    def service_e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def has_other_prompt(self) -> bool:
        """Whether the server counted another number of prompt tokens than planned."""
        return self.prompt_tokens is not None and self.prompt_tokens != self.planned_input_tokens

    @property
    def queue_s(self) -> float | None:
        """Waiting in queues before the prompt was computed, by the server's ledger; None where it tells none."""
        ledger = {} if self.server_metrics is None else self.server_metrics
        waits = [wait for name in _QUEUES if (wait := _seconds(ledger.get(name))) is not None]
        return sum(waits) if waits else None


@dataclass(slots=True)
class _Stream:
    """What the events of one response said, gathered in order."""

    texts: list[float]
    blanks: list[float]
    closing_at: float | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    is_done: bool = False
    failure: Failure | None = None

    def token_times(self, num_tokens: int | None) -> tuple[float, ...]:
        """Arrival of each token event, given the usage's count where there is one."""
        times = sorted(self.texts + self.blanks)
        if num_tokens is not None and len(times) > num_tokens:
            times = self.texts
        # Where more is missing, events were merged, and the closing one need not be a token.
        if self.closing_at is not None and num_tokens and (not times or len(times) == num_tokens - 1):
            times = [*times, self.closing_at]
        return tuple(times)


def read_exchange(planned: PlannedRequest, exchange: Exchange, start: float) -> Record:
    """The record of one request; start is the monotonic time of the run's start."""
    response = read_response(exchange)
    stream = _read_events(split_events(response.chunks))
    num_tokens = _count(stream.usage, "completion_tokens")
    times = stream.token_times(num_tokens)
    output_tokens = len(times) if num_tokens is None else num_tokens
    failure = _find_failure(planned, response, stream, output_tokens)
    return Record(
        index=planned.index,
        intended_s=planned.at_s,
        woke_s=exchange.woke_at - start,
        sent_s=exchange.sent_at - start,
        ended_s=exchange.ended_at - start,
        planned_input_tokens=planned.input_tokens,
        planned_output_tokens=planned.output_tokens,
        token_times_s=tuple(time - start for time in times),
        output_tokens=output_tokens,
        usage_is_given=num_tokens is not None,
        prompt_tokens=_count(stream.usage, "prompt_tokens"),
        finish_reason=stream.finish_reason,
        status=response.status,
        error=None if failure is None else failure.kind,
        detail=None if failure is None else printable(failure.detail[:_MAX_DETAIL]),
        server_metrics=stream.metrics,
        window=planned.window,
        conversation=planned.conversation,
        turn=planned.turn,
    )


def parse_json(text: str | bytes) -> Any:
    """JSON without the numbers that JSON does not have. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def printable(text: str) -> str:
    """A stranger's words on one line that any terminal and any file can hold: JSON may escape half a character."""
    return "".join(c if c.isprintable() else " " for c in text).strip()


def _read_events(events: list[Event]) -> _Stream:
    stream = _Stream(texts=[], blanks=[])
    for event in events:
        if event.data.strip() == "[DONE]":
            stream.is_done = True
            break
        try:
            payload = parse_json(event.data)
        except ValueError as error:
            stream.failure = Failure("bad_event", f"{error}: {event.data}")
            break
        if not isinstance(payload, dict):
            stream.failure = Failure("bad_event", f"not an object: {event.data}")
            break
        if payload.get("error"):
            stream.failure = Failure("stream_error", _error_message(payload))
            break
        _read_payload(stream, payload, event.arrived_at)
    return stream


def _read_payload(stream: _Stream, payload: dict[str, Any], arrived_at: float) -> None:
    usage = payload.get("usage")
    if isinstance(usage, dict):
        stream.usage = usage
        metrics = usage.get("metrics", payload.get("metrics"))
    else:
        metrics = payload.get("metrics")
    if isinstance(metrics, dict) and _is_shallow(metrics, _MAX_DEPTH):
        stream.metrics = metrics
    choices = payload.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        return
    delta = choice.get("delta")
    if isinstance(delta, dict):
        has_text = any(delta.get(name) for name in ("content", "reasoning_content", "reasoning"))
        opens = "role" in delta
    else:
        has_text = bool(choice.get("text"))
        opens = False
    finish_reason = choice.get("finish_reason")
    if isinstance(finish_reason, str):
        stream.finish_reason = printable(finish_reason)[:_MAX_DETAIL]
    if has_text:
        stream.texts.append(arrived_at)
    elif finish_reason is not None:
        stream.closing_at = arrived_at
    elif not opens:
        stream.blanks.append(arrived_at)


def _find_failure(planned: PlannedRequest, response: Response, stream: _Stream, output_tokens: int) -> Failure | None:
    """The first thing wrong with a request, nearest to the wire first."""
    if response.status is not None and response.status != 200:
        return Failure(f"http_{response.status}", _describe_body(response))
    if stream.failure is not None:
        return stream.failure
    if response.failure is not None:
        return response.failure
    if stream.finish_reason is None:
        return Failure(
            "missing_finish", f"no finish_reason in the stream, which ended with: {_describe_body(response)}"
        )
    if not stream.is_done:
        return Failure("missing_done", "the stream ended without data: [DONE]")
    if output_tokens != planned.output_tokens:
        kind = "short_output" if output_tokens < planned.output_tokens else "long_output"
        counted = "usage" if _count(stream.usage, "completion_tokens") is not None else "events, no usage was sent"
        detail = f"{output_tokens} tokens of {planned.output_tokens}, by {counted}; finish {stream.finish_reason}"
        return Failure(kind, detail)
    return None


def _count(usage: dict[str, Any] | None, name: str) -> int | None:
    value = None if usage is None else usage.get(name)
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def _seconds(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value <= _MAX_S else None


def _describe_body(response: Response) -> str:
    """The error message in a body, else the end of the body itself."""
    text = b"".join(chunk.data for chunk in response.chunks)
    try:
        payload = parse_json(text)
    except ValueError:
        return text[-_MAX_DETAIL:].decode(errors="replace")
    return _error_message(payload) if isinstance(payload, dict) else str(payload)


def _error_message(payload: dict[str, Any]) -> str:
    error = payload.get("error", payload)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


def _is_shallow(value: Any, depth: int) -> bool:
    """Whether JSON has at most so many lists and objects within each other."""
    if not isinstance(value, dict | list):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(part, depth - 1) for part in parts)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value
