"""Requests that somebody's users sent: when, how long, and which prompts began alike. No text of anybody.

`trace_file.py` reads it; the methods cut and scale it to what a server can hold, each to a new trace that remembers
what was done. Light to import: the command line needs it for help.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.workload.arrivals import Replay
from pdserve.loadtest.workload.lengths import MAX_TOKENS, Span

# A trace's times are taken for quantised where more requests than this share theirs with the one before.
QUANTISED_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """at_s counts from any start. block_ids name the prompt's blocks in order; equal ones are equal prefixes.

    is_cut  whether it was longer in the trace
    """

    input_tokens: int
    output_tokens: int
    at_s: float = 0.0
    block_ids: tuple[int, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file in order of arrival, or in the file's order where it says no times.

    has_times      whether it can be replayed; else its lengths are drawn without replacement
    block_tokens   tokens of the prompt that one of block_ids stands for, scaled as the lengths are
    length_scale   by which tokens were multiplied
    max_tokens     of prompt and answer together, None for no limit
    first_s        when the cut that is replayed begins, from the start of the trace
    quantum_s      step of the times that the trace has, where it has them in batches; else 0
    """

    name: str
    requests: tuple[TraceRequest, ...]
    has_times: bool = True
    block_tokens: float = 512.0
    length_scale: float = 1.0
    max_tokens: int | None = None
    first_s: float = 0.0
    quantum_s: float = 0.0

    @property
    def input_tokens(self) -> Span:
        lengths = [request.input_tokens for request in self.requests]
        return Span(min(lengths), max(lengths))

    @property
    def output_tokens(self) -> Span:
        lengths = [request.output_tokens for request in self.requests]
        return Span(min(lengths), max(lengths))

    @property
    def num_cut(self) -> int:
        """The requests that were longer than max_tokens."""
        return sum(request.is_cut for request in self.requests)

    @property
    def has_prefixes(self) -> bool:
        return any(request.block_ids for request in self.requests)

    @property
    def arrivals(self) -> Replay:
        """Raises OptionError where the trace has no times."""
        if not self.has_times:
            raise OptionError(f"--trace {self.name}: has no times; say with --arrivals and --rate when to send")
        times_s = tuple(request.at_s - self.requests[0].at_s for request in self.requests)
        return Replay(times_s, self.quantum_s)

    def within(self, start_s: float, duration_s: float) -> "Trace":
        """The requests of a span of the trace's own time. Raises OptionError where there is none."""
        if not self.has_times:
            raise OptionError(f"--start-s, --duration-s: {self.name} has no times to choose by")
        first = self.requests[0].at_s
        kept = tuple(r for r in self.requests if start_s <= r.at_s - first < start_s + duration_s)
        if not kept:
            raise OptionError(
                f"--start-s {start_s:g} --duration-s {duration_s:g}: no request of {self.name}, which lasts "
                f"{self.requests[-1].at_s - first:.1f} s"
            )
        return replace(self, requests=kept, first_s=self.first_s + start_s)

    def scaled(self, length_scale: float) -> "Trace":
        """Tokens times length_scale, at least one each. Raises OptionError where a block would have no token."""
        block_tokens = self.block_tokens * length_scale
        if not (0 < length_scale <= 100) or (self.has_prefixes and block_tokens < 1):
            raise OptionError(
                f"--length-scale {length_scale:g}: must be above 0, at most 100, and leave a block of "
                f"{self.block_tokens:g} tokens one token"
            )
        requests = tuple(
            replace(
                request,
                input_tokens=max(1, round(request.input_tokens * length_scale)),
                output_tokens=max(1, round(request.output_tokens * length_scale)),
            )
            for request in self.requests
        )
        longest = max(max(request.input_tokens, request.output_tokens) for request in requests)
        if longest > MAX_TOKENS:
            raise OptionError(f"--length-scale {length_scale:g}: makes {longest} tokens, more than {MAX_TOKENS}")
        return replace(
            self, requests=requests, block_tokens=block_tokens, length_scale=self.length_scale * length_scale
        )

    def capped(self, max_tokens: int) -> "Trace":
        """At most max_tokens a request: an answer beyond half of it is cut to the half, then the prompt's end."""
        if max_tokens < 2:
            raise OptionError(f"--max-request-tokens {max_tokens}: must be at least 2, one in and one out")
        requests = []
        for request in self.requests:
            if request.input_tokens + request.output_tokens > max_tokens:
                output_tokens = min(request.output_tokens, max_tokens // 2)
                input_tokens = min(request.input_tokens, max_tokens - output_tokens)
                request = replace(request, input_tokens=input_tokens, output_tokens=output_tokens, is_cut=True)
            requests.append(request)
        return replace(self, requests=tuple(requests), max_tokens=max_tokens)

    def first(self, num_requests: int) -> "Trace":
        """Only the first ones. Raises OptionError where there are fewer."""
        if num_requests > len(self.requests):
            raise OptionError(f"--num-requests: {num_requests} with ramps, but {self.name} has {len(self.requests)}")
        return replace(self, requests=self.requests[:num_requests])


def find_quantum(times_s: Sequence[float]) -> float:
    """The step of ascending times that come in batches, 0 for times that do not."""
    steps = [later - earlier for earlier, later in pairwise(times_s)]
    between_batches = [step for step in steps if step > 0]
    if not between_batches or len(steps) - len(between_batches) <= QUANTISED_SHARE * len(steps):
        return 0.0
    return median(between_batches)
