"""What is sent: arrivals, lengths and prompts as they were asked for, checked and immutable.

The commands build it from flags; other programs build it directly and meet the same checks, which
name the flag because that is the word users know. Light to import: the command line needs it for help.
"""

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import check_count
from pdserve.loadtest.workload.arrivals import Arrivals, Poisson, Replay
from pdserve.loadtest.workload.lengths import MAX_TOKENS, DrawnLengths, Span
from pdserve.loadtest.workload.sharing import Conversations, SharedPrefix
from pdserve.loadtest.workload.trace import Trace

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


class PromptFormat(StrEnum):
    """How completions are asked for. A chat is always text."""

    IDS = "ids"
    TEXT = "text"


_POISSON = Poisson()


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. The same load gives the same arrival times, lengths and prompts.

    rate_per_s    offered mean rate; infinite sends all at once
    num_requests  those of the steady window
    ramp          how many more are sent before and after them, from the same arrivals, as a share of num_requests;
                  of a trace all are sent, so there the windows share what it has
    lengths       of each prompt and answer; with shared_prefix or conversations, of each message and answer
    tokenizer     a folder with the server's tokenizer, for prompts that are text; None asks the server
    """

    rate_per_s: float
    num_requests: int
    lengths: DrawnLengths | Trace
    arrivals: Arrivals = _POISSON
    seed: int = 0
    vocabulary: Vocabulary = Vocabulary()
    ramp: float = 0.1
    shared_prefix: SharedPrefix | None = None
    conversations: Conversations | None = None
    prompt_format: PromptFormat = PromptFormat.IDS
    tokenizer: str | None = None

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
        if isinstance(self.lengths, Trace):
            self._check_trace(self.lengths)
        else:
            check_count("--input-tokens with what is shared", self.input_tokens.high, 1, MAX_TOKENS)
        if isinstance(self.arrivals, Replay):
            if self.conversations is not None:
                raise OptionError("--turns: conversations need an arrival process, not a trace's times")
            check_count("--num-requests", self.num_requests, 1, len(self.arrivals.times_s))

    def _check_trace(self, trace: Trace) -> None:
        if self.shared_prefix is not None or self.conversations is not None:
            raise OptionError(f"--trace {trace.name}: its prompts are given; no --shared-prefix or --turns with it")
        if self.num_total > len(trace.requests):
            raise OptionError(
                f"--num-requests: {self.num_total} with ramps, but {trace.name} has {len(trace.requests)}"
            )

    @property
    def num_total(self) -> int:
        """All requests of a run, its ramps included."""
        if isinstance(self.arrivals, Replay):
            return len(self.arrivals.times_s)
        return num_with_ramps(self.num_requests, self.ramp)

    @property
    def num_warm_up(self) -> int:
        """The requests before the steady window."""
        return (self.num_total - self.num_requests) // 2

    @property
    def input_tokens(self) -> Span:
        """The shortest and the longest prompt that may come, all that is shared included."""
        own, answer = self.lengths.input_tokens, self.lengths.output_tokens
        shared = 0 if self.shared_prefix is None else self.shared_prefix.num_tokens
        num_before = 0 if self.conversations is None else self.conversations.turns.high - 1
        return Span(shared + own.low, shared + own.high + num_before * (own.high + answer.high))

    @property
    def output_tokens(self) -> Span:
        return self.lengths.output_tokens

    def at_rate(self, rate_per_s: float) -> "Load":
        """The same requests in the same order at scaled times, think times included."""
        if self.conversations is None or math.isinf(self.rate_per_s):
            return replace(self, rate_per_s=rate_per_s)
        conversations = self.conversations.at_speed(rate_per_s / self.rate_per_s)
        return replace(self, rate_per_s=rate_per_s, conversations=conversations)

    @property
    def longest(self) -> int:
        """Tokens of the longest request that may come, prompt and answer together."""
        if isinstance(self.lengths, Trace):
            return max(request.input_tokens + request.output_tokens for request in self.lengths.requests)
        return self.input_tokens.high + self.output_tokens.high


def num_with_ramps(num_requests: int, ramp: float) -> int:
    return num_requests + 2 * round(ramp * num_requests)


def num_steady(num_total: int, ramp: float) -> int:
    """How many requests are left for the steady window where num_total are all there are."""
    return max(1, round(num_total / (1 + 2 * ramp)))


def parse_vocabulary(text: str) -> Vocabulary:
    """Read "100-30000": ids from 100 to 29999."""
    match = re.fullmatch(r"([0-9]{1,12})-([0-9]{1,12})", text.strip(), re.ASCII)
    if match is None:
        raise OptionError(f"--vocab {text}: must be LOW-END, for example 100-30000")
    return Vocabulary(int(match[1]), int(match[2]))
