"""The source's half of a hand-off: what was asked for, what is announced, and how long it is kept.

    (none) ── want ──► PARKED ── open ──► OPEN ── finish ──► ENDED ── release / cancel ──► (none)
       └───── open ───────────────────────┘ └── expiry, cancel ──────────────────────────► (none)

An offer is one lease: a record per (request, attempt) with one expiry, renewed by the router's Live
while it lists the request. A Want is a standing order: whatever is sealed later is announced at once, or,
as far as the Want's credit goes, sent. Nothing is sent but in answer to a Want. No I/O and no blocks here:
the scheduler pins and unpins.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.messages import Blocks, End, Fetch, Gone, Have, HaveEntry, Send, Want
from pdserve.core.ids import BlockHash, NodeId, RequestId

MAX_PARKED_WANTS = 1024


@dataclass(frozen=True, slots=True)
class SendBlocks:
    """Action: send this message with the bytes of its blocks, as they lie in the pool, behind it."""

    peer: NodeId
    blocks: Blocks


Answer = Send | SendBlocks


@dataclass(slots=True)
class Offer:
    """One request's lease.

    sealed            every block announced so far, in prefix order
    sent, sent_bytes  of the present Want: the blocks sent, and what they took of its credit
    link_token_s      seconds that a token's KV takes to the puller, before its Want to the last one known; 0.0: unknown
    """

    request: RequestId
    attempt: int
    expires_at: float
    puller: NodeId | None = None
    wanted: set[BlockHash] = field(default_factory=set)
    sealed: dict[BlockHash, HaveEntry] = field(default_factory=dict)
    seq: int = 0
    credit: int = 0
    sent: set[BlockHash] = field(default_factory=set)
    sent_bytes: int = 0
    link_token_s: float = 0.0
    end: End | None = None


@dataclass(frozen=True, slots=True)
class ParkedWant:
    sender: NodeId
    want: Want
    expires_at: float


class OfferBook:
    """All offers of a node. lease_s: how long an offer lives without being renewed, set by the router."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.lease_s = DEFAULT_LEASE_S
        self._offers: dict[RequestId, Offer] = {}
        self._parked: OrderedDict[RequestId, ParkedWant] = OrderedDict()
        self._link_token_s = 0.0

    def __len__(self) -> int:
        return len(self._offers)

    def find(self, request: RequestId, attempt: int) -> Offer | None:
        offer = self._offers.get(request)
        return offer if offer is not None and offer.attempt == attempt else None

    def open(self, request: RequestId, attempt: int, now: float) -> None:
        """Start the lease of an accepted request; a Want that came first is answered from now on."""
        offer = Offer(request, attempt, now + self.lease_s, link_token_s=self._link_token_s)
        self._offers[request] = offer
        parked = self._parked.pop(request, None)
        if parked is not None and parked.want.attempt == attempt:
            self._take_order(offer, parked.sender, parked.want)

    def want(self, sender: NodeId, want: Want, now: float) -> list[Answer]:
        """Answer a Want with everything sealed that it names; park it when the request is not here yet."""
        offer = self._offers.get(want.request)
        if offer is None or offer.attempt < want.attempt:
            return list(self._park(sender, want, now))
        if offer.attempt > want.attempt:
            return list(self.gone(sender, want))
        if want.seq < offer.seq:
            return []
        if want.seq == offer.seq and offer.credit:
            # The same message again: its blocks are on their way already.
            return list(self._end(offer))
        self._take_order(offer, sender, want)
        return [*self._answer(offer, list(offer.sealed.values())), *self._end(offer)]

    def fetch(self, sender: NodeId, fetch: Fetch) -> list[Answer]:
        """More credit for the present Want; what comes late or twice changes nothing."""
        offer = self.find(fetch.request, fetch.attempt)
        if offer is None:
            return [Send(sender, Gone(fetch.request, fetch.attempt))]
        if offer.puller != sender or fetch.seq != offer.seq or fetch.credit <= offer.credit:
            return []
        offer.credit = fetch.credit
        return list(self._send(offer))

    def _park(self, sender: NodeId, want: Want, now: float) -> list[Send]:
        """Keep the Want of a request that is not here yet, for one lease from the first time it was heard."""
        known = self._parked.get(want.request)
        if known is not None and known.want.attempt == want.attempt:
            self._parked[want.request] = replace(known, sender=sender, want=want)
            return []
        self._parked.pop(want.request, None)
        self._parked[want.request] = ParkedWant(sender, want, now + self.lease_s)
        if len(self._parked) <= MAX_PARKED_WANTS:
            return []
        _, oldest = self._parked.popitem(last=False)
        return self.gone(oldest.sender, oldest.want)

    def gone(self, sender: NodeId, want: Want) -> list[Send]:
        """The answer to a Want for what ended here."""
        return [Send(sender, Gone(want.request, want.attempt))]

    def seal(self, request: RequestId, attempt: int, entries: list[HaveEntry]) -> list[Answer]:
        """Blocks whose last write is complete; announced or sent when somebody wants them."""
        offer = self.find(request, attempt)
        if offer is None:
            return []
        offer.sealed.update((entry.hash, entry) for entry in entries)
        return self._answer(offer, entries)

    def finish(self, request: RequestId, attempt: int, end: End) -> list[Send]:
        """The prefill is over; End is kept and repeated on each Want until the lease ends."""
        offer = self.find(request, attempt)
        if offer is None:
            return []
        offer.end = end
        return self._end(offer)

    def close(self, request: RequestId, attempt: int) -> list[Send]:
        """End the lease; a puller that still waits is told that nothing will come. Twice is nothing."""
        parked = self._parked.get(request)
        if parked is not None and parked.want.attempt <= attempt:
            del self._parked[request]
        offer = self.find(request, attempt)
        if offer is None:
            return []
        del self._offers[request]
        if offer.end is None and offer.puller is not None:
            return [Send(offer.puller, Gone(request, attempt))]
        return []

    def renew(self, request: RequestId, attempt: int, now: float) -> None:
        offer = self.find(request, attempt)
        if offer is not None:
            offer.expires_at = now + self.lease_s

    def grant_beat(self, now: float, beat_s: float) -> None:
        """After a pause of the whole process: nothing ends before one more beat could be heard."""
        for offer in self._offers.values():
            offer.expires_at = max(offer.expires_at, now + beat_s)
        for request, parked in self._parked.items():
            self._parked[request] = replace(parked, expires_at=max(parked.expires_at, now + beat_s))

    def expired(self, now: float) -> list[tuple[RequestId, int]]:
        """Offers whose lease is over; the caller ends them."""
        return [(o.request, o.attempt) for o in self._offers.values() if o.expires_at <= now]

    def lapse(self, now: float) -> list[Send]:
        """Give up the Wants of requests that never came."""
        sends: list[Send] = []
        while self._parked and next(iter(self._parked.values())).expires_at <= now:
            _, parked = self._parked.popitem(last=False)
            sends += self.gone(parked.sender, parked.want)
        return sends

    def _take_order(self, offer: Offer, sender: NodeId, want: Want) -> None:
        offer.puller, offer.wanted, offer.seq = sender, set(want.hashes), want.seq
        offer.credit, offer.sent, offer.sent_bytes = want.credit, set(), 0
        offer.link_token_s = self._link_token_s = want.link_token_s

    def _answer(self, offer: Offer, entries: list[HaveEntry]) -> list[Answer]:
        return list(self._send(offer)) if offer.credit else list(self._have(offer, entries))

    def _send(self, offer: Offer) -> list[SendBlocks]:
        """What is sealed, wanted and not sent yet, in prefix order, as far as the credit goes."""
        actions: list[SendBlocks] = []
        assert offer.puller is not None
        for entry in offer.sealed.values():
            if entry.hash not in offer.wanted or entry.hash in offer.sent:
                continue
            # A block larger than all credit would never be sent.
            if offer.sent and offer.sent_bytes + self._block_bytes > offer.credit:
                break
            offer.sent.add(entry.hash)
            offer.sent_bytes += self._block_bytes
            actions.append(SendBlocks(offer.puller, Blocks(offer.request, offer.attempt, offer.seq, (entry,))))
        return actions

    def _have(self, offer: Offer, entries: list[HaveEntry]) -> list[Send]:
        wanted = tuple(entry for entry in entries if entry.hash in offer.wanted)
        if not wanted or offer.puller is None:
            return []
        return [Send(offer.puller, Have(offer.request, offer.attempt, offer.seq, wanted))]

    def _end(self, offer: Offer) -> list[Send]:
        if offer.end is None or offer.puller is None:
            return []
        return [Send(offer.puller, offer.end)]
