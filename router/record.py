"""The router's record of one request: its tokens so far, its attempt and plan, and what it tells of its times.

The outputs here are the ledger of tokens: what is in it was sent or will be, once, and never changes.
Owned by Attempts; Dispatcher puts the tokens in.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pdserve.cluster.messages import Sample, Stage
from pdserve.core.block_hash import BlockHasher, pack_token_ids
from pdserve.core.chunk import Chunk
from pdserve.core.ids import BlockHash, NodeId, RequestId
from pdserve.core.logprobs import NO_LOGPROBS, Logprobs
from pdserve.core.sampling import SamplingParams
from pdserve.router.ledger import Stages, Times


class Plan(StrEnum):
    """How a request is served: split over two nodes, computed where it decodes, or ended by its first token."""

    SPLIT = "split"
    LOCAL = "local"
    PREFILL_ONLY = "prefill-only"


@dataclass(slots=True)
class SampleRecord:
    """One continuation of the prompt; without a finish it goes on."""

    index: int
    outputs: list[int] = field(default_factory=list)
    finish: str | None = None


def _one_sample() -> list[SampleRecord]:
    return [SampleRecord(0)]


@dataclass(slots=True)
class Record:
    """stage None: in the router's queue. missed: beats in which a node that should hold it did not name it.

    ready_attempt  the last attempt whose blocks were all verified on its decode node
    handoff_due    when its hand-off is late: it is moved then, or its decode node is told that it is_overdue
    has_blocks     its decode node says that it has reserved them
    num_yields     how often decode nodes have taken its blocks for others and sent it back
    left           decode nodes it was taken from because they were late
    num_not_computed, num_not_moved
                   prompt tokens that were cached where the prompt was computed, and where they were moved to
    """

    request: RequestId
    label: str
    prompt: list[int]
    params: SamplingParams
    times: Times
    priority: int = 0
    samples: list[SampleRecord] = field(default_factory=_one_sample)
    prompt_logprobs: Logprobs = NO_LOGPROBS
    stage: Stage | None = None
    attempt: int = 0
    plan: Plan | None = None
    prefill_node: NodeId | None = None
    decode_node: NodeId | None = None
    placed_in_beat: int = 0
    ready_attempt: int = 0
    handoff_due: float = 0.0
    is_overdue: bool = False
    has_blocks: bool = False
    num_yields: int = 0
    left: set[NodeId] = field(default_factory=set)
    missed: dict[NodeId, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    finish: str | None = None
    num_not_computed: int = 0
    num_not_moved: int = 0
    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    reserve_s: float = 0.0
    copy_s: float = 0.0
    verify_s: float = 0.0
    chunks: tuple[Chunk, ...] = ()
    bytes_moved: int = 0
    _hashes: tuple[BlockHash, ...] = ()
    _num_hashed: int = 0

    def sample(self, index: int) -> SampleRecord | None:
        """None for one that nobody asked for."""
        return self.samples[index] if index < len(self.samples) else None

    @property
    def live(self) -> list[SampleRecord]:
        """Samples that go on."""
        return [sample for sample in self.samples if sample.finish is None]

    @property
    def shared(self) -> list[int]:
        """Tokens that all samples have in common, which a prefill node computes: those of one alone, or the prompt."""
        live = self.live
        return self.prompt + live[0].outputs if len(live) == 1 else self.prompt

    @property
    def num_tokens(self) -> int:
        live = self.live
        return len(self.prompt) + (len(live[0].outputs) if len(live) == 1 else 0)

    @property
    def num_outputs(self) -> int:
        return sum(len(sample.outputs) for sample in self.samples)

    @property
    def final_tokens(self) -> int:
        """Tokens of a sample whose KV there will be at its end: the last one drawn is never run."""
        return len(self.prompt) + self.params.max_tokens - 1

    @property
    def total_tokens(self) -> int:
        """Tokens of all samples whose KV there may be at once; what they share counts once."""
        return len(self.prompt) + len(self.live) * (self.params.max_tokens - 1)

    @property
    def ends_with_prefill(self) -> bool:
        """Whether what is drawn after the last chunk is the last token of every sample."""
        num_shared = self.num_tokens - len(self.prompt)
        return all(len(s.outputs) == num_shared == self.params.max_tokens - 1 for s in self.live)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt) > 1 and not self.prompt_logprobs.values

    @property
    def nodes(self) -> list[NodeId]:
        return [node for node in (self.prefill_node, self.decode_node) if node is not None]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were cached on one of the nodes."""
        return max(self.num_not_computed, self.num_not_moved)

    def of_prompt(self, num_tokens: int) -> int:
        """Of so many tokens those of the prompt: of outputs that were computed again nobody asks."""
        return min(num_tokens, len(self.prompt))

    def packed(self) -> tuple[bytes, tuple[Sample, ...]]:
        """The prompt and the samples that go on, as they travel."""
        samples = tuple(Sample(sample.index, pack_token_ids(sample.outputs)) for sample in self.live)
        return pack_token_ids(self.prompt), samples

    def hashes(self, hasher: BlockHasher) -> tuple[BlockHash, ...]:
        """Names of all blocks of what the samples share, made once for each length."""
        if self._num_hashed != self.num_tokens:
            hashes = hasher.hashes(self.shared, hasher.root(self.request))
            self._hashes, self._num_hashed = tuple(hashes), self.num_tokens
        return self._hashes

    def ledger(self) -> dict[str, Any]:
        """The `metrics` object of the final usage event: seconds, bytes and nodes; None where it never happened."""
        times = self.times

        def since(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else round(end - start, 6)

        return {
            "plan": self.plan,
            "nodes": {"prefill": self.prefill_node, "decode": self.decode_node},
            "attempts": self.attempt,
            "arrival_wait_s": round(times.waited_s, 6),
            "queue_s": since(times.queued, times.dispatched),
            "prefill_queue_s": round(self.prefill_queue_s, 6),
            "prefill_s": round(self.prefill_s, 6),
            "chunks": [[chunk.num_tokens, round(chunk.start_s, 6), round(chunk.seconds, 6)] for chunk in self.chunks],
            "exposed_transfer_s": self.exposed_transfer_s,
            "wait_for_blocks_s": round(self.reserve_s, 6),
            "copy_s": round(self.copy_s, 6),
            "verify_s": round(self.verify_s, 6),
            "ttft_s": since(times.arrived, times.first_token),
            "time_to_second_token_s": since(times.arrived, times.second_token),
            "tpot_s": self.tpot_s,
            "bytes_moved": self.bytes_moved,
            "cached_tokens": self.num_cached_tokens,
            "first_token": _stages(times.first_stages, since(times.first_token, times.first_written)),
            "second_token": _stages(times.second_stages, since(times.second_token, times.second_written)),
        }

    @property
    def exposed_transfer_s(self) -> float | None:
        """From the first token's arrival here to the decode node's word that every block is verified."""
        if self.plan is not Plan.SPLIT or self.times.ready is None or self.times.first_token is None:
            return None
        return round(max(0.0, self.times.ready - self.times.first_token), 6)

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; of several samples, which run side by side, the longest's."""
        times = self.times
        longest = max(len(sample.outputs) for sample in self.samples)
        if times.first_token is None or times.last_token is None or longest < 2:
            return None
        return round((times.last_token - times.first_token) / (longest - 1), 6)


def _stages(stages: Stages, delivery_s: float | None) -> dict[str, float | None] | None:
    """As they are told; None for a token that never came, or whose attempt nobody knows."""
    return {**{name: round(value, 6) for name, value in stages.items()}, "delivery_s": delivery_s} if stages else None
