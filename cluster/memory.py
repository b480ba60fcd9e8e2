"""The links of a whole cluster inside one process: no sockets, no clock, every run the same.

send puts an encoded frame on its way, deliver takes off what has arrived by `now`. Without faults a link
is FIFO. Faults are drawn from a seed; single losses, broken links and dead nodes are scripted by the test.
Used by the tests of the machines and by the in-process cluster, which drive it with a clock of their own.
"""

import heapq
import itertools
import random
from dataclasses import dataclass

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


@dataclass(slots=True)
class Loss:
    """The `countdown`-th frame from now that matches is lost; None matches any node."""

    message_type: type
    countdown: int
    sender: NodeId | None
    peer: NodeId | None


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
        self._random = random.Random(self.faults.seed)
        self._frames: list[Frame] = []
        self._order = itertools.count()
        self._last_due: dict[tuple[NodeId, NodeId], float] = {}
        self._epochs: dict[NodeId, Epoch] = {}
        self._dead: set[NodeId] = set()
        self._cuts: list[Cut] = []
        self._losses: list[Loss] = []

    # ---- what a test does to the network ---------------------------------------------------------

    def join(self, node: NodeId, epoch: Epoch = NO_EPOCH) -> None:
        """A new incarnation of `node` can be reached from now on."""
        self._epochs[node] = epoch
        self._dead.discard(node)

    def kill(self, node: NodeId) -> None:
        """Nothing reaches `node` any more; what it sent before is still on its way."""
        self._dead.add(node)
        kept = [frame for frame in self._frames if frame.peer != node]
        self.num_dropped += len(self._frames) - len(kept)
        self._frames = kept
        heapq.heapify(self._frames)

    def cut(self, sender: NodeId, peer: NodeId, start: float, end: float = float("inf")) -> None:
        """Break the link from sender to peer, in this direction only, for start <= t < end."""
        self._cuts.append(Cut(sender, peer, start, end))

    def drop_next(
        self, message_type: type, count: int = 1, sender: NodeId | None = None, peer: NodeId | None = None
    ) -> None:
        """Lose the `count`-th message of a type that is sent from now on, between any nodes or these."""
        self._losses.append(Loss(message_type, count, sender, peer))

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
        if self._is_scripted_loss(sender, peer, message) or drop < self.faults.drop:
            self.num_dropped += 1
            return
        self._enqueue(sender, peer, data, payloads, now, delay, reorder < self.faults.reorder)
        if duplicate < self.faults.duplicate:
            self._enqueue(sender, peer, data, payloads, now, second_delay, reorder < self.faults.reorder)

    def deliver(self, now: float) -> list[tuple[NodeId, NodeId, Message]]:
        """Everything that has arrived by `now`: (receiver, sender, message) in the order of arrival."""
        arrived: list[tuple[NodeId, NodeId, Message]] = []
        while self._frames and self._frames[0].due <= now:
            frame = heapq.heappop(self._frames)
            arrived.append((frame.peer, frame.sender, decode(frame.data, frame.payloads).message))
        self.num_delivered += len(arrived)
        return arrived

    def next_time(self) -> float | None:
        """When the next frame arrives; None when nothing is on its way."""
        return self._frames[0].due if self._frames else None

    def _is_scripted_loss(self, sender: NodeId, peer: NodeId, message: Message) -> bool:
        is_lost = False
        for loss in list(self._losses):
            fits = loss.sender in (None, sender) and loss.peer in (None, peer)
            if not fits or not isinstance(message, loss.message_type):
                continue
            loss.countdown -= 1
            if loss.countdown == 0:
                self._losses.remove(loss)
                is_lost = True
        return is_lost

    def _enqueue(
        self,
        sender: NodeId,
        peer: NodeId,
        data: bytes,
        payloads: Payloads,
        now: float,
        delay: float,
        overtaken: bool,
    ) -> None:
        due = now + self.latency_s + delay * self.faults.delay_s
        link = (sender, peer)
        if overtaken:
            due += self.faults.delay_s
        else:
            due = self._last_due[link] = max(due, self._last_due.get(link, due))
        is_cut = any(
            (cut.sender, cut.peer) == link and (cut.start <= now < cut.end or cut.start <= due < cut.end)
            for cut in self._cuts
        )
        if is_cut or peer in self._dead or sender in self._dead:
            self.num_dropped += 1
            return
        heapq.heappush(self._frames, Frame(due, next(self._order), sender, peer, data, payloads))
