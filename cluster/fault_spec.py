"""Which faults a node is to have, as text: ACTION[=SECONDS]@STEP[#N], several separated by commas.

    kill                  SIGKILL to the node itself                                         any step
    freeze[=SECONDS]      SIGSTOP to itself; SIGCONT after so long, without it never         any step
    cut                   the link breaks under both its ends                                send, receive
    slow=SECONDS          this message and all later ones on its link leave so much later    send
    corrupt               one byte of the first block that the message names is flipped: in
                          this node's pool (send:Have), or on the wire                       send:Have, any Blocks

    send:TYPE, receive:TYPE   a message of this type, before it leaves, before anybody here sees it
    step, stepped             the engine thread was given a step, its result is not known to the machine yet
    copy, copied              the copy worker was given blocks, likewise

A fault strikes once, at the N-th time that its step is reached, the first without a number. Parsing and
counting are pure; what a fault does stands in faults.py.
"""

import re
import typing
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pdserve.cluster.messages import Message
from pdserve.cluster.readers import Reader


class Act(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    CUT = "cut"
    SLOW = "slow"
    CORRUPT = "corrupt"


SPEC = re.compile(
    r"(?P<act>[a-z]+)(?:=(?P<seconds>\d{1,4}(?:\.\d{1,3})?))?@(?P<step>[a-z]+(?::[A-Za-z]+)?)(?:#(?P<nth>\d{1,9}))?"
)
SENDS = frozenset(f"send:{kind.__name__}" for kind in typing.get_args(Message))
RECEIVES = frozenset(f"receive:{kind.__name__}" for kind in typing.get_args(Message))
STEPS = SENDS | RECEIVES | {"step", "stepped", "copy", "copied"}
STEPS_OF = {
    Act.KILL: STEPS,
    Act.FREEZE: STEPS,
    Act.CUT: SENDS | RECEIVES,
    Act.SLOW: SENDS,
    Act.CORRUPT: frozenset({"send:Have", "send:Blocks", "receive:Blocks"}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    act: Act
    step: str
    seconds: float | None = None
    nth: int = 1

    def __str__(self) -> str:
        seconds = "" if self.seconds is None else f"={self.seconds:g}"
        return f"{self.act}{seconds}@{self.step}#{self.nth}"


def parse(text: str) -> Fault:
    """Raises ValueError, whose message goes on after the value."""
    match = SPEC.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"holds {text!r}, which is not of the form ACTION[=SECONDS]@STEP[#N]")
    if match["act"] not in list(Act):
        raise ValueError(f"holds the action {match['act']!r}, which is not one of {', '.join(Act)}")
    act, step = Act(match["act"]), match["step"]
    if step not in STEPS:
        raise ValueError(
            f"holds the step {step!r}: it is step, stepped, copy, copied, or send: or receive: and a message type"
        )
    if step not in STEPS_OF[act]:
        raise ValueError(f"holds {act}@{step}, but {act} has no meaning at that step")
    seconds = None if match["seconds"] is None else float(match["seconds"])
    if (seconds is None) if act is Act.SLOW else (seconds is not None and act is not Act.FREEZE):
        raise ValueError(f"holds {text!r}: seconds belong to slow, and may be given to freeze")
    nth = int(match["nth"] or 1)
    if nth == 0:
        raise ValueError(f"holds {text!r}: occurrences are counted from 1")
    return Fault(act, step, seconds, nth)


def reader() -> Reader:
    def from_text(text: str) -> tuple[Fault, ...]:
        return tuple(parse(item) for item in text.split(","))

    def from_toml(value: object) -> tuple[Fault, ...]:
        items = value if isinstance(value, list) else [value]
        texts = [item for item in items if isinstance(item, str)]
        if not items or len(texts) < len(items):
            raise ValueError("is not a list of faults like 'kill@send:Have#2'")
        return from_text(",".join(texts))

    return Reader("SPEC", from_text, from_toml)


class Countdown:
    """Which faults are due when: the steps reached so far, counted."""

    def __init__(self, faults: Iterable[Fault]):
        self._faults = tuple(faults)
        self._steps = frozenset(fault.step for fault in self._faults)
        self._reached: Counter[str] = Counter()

    def reach(self, step: str) -> list[Fault]:
        """Count the step; returns the faults that strike now, in the order in which they were given."""
        if step not in self._steps:
            return []
        self._reached[step] += 1
        return [fault for fault in self._faults if (fault.step, fault.nth) == (step, self._reached[step])]
