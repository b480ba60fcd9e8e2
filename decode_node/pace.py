"""How far ahead of its promised time per output token a stream is: what the next step may take beside it.

TPOT is a mean over a stream, from its first token on: what a stream waited for its first step is made up for by the
steps after it. Belongs to a job; written by the batch.
"""

from dataclasses import dataclass

# A stream that is so many tokens behind has waited for more than steps (it was preempted, say), and begins anew:
# prompts must not wait until it has made up for that.
MAX_BEHIND = 4


@dataclass(slots=True)
class Pace:
    """since: it had num_outputs outputs then."""

    since: float
    num_outputs: int

    def left_s(self, num_outputs: int, tpot_s: float, now: float) -> float:
        """Seconds until the output after num_outputs is due; below 0 when it is late."""
        left = self.since + tpot_s * (num_outputs + 1 - self.num_outputs) - now
        if left < -MAX_BEHIND * tpot_s:
            self.since, self.num_outputs = now, num_outputs
            return tpot_s
        return left
