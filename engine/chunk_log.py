"""The chunks of one prompt as they ran, for the ledger of its request.

A record a chunk, of which there are few: of a prompt with more than MAX_CHUNKS the later ones count as one. Belongs to
a sequence; each node's batch writes it when a step is over.
"""

from dataclasses import dataclass, field

from pdserve.core.chunk import Chunk

# 64 chunks of 512 tokens are a prompt of 32,768; 64 entries on the wire are 1.3 KB.
MAX_CHUNKS = 64


@dataclass(slots=True)
class ChunkLog:
    """forward_s: seconds of the model in all of them, of the steps' whole time."""

    chunks: list[Chunk] = field(default_factory=list)
    forward_s: float = 0.0

    def add(self, num_tokens: int, start_s: float, seconds: float, forward_s: float) -> None:
        """start_s as in Chunk; forward_s: what of `seconds` the engine was busy."""
        self.forward_s += forward_s
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(Chunk(num_tokens, start_s, seconds))
        else:
            last = self.chunks[-1]
            self.chunks[-1] = Chunk(last.num_tokens + num_tokens, last.start_s, last.seconds + seconds)

    @property
    def step_end_s(self) -> float:
        """What the steps took beyond the model: the way to the engine's thread and back."""
        return max(0.0, sum(chunk.seconds for chunk in self.chunks) - self.forward_s)
