"""Who is on the other end of a link: the handshake, and the check of every frame after it.

    dialling side    UNKNOWN ── Hello each beat ──► (Welcome) KNOWN ── silence, WrongEpoch ──► UNKNOWN
                                              └──► (Refused) REFUSED, as long as the connection stands
    accepting side   a link without a name ── Hello ──► admitted under its node's name, or Refused

A frame counts only from the incarnation that was let in and only when it was meant for ours. Facts are
compared field by field and refused by name, on both sides. Owns the names of links; sockets belong to
the endpoint. Used by router and nodes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pdserve.cluster.codec import Envelope
from pdserve.cluster.endpoint import LinkId
from pdserve.cluster.messages import Facts, Hello, Message, Refused, Welcome, WrongEpoch
from pdserve.core.ids import NO_EPOCH, Epoch, NodeId

log = logging.getLogger(__name__)

# A beat later than this means that the whole process was held up: nothing may expire unheard.
LATE_S = 1.0


class Outbox(Protocol):
    """The part of an endpoint that the handshake needs."""

    def send(self, link: LinkId, message: Message, addressee: Epoch) -> bool: ...


def disagreement(ours: Facts, theirs: Facts) -> Refused | None:
    """The first fact that keeps two processes from serving together, or None.

    An empty fact is one that a process does not hold (the router knows nothing of KV before a node
    joins). How each computes may differ where both accept it; what follows from it is compared after it.
    """
    return (
        _difference(ours, theirs, "checkpoint", "--model")
        or _difference(ours, theirs, "tokenizer", "--model")
        or _not_accepted(ours, theirs)
        or _not_accepted(theirs, ours)
        or _difference(ours, theirs, "kv_spec", "--block-size")
        or _difference(ours, theirs, "kv_fingerprint", "--model")
        or _difference(ours, theirs, "batching", "--batching")
        or _difference(ours, theirs, "prefix_cache", "--prefix-cache")
    )


def _not_accepted(accepting: Facts, computing: Facts) -> Refused | None:
    accepted, compute = accepting.accept_compute, computing.compute
    if not accepted or not compute or compute in accepted:
        return None
    knobs = "use one --dtype for all, or let decode nodes take it with --accept-compute"
    return Refused("compute", f"{compute} is not among the accepted {'; '.join(accepted)}: {knobs}")


def _difference(ours: Facts, theirs: Facts, name: str, knob: str) -> Refused | None:
    mine, other = getattr(ours, name), getattr(theirs, name)
    if not mine or not other or mine == other:
        return None
    return Refused(name, f"{_shown(other)} here is {_shown(mine)}: use one {knob} for all")


def _shown(value: str | bytes) -> str:
    text = value.hex() if isinstance(value, bytes) else value
    return text if len(text) <= 16 else text[:16] + "…"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A peer that was let in."""

    node: NodeId
    link: LinkId
    epoch: Epoch
    hello: Hello


class Doorway:
    """The accepting side: which node speaks on which link.

    judge    says why a Hello is refused, or None
    welcome  the answer to a Hello that is accepted
    """

    def __init__(
        self, epoch: Epoch, outbox: Outbox, judge: Callable[[Hello], Refused | None], welcome: Callable[[], Welcome]
    ):
        self.members: dict[NodeId, Admitted] = {}
        self.num_stale = 0
        self._epoch = epoch
        self._outbox = outbox
        self._judge = judge
        self._welcome = welcome
        self._links: dict[LinkId, Admitted] = {}

    def hello(self, link: LinkId, envelope: Envelope, hello: Hello) -> tuple[Admitted | None, Admitted | None]:
        """Answer a Hello; returns (newly admitted, the incarnation it replaces), each None when there is none."""
        if envelope.addressee not in (NO_EPOCH, self._epoch):
            self.num_stale += 1
            self._outbox.send(link, WrongEpoch(self._epoch), envelope.sender)
            return None, None
        named = self._links.get(link)
        if named is not None and named.node != hello.node:
            # A link is one process. Else one link could fill the list of members with names.
            self.num_stale += 1
            return None, None
        refused = self._judge(hello)
        if refused is not None:
            log.error("%s is refused: %s: %s", hello.node, refused.field, refused.reason)
            self._outbox.send(link, refused, envelope.sender)
            return None, None
        before = self.members.get(hello.node)
        known = before is not None and before.epoch == envelope.sender and before.link == link
        if before is not None and before.epoch > envelope.sender:
            # A late frame of an incarnation that has been replaced.
            self.num_stale += 1
            return None, None
        self._outbox.send(link, self._welcome(), envelope.sender)
        if known:
            return None, None
        admitted = Admitted(hello.node, link, envelope.sender, hello)
        if before is not None:
            self._links.pop(before.link, None)
        self.members[hello.node] = self._links[link] = admitted
        return admitted, before

    def sender(self, link: LinkId, envelope: Envelope) -> NodeId | None:
        """The node behind a frame, or None when the frame must be dropped; tells strangers our epoch."""
        admitted = self._links.get(link)
        if admitted is None or admitted.epoch != envelope.sender or envelope.addressee != self._epoch:
            self.num_stale += 1
            self._outbox.send(link, WrongEpoch(self._epoch), envelope.sender)
            return None
        return admitted.node

    def node_of(self, link: LinkId) -> NodeId | None:
        admitted = self._links.get(link)
        return None if admitted is None else admitted.node

    def lost(self, link: LinkId) -> NodeId | None:
        """The link broke; the name of the node behind it, if it had one."""
        admitted = self._links.pop(link, None)
        if admitted is None or self.members.get(admitted.node) is not admitted:
            return None
        del self.members[admitted.node]
        return admitted.node

    def drop(self, node: NodeId) -> None:
        admitted = self.members.pop(node, None)
        if admitted is not None:
            self._links.pop(admitted.link, None)

    def send(self, node: NodeId, message: Message) -> bool:
        """False when the node is not here or its pipe is full; every message is repeated from state."""
        admitted = self.members.get(node)
        return admitted is not None and self._outbox.send(admitted.link, message, admitted.epoch)


class Acquaintance(Enum):
    UNKNOWN = "unknown"
    KNOWN = "known"
    REFUSED = "refused"


class Dialled:
    """The dialling side of one link. expected: the incarnation that was announced, or None for any."""

    def __init__(self, link: LinkId, outbox: Outbox, own: Epoch, hello: Hello, expected: Epoch | None = None):
        self.link = link
        self.state = Acquaintance.UNKNOWN
        self.peer: Epoch = NO_EPOCH
        self.expected = expected
        self.num_stale = 0
        self._outbox = outbox
        self._own = own
        self._hello = hello
        self._heard_at = float("-inf")

    def beat(self, now: float, silence_s: float) -> bool:
        """Say hello while the peer is unknown; True when it has just gone silent for silence_s."""
        silent = self.state is Acquaintance.KNOWN and now - self._heard_at > silence_s
        if silent:
            self.state = Acquaintance.UNKNOWN
        self.greet()
        return silent

    def greet(self) -> None:
        if self.state is Acquaintance.UNKNOWN:
            self._outbox.send(self.link, self._hello, self.expected or NO_EPOCH)

    def accept(self, envelope: Envelope, now: float) -> Message | None:
        """The message of a frame that counts, or None; Welcome, Refused and WrongEpoch move the state."""
        message = envelope.message
        if isinstance(message, WrongEpoch):
            # It has been replaced, or has given us up while we stood still. While it is unknown the beats greet: our
            # Hello itself may be meant for one that is gone.
            if self.state is Acquaintance.KNOWN:
                self.state = Acquaintance.UNKNOWN
                self.greet()
            return message
        if envelope.addressee != self._own or self.state is Acquaintance.REFUSED:
            self.num_stale += 1
            return None
        if isinstance(message, Welcome):
            if self.expected is not None and envelope.sender != self.expected:
                self.num_stale += 1
                return None
            fresh = self.state is not Acquaintance.KNOWN or self.peer != envelope.sender
            self.state, self.peer, self._heard_at = Acquaintance.KNOWN, envelope.sender, now
            return message if fresh else None
        if isinstance(message, Refused):
            self.state = Acquaintance.REFUSED
            return message
        if self.state is not Acquaintance.KNOWN or envelope.sender != self.peer:
            self.num_stale += 1
            return None
        self._heard_at = now
        return message

    def lost(self) -> bool:
        """The connection broke; True when the peer was known. The owner dials again."""
        known = self.state is Acquaintance.KNOWN
        self.state = Acquaintance.UNKNOWN
        return known

    def redialled(self, link: LinkId) -> None:
        self.link = link

    def send(self, message: Message) -> bool:
        return self.state is Acquaintance.KNOWN and self._outbox.send(self.link, message, self.peer)


class Liveness:
    """When each peer was last heard, asked once a beat.

    beat_s     how often `silent` is called
    silence_s  how long a peer may say nothing
    """

    def __init__(self, beat_s: float, silence_s: float):
        self._late_s = beat_s + LATE_S
        self._silence_s = silence_s
        self._heard: dict[NodeId, float] = {}
        self._asked_at: float | None = None

    def hear(self, node: NodeId, now: float) -> None:
        self._heard[node] = now

    def forget(self, node: NodeId) -> None:
        self._heard.pop(node, None)

    def silent(self, now: float) -> list[tuple[NodeId, float]]:
        """Who is silent for too long, and for how long; nobody when this process was held up itself."""
        was_held_up = self._asked_at is not None and now - self._asked_at > self._late_s
        self._asked_at = now
        if was_held_up:
            # What they said meanwhile has not been read yet.
            self._heard = dict.fromkeys(self._heard, now)
        return [(node, now - heard) for node, heard in self._heard.items() if now - heard > self._silence_s]
