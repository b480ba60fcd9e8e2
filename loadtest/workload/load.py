"""What is sent: arrivals, lengths and prompts as they were asked for, checked and immutable.

The commands build it from flags; other programs build it directly and meet the same checks, which
name the flag because that is the word users know. Light to import: the command line needs it for help.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import check_count
from pdserve.loadtest.workload.arrivals import Arrivals, Poisson, Replay
from pdserve.loadtest.workload.lengths import DrawnLengths, Span

MAX_REQUESTS = 1_000_000
MIN_RATE_PER_S = 0.001
MAX_RATE_PER_S = 100_000.0
MAX_TOKEN_ID = 2**31
MAX_RAMP = 10.0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The token ids that prompts are drawn from: low, low + 1, ... end - 1."""

    low: int = 100
    end: int = 30_000

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.end <= MAX_TOKEN_ID:
            raise OptionError(f"--vocab {self.low}-{self.end}: needs 0 <= LOW < END <= {MAX_TOKEN_ID}")

    @property
    def size(self) -> int:
        return self.end - self.low


_POISSON = Poisson()


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. The same load gives the same arrival times, lengths and prompts.

    rate_per_s    offered mean rate; infinite sends all at once
    num_requests  those of the steady window
    ramp          how many more are sent before and after them, from the same arrivals, as a share of num_requests;
                  of a trace all are sent, so there the windows share what it has
    """

    rate_per_s: float
    num_requests: int
    lengths: DrawnLengths
    arrivals: Arrivals = _POISSON
    seed: int = 0
    vocabulary: Vocabulary = Vocabulary()
    ramp: float = 0.1

    def __post_init__(self) -> None:
        if not (MIN_RATE_PER_S <= self.rate_per_s <= MAX_RATE_PER_S or self.rate_per_s == math.inf):
            raise OptionError(
                f"--rate {self.rate_per_s}: must be within {MIN_RATE_PER_S} and {MAX_RATE_PER_S:.0f} "
                "requests a second, or inf for all at once"
            )
        if not 0 <= self.ramp <= MAX_RAMP:
            raise OptionError(f"--ramp {self.ramp}: must be within 0 and {MAX_RAMP:g}, a share of --num-requests")
        check_count("--num-requests", self.num_requests, 1, MAX_REQUESTS)
        check_count("--seed", self.seed, 0, 2**63 - 1)

    @property
    def num_total(self) -> int:
        """All requests of a run, its ramps included."""
        if isinstance(self.arrivals, Replay):
            return len(self.arrivals.times_s)
        return self.num_requests + 2 * round(self.ramp * self.num_requests)

    @property
    def num_warm_up(self) -> int:
        """The requests before the steady window."""
        return (self.num_total - self.num_requests) // 2

    @property
    def input_tokens(self) -> Span:
        """The shortest and the longest prompt that may come."""
        return self.lengths.input_tokens

    @property
    def output_tokens(self) -> Span:
        return self.lengths.output_tokens

    def at_rate(self, rate_per_s: float) -> "Load":
        """The same requests in the same order at scaled times."""
        return replace(self, rate_per_s=rate_per_s)

    def to_json(self) -> dict[str, Any]:
        """What a report says of the load, in plain JSON types."""
        return {
            # JSON has no infinity.
            "rate_per_s": "inf" if math.isinf(self.rate_per_s) else self.rate_per_s,
            "num_requests": self.num_requests,
            "ramp": self.ramp,
            "arrivals": str(self.arrivals),
            "input_tokens": asdict(self.input_tokens),
            "output_tokens": asdict(self.output_tokens),
            "seed": self.seed,
            "vocabulary": asdict(self.vocabulary),
        }


def parse_vocabulary(text: str) -> Vocabulary:
    """Read "100-30000": ids from 100 to 29999."""
    match = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"--vocab {text}: must be LOW-END, for example 100-30000")
    return Vocabulary(int(match[1]), int(match[2]))
