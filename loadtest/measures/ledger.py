"""Where the time of a request went, by the server's own account, and what of it that account leaves open.

    sent late ─ read, route, queue ─ prefill queue, chunks ─ link ─┬─ delivery ─► first token
                      transfer ─ decode queue, first step ─ link ──┴─ delivery ─► second token

The server measures every stage as a duration; the client adds how late it was itself. What is left of the time that
the client saw is unexplained: connections, messages on their way, processes that wake up, and mistakes. The server's
`link_s`, which is what its router could not attribute either, is no explanation. Pure functions over Records; the
account is a stranger's, so whatever it says wrongly explains nothing, and nothing here raises. Servers without one
give None.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.loadtest.measures.distribution import Distribution, describe, percentile
from pdserve.loadtest.measures.record import Record

# What may stay unexplained of a token's time: the larger of these.
MAX_UNEXPLAINED_S = 0.002
MAX_UNEXPLAINED_SHARE = 0.05

_MAX_STAGE_S = 1e6
# Differences of clock readings, rounded.
_ROUNDING_S = 1e-5
_MAX_CHUNKS = 64


class Kind(StrEnum):
    """What a stage is drawn as."""

    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    OTHER = "other"


CLIENT_LAG = "client_lag_s"
ARRIVAL_WAIT = "arrival_wait_s"
EXCESS = "excess_s"
UNEXPLAINED = "unexplained_s"
DELIVERY = "delivery_s"

# Stages of the account in the order in which they follow each other; a token has some of them.
STAGE_KINDS: dict[str, Kind] = {
    "read_s": Kind.OTHER,
    "route_s": Kind.OTHER,
    "queue_s": Kind.QUEUE,
    "earlier_attempts_s": Kind.QUEUE,
    "prefill_queue_s": Kind.QUEUE,
    "chunks_s": Kind.PREFILL,
    "chunk_wait_s": Kind.QUEUE,
    "step_end_s": Kind.PREFILL,
    "wait_for_blocks_s": Kind.QUEUE,
    "fetch_s": Kind.TRANSFER,
    "copy_s": Kind.TRANSFER,
    "verify_s": Kind.TRANSFER,
    "decode_queue_s": Kind.QUEUE,
    "first_step_s": Kind.DECODE,
    "cpu_wait_s": Kind.QUEUE,
    DELIVERY: Kind.OTHER,
}


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    kind: Kind
    seconds: float


@dataclass(frozen=True, slots=True)
class Account:
    """Of one token of one request: total_s is what the client saw, from the intended send time.

    excess_s: what the server's stages had beyond the time that its router knows of, and were cut by
    """

    stages: tuple[Stage, ...]
    total_s: float
    excess_s: float = 0.0

    @property
    def explained_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def unexplained_s(self) -> float:
        """Below 0 where the account has more than there was; that it was cut to fit makes it no better."""
        return self.total_s - self.explained_s - self.excess_s

    @property
    def allowed_s(self) -> float:
        return max(MAX_UNEXPLAINED_S, MAX_UNEXPLAINED_SHARE * self.total_s)

    @property
    def is_explained(self) -> bool:
        return abs(self.unexplained_s) <= self.allowed_s


@dataclass(frozen=True, slots=True)
class Span:
    """A stage on the time line, in seconds since the start of the run."""

    name: str
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Of one stage over all requests that have an account; share: of the time of their tokens."""

    name: str
    kind: Kind
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Accounts against what the client saw, over a run.

    unexplained       seconds, an excess of the account as much as a lack
    used_p99          p99 of unexplained over what is allowed; up to 1 the accounts add up
    share_explained   of requests that are explained
    """

    num_requests: int
    unexplained: Distribution
    used_p99: float
    share_explained: float
    stages: tuple[StageSummary, ...]

    @property
    def adds_up(self) -> bool:
        return self.used_p99 <= 1.0


def first_token(record: Record) -> Account | None:
    """The account of the time to the first token."""
    stages = _stages(record, "first_token")
    if stages is None or record.ttft_s is None:
        return None
    return Account((*_before(record), *stages), record.ttft_s, _excess_s(record, "first_token"))


def second_token(record: Record) -> Account | None:
    """The account of the time to the second token: what the first took to the router, and what followed."""
    stages = _to_second(record)
    if stages is None or record.second_token_s is None:
        return None
    excess_s = _excess_s(record, "first_token") + _excess_s(record, "second_token")
    return Account((*_before(record), *stages), record.second_token_s, excess_s)


def reconcile(records: Iterable[Record], account: Callable[[Record], Account | None]) -> Reconciliation | None:
    """Over the complete requests that have an account; None where none has. account: first_token or second_token"""
    accounts = [found for record in records if record.is_complete and (found := account(record)) is not None]
    unexplained = describe(abs(each.unexplained_s) for each in accounts)
    if unexplained is None:
        return None
    return Reconciliation(
        len(accounts),
        unexplained,
        percentile([abs(each.unexplained_s) / each.allowed_s for each in accounts], 99),
        sum(each.is_explained for each in accounts) / len(accounts),
        tuple(_summaries(accounts)),
    )


def time_line(record: Record) -> tuple[Span, ...] | None:
    """The stages of one request one after another, up to its last token; None without an account.

    Chunks of its prompt with the waits between them where the account lists them. The account's stages have no times
    of day, so what is unexplained before the first token is put before its delivery.
    """
    account = first_token(record)
    if account is None:
        return None
    before = [stage for stage in account.stages if stage.name != DELIVERY]
    delivery_s = account.explained_s - sum(stage.seconds for stage in before)
    spans, at = _lay(_with_chunks(before, _chunks(record)), record.intended_s)
    arrived = max(at, record.token_times_s[0] - delivery_s)
    spans += _span(UNEXPLAINED, Kind.OTHER, at, arrived)
    second = second_token(record)
    if second is not None:
        after = [stage for stage in second.stages[len(before) :] if stage.name != DELIVERY]
        laid, arrived = _lay(after, arrived)
        spans += laid
    spans += _span("decode", Kind.DECODE, arrived, record.token_times_s[-1])
    return tuple(spans)


def _to_second(record: Record) -> list[Stage] | None:
    first, second = _stages(record, "first_token"), _stages(record, "second_token")
    if first is None or second is None:
        return None
    return [stage for stage in first if stage.name != DELIVERY] + second


def _before(record: Record) -> tuple[Stage, Stage]:
    """What came before the server's handler: how late the client was, by its own clock and for its own reasons, and
    what the server's process waited for a core then, which is at most what is left of either token's time.
    """
    lag_s = max(0.0, record.sent_s - record.intended_s)
    wait_s = _seconds(record.server_metrics.get(ARRIVAL_WAIT)) or 0.0 if record.server_metrics else 0.0
    for stages, total_s in (
        (_stages(record, "first_token"), record.ttft_s),
        (_to_second(record), record.second_token_s),
    ):
        if stages is not None and total_s is not None:
            wait_s = min(wait_s, max(0.0, total_s - lag_s - sum(stage.seconds for stage in stages)))
    return Stage(CLIENT_LAG, Kind.OTHER, lag_s), Stage(ARRIVAL_WAIT, Kind.QUEUE, wait_s)


def _told(record: Record, token: str) -> dict[Any, Any] | None:
    told = record.server_metrics.get(token) if isinstance(record.server_metrics, dict) else None
    return told if isinstance(told, dict) else None


def _excess_s(record: Record, token: str) -> float:
    return _seconds((_told(record, token) or {}).get(EXCESS)) or 0.0


def _stages(record: Record, token: str) -> list[Stage] | None:
    told = _told(record, token)
    if told is None:
        return None
    return [
        Stage(name, kind, seconds)
        for name, kind in STAGE_KINDS.items()
        if (seconds := _seconds(told.get(name))) is not None
    ]


def _seconds(value: Any) -> float | None:
    """A duration as a stranger tells it; None for what is none."""
    # No comparison holds for NaN.
    if type(value) not in (int, float) or not -_ROUNDING_S <= value <= _MAX_STAGE_S:
        return None
    return max(0.0, float(value))


def _summaries(accounts: Sequence[Account]) -> Iterable[StageSummary]:
    """Every stage that any of them has, in order, then what is unexplained; a stage that one lacks took it nothing."""
    total_s = sum(each.total_s for each in accounts)
    kinds = {CLIENT_LAG: Kind.OTHER, ARRIVAL_WAIT: Kind.QUEUE, **STAGE_KINDS, UNEXPLAINED: Kind.OTHER}
    columns: dict[str, list[float]] = {name: [] for name in kinds}
    for each in accounts:
        # Of a second token, some stages of the first come again.
        found = {UNEXPLAINED: each.unexplained_s}
        for stage in each.stages:
            found[stage.name] = found.get(stage.name, 0.0) + stage.seconds
        for name, column in columns.items():
            column.append(found.get(name, 0.0))
    for name, column in columns.items():
        if any(column):
            p50_s, p90_s, p99_s = (percentile(column, percent) for percent in (50, 90, 99))
            share = sum(column) / total_s if total_s > 0 else 0.0
            yield StageSummary(name, kinds[name], sum(column) / len(column), p50_s, p90_s, p99_s, share)


def _chunks(record: Record) -> list[tuple[float, float]]:
    """Start after acceptance by the node, and length, of each chunk; none where the account's list makes no sense."""
    told = record.server_metrics.get("chunks") if isinstance(record.server_metrics, dict) else None
    chunks, end = [], 0.0
    for each in told[:_MAX_CHUNKS] if isinstance(told, list) else ():
        start, seconds = map(_seconds, each[1:]) if isinstance(each, list) and len(each) == 3 else (None, None)
        if start is None or seconds is None or start < end - _ROUNDING_S:
            return []
        chunks.append((start, seconds))
        end = start + seconds
    return chunks


def _with_chunks(stages: Sequence[Stage], chunks: Sequence[tuple[float, float]]) -> list[Stage]:
    """Chunks and the waits between them one by one in the place of their sums, where they are about as long."""
    in_sum = ("chunks_s", "chunk_wait_s", "step_end_s")
    sum_s = sum(stage.seconds for stage in stages if stage.name in in_sum)
    if not chunks or abs(chunks[-1][0] + chunks[-1][1] - chunks[0][0] - sum_s) > MAX_UNEXPLAINED_S + 0.01 * sum_s:
        return list(stages)
    laid: list[Stage] = []
    for stage in stages:
        if stage.name == in_sum[0]:
            end = chunks[0][0]
            for start, seconds in chunks:
                laid.append(Stage("chunk_wait_s", Kind.QUEUE, max(0.0, start - end)))
                laid.append(Stage("chunks_s", Kind.PREFILL, seconds))
                end = start + seconds
        elif stage.name not in in_sum:
            laid.append(stage)
    return laid


def _lay(stages: Iterable[Stage], at: float) -> tuple[list[Span], float]:
    spans: list[Span] = []
    for stage in stages:
        spans += _span(stage.name, stage.kind, at, at + stage.seconds)
        at += stage.seconds
    return spans, at


def _span(name: str, kind: Kind, start_s: float, end_s: float) -> list[Span]:
    """None of no length."""
    return [Span(name, kind, start_s, end_s)] if end_s > start_s else []
