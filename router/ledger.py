"""When what happened to one request, and what its time to the first and to the second token is made of.

    arrived ─ read, route ─ queue ─ earlier attempts ─┐
                                                      ├─ dispatched ─ the node's own stages, link ─► first token
    first token ─ earlier attempts, prefill again ────┘
    first token ─ transfer, decode queue, first step, link ─► second token        either token ─ delivery ─► client

The stages of a token are one after another and add up to its time, to the microsecond: a node's are durations on its
own clock. Of what the router waited beyond them, `cpu_wait_s` is what the processes that a message came to stood
ready without a core; the rest is `link_s`.
Monotonic seconds of the router. Belongs to a Record; Dispatcher and Attempts write it, TokenStream what is delivered.
"""

from dataclasses import dataclass, field

from pdserve.cluster.messages import Begun, FirstToken

Stages = dict[str, float]


@dataclass(slots=True)
class AttemptTimes:
    """Of one attempt. computed: its FirstToken came, with the stages in `prefill`; those in `begun` with its Begun.

    prefill_waited_s, begun_waited_s: what the messages before and of each may have waited for a core
    """

    dispatched: float
    computed: float | None = None
    prefill: Stages = field(default_factory=dict)
    begun: Stages = field(default_factory=dict)
    prefill_waited_s: float = 0.0
    begun_waited_s: float = 0.0


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
    first_stages: Stages = field(default_factory=dict)
    second_stages: Stages = field(default_factory=dict)
    _first_attempt: AttemptTimes | None = None

    @property
    def promised_from(self) -> float:
        """A promise begins when all of the request is here."""
        return self.arrived + self.read_s

    def dispatch(self, now: float) -> None:
        """An attempt begins."""
        self.dispatched = now if self.dispatched is None else self.dispatched
        self.attempt = AttemptTimes(now)

    def compute(self, message: FirstToken, waited_s: float, now: float) -> None:
        """The prompt of the present attempt is computed. waited_s: what the message may have waited here."""
        if self.attempt is not None and self.attempt.computed is None:
            self.attempt.computed = now
            self.attempt.prefill_waited_s = message.waited_s + waited_s
            chunks_s = sum(chunk.seconds for chunk in message.chunks)
            self.attempt.prefill = {
                "prefill_queue_s": message.queue_s,
                "chunks_s": chunks_s - message.step_end_s,
                "chunk_wait_s": message.prefill_s - chunks_s,
                "step_end_s": message.step_end_s + message.told_s,
            }

    def begin(self, message: Begun, waited_s: float) -> None:
        """The present attempt runs where it decodes. waited_s as in `compute`."""
        if self.attempt is not None and not self.attempt.begun:
            self.attempt.begun_waited_s = message.waited_s + waited_s
            self.attempt.begun = {
                "wait_for_blocks_s": message.wait_for_blocks_s,
                "fetch_s": message.fetch_s,
                "copy_s": message.copy_s,
                "verify_s": message.verify_s,
                "decode_queue_s": message.queue_s,
                "first_step_s": message.step_s,
                "step_end_s": message.told_s,
            }

    def take(self, num_before: int, num_outputs: int, now: float) -> None:
        """A sample has more outputs than before; those of the first that has two count as first and second token."""
        if self.first_token is None:
            self.first_token, self._first_attempt = now, self.attempt
            self.first_stages = self._to_first(now)
        if self.second_token is None and num_before < 2 <= num_outputs:
            self.second_token = now
            self.second_stages = self._to_second(self.first_token, now)
        self.last_token = now

    def written(self, has_second: bool, now: float) -> None:
        """What has come so far is on its way to the client, the second token or not."""
        if self.first_written is None:
            self.first_written = now
        if has_second and self.second_written is None:
            self.second_written = now

    def _to_first(self, now: float) -> Stages:
        attempt = self.attempt
        if attempt is None or self.dispatched is None or self.queued is None:
            return {}
        before = {
            "read_s": self.read_s,
            "route_s": self.queued - self.promised_from,
            "queue_s": self.dispatched - self.queued,
            "earlier_attempts_s": attempt.dispatched - self.dispatched,
        }
        return _with_link({**before, **attempt.prefill}, attempt.prefill_waited_s, now - self.arrived)

    def _to_second(self, first_token: float, now: float) -> Stages:
        attempt = self.attempt
        if attempt is None:
            return {}
        stages: Stages = dict(attempt.begun)
        waited_s = attempt.begun_waited_s
        if attempt is not self._first_attempt:
            stages = _joined({"earlier_attempts_s": attempt.dispatched - first_token}, attempt.prefill, stages)
            waited_s += attempt.prefill_waited_s
        return _with_link(stages, waited_s, now - first_token)


def _joined(*parts: Stages) -> Stages:
    """One after another; a stage that comes twice has the sum."""
    joined: Stages = {}
    for part in parts:
        for name, seconds in part.items():
            joined[name] = joined.get(name, 0.0) + seconds
    return joined


def _with_link(stages: Stages, waited_s: float, total_s: float) -> Stages:
    """What no stage has is the link's, but for what messages may have waited for a core.

    A node may have begun before the router knew: its first stages went by meanwhile, and count as much less.
    """
    rest_s = total_s - sum(stages.values())
    for name in stages:
        excess_s = min(max(0.0, -rest_s), stages[name])
        stages = {**stages, name: stages[name] - excess_s}
        rest_s += excess_s
    cpu_wait_s = min(waited_s, max(0.0, rest_s))
    return {**stages, "cpu_wait_s": cpu_wait_s, "link_s": rest_s - cpu_wait_s}
