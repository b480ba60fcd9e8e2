"""How requests arrive, as data: the shape of the process; the rate is the load's. `times.py` draws from it.

An infinite rate is the end of every process: all requests at once. Light to import: the command line needs it for help.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_number

MAX_CV = 20.0
MAX_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: exponential gaps."""

    def __str__(self) -> str:
        return "Poisson"


@dataclass(frozen=True, slots=True)
class Constant:
    """Equal gaps: the least that a mean rate can ask of a server."""

    def __str__(self) -> str:
        return "constant gaps"


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps. cv: their standard deviation over their mean; 1 is Poisson, above it come bursts."""

    cv: float

    def __post_init__(self) -> None:
        if not 0.01 <= self.cv <= MAX_CV:
            raise OptionError(
                f"--arrivals gamma:{self.cv:g}: needs a coefficient of variation within 0.01 and {MAX_CV:g}"
            )

    def __str__(self) -> str:
        return f"gamma gaps, CV {self.cv:g}"


@dataclass(frozen=True, slots=True)
class Step:
    rate_per_s: float
    duration_s: float

    def __str__(self) -> str:
        return f"{self.rate_per_s:g}@{self.duration_s:g}"


@dataclass(frozen=True, slots=True)
class Steps:
    """Poisson at one rate after the other, from the start again after the last. All but the first may be pauses.

    At another mean rate than their own the rates of the steps grow and their seconds shrink by the same factor.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= MAX_STEPS:
            raise OptionError(f"--arrivals steps: {len(self.steps)} steps, needs 1 to {MAX_STEPS}")
        for step in self.steps:
            if not (0 <= step.rate_per_s < math.inf and 0 < step.duration_s < math.inf):
                raise OptionError(f"--arrivals steps:{step}: needs RATE@SECONDS, at least 0 a second for more than 0 s")
        if self.steps[0].rate_per_s == 0:
            raise OptionError(f"--arrivals {self}: the first step must have a rate above 0")

    @property
    def duration_s(self) -> float:
        return sum(step.duration_s for step in self.steps)

    @property
    def mean_requests(self) -> float:
        """The requests of one pass through the steps, on average."""
        return sum(step.rate_per_s * step.duration_s for step in self.steps)

    @property
    def own_rate_per_s(self) -> float:
        return self.mean_requests / self.duration_s

    def __str__(self) -> str:
        return "steps:" + ",".join(map(str, self.steps))


@dataclass(frozen=True, slots=True)
class Replay:
    """The times of a trace. Their order is that of its requests.

    times_s    ascending, [num_requests]
    quantum_s  the times are multiples of it: each request is moved within it, at random; 0 keeps the times
    """

    times_s: tuple[float, ...]
    quantum_s: float = 0.0

    def __post_init__(self) -> None:
        if any(later < earlier for earlier, later in pairwise(self.times_s)):
            raise OptionError("--trace: its times must not decrease")

    @property
    def own_rate_per_s(self) -> float:
        """Infinite where all come at once. The last of quantised times has its step to come in, too."""
        span_s = self.times_s[-1] - self.times_s[0] if self.times_s else 0.0
        if self.quantum_s > 0:
            return len(self.times_s) / (span_s + self.quantum_s)
        return (len(self.times_s) - 1) / span_s if span_s > 0 else math.inf

    def __str__(self) -> str:
        return "replayed"


Arrivals = Poisson | Constant | Gamma | Steps | Replay


def parse_arrivals(text: str) -> Poisson | Constant | Gamma | Steps:
    """Read "poisson", "constant", "gamma:2.5" or "steps:0.5@60,2@30"."""
    name, _, rest = text.strip().partition(":")
    match name:
        case "poisson" if not rest:
            return Poisson()
        case "constant" if not rest:
            return Constant()
        case "gamma":
            return Gamma(parse_number("--arrivals", "gamma:", rest))
        case "steps":
            return Steps(tuple(_parse_step(part) for part in rest.split(",")))
    raise OptionError(f"--arrivals {text}: must be poisson, constant, gamma:CV or steps:RATE@SECONDS,RATE@SECONDS,...")


def _parse_step(text: str) -> Step:
    rate, _, seconds = text.partition("@")
    if not seconds:
        raise OptionError(f"--arrivals steps:{text}: each step must be RATE@SECONDS, for example 0.5@60")
    return Step(parse_number("--arrivals", "steps:", rate), parse_number("--arrivals", f"steps:{rate}@", seconds))
