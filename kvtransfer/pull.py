"""The destination's half of a hand-off: which blocks are still lacking, and what to do about it.

    WANTING ── start (blocks reserved) ──► COPYING ── all verified, End ──► COMPLETE
       ▲                                    │  │
       └────────── revoke ──────────────────┘  └── a block failed twice ──► FAILED (End is still awaited)

Each lacking block goes   wanted → announced → copying → verified,
and back to wanted when its copy fails (generation moved, checksum wrong): once, then the pull fails.
A pull whose source is gone may finish the copies it has begun; it is told nothing more. From a source whose
pool cannot be mapped here, blocks come in frames: announced first, then sent once they are reserved, within
a credit that grows as they are taken in.

No I/O and no block ownership: DecodeScheduler reserves and takes the destination blocks, feeds what
happens, and sends what this returns. One pull per (request, attempt).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from pdserve.cluster.messages import Bad, End, Fetch, HaveEntry, Payloads, Release, Send, Want
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import BlockHash, BlockId, NodeId, RequestId

WANT_AGAIN_S = 0.5
# Blocks of one source come one after another. Asked for again while they stand in line behind others', they would come
# twice and make the line longer (a link that fell to 16 Mbit/s, six prompts of 1 MB: 70 % more bytes). How long a line
# is is a guess, so that nothing is left to it for longer than this.
MAX_IN_LINE_S = 4.0
MAX_FAILURES = 2
# Bytes on their way to one pull: enough to keep a link of 10 Gbit/s with 5 ms of delay busy, and what a decode
# node may have to keep for each of its pulls.
CREDIT_BYTES = 8 << 20


class PullState(Enum):
    WANTING = "wanting"
    COPYING = "copying"
    COMPLETE = "complete"
    FAILED = "failed"


class Verdict(Enum):
    """What became of one block's copy."""

    OK = "ok"
    MOVED = "moved"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block to copy and verify: from `source` in the peer's pool, or `payload`, to `target` in ours."""

    hash: BlockHash
    source: BlockId
    generation: int
    checksum: int
    target: BlockId
    payload: memoryview | None = None


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Action: copy and verify in the copy worker, then report CopyDone. key: the pulling sequence."""

    key: int
    peer: NodeId
    copies: tuple[BlockCopy, ...]


@dataclass(frozen=True, slots=True)
class CopyDone:
    """Event: the verdict on every block of a CopyBlocks, in its order, and how long its bytes and their sums took."""

    key: int
    copies: tuple[BlockCopy, ...]
    verdicts: tuple[Verdict, ...]
    copy_s: float = 0.0
    verify_s: float = 0.0


@dataclass(slots=True)
class Traffic:
    """What a link brings to all pulls from its source.

    num_blocks    that have come so far, the last one at moved_at
    num_pulls     of blocks in frames; num_expected: blocks that may be on their way to them
    """

    num_blocks: int = 0
    moved_at: float = float("-inf")
    num_pulls: int = 0
    num_expected: int = 0


@dataclass(slots=True)
class Pull:
    """The pull of one request from `source`. `lacking` maps each block's hash to its failures so far.

    is_remote    blocks come in frames; `arrived` are those not copied yet
    bytes_per_s  how fast the link is, 0.0: unknown; token_bytes: KV of one token on its way
    orphaned     the link to the source broke: who comes back under its name is not asked again
    credit       bytes granted with the present Want; `taken`: of blocks that came and were dealt with
    """

    request: RequestId
    attempt: int
    source: NodeId
    is_remote: bool = False
    bytes_per_s: float = 0.0
    token_bytes: int = 0
    state: PullState = PullState.WANTING
    lacking: dict[BlockHash, int] = field(default_factory=dict)
    announced: dict[BlockHash, HaveEntry] = field(default_factory=dict)
    arrived: dict[BlockHash, memoryview] = field(default_factory=dict)
    targets: dict[BlockHash, BlockId] = field(default_factory=dict)
    copying: set[BlockHash] = field(default_factory=set)
    end: End | None = None
    orphaned: bool = False
    seq: int = 0
    credit: int = 0
    taken: int = 0
    progress_at: float = 0.0
    line_seen_at: float | None = None
    line_end: int = 0
    num_verified: int = 0
    copy_s: float = 0.0
    verify_s: float = 0.0

    @property
    def heard(self) -> bool:
        """Whether the source has announced anything: the moment at which blocks are reserved."""
        return bool(self.announced) or self.end is not None

    @property
    def can_finish_alone(self) -> bool:
        """Whether nothing more is needed from the source but its mapped memory, which outlives copies begun."""
        here = self.arrived.keys() | self.copying if self.is_remote else self.announced.keys()
        is_told = self.end is not None and all(h in here for h in self.lacking)
        return is_told and self.state is not PullState.WANTING

    def want(self, hashes: Iterable[BlockHash], now: float) -> list[Send]:
        """Ask for `hashes`, replacing what was asked before; failures already counted stay counted."""
        self.lacking = {h: self.lacking.get(h, 0) for h in hashes}
        return self._send_want(now)

    def announce(self, entries: Iterable[HaveEntry], now: float) -> None:
        """Note what the source has; a later announcement of a block replaces an earlier one."""
        for entry in entries:
            if entry.hash in self.lacking:
                self.announced[entry.hash] = entry
                self.progress_at = now

    def take(self, entries: Iterable[HaveEntry], payloads: Payloads, now: float) -> None:
        """Blocks came in frames. Those that are not lacking, or have no place here any more, are dropped."""
        for entry, payload in zip(entries, payloads, strict=True):
            if self.state is PullState.COPYING and entry.hash in self.targets and self._is_free(entry.hash):
                self.announced[entry.hash], self.arrived[entry.hash] = entry, payload
                self.progress_at = now
            else:
                self.taken += len(payload)

    def start(self, targets: dict[BlockHash, BlockId], now: float) -> list[Send]:
        """The destination blocks are reserved: copying may begin, and blocks that come in frames may come."""
        self._move(PullState.WANTING, PullState.COPYING)
        self.targets = targets
        return self._send_want(now) if self.is_remote and targets else []

    def adopt(self, block_hash: BlockHash, target: BlockId) -> None:
        """Take over a block that another request's pull was filling: it is asked for at the next tick."""
        self.targets[block_hash] = target
        if self.is_remote:
            self.progress_at = float("-inf")

    def next_copies(self) -> list[BlockCopy]:
        """Blocks that are here, have a target and are not being copied; marks them copying."""
        if self.state is not PullState.COPYING:
            return []
        copies = []
        for block_hash in list(self.arrived if self.is_remote else self.announced):
            if block_hash in self.targets and self._is_free(block_hash):
                self.copying.add(block_hash)
                entry, target = self.announced[block_hash], self.targets[block_hash]
                where = (entry.block_id, entry.generation, entry.checksum, target)
                copies.append(BlockCopy(block_hash, *where, self.arrived.pop(block_hash, None)))
        return copies

    def _is_free(self, block_hash: BlockHash) -> bool:
        return block_hash in self.lacking and block_hash not in self.copying

    def copied(self, done: CopyDone, now: float) -> list[Send]:
        """Take the verdicts in; a block that failed is asked for again, once, then the pull fails.

        The source is told of every corrupt block, wanted any more or not: it may be giving it to others.
        """
        self.copy_s += done.copy_s
        self.verify_s += done.verify_s
        corrupt, again = [], False
        for copy, verdict in zip(done.copies, done.verdicts, strict=True):
            self.copying.discard(copy.hash)
            self.taken += len(copy.payload) if copy.payload is not None else 0
            if verdict is Verdict.CORRUPT:
                corrupt.append(copy.hash)
            if copy.hash not in self.lacking:
                continue
            if verdict is Verdict.OK:
                del self.lacking[copy.hash]
                self.num_verified += 1
                self.progress_at = now
                continue
            again = True
            self.announced.pop(copy.hash, None)
            self.lacking[copy.hash] += 1
        if self.state is PullState.COPYING and any(n >= MAX_FAILURES for n in self.lacking.values()):
            self.state, self.lacking = PullState.FAILED, {}
        sends = [Send(self.source, Bad(self.request, self.attempt, tuple(corrupt)))] if corrupt else []
        if self.state is PullState.COPYING:
            sends += self._send_want(now) if again else self.grant()
        return sends

    def grant(self) -> list[Send]:
        """More credit once half of it is used up, while something is lacking."""
        if not self.credit or not self.lacking or self.credit - self.taken > CREDIT_BYTES // 2:
            return []
        self.credit = self.taken + CREDIT_BYTES
        return [Send(self.source, Fetch(self.request, self.attempt, self.seq, self.credit))]

    def complete(self) -> bool:
        """Whether every lacking block is verified and End is here; then the pull is COMPLETE."""
        ready = not self.lacking and not self.copying and self.end is not None
        if self.state is PullState.COPYING and ready:
            self.state = PullState.COMPLETE
        return self.state is PullState.COMPLETE

    def release(self) -> list[Send]:
        return [Send(self.source, Release(self.request, self.attempt))]

    def revoke(self) -> None:
        """The reservation is taken back: what was verified stays cached here, the rest stays with the source."""
        self._move(PullState.COPYING, PullState.WANTING)
        self.targets, self.arrived, self.credit = {}, {}, 0

    def tick(self, now: float, traffic: Traffic) -> list[Send]:
        """Ask again when nothing was heard for long enough: no message is assumed delivered."""
        is_waiting = self.state in (PullState.WANTING, PullState.COPYING) or self.end is None
        is_in_line = self._is_in_line(now, traffic)
        is_late = now - self.progress_at >= self._patience_s(traffic.num_pulls)
        if is_waiting and is_late and not is_in_line and not self.copying:
            return self._send_want(now)
        return []

    @property
    def num_expected(self) -> int:
        """Blocks that may be on their way."""
        if not self.credit:
            return 0
        return sum(h in self.targets and h not in self.arrived and h not in self.copying for h in self.lacking)

    def _is_in_line(self, now: float, traffic: Traffic) -> bool:
        """Whether what was on its way to others at the last progress is still coming, and so before ours."""
        if self.line_seen_at != self.progress_at:
            self.line_seen_at = self.progress_at
            self.line_end = traffic.num_blocks + traffic.num_expected - self.num_expected + 1
        is_moving = now - traffic.moved_at < WANT_AGAIN_S and now - self.progress_at < MAX_IN_LINE_S
        return is_moving and self.num_expected > 0 and traffic.num_blocks < self.line_end

    def _patience_s(self, num_sharing: int) -> float:
        """Longer where the bytes asked for may still be on their way: to ask for them twice would slow them down."""
        if not self.credit or not self.bytes_per_s:
            return WANT_AGAIN_S
        return WANT_AGAIN_S + 2 * num_sharing * CREDIT_BYTES / self.bytes_per_s

    def _send_want(self, now: float) -> list[Send]:
        """A block that another request's pull has under way is announced to this one, not sent."""
        self.seq += 1
        self.progress_at = now
        hashes = tuple(self.lacking)
        self.credit = self.taken = 0
        if self.is_remote and self.state is PullState.COPYING:
            self.credit = CREDIT_BYTES
            hashes = tuple(h for h in hashes if h in self.targets and h not in self.arrived)
        token_s = self.token_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return [Send(self.source, Want(self.request, self.attempt, self.seq, hashes, self.credit, token_s))]

    def _move(self, before: PullState, after: PullState) -> None:
        if self.state is not before:
            raise ProtocolError(f"pull of {self.request.hex()} attempt {self.attempt}: {self.state} → {after}")
        self.state = after
