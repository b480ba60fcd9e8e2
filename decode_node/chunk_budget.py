"""How many prompt tokens a decode node computes in one step, beside the streams that it runs.

    no stream and none on its way     the whole token budget of a step
    else                              what fits until the step's time is out, at least MIN_CHUNK tokens

A step's time is out at TPOT_SHARE of the promised time per output token, or when the first stream would be late
(pace.py); without a promise, when it takes STRETCH times as long as the streams alone would. Owns the learned cost of
steps. Called by DecodeScheduler.
"""

from pdserve.engine.chunking import CHUNKS, WHOLE_PROMPTS, ChunkedPrefill, Chunking
from pdserve.engine.step_cost import StepCost, StepWork

# TPOT is a mean over a stream: the rest is for steps that take longer than expected, and for the hand-off
# and the running step that a new stream waits for.
TPOT_SHARE = 0.9
STRETCH = 2.0
# A prompt that is here makes progress even beside streams that use all of their time.
MIN_CHUNK = 8


class ChunkBudget:
    """max_step_tokens: token budget of a step. chunking: what that means to a prompt.

    cost: what steps take here, learned by the caller; tpot_s: the promise, set by the caller once it is known
    """

    chunking: Chunking = CHUNKS

    def __init__(self, max_step_tokens: int, cost: StepCost):
        self.cost = cost
        self.tpot_s: float | None = None
        self.max_step_tokens = max_step_tokens

    def limit_s(self, streams: StepWork) -> float | None:
        """Seconds that a step with these streams and a chunk may take; None: any."""
        if self.tpot_s is not None:
            return TPOT_SHARE * self.tpot_s
        # A stream that joins in mid-step waits for all of it, as if it ran in it.
        return STRETCH * self.cost.predict_s(streams if streams.num_tokens else StepWork(num_tokens=1))

    def num_tokens(self, streams: StepWork, limit_s: float | None, start: int) -> int:
        """Prompt tokens, after `start` others, for a step with these streams; no limit_s where none is kept."""
        most = self.max_step_tokens - streams.num_tokens
        if limit_s is None:
            return most
        return min(most, max(MIN_CHUNK, self.cost.tokens_within(limit_s, streams, start)))

    def token_s(self, streams: StepWork) -> float:
        """Seconds that each token of a prompt takes beside these streams; more may join before it is computed."""
        length = max(1, self.num_tokens(streams, self.limit_s(streams), start=0))
        return self.cost.predict_s(streams.plus_chunk(0, length)) / length


class WholePromptBudget(ChunkBudget):
    """Prompts are computed in one step each, and streams wait for it, whatever they were promised."""

    chunking = WHOLE_PROMPTS

    def limit_s(self, streams: StepWork) -> float | None:
        return None


def chunk_budget(setting: ChunkedPrefill, max_step_tokens: int, cost: StepCost) -> ChunkBudget:
    budget = ChunkBudget if setting is ChunkedPrefill.ON else WholePromptBudget
    return budget(max_step_tokens, cost)
