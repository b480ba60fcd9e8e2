"""Which tokens go into the next step: decode rows first, then prompt chunks within the token budget.

Pure functions over sequences, used by both roles: a prefill node has no decode rows, a decode node
fits the chunks it computes itself into what its decode rows leave of the budget.
"""

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


def order(
    sequences: Seq[Sequence], policy: Policy, waited_s: Callable[[Sequence], float] = lambda _: 0.0
) -> list[Sequence]:
    """Sequences in the order in which they get chunks; ties and FCFS keep the given order."""
    if policy is Policy.FCFS:
        return list(sequences)
    return sorted(sequences, key=lambda s: s.num_missing - AGEING_TOKENS_PER_S * waited_s(s))


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
