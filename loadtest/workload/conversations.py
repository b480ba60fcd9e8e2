"""When each turn of each conversation is sent, and how the prompts of its turns grow. Called by the schedule.

Conversations arrive by the load's process, turns follow after think times; both are drawn before the run, so the
answer that a turn carries on is a planned one, the same for every server.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pdserve.loadtest.workload.arrivals import Arrivals
from pdserve.loadtest.workload.parts import Part, Parts
from pdserve.loadtest.workload.sharing import Conversations
from pdserve.loadtest.workload.times import draw_times


@dataclass(frozen=True, slots=True)
class Turn:
    at_s: float
    conversation: int
    number: int


def draw_turns(
    rng: np.random.Generator, arrivals: Arrivals, rate_per_s: float, conversations: Conversations, num_requests: int
) -> list[Turn]:
    """num_requests turns in order of time, numbered from 0 in each conversation.

    Conversations begin so often that their turns come at the rate once conversations overlap. The last one is cut.
    """
    counts = _draw_counts(rng, conversations, num_requests)
    starts_s = draw_times(rng, arrivals, rate_per_s * len(counts) / num_requests, len(counts))
    turns = []
    for conversation, (count, start_s) in enumerate(zip(counts, starts_s, strict=True)):
        thinks_s = rng.uniform(*conversations.think_s, size=count)
        # The first comes at once; its think time is drawn all the same, so that a scaled one changes no draw.
        at_s = start_s + np.cumsum(thinks_s) - thinks_s[0]
        turns += [Turn(float(at_s[number]), conversation, number) for number in range(count)]
    return sorted(turns, key=lambda turn: (turn.at_s, turn.conversation, turn.number))


def grow(
    turns: Sequence[Turn], prefixes: Sequence[Parts], messages: Sequence[np.ndarray], answers: Sequence[np.ndarray]
) -> Iterator[Parts]:
    """The prompt of each turn: the conversation's prefix, then message and answer of each turn before, then its own.

    prefixes, messages, answers  in the order of turns; the prefix of a conversation's first turn is all its turns'
    """
    so_far: dict[int, Parts] = {}
    for turn, prefix, message, answer in zip(turns, prefixes, messages, answers, strict=True):
        prompt = (*so_far.get(turn.conversation, prefix), Part("user", message))
        yield prompt
        so_far[turn.conversation] = (*prompt, Part("assistant", answer))


def _draw_counts(rng: np.random.Generator, conversations: Conversations, num_requests: int) -> list[int]:
    """The turns of each conversation, num_requests together."""
    counts: list[int] = []
    missing = num_requests
    while missing > 0:
        low, high = conversations.turns.low, conversations.turns.high
        counts.append(min(missing, int(rng.integers(low, high, endpoint=True))))
        missing -= counts[-1]
    return counts
