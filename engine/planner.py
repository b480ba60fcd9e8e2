"""Which tokens go into the next step: decode rows first, then prompt chunks within the token budget.

Pure functions over sequences, used by both roles: a prefill node has no decode rows, a decode node
fits the chunks it computes itself into what its decode rows leave of the budget.
"""

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import StrEnum

from pdserve.engine.sequence import Sequence


class Policy(StrEnum):
    FCFS = "fcfs"
    SHORTEST = "shortest"


# Under `shortest`, a waiting prompt gains on shorter ones by this many tokens a second, so that no
# prompt waits for ever: a 32k prompt overtakes fresh 100-token prompts after about 16 s.
AGEING_TOKENS_PER_S = 2048.0
# A prompt that lets others go first because its deadline is lost does so no longer than this.
MAX_YIELD_S = 10.0
# Half of all steps are slower than the mean.
COST_MARGIN = 1.05


def order(sequences: Seq[Sequence], policy: Policy, token_s: float, now: float) -> list[Sequence]:
    """Sequences in the order in which they get chunks.

    By policy, ties in the given order, but so that as many as possible keep their deadline: whenever one would
    be late, the longest up to it gives way to all that are in time (Moore, Management Science 15, 1968, which
    is exact for deadlines in that order). Who has waited for MAX_YIELD_S does so no more and goes first.

    token_s: seconds that each token of a prompt is expected to take
    """

    def length(sequence: Sequence) -> float:
        if policy is Policy.FCFS:
            return 0.0
        return sequence.num_missing - AGEING_TOKENS_PER_S * (now - sequence.accepted_at)

    def standing(sequence: Sequence) -> int:
        return 0 if sequence.key in starved else 2 if sequence.key in late else 1

    in_turn = sorted(sequences, key=length)
    starved = {s.key for s in in_turn if s.deadline is not None and now - s.accepted_at > MAX_YIELD_S}
    late = _late(sorted(in_turn, key=lambda s: s.key not in starved), starved, token_s * COST_MARGIN, now)
    return sorted(in_turn, key=standing)


def _late(in_turn: Seq[Sequence], starved: set[int], token_s: float, now: float) -> set[int]:
    """Keys of those that must be late so that the others are in time; the starved come first whatever they do."""
    late: set[int] = set()
    longest: list[tuple[int, int]] = []
    num_tokens = 0
    for sequence in in_turn:
        num_tokens += sequence.num_missing
        if sequence.deadline is None or sequence.key in starved:
            continue
        heapq.heappush(longest, (-sequence.num_missing, sequence.key))
        if now + num_tokens * token_s > sequence.deadline:
            shortened, key = heapq.heappop(longest)
            num_tokens += shortened
            late.add(key)
    return late


def chunks(
    sequences: Seq[Sequence], budget: int, cut: Callable[[Sequence, int], int] = lambda _, num_tokens: num_tokens
) -> list[tuple[Sequence, int]]:
    """Split `budget` tokens over sequences that have tokens to catch up on, in the given order.

    cut: how many of the tokens that a sequence could have in this step it is to have
    """
    plan = []
    for sequence in sequences:
        if budget <= 0:
            break
        num_tokens = cut(sequence, min(sequence.num_missing, budget))
        if num_tokens > 0:
            plan.append((sequence, num_tokens))
            budget -= num_tokens
    return plan
