"""What a step drew for the samples of a request, as both roles tell the router and each other.

Owns nothing. Called by the schedulers of prefill and decode nodes when a step is over.
"""

from collections.abc import Iterable

from pdserve.cluster.messages import Drawn, Finish
from pdserve.engine.sequence import Sequence
from pdserve.engine.step import Draw


def drawn_after(sequence: Sequence, draws: Iterable[Draw]) -> tuple[Drawn, ...]:
    """The draws after the last token of `sequence`, one for each sample that it draws for."""
    drawn = []
    for sample, draw in zip(sequence.drawing, draws, strict=True):
        reason = sequence.params.finish_reason(sequence.num_outputs + 1, draw.token)
        finish = Finish(reason) if reason else None
        drawn.append(Drawn(sample, sequence.num_outputs, draw.token, finish, draw.logprobs))
    return tuple(drawn)
