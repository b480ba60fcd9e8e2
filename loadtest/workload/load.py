"""What is sent: arrivals, lengths and prompts as they were asked for, checked and immutable.

The commands build it from flags; other programs build it directly and meet the same checks, which
name the flag because that is the word users know. Light to import: the command line needs it for help.
"""

import math
import re
from dataclasses import dataclass

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import check_count

MAX_REQUESTS = 1_000_000
MAX_TOKENS = 1_000_000
MIN_RATE_PER_S = 0.001
MAX_RATE_PER_S = 100_000.0
MAX_TOKEN_ID = 2**31


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


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


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. The same load gives the same arrival times, lengths and prompts.

    rate_per_s may be infinite: all requests at once.
    """

    rate_per_s: float
    num_requests: int
    input_tokens: Span
    output_tokens: Span
    seed: int = 0
    vocabulary: Vocabulary = Vocabulary()

    def __post_init__(self) -> None:
        if not (MIN_RATE_PER_S <= self.rate_per_s <= MAX_RATE_PER_S or self.rate_per_s == math.inf):
            raise OptionError(
                f"--rate {self.rate_per_s}: must be within {MIN_RATE_PER_S} and {MAX_RATE_PER_S:.0f} "
                "requests a second, or inf for all at once"
            )
        check_count("--num-requests", self.num_requests, 1, MAX_REQUESTS)
        check_count("--seed", self.seed, 0, 2**63 - 1)
        _check_span("--input-tokens", self.input_tokens)
        _check_span("--output-tokens", self.output_tokens)


def parse_span(flag: str, text: str) -> Span:
    """Read "256-768", or "512" for exactly 512."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"{flag} {text}: must be LOW-HIGH, for example 256-768, or one number")
    low = int(match[1])
    return Span(low, low if match[2] is None else int(match[2]))


def parse_vocabulary(text: str) -> Vocabulary:
    """Read "100-30000": ids from 100 to 29999."""
    match = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"--vocab {text}: must be LOW-END, for example 100-30000")
    return Vocabulary(int(match[1]), int(match[2]))


def _check_span(flag: str, span: Span) -> None:
    if not 1 <= span.low <= span.high <= MAX_TOKENS:
        raise OptionError(f"{flag} {span}: needs 1 <= LOW <= HIGH <= {MAX_TOKENS}")
