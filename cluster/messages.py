"""The protocol: every message that goes between router (R), prefill nodes (P) and decode nodes (D).

    R → P  Prefill Cancel Live                P → R  Hello FirstToken Failed Held
    R → D  Decode Cancel Live Peers Resume    D → R  Hello FirstToken Tokens Ready Begun Failed Returned Held
    D → P  Hello Probe Want Fetch Release Bad P → D  Probed Have Blocks End Gone
    answers to Hello: Welcome or Refused; to a frame of a wrong incarnation: WrongEpoch

One request, undisturbed:

    R ── Prefill ──► P ─────── FirstToken ──────────────► R ──► client
    R ── Decode ───► D ── Want ──► P ── Have … Have, End ──► D ── Ready, Tokens ──► R ──► client
                                   P ◄─ Release ── D            (before the first Tokens: Begun)

Every message is idempotent and repeated from state, none is assumed delivered. The frame around a
message carries the protocol version and the epochs of sender and addressee (see codec). Durations
are seconds; no clock value crosses a process. Token ids and hashes travel as packed bytes.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pdserve.core.cache_delta import BEGINNING, CacheDelta, CachePosition
from pdserve.core.chunk import Chunk
from pdserve.core.ids import BlockHash, BlockId, Epoch, NodeId, RequestId
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.core.sampling import SamplingParams

PROTOCOL_VERSION = 5
# Bytes that travel behind a message, a frame each: memoryviews where they arrive, Frames where they are sent.
Payloads = tuple[Any, ...]
MAX_PROBE_BYTES = 4 << 20
NO_BEAT = 0


class Role(StrEnum):
    ROUTER = "router"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Stage(StrEnum):
    """Where a dispatched request is, as the router and the node see it."""

    PREFILL = "prefill"
    HANDOFF = "handoff"
    DECODE = "decode"
    DONE = "done"


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"


# ---- handshake -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Facts:
    """What two processes must agree on before any request: compared field by field, refused by name.

    kv_fingerprint  32 bytes, what KV means (core.checkpoint.kv_fingerprint)
    compute         what its KV was computed with: the dtype, and what besides decides on the numbers, such as weights
    accept_compute  those it takes KV from, itself included; empty of a node that takes KV from nobody
    batching, prefix_cache
                    those settings where router and nodes go by the same one, empty where a process has none
    """

    checkpoint: str
    tokenizer: str
    kv_spec: str
    kv_fingerprint: bytes
    compute: str
    accept_compute: tuple[str, ...]
    batching: str = ""
    prefix_cache: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a node can hold. Router and peers refuse what cannot fit, with both numbers.

    token_bytes: of the KV of one token; least_tokens: for which each sequence is given blocks at once, 0: it is given
    them as it grows
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_running: int
    token_bytes: int
    least_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the whole pool holds."""
        return self.num_blocks * self.block_size

    def blocks_to_begin(self, num_prompt: int, num_samples: int) -> int:
        """What several samples need to begin side by side: the prompt's blocks, and one for each to write to.

        Or all that each is given at once beside the full ones, which they share.
        """
        each = max(1, -(-self.least_tokens // self.block_size) - num_prompt // self.block_size)
        return -(-num_prompt // self.block_size) + num_samples * each

    def can_begin(self, num_prompt: int, num_samples: int) -> bool:
        has_blocks = self.blocks_to_begin(num_prompt, num_samples) <= self.num_blocks
        return has_blocks and num_samples <= self.max_running


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """How a peer on this host maps the pool: the unix socket that hands over its descriptor."""

    host: str
    socket_path: str
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every link. `peer_address` is where decode nodes reach a prefill node."""

    node: NodeId
    role: Role
    facts: Facts
    capacity: Capacity
    peer_address: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The link stands. The router adds its times, a prefill node the offer of its pool.

    tpot_s: the promised time per output token, which prompts computed beside streams must leave them
    """

    node: NodeId
    pool: PoolOffer | None = None
    heartbeat_s: float = 0.5
    lease_s: float = 5.0
    node_lost_s: float = 3.0
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    field: str
    reason: str


@dataclass(frozen=True, slots=True)
class WrongEpoch:
    """A frame was addressed to an incarnation that is gone; `epoch` is the living one."""

    epoch: Epoch


# ---- router to nodes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    node: NodeId
    epoch: Epoch
    address: str


@dataclass(frozen=True, slots=True)
class Peers:
    """All prefill nodes there are; a decode node links to those it lacks and unlinks the others."""

    prefill: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One of the continuations of a prompt: which, and what was streamed of it already as packed u32 token ids."""

    index: int
    outputs: bytes = b""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the KV of what the samples share and draw the next token of each that has no more than that.

    They share the prompt; a sample that is alone, its outputs, too.

    prompt   packed u32 token ids
    samples  those that have not finished
    hashes   one block hash per block of what they share, the last of a partial block if there is one
    """

    request: RequestId
    attempt: int
    prompt: bytes
    samples: tuple[Sample, ...]
    hashes: tuple[BlockHash, ...]
    sampling: SamplingParams
    priority: int = 0
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Continue every sample. source: whose blocks to pull, or None to compute everything here; the rest as in Prefill.

    What a sample has beyond what all share is computed here.

    num_yields  how often it has yielded its blocks to others on decode nodes before
    """

    request: RequestId
    attempt: int
    prompt: bytes
    samples: tuple[Sample, ...]
    hashes: tuple[BlockHash, ...]
    sampling: SamplingParams
    source: Peer | None
    priority: int = 0
    deadline_s: float | None = None
    num_yields: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this request any more, or for one sample of it."""

    request: RequestId
    attempt: int
    sample: int | None = None


@dataclass(frozen=True, slots=True)
class LiveEntry:
    """is_overdue: its hand-off is past its deadline, so the decode node makes room for it."""

    request: RequestId
    attempt: int
    stage: Stage
    is_overdue: bool = False


@dataclass(frozen=True, slots=True)
class Live:
    """The router's beat: every request dispatched to this node. Renews leases; absence lets them end.

    cache: how far the router has followed the node's prefix index
    """

    beat: int
    entries: tuple[LiveEntry, ...]
    cache: CachePosition = BEGINNING


@dataclass(frozen=True, slots=True)
class Resume:
    """The router misses tokens from `first_index` on: send them again."""

    request: RequestId
    attempt: int
    sample: int
    first_index: int


# ---- nodes to router -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token that was drawn as output `index` of a sample, with `finish` when it is the last one."""

    sample: int
    index: int
    token: int
    finish: Finish | None = None
    logprobs: Logprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What was drawn after the last chunk, straight to the router, from the node that computed the prompt.

    drawn              of each sample that had no token beyond what all share; of none where they all had
    num_cached_tokens  prompt tokens found in that node's prefix cache
    queue_s, prefill_s from acceptance to the first chunk, from there to the token
    prompt_logprobs    of every prompt token but the first, where they were asked for and no token is out yet
    chunks, step_end_s what of it ran when; of these seconds those that were not the model's
    waited_s           for a core before the request was read, at most
    told_s             from the end of the last step until this went out, filled in by who sends it; of one that is
                       sent again only what that took, so that a lost one is the link's
    """

    request: RequestId
    attempt: int
    drawn: tuple[Drawn, ...]
    num_cached_tokens: int
    queue_s: float
    prefill_s: float
    prompt_logprobs: Logprobs = NO_LOGPROBS
    chunks: tuple[Chunk, ...] = ()
    step_end_s: float = 0.0
    waited_s: float = 0.0
    told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens first_index, first_index + 1, ... of one sample."""

    request: RequestId
    attempt: int
    sample: int
    first_index: int
    token_ids: tuple[int, ...]
    finish: Finish | None
    logprobs: Logprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of one step, one message."""

    runs: tuple[TokenRun, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Every block is verified on the decode node: the loss of the prefill node matters no more.

    reserve_s          wait for blocks on the decode node
    copy_s, verify_s   busy time of the copies, and of checksums that no copy computes in the same pass
    """

    request: RequestId
    attempt: int
    num_blocks: int
    num_bytes: int
    num_cached_tokens: int
    reserve_s: float
    copy_s: float
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Begun:
    """A request runs on the decode node: where its time went from the prompt's end there to what it drew next.

    One after another, in this order. Goes out before those Tokens, once an attempt.

    wait_for_blocks_s                  until its blocks were reserved
    fetch_s, copy_s, verify_s          until all were verified: on their way, being copied, being summed; of a prompt
                                       that was computed here nothing
    queue_s, step_s                    until its first step began, and until the token was drawn
    waited_s                           for a core before the End was read, at most
    told_s                             until this went out, filled in by who sends it
    """

    request: RequestId
    attempt: int
    wait_for_blocks_s: float
    fetch_s: float
    copy_s: float
    verify_s: float
    queue_s: float
    step_s: float
    waited_s: float = 0.0
    told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """This attempt ends here. `stage` and `reason` go to the log and, at the last attempt, to the client."""

    request: RequestId
    attempt: int
    stage: Stage
    reason: str


@dataclass(frozen=True, slots=True)
class Returned:
    """Others need the blocks of this request here, and it has yielded: it may go on elsewhere."""

    request: RequestId
    attempt: int
    num_yields: int


@dataclass(frozen=True, slots=True)
class HeldEntry:
    """One sample of a request, or, up to its hand-off, all of them.

    has_blocks: the decode node has reserved all blocks of a hand-off, its copies are under way
    """

    request: RequestId
    attempt: int
    stage: Stage
    next_index: int
    has_blocks: bool = False
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """A node's state in numbers, as shown by /metrics.

    num_parked       blocks of finished prompts that no decode node has released yet
    token_s          seconds that each token of a prompt is expected to take here as things are
    starts_no_prompt too much of the pool is parked for a new prompt to be started
    num_corrupt      blocks that were not what they are named, since the start: a prefill node's own, or received
    num_yielded_*    how often a sequence has yielded its blocks, since the start, by the way of it
    num_swap_blocks  blocks that the host pool holds; num_swapped: of sequences that have yielded
    """

    num_free: int
    num_cached: int
    num_held: int
    num_leased: int
    num_reserved: int
    num_running: int
    num_waiting: int
    num_leases: int
    num_parked: int
    num_queued_tokens: int
    token_s: float
    starts_no_prompt: bool = False
    num_corrupt: int = 0
    num_yielded_swap: int = 0
    num_yielded_recompute: int = 0
    num_yielded_return: int = 0
    num_swap_blocks: int = 0
    num_swapped: int = 0


@dataclass(frozen=True, slots=True)
class Link:
    """A prefill node that a decode node can pull from.

    is_remote    blocks come in frames, else they are copied from mapped memory
    bytes_per_s  as measured when the link came up
    """

    node: NodeId
    is_remote: bool = False
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """The node's answer to the Live of the same beat: what it holds, its gauges, the peers it is linked to.

    With NO_BEAT it answers none: something else has changed, and nothing follows from what `entries` lacks.
    is_leaving: it takes no new work.
    cache: what has changed in its prefix index since the position that Live named; None with NO_BEAT
    """

    beat: int
    entries: tuple[HeldEntry, ...]
    gauges: Gauges
    links: tuple[Link, ...]
    is_leaving: bool = False
    cache: CacheDelta | None = None


# ---- decode node to prefill node and back ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """How fast is this link? Answered with so many bytes, at most MAX_PROBE_BYTES."""

    seq: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Probed:
    """The bytes that the Probe numbered `seq` asked for, in one frame; what is in them means nothing."""

    seq: int
    payloads: Payloads = ()


@dataclass(frozen=True, slots=True)
class Want:
    """The blocks the decode node lacks; a standing order until Release.

    credit        bytes of them that may be sent as Blocks; 0: they are only to be announced
    link_token_s  seconds that the KV of one token takes on its way, as measured; 0: unknown
    """

    request: RequestId
    attempt: int
    seq: int
    hashes: tuple[BlockHash, ...]
    credit: int = 0
    link_token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HaveEntry:
    """A block whose writes are complete: where it is, which incarnation of it, and its checksum."""

    hash: BlockHash
    block_id: BlockId
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Have:
    request: RequestId
    attempt: int
    seq: int
    entries: tuple[HaveEntry, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks themselves, to a decode node that cannot map the pool: each entry's bytes are a frame of their own."""

    request: RequestId
    attempt: int
    seq: int
    entries: tuple[HaveEntry, ...]
    payloads: Payloads = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Of what the Want numbered `seq` named, `credit` bytes may be sent in all: what came has been taken in."""

    request: RequestId
    attempt: int
    seq: int
    credit: int


@dataclass(frozen=True, slots=True)
class End:
    """The prefill is over: `count` tokens have KV here, and this was drawn after them."""

    request: RequestId
    attempt: int
    count: int
    drawn: tuple[Drawn, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Everything wanted is verified: the lease may end."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing is left here of what was wanted, and nothing will come."""

    request: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Bad:
    """These blocks failed verification on the decode node: check your own bytes."""

    request: RequestId
    attempt: int
    hashes: tuple[BlockHash, ...]


Handshake = Hello | Welcome | Refused | WrongEpoch | Probe | Probed
PrefillInbox = Prefill | Cancel | Live | Want | Fetch | Release | Bad
DecodeInbox = Decode | Cancel | Live | Peers | Resume | Have | Blocks | End | Gone
RouterInbox = FirstToken | Tokens | Ready | Begun | Failed | Returned | Held
Message = Handshake | PrefillInbox | DecodeInbox | RouterInbox


@dataclass(frozen=True, slots=True)
class Send:
    """The one action that all machines share: put this message on the link to `peer`."""

    peer: NodeId
    message: Message
