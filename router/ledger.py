"""When what happened to one request, and what its time to the first and to the second token is made of.

    arrived ─ read, route ─ queue ─ earlier attempts ─┐
                                                      ├─ dispatched ─ the node's own stages, link ─► first token
    first token ─ earlier attempts, prefill again ────┘
    first token ─ transfer, decode queue, first step, link ─► second token        either token ─ delivery ─► client

The stages of a token are one after another and add up to its time, to the microsecond: a node's are durations on its
own clock. Of what the router waited beyond them, `cpu_wait_s` is what the processes that a message came to stood
ready without a core; the rest is `link_s`. What a node has more than there was is taken off and told as `excess_s`.
They are made when they are asked for: messages of two nodes about one request come in any order.
Monotonic seconds of the router. Belongs to a Record; Dispatcher and Attempts write it, TokenStream what is delivered.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from pdserve.cluster.messages import Begun, FirstToken

Stages = dict[str, float]


@dataclass(frozen=True, slots=True)
class Told:
    """Stages of a node, and what messages before and with them may have waited for a core."""

    stages: Stages = field(default_factory=dict)
    waited_s: float = 0.0


@dataclass(slots=True)
class AttemptTimes:
    """Of one attempt. prefill: of its FirstToken, begun: of its Begun; None until it came."""

    dispatched: float
    prefill: Told | None = None
    begun: Told | None = None


@dataclass(frozen=True, slots=True)
class Bringer:
    """Of a token: its attempt, and whether that had been told to run where it decodes, which is before what it draws
    there and after what was drawn with the prompt.
    """

    attempt: AttemptTimes
    had_begun: bool


@dataclass(slots=True)
class Times:
    """None until it happened; first_token and second_token: here, first_written and second_written: to the client.

    arrived  the HTTP handler began; read_s: until the body was here
    waited_s what the process may have waited for a core before that, at most: no part of any stage
    attempt  of the present one; None in the queue before the first
    """

    arrived: float
    read_s: float = 0.0
    waited_s: float = 0.0
    queued: float | None = None
    dispatched: float | None = None
    first_token: float | None = None
    ready: float | None = None
    second_token: float | None = None
    last_token: float | None = None
    first_written: float | None = None
    second_written: float | None = None
    attempt: AttemptTimes | None = None
    _first: Bringer | None = None
    _second: Bringer | None = None

    @property
    def promised_from(self) -> float:
        """A promise begins when all of the request is here."""
        return self.arrived + self.read_s

    def dispatch(self, now: float) -> None:
        """An attempt begins."""
        self.dispatched = now if self.dispatched is None else self.dispatched
        self.attempt = AttemptTimes(now)

    @property
    def is_first_attempt(self) -> bool:
        """Whether the present attempt has brought the first token, or still may."""
        return self._first is None or self.attempt is self._first.attempt

    def compute(self, message: FirstToken, waited_s: float) -> None:
        """The prompt of the present attempt is computed; the first word of it counts, which others may have passed.

        waited_s  what the message may have waited here
        """
        if self.attempt is not None and self.attempt.prefill is None:
            chunks_s = sum(chunk.seconds for chunk in message.chunks)
            stages = {
                "prefill_queue_s": message.queue_s,
                "chunks_s": chunks_s - message.step_end_s,
                "chunk_wait_s": message.prefill_s - chunks_s,
                "step_end_s": message.step_end_s + message.told_s,
            }
            self.attempt.prefill = Told(stages, message.waited_s + waited_s)

    def begin(self, message: Begun, waited_s: float) -> None:
        """The present attempt runs where it decodes. waited_s as in `compute`."""
        if self.attempt is not None and self.attempt.begun is None:
            stages = {
                "wait_for_blocks_s": message.wait_for_blocks_s,
                "fetch_s": message.fetch_s,
                "copy_s": message.copy_s,
                "verify_s": message.verify_s,
                "decode_queue_s": message.queue_s,
                "first_step_s": message.step_s,
                "step_end_s": message.told_s,
            }
            self.attempt.begun = Told(stages, message.waited_s + waited_s)

    def take(self, num_before: int, num_outputs: int, now: float) -> None:
        """A sample has more outputs than before; those of the first that has two count as first and second token."""
        if self.first_token is None:
            self.first_token, self._first = now, self._bringer()
        if self.second_token is None and num_before < 2 <= num_outputs:
            self.second_token, self._second = now, self._bringer()
        self.last_token = now

    def written(self, has_second: bool, now: float) -> None:
        """What has come so far is on its way to the client, the second token or not."""
        if self.first_written is None:
            self.first_written = now
        if has_second and self.second_written is None:
            self.second_written = now

    def _bringer(self) -> Bringer | None:
        return None if self.attempt is None else Bringer(self.attempt, self.attempt.begun is not None)

    @property
    def first_stages(self) -> Stages:
        """From the arrival to the first token; none without one, or where nobody knows its attempt."""
        first = self._first
        if first is None or self.first_token is None or self.dispatched is None or self.queued is None:
            return {}
        own = {
            "read_s": self.read_s,
            "route_s": self.queued - self.promised_from,
            "queue_s": self.dispatched - self.queued,
            "earlier_attempts_s": first.attempt.dispatched - self.dispatched,
        }
        told = [first.attempt.prefill, first.attempt.begun] if first.had_begun else [first.attempt.prefill]
        return _account(own, told, self.first_token - self.arrived)

    @property
    def second_stages(self) -> Stages:
        """From the first token to the second; none as above."""
        first, second = self._first, self._second
        if first is None or second is None or self.first_token is None or self.second_token is None:
            return {}
        own: Stages = {}
        told = [second.attempt.begun] if second.had_begun else []
        if second.attempt is not first.attempt:
            own = {"earlier_attempts_s": second.attempt.dispatched - self.first_token}
            told = [second.attempt.prefill, *told]
        elif first.had_begun:
            told = []
        return _account(own, told, self.second_token - self.first_token)


def _joined(parts: Iterable[Told | None]) -> Told:
    """One after another; a stage that comes twice has the sum."""
    joined: Stages = {}
    waited_s = 0.0
    for part in filter(None, parts):
        waited_s += part.waited_s
        for name, seconds in part.stages.items():
            joined[name] = joined.get(name, 0.0) + seconds
    return Told(joined, waited_s)


def _account(own: Stages, parts: Iterable[Told | None], total_s: float) -> Stages:
    """The router's own stages and those that nodes told it of; what neither has is the link's, but for waits.

    A node may have begun before the router knew: its first stages went by meanwhile, and count as much less. How much
    that is in all is the excess, which is small unless somebody's account is wrong.
    """
    told = _joined(parts)
    excess_s = max(0.0, sum(own.values()) + sum(told.stages.values()) - total_s)
    left_s, kept = excess_s, {}
    for name, seconds in told.stages.items():
        off_s = min(left_s, seconds)
        kept[name] = seconds - off_s
        left_s -= off_s
    rest_s = total_s - sum(own.values()) - sum(kept.values())
    cpu_wait_s = min(told.waited_s, max(0.0, rest_s))
    return {**own, **kept, "cpu_wait_s": cpu_wait_s, "link_s": rest_s - cpu_wait_s, "excess_s": excess_s}
