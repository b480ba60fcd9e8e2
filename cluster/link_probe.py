"""How fast a link is, measured when it comes up: a few answers of known size, timed.

Pure. The first answers of a new TCP connection are slow, so the best one counts; a slow link is not asked
again and again. Owned by PeerLinks, one for each link whose blocks come in frames.
"""

from collections.abc import Iterable

from pdserve.cluster.messages import MAX_PROBE_BYTES, Probe

MAX_ANSWERS = 4
# An answer that took so long has measured more than the start of a connection.
LONG_S = 0.1
# Then the question or its answer is taken for lost: 4 MiB at 15 Mbit/s.
AGAIN_S = 2.0


class LinkProbe:
    """bytes_per_s: of the best answer so far, 0.0 before the first"""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.is_done = False
        self._asked_at: list[float] = []
        self._num_answers = 0

    def tick(self, now: float) -> Iterable[Probe]:
        """Ask, unless an answer may still be on its way."""
        if self.is_done or (self._asked_at and now - self._asked_at[-1] < AGAIN_S):
            return []
        return self._ask(now)

    def answered(self, seq: int, num_bytes: int, now: float) -> Iterable[Probe]:
        """The answer to the question numbered `seq` has come; returns the next question."""
        if self.is_done or not 0 <= seq < len(self._asked_at):
            return []
        took_s = max(now - self._asked_at[seq], 1e-6)
        self.bytes_per_s = max(self.bytes_per_s, num_bytes / took_s)
        self._num_answers += 1
        self.is_done = took_s >= LONG_S or self._num_answers >= MAX_ANSWERS
        return [] if self.is_done else self._ask(now)

    def _ask(self, now: float) -> list[Probe]:
        self._asked_at.append(now)
        return [Probe(len(self._asked_at) - 1, MAX_PROBE_BYTES)]
