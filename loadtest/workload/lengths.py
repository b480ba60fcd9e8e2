"""How long prompts and answers are, in tokens. Light to import: the command line needs it for help."""

import re
from dataclasses import dataclass

from pdserve.loadtest.errors import OptionError

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from low to high, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Uniform within two spans, one request independent of the next."""

    input_tokens: Span
    output_tokens: Span

    def __post_init__(self) -> None:
        check_span("--input-tokens", self.input_tokens)
        check_span("--output-tokens", self.output_tokens)


def parse_span(flag: str, text: str) -> Span:
    """Read "256-768", or "512" for exactly 512."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"{flag} {text}: must be LOW-HIGH, for example 256-768, or one number")
    low = int(match[1])
    return Span(low, low if match[2] is None else int(match[2]))


def check_span(flag: str, span: Span, max_value: int = MAX_TOKENS) -> None:
    if not 1 <= span.low <= span.high <= max_value:
        raise OptionError(f"{flag} {span.low}-{span.high}: needs 1 <= LOW <= HIGH <= {max_value}")
