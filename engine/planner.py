"""Which prompts get chunks in the next step, on nodes of both roles.

A prefill node's step is chunks alone; a decode node runs its streams first and gives chunks what that leaves of
the step. The order is core/turns.py's, kept while sequences come, progress and go, so that planning a step costs what
the step takes, however many wait. Owned by each node's scheduler.
"""

from collections.abc import Callable, Iterable

from pdserve.core.turns import Policy, Turns
from pdserve.engine.chunking import CHUNKS, Chunking, Cut
from pdserve.engine.sequence import Sequence
from pdserve.engine.step_cost import StepCost, StepWork

NOTHING = StepWork()


def uncut(sequence: Sequence, num_tokens: int) -> int:
    return num_tokens


class Planner:
    """step_tokens: the budget of a step; cost: what steps take here, read only: its owner goes on teaching it."""

    def __init__(self, policy: Policy, step_tokens: int, cost: StepCost, chunking: Chunking = CHUNKS):
        self.step_tokens = step_tokens
        self._cost = cost
        self._chunking = chunking
        self._turns = Turns(policy)
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """It has its blocks, and tokens to catch up on."""
        self._sequences[sequence.key] = sequence
        self._turns.join(sequence.key, sequence.priority, sequence.accepted_at, sequence.deadline, sequence.num_missing)

    def remove(self, sequence: Sequence) -> None:
        """It has caught up, or is gone; twice is nothing."""
        self._sequences.pop(sequence.key, None)
        self._turns.leave(sequence.key)

    def progressed(self, sequence: Sequence) -> None:
        """Fewer of its tokens are missing than when it was added."""
        if sequence.key in self._sequences:
            self._turns.advance(sequence.key, sequence.num_missing)

    def keep(self, sequences: Iterable[Sequence]) -> None:
        """These are to be planned as they are now, and no others: for few, whose comings and goings are many."""
        kept = {sequence.key: sequence for sequence in sequences}
        for key in self._sequences.keys() - kept.keys():
            self.remove(self._sequences[key])
        for key, sequence in kept.items():
            if key in self._sequences:
                self.progressed(sequence)
            else:
                self.add(sequence)

    def chunks(
        self,
        budget: Callable[[Sequence], int],
        token_s: float,
        now: float,
        beside: StepWork = NOTHING,
        cut: Cut = uncut,
    ) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, and how many tokens of each.

        budget   tokens in all, when this sequence comes first
        token_s  seconds that each token is expected to take
        beside   what the step does anyway
        cut      how many of the tokens that a sequence could have it is to have
        """
        plan: list[tuple[Sequence, int]] = []
        left = num_ended = 0
        for key in self._turns.order(token_s, now, self.step_tokens):
            sequence = self._sequences[key]
            if not plan:
                left = self._chunking.num_step_tokens(sequence, budget(sequence))
            if left <= 0 or (sequence.num_missing > left and not self._pays(left, num_ended, beside)):
                break
            num_tokens = self._chunking.num_tokens(sequence, left, cut)
            if num_tokens == 0:
                break
            plan.append((sequence, num_tokens))
            left -= num_tokens
            num_ended += num_tokens == sequence.num_missing
        if plan:
            self._turns.serve(plan[0][0].key)
        return plan

    def _pays(self, num_tokens: int, num_ended: int, beside: StepWork) -> bool:
        """Whether to fill a step that ends `num_ended` prompts with this many tokens of one that it does not end.

        Each of the former waits for them; each of the others waits once less for what a step takes without them.
        """
        if num_ended == 0:
            return True
        least_s = self._cost.predict_s(beside)
        longer_s = self._cost.predict_s(beside.plus_chunk(0, num_tokens)) - least_s
        return num_ended * longer_s < (len(self._sequences) - num_ended) * least_s
