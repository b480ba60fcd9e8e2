"""What a node did of one prompt in one step: what the ledger of a request says of its prefill.

A leaf, because the engine writes it down and messages carry it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """start_s: after the node accepted the request; seconds: until the step that ran it was over."""

    num_tokens: int
    start_s: float
    seconds: float
