"""A short last chunk: what is still on its way when a prompt's first token is out.

Only the blocks of the last chunk travel after the prompt is computed; those of earlier ones travel meanwhile. On a
slow link a short last chunk lets the decode node go on sooner, at the price of one more step, whose weights are
read once more. Pure; called by PrefillScheduler when it plans a step.
"""

from pdserve.engine.sequence import Sequence
from pdserve.engine.step_cost import StepCost, StepWork

# How long the blocks of a last chunk may travel.
TAIL_S = 0.002
MIN_TAIL_TOKENS = 32


def cut_tail(sequence: Sequence, num_tokens: int, link_token_s: float, cost: StepCost) -> int:
    """How many of `num_tokens` tokens to run in this step, so that the second token is there soonest.

    All of them, unless they would end the prompt with more than travels in TAIL_S, and a step more costs less than
    the travelling that it hides. What is left begins with a block.
    """
    if num_tokens < sequence.num_missing:
        return num_tokens
    tail = max(MIN_TAIL_TOKENS, int(TAIL_S / link_token_s)) if link_token_s > 0 else num_tokens
    size, start = sequence.block_size, sequence.num_computed
    cut = -(-(sequence.num_tokens - tail) // size) * size - start
    if not 0 < cut < num_tokens:
        return num_tokens
    whole = cost.predict_s(StepWork().plus_chunk(start, num_tokens))
    split = cost.predict_s(StepWork().plus_chunk(start, cut))
    last = cost.predict_s(StepWork().plus_chunk(start + cut, num_tokens - cut))
    # What travels while the last chunk is computed is hidden, the rest of it is not.
    hidden = min(cut * link_token_s, last)
    return cut if hidden > split + last - whole else num_tokens
