"""How long a step takes on this node, learned from the steps it has run.

    seconds = fixed + a * tokens + b * context of single-token rows + c * attended pairs of prompt chunks

Reading the weights is the fixed part; a row that decodes reads its context's KV; a chunk multiplies each of
its tokens with every earlier one. The four coefficients follow the measured steps by a Kalman filter whose
state drifts: what a step says nothing about keeps its value. Owned by each node's scheduler.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pdserve.engine.step import Row

# The size of each coefficient on a CPU core, in seconds: how far the start may be off. Of tokens it is the start
# itself, so that a chunk beside running streams is small until one has been measured.
PRIOR = np.array([0.02, 1e-3, 3e-6, 1e-6])
# One step's time is taken to be this far off, and a coefficient to drift by this much a step, as shares of
# themselves: together about the last twenty steps count.
NOISE = 0.1
DRIFT = 0.01
# A coefficient that came out as nothing must be able to grow again.
LEAST = 0.01


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's time depends on."""

    num_tokens: int = 0
    num_context: int = 0
    num_pairs: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "StepWork":
        num_tokens = num_context = 0
        num_pairs = 0.0
        for row in rows:
            length = len(row.token_ids)
            num_tokens += length
            if length == 1:
                num_context += row.start + 1
            else:
                num_pairs += pairs(row.start, length)
        return cls(num_tokens, num_context, num_pairs)

    def plus_chunk(self, start: int, length: int) -> "StepWork":
        return StepWork(self.num_tokens + length, self.num_context, self.num_pairs + pairs(start, length))


def pairs(start: int, length: int) -> float:
    """Token pairs that causal attention looks at in a chunk of `length` tokens after `start` others."""
    return length * (start + (length + 1) / 2)


class StepCost:
    def __init__(self) -> None:
        self._mean = PRIOR * (0.0, 1.0, 0.0, 0.0)
        self._covariance = np.diag(PRIOR**2)

    def learn(self, work: StepWork, seconds: float) -> None:
        """Take in one measured step; a time that is not positive says nothing."""
        if seconds <= 0:
            return
        seen = self._features(work)
        self._covariance += np.diag((DRIFT * np.maximum(self._mean, LEAST * PRIOR)) ** 2)
        towards = self._covariance @ seen
        expected = float(seen @ self._mean)
        gain = towards / (float(seen @ towards) + (NOISE * max(seconds, expected)) ** 2)
        self._mean = np.maximum(self._mean + gain * (seconds - expected), 0.0)
        self._covariance -= np.outer(gain, towards)

    def predict_s(self, work: StepWork) -> float:
        """Seconds that a step with this work is expected to take."""
        return float(self._features(work) @ self._mean)

    def tokens_within(self, seconds: float, work: StepWork, start: int) -> int:
        """Prompt tokens, after `start` others, that make a step which does `work` take this long."""
        _, token_s, _, pair_s = self._mean
        each_s = float(token_s + pair_s * start)
        slack_s = seconds - self.predict_s(work)
        return max(0, int(slack_s / each_s)) if each_s > 0 else 1 << 30

    @staticmethod
    def _features(work: StepWork) -> np.ndarray:
        return np.array([1.0, work.num_tokens, work.num_context, work.num_pairs])
