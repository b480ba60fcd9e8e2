"""Log-probabilities of tokens, packed as they travel: from the sampler over both schedulers to the front door.

one token      itself, then the `num_top` likeliest ids, best first
token_ids      1 + num_top u32 for each token
values         as many f32: natural logarithms of the model's own probabilities, before anything that a request
               changes about them (biases, penalties, temperature)
"""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdserve.core.block_hash import pack_token_ids, unpack_token_ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of no token, or of each token of a run."""

    num_top: int = 0
    token_ids: bytes = b""
    values: bytes = b""

    @classmethod
    def pack(cls, num_top: int, rows: Iterable[Iterable[TokenLogprob]]) -> "Logprobs":
        """One row a token: itself, then num_top others."""
        entries = [entry for row in rows for entry in row]
        values = array("f", [entry.logprob for entry in entries])
        return cls(num_top, pack_token_ids([entry.token for entry in entries]), values.tobytes())

    @classmethod
    def join(cls, runs: Iterable["Logprobs"]) -> "Logprobs":
        """Of runs one after another; those of no token count for nothing."""
        full = [run for run in runs if run.values]
        if not full:
            return NO_LOGPROBS
        token_ids, values = b"".join(run.token_ids for run in full), b"".join(run.values for run in full)
        return cls(full[0].num_top, token_ids, values)

    def __len__(self) -> int:
        """Tokens it is about."""
        return len(self.values) // self._stride

    def __iter__(self) -> Iterator[list[TokenLogprob]]:
        """One row a token: itself, then the likeliest."""
        values = array("f")
        values.frombytes(self.values)
        entries = [
            TokenLogprob(token, value) for token, value in zip(unpack_token_ids(self.token_ids), values, strict=True)
        ]
        width = 1 + self.num_top
        return iter([entries[start : start + width] for start in range(0, len(entries), width)])

    def covers(self, num_tokens: int) -> bool:
        """Whether it is about exactly so many tokens; what a peer sent need not be."""
        return len(self.values) == len(self.token_ids) == num_tokens * self._stride

    def after(self, num_tokens: int) -> "Logprobs":
        """Without those of the first num_tokens tokens."""
        start = num_tokens * self._stride
        return Logprobs(self.num_top, self.token_ids[start:], self.values[start:]) if start else self

    @property
    def _stride(self) -> int:
        return 4 * (1 + self.num_top)


NO_LOGPROBS = Logprobs()
