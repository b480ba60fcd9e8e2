"""Which tokens go into the next step: decode rows first, then prompt chunks within the token budget.

Pure functions over sequences, used by both roles: a prefill node has no decode rows, a decode node
fits the chunks it computes itself into what its decode rows leave of the budget.
"""

from collections.abc import Sequence as Seq
from enum import StrEnum

from pdserve.engine.sequence import Sequence


class Policy(StrEnum):
    FCFS = "fcfs"
    SHORTEST = "shortest"


# Under `shortest`, a waiting prompt gains on shorter ones by this many tokens a second, so that no
# prompt waits for ever: a 32k prompt overtakes fresh 100-token prompts after about 16 s.
AGEING_TOKENS_PER_S = 2048.0
# A prompt that cannot keep its deadline any more lets others go first, but not longer than this.
MAX_YIELD_S = 10.0
# Weight of the newest step in the mean: about the last twenty steps count.
PACE_WEIGHT = 0.05
# Half of all steps are slower than the mean.
PACE_MARGIN = 1.05


class Pace:
    """How long a prompt token takes on this node, an exponential mean over the steps it has run."""

    def __init__(self) -> None:
        self.token_s = 0.0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Steps of a few tokens say nothing of a chunk's pace: their cost is that of reading the weights."""
        if num_tokens < 64:
            return
        measured = seconds / num_tokens
        self.token_s = measured if not self.token_s else self.token_s + PACE_WEIGHT * (measured - self.token_s)


def order(sequences: Seq[Sequence], policy: Policy, pace: Pace, now: float) -> list[Sequence]:
    """Sequences in the order in which they get chunks.

    Those that can still keep their deadline go before those that cannot, and those that have waited for
    MAX_YIELD_S before all; within each, by policy, ties in the given order.
    """

    def standing(sequence: Sequence) -> int:
        if sequence.deadline is None:
            return 1
        if now - sequence.accepted_at > MAX_YIELD_S:
            return 0
        return 1 if now + sequence.num_missing * pace.token_s * PACE_MARGIN <= sequence.deadline else 2

    def length(sequence: Sequence) -> float:
        if policy is Policy.FCFS:
            return 0.0
        return sequence.num_missing - AGEING_TOKENS_PER_S * (now - sequence.accepted_at)

    return sorted(sequences, key=lambda sequence: (standing(sequence), length(sequence)))


def chunks(sequences: Seq[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Split `budget` tokens over sequences that have tokens to catch up on, in the given order."""
    plan = []
    for sequence in sequences:
        if budget <= 0:
            break
        num_tokens = min(sequence.num_missing, budget)
        if num_tokens > 0:
            plan.append((sequence, num_tokens))
            budget -= num_tokens
    return plan
