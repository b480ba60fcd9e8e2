"""What prompts have in common, as data: a system prompt, or the turns of a conversation so far.

Light to import: the command line needs it for help.
"""

import re
from dataclasses import dataclass

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import check_count
from pdserve.loadtest.workload.lengths import MAX_TOKENS, Span

MAX_GROUPS = 100_000
MAX_TURNS = 1000
MAX_THINK_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A system prompt before each prompt's own tokens: one of num_groups different ones, each as long."""

    num_tokens: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        check_count("--shared-prefix", self.num_tokens, 1, MAX_TOKENS)
        check_count("--prefix-groups", self.num_groups, 1, MAX_GROUPS)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Prompts that grow: each turn's is the one before, its planned answer and a new message.

    turns     of a conversation, uniform
    think_s   from one turn to the next, uniform within (low, high); the answer comes meanwhile, or does not: the loop
              is open
    """

    turns: Span
    think_s: tuple[float, float]

    def __post_init__(self) -> None:
        if not 1 <= self.turns.low <= self.turns.high <= MAX_TURNS:
            raise OptionError(f"--turns {self.turns}: needs 1 <= LOW <= HIGH <= {MAX_TURNS}")
        low, high = self.think_s
        if not 0 <= low <= high <= MAX_THINK_S:
            raise OptionError(f"--think-s {low:g}-{high:g}: needs 0 <= LOW <= HIGH <= {MAX_THINK_S:g} seconds")

    def at_speed(self, factor: float) -> "Conversations":
        """Think times over factor, which may be infinite."""
        low, high = self.think_s
        return Conversations(self.turns, (low / factor, high / factor))


def parse_seconds(flag: str, text: str) -> tuple[float, float]:
    """Read "5-15", or "10" for exactly 10."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(?:-([0-9]+(?:\.[0-9]+)?))?", text.strip()[:40], re.ASCII)
    if match is None:
        raise OptionError(f"{flag} {text}: must be LOW-HIGH in seconds, for example 5-15, or one number")
    low = float(match[1])
    return low, low if match[2] is None else float(match[2])
