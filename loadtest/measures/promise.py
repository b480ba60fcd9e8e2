"""What can be promised for a request, and how promises are written.

Light to import: the command line needs it for help.
"""

import math
from dataclasses import dataclass
from enum import StrEnum

from pdserve.loadtest.errors import OptionError
from pdserve.loadtest.options import parse_number


class Measure(StrEnum):
    """What can be promised for a request, in seconds counted from its intended send time."""

    TTFT = "ttft"
    SECOND = "second"
    TPOT = "tpot"
    GAP = "gap"
    E2E = "e2e"


@dataclass(frozen=True, slots=True)
class Promise:
    measure: Measure
    limit_s: float


def parse_promises(text: str) -> tuple[Promise, ...]:
    """Read "ttft=2.0,tpot=0.06", limits in seconds."""
    promises: dict[Measure, Promise] = {}
    for part in text.split(","):
        name, _, limit = (piece.strip() for piece in part.partition("="))
        if name not in list(Measure):
            raise OptionError(f"--slo {part.strip()}: must be NAME=SECONDS with a name out of {', '.join(Measure)}")
        limit_s = parse_number("--slo", f"{name}=", limit)
        if not (limit_s > 0 and math.isfinite(limit_s)):
            raise OptionError(f"--slo {name}={limit}: must be a number of seconds above 0")
        if Measure(name) in promises:
            raise OptionError(f"--slo {text}: {name} is given twice")
        promises[Measure(name)] = Promise(Measure(name), limit_s)
    return tuple(promises.values())
