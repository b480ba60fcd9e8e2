"""How much of a prompt one step computes: what the step has tokens for, or all of it.

    chunked   as much as fits into the budget, the rest in later steps (Sarathi-Serve, Agrawal et al., OSDI 2024)
    whole     a prompt is one step's work, however long it is; a step that has begun with one takes further ones only
              whole (what Sarathi-Serve is compared with)

Used by Planner.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from pdserve.engine.sequence import Sequence

Cut = Callable[[Sequence, int], int]


class Chunking(Protocol):
    def num_step_tokens(self, first: Sequence, budget: int) -> int:
        """Prompt tokens of a step that begins with `first`."""
        ...

    def num_tokens(self, sequence: Sequence, left: int, cut: Cut) -> int:
        """How many of its tokens the step computes, of `left`; 0: none in this step.

        cut  how many of the tokens that a sequence could have it is to have
        """
        ...


class Chunks:
    def num_step_tokens(self, first: Sequence, budget: int) -> int:
        return budget

    def num_tokens(self, sequence: Sequence, left: int, cut: Cut) -> int:
        return cut(sequence, min(sequence.num_missing, left))


class WholePrompts:
    def num_step_tokens(self, first: Sequence, budget: int) -> int:
        return max(budget, first.num_missing)

    def num_tokens(self, sequence: Sequence, left: int, cut: Cut) -> int:
        return sequence.num_missing if sequence.num_missing <= left else 0


CHUNKS, WHOLE_PROMPTS = Chunks(), WholePrompts()


class ChunkedPrefill(StrEnum):
    """The setting chunked_prefill."""

    ON = "on"
    OFF = "off"


def chunking(setting: ChunkedPrefill) -> Chunking:
    return CHUNKS if setting is ChunkedPrefill.ON else WHOLE_PROMPTS
