"""The links of a whole cluster inside one process: no sockets, no clock, every run the same.

send puts an encoded frame on its way, deliver takes off what has arrived by `now`. Without faults a link
is FIFO. Faults are drawn from a seed; what befalls a single frame, broken links and dead nodes are scripted
by the test. Used by the tests of the machines and by the in-process cluster, which drive it with a clock of
their own.
"""

import heapq
import itertools
import random
from dataclasses import dataclass, replace
from enum import Enum

from pdserve.cluster.codec import decode, encode, payloads_of
from pdserve.cluster.messages import Message, Payloads
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NO_EPOCH, Epoch, NodeId


@dataclass(frozen=True, slots=True)
class Faults:
    """What a bad network does to each frame, by chance.

    drop, duplicate, reorder  probabilities; a reordered frame lets later ones of its link overtake it
    delay_s                   up to so much longer on the way, in order unless reordered
    """

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    delay_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("drop", "duplicate", "reorder"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}, a probability is 0 to 1")
        if self.reorder > 0.0 and self.delay_s <= 0.0:
            raise ConfigError(f"reorder is {self.reorder} but delay_s is {self.delay_s}: nothing could overtake")


@dataclass(frozen=True, slots=True)
class Cut:
    """Frames from sender to peer that are sent or due in [start, end) are lost."""

    sender: NodeId
    peer: NodeId
    start: float
    end: float


class Fate(Enum):
    """What befalls one frame. A late one arrives right after the next one of its link, or LATE_S late without one."""

    LOST = "lost"
    TWICE = "twice"
    LATE = "late"


@dataclass(slots=True)
class Script:
    """The `countdown`-th frame from now that matches meets this fate; None matches any node."""

    fate: Fate
    message_type: type
    countdown: int
    sender: NodeId | None
    peer: NodeId | None


LATE_S = 1.0


@dataclass(frozen=True, slots=True, order=True)
class Frame:
    due: float
    order: int
    sender: NodeId
    peer: NodeId
    data: bytes
    payloads: Payloads = ()


class MemoryHub:
    """latency_s: of every frame. A node that was never killed can be reached, joined or not."""

    def __init__(self, latency_s: float = 0.0, faults: Faults | None = None) -> None:
        self.latency_s = latency_s
        self.faults = faults or Faults()
        self.num_sent = 0
        self.num_dropped = 0
        self.num_delivered = 0
        self.num_stale = 0
        self._random = random.Random(self.faults.seed)
        self._frames: list[Frame] = []
        self._order = itertools.count()
        self._last_due: dict[tuple[NodeId, NodeId], float] = {}
        self._epochs: dict[NodeId, Epoch] = {}
        self._dead: set[NodeId] = set()
        self._cuts: list[Cut] = []
        self._scripts: list[Script] = []
        self._late: dict[tuple[NodeId, NodeId], list[Frame]] = {}

    # ---- what a test does to the network ---------------------------------------------------------

    def join(self, node: NodeId, epoch: Epoch = NO_EPOCH) -> None:
        """A new incarnation of `node` can be reached from now on."""
        self._epochs[node] = epoch
        self._dead.discard(node)

    def kill(self, node: NodeId) -> None:
        """Nothing reaches `node` any more; what it sent before is still on its way."""
        self._dead.add(node)
        self._lose([frame for frame in self._frames if frame.peer == node])

    def reset(self, a: NodeId, b: NodeId) -> None:
        """The connection between two nodes breaks: what is on its way on it, in both directions, is lost."""
        self._lose([frame for frame in self._frames if {frame.sender, frame.peer} == {a, b}])

    def cut(self, sender: NodeId, peer: NodeId, start: float, end: float = float("inf")) -> None:
        """Break the link from sender to peer, in this direction only, for start <= t < end."""
        self._cuts.append(Cut(sender, peer, start, end))

    def drop_next(
        self, message_type: type, count: int = 1, sender: NodeId | None = None, peer: NodeId | None = None
    ) -> None:
        """Lose the `count`-th message of a type that is sent from now on, between any nodes or these."""
        self._scripts.append(Script(Fate.LOST, message_type, count, sender, peer))

    def repeat_next(
        self, message_type: type, count: int = 1, sender: NodeId | None = None, peer: NodeId | None = None
    ) -> None:
        """Let that message arrive twice."""
        self._scripts.append(Script(Fate.TWICE, message_type, count, sender, peer))

    def delay_next(
        self, message_type: type, count: int = 1, sender: NodeId | None = None, peer: NodeId | None = None
    ) -> None:
        """Let the next message of its link overtake that message."""
        self._scripts.append(Script(Fate.LATE, message_type, count, sender, peer))

    @property
    def num_scripted(self) -> int:
        """Scripted fates that no frame has met yet."""
        return len(self._scripts)

    # ---- what the cluster does with it -----------------------------------------------------------

    def send(self, sender: NodeId, peer: NodeId, message: Message, now: float) -> None:
        """Put a message on its way, or lose it. Raises CodecError for what is no legal message."""
        data = encode(message, self._epochs.get(sender, NO_EPOCH), self._epochs.get(peer, NO_EPOCH))
        # Decoded at once, so that a message no peer would take fails in the machine that made it.
        payloads = payloads_of(message)
        decode(data, payloads)
        self.num_sent += 1
        # Always the same number of draws: changing one fault leaves the dice of the others alone.
        drop, duplicate, reorder, delay, second_delay = (self._random.random() for _ in range(5))
        fates = self._fates(sender, peer, message)
        if Fate.LOST in fates or drop < self.faults.drop:
            self.num_dropped += 1
            return
        overtaken = reorder < self.faults.reorder
        frame = Frame(now + self.latency_s, next(self._order), sender, peer, data, payloads)
        if Fate.LATE in fates:
            self._enqueue_late(frame, now)
        else:
            self._enqueue(frame, now, delay, overtaken)
        if Fate.TWICE in fates or duplicate < self.faults.duplicate:
            self._enqueue(replace(frame, order=next(self._order)), now, second_delay, overtaken)

    def deliver(self, now: float) -> list[tuple[NodeId, NodeId, Message]]:
        """Everything that has arrived by `now`: (receiver, sender, message) in the order of arrival.

        What an incarnation sent that is gone, or was sent to one, is dropped, as every receiver does.
        """
        arrived: list[tuple[NodeId, NodeId, Message]] = []
        while self._frames and self._frames[0].due <= now:
            frame = heapq.heappop(self._frames)
            envelope = decode(frame.data, frame.payloads)
            living = self._epochs.get(frame.sender, NO_EPOCH), self._epochs.get(frame.peer, NO_EPOCH)
            if (envelope.sender, envelope.addressee) == living:
                arrived.append((frame.peer, frame.sender, envelope.message))
            else:
                self.num_stale += 1
        self.num_delivered += len(arrived)
        return arrived

    def next_time(self) -> float | None:
        """When the next frame arrives; None when nothing is on its way."""
        return self._frames[0].due if self._frames else None

    def _fates(self, sender: NodeId, peer: NodeId, message: Message) -> set[Fate]:
        fates = set()
        for script in list(self._scripts):
            fits = script.sender in (None, sender) and script.peer in (None, peer)
            if not fits or not isinstance(message, script.message_type):
                continue
            script.countdown -= 1
            if script.countdown == 0:
                self._scripts.remove(script)
                fates.add(script.fate)
        return fates

    def _enqueue(self, frame: Frame, now: float, delay: float, overtaken: bool) -> None:
        due = frame.due + delay * self.faults.delay_s
        link = (frame.sender, frame.peer)
        if overtaken:
            due += self.faults.delay_s
        else:
            due = self._last_due[link] = max(due, self._last_due.get(link, due))
        if not self._push(replace(frame, due=due), now):
            return
        for late in self._late.pop(link, []):
            if late in self._frames:
                self._frames.remove(late)
                heapq.heapify(self._frames)
                self._push(replace(late, due=due, order=next(self._order)), now)

    def _enqueue_late(self, frame: Frame, now: float) -> None:
        late = replace(frame, due=frame.due + LATE_S)
        if self._push(late, now):
            self._late.setdefault((frame.sender, frame.peer), []).append(late)

    def _push(self, frame: Frame, now: float) -> bool:
        """Put a frame on its way, unless its link is cut or ends at a dead node."""
        is_cut = any(
            (cut.sender, cut.peer) == (frame.sender, frame.peer)
            and (cut.start <= now < cut.end or cut.start <= frame.due < cut.end)
            for cut in self._cuts
        )
        if is_cut or frame.peer in self._dead or frame.sender in self._dead:
            self.num_dropped += 1
            return False
        heapq.heappush(self._frames, frame)
        return True

    def _lose(self, lost: list[Frame]) -> None:
        self.num_dropped += len(lost)
        self._frames = [frame for frame in self._frames if frame not in lost]
        heapq.heapify(self._frames)
