"""One sequence on one node: its tokens, how far their KV is computed, and its block table.

Progress is one number, num_computed against num_tokens. Chunked prefill, prefix hits, resuming after
a transfer and recompute after preemption are all the same thing: letting it catch up. Mutable, owned
by the node's scheduler on the event loop.
"""

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.core.block_hash import BlockHasher, unpack_token_ids
from pdserve.core.errors import ProtocolError
from pdserve.core.ids import BlockHash, BlockId, RequestId
from pdserve.core.logprobs import Logprobs
from pdserve.core.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.chunk_log import ChunkLog
from pdserve.engine.step import BlockMove, Row, SampleSpec, Scored, Seal


class Continued(Protocol):
    """A sample as it travels."""

    @property
    def index(self) -> int: ...

    @property
    def outputs(self) -> bytes: ...


class Work(Protocol):
    """A request as it travels, whichever role it goes to: ids packed, one hash per block of what its samples share."""

    @property
    def request(self) -> RequestId: ...

    @property
    def attempt(self) -> int: ...

    @property
    def prompt(self) -> bytes: ...

    @property
    def samples(self) -> Seq[Continued]: ...

    @property
    def hashes(self) -> tuple[BlockHash, ...]: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def deadline_s(self) -> float | None: ...

    @property
    def priority(self) -> int: ...


@dataclass(slots=True)
class Sequence:
    """tokens = prompt, then outputs. Samples that go on apart share one until the prompt is computed.

    sample         which one of the request's it is
    num_samples    how many go on from it; drawing: those that have their next token drawn after its last one
    hashes         names of its leading full blocks; decode nodes extend them as blocks fill
    tail_hash      name of the partial block at the end of what was given, if there is one
    started_at     when its first chunk was planned; waited_s: what it may have waited for a core before it was accepted
    deadline       when its next token is promised, on this node's clock; None without a promise
    num_computed   tokens whose KV is in block_ids
    num_found      tokens whose KV lies in blocks found by hash: never written again
    num_reserved   blocks promised by the pool and not taken yet
    busy           rows and copies in flight that name its blocks; they are freed when it is 0
    scores_prompt  whether the log-probabilities of its prompt are wanted: then all of it is run, found or not
    scores         those there are so far, in order
    chunks         of its prompt that have run here
    """

    key: int
    request: RequestId
    attempt: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    hashes: list[BlockHash]
    block_size: int
    tail_hash: BlockHash | None = None
    sample: int = 0
    num_samples: int = 1
    drawing: tuple[int, ...] = (0,)
    priority: int = 0
    accepted_at: float = 0.0
    started_at: float | None = None
    waited_s: float = 0.0
    deadline: float | None = None
    block_ids: list[BlockId] = field(default_factory=list)
    num_computed: int = 0
    num_found: int = 0
    num_reserved: int = 0
    num_committed: int = 0
    busy: int = 0
    scores_prompt: bool = False
    scores: list[Logprobs] = field(default_factory=list)
    chunks: ChunkLog = field(default_factory=ChunkLog)

    @classmethod
    def of(cls, key: int, work: Work, block_size: int, now: float, computes: bool = True) -> "Sequence":
        """The sequence of what the samples of `work` share, accepted now; raises ProtocolError when it makes no sense.

        computes  whether the prompt is computed here
        """
        _check(work)
        prompt, first = unpack_token_ids(work.prompt), work.samples[0]
        is_alone = len(work.samples) == 1
        tokens = prompt + unpack_token_ids(first.outputs) if is_alone else prompt
        num_full = len(tokens) // block_size
        is_fresh = not any(sample.outputs for sample in work.samples)
        sequence = cls(
            key,
            work.request,
            work.attempt,
            tokens,
            len(prompt),
            work.sampling,
            list(work.hashes[:num_full]),
            block_size,
            tail_hash=work.hashes[num_full] if num_full < len(work.hashes) else None,
            sample=first.index,
            num_samples=len(work.samples),
            drawing=tuple(sample.index for sample in work.samples if is_alone or not sample.outputs),
            priority=work.priority,
            accepted_at=now,
            deadline=None if work.deadline_s is None else now + work.deadline_s,
            scores_prompt=computes and is_fresh and work.sampling.prompt_logprobs is not None,
        )
        if len(work.hashes) != sequence.num_blocks:
            raise ProtocolError(f"{len(tokens)} tokens fill {sequence.num_blocks} blocks, not {len(work.hashes)}")
        return sequence

    @property
    def queue_s(self) -> float:
        """From acceptance to the first chunk."""
        return 0.0 if self.started_at is None else self.started_at - self.accepted_at

    def ran_chunk(self, num_tokens: int, began_at: float, now: float, forward_s: float) -> None:
        """A step that began then is over, and ran so many tokens of its prompt."""
        self.chunks.add(num_tokens, began_at - self.accepted_at, now - began_at, forward_s)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.tokens) - self.num_computed

    @property
    def num_blocks(self) -> int:
        return -(-len(self.tokens) // self.block_size)

    def claim(self, pool: BlockPool, hits: list[BlockId], num_blocks: int) -> None:
        """Hold the found prefix and reserve `num_blocks` more; the caller checked can_reserve."""
        for block_id in hits:
            pool.hold(block_id)
        pool.reserve(num_blocks)
        self.block_ids = list(hits)
        self.num_reserved = num_blocks
        self.num_committed = len(hits)
        self.num_found = len(hits) * self.block_size
        # The last token is always run: its logits give the next one.
        self.num_computed = 0 if self.scores_prompt else min(self.num_found, self.num_tokens - 1)

    def give_back(self, pool: BlockPool) -> None:
        """Drop every block and reservation; what is committed stays findable."""
        pool.unreserve(self.num_reserved)
        pool.drop(self.block_ids)
        self.block_ids = []
        self.num_reserved = self.num_computed = self.num_found = self.num_committed = 0
        self.scores = []

    def fork(self, key: int, sample: int, outputs: Seq[int]) -> "Sequence":
        """One of the samples that share it, with outputs of its own and no blocks yet."""
        return dataclasses.replace(
            self,
            key=key,
            sample=sample,
            num_samples=1,
            drawing=(sample,),
            tokens=[*self.tokens, *outputs],
            hashes=list(self.hashes),
            tail_hash=None,
            block_ids=[],
            num_computed=0,
            num_found=0,
            num_reserved=0,
            num_committed=0,
            scores_prompt=False,
            scores=[],
        )

    def share(self, head: "Sequence", pool: BlockPool) -> None:
        """Hold the blocks of the sequence that it was forked from, too; whoever writes to one first copies it."""
        for block_id in head.block_ids:
            pool.hold(block_id)
        self.block_ids = list(head.block_ids)
        self.num_computed, self.num_found, self.num_committed = head.num_computed, head.num_found, head.num_committed

    def replace_block(self, index: int, pool: BlockPool) -> BlockMove:
        """Put a block of the reservation in the place of one that others hold, too; the caller drops that one."""
        shared = self.block_ids[index]
        self.block_ids[index] = pool.take()
        self.num_reserved -= 1
        return BlockMove(shared, self.block_ids[index])

    @property
    def next_written(self) -> int | None:
        """Index of the block that its next token is written to, when that is in its table already."""
        index = max(self.num_computed, self.num_found) // self.block_size
        return index if index < len(self.block_ids) else None

    def take_blocks(self, pool: BlockPool, num_tokens: int) -> None:
        """Extend the block table to cover `num_tokens`, out of the reservation."""
        while len(self.block_ids) * self.block_size < num_tokens:
            self.block_ids.append(pool.take())
            self.num_reserved -= 1

    def row(self, num_tokens: int) -> Row:
        """The next `num_tokens` tokens as a step's row; samples when they are the last ones."""
        end = self.num_computed + num_tokens
        samples = self._sample_specs() if end == self.num_tokens else ()
        tokens = tuple(self.tokens[self.num_computed : end])
        scored = self._scored(end)
        return Row(self.key, tokens, self.num_computed, tuple(self.block_ids), self.num_found, samples, scored)

    def _sample_specs(self) -> tuple[SampleSpec, ...]:
        history = tuple(self.tokens) if self.params.has_penalties else ()
        return tuple(
            SampleSpec(self.params, self.num_outputs, sample, history, self.num_prompt) for sample in self.drawing
        )

    def _scored(self, end: int) -> Scored | None:
        """The prompt tokens that follow those of a row up to `end`."""
        if not self.scores_prompt or self.params.prompt_logprobs is None:
            return None
        following = tuple(self.tokens[self.num_computed + 1 : min(end + 1, self.num_prompt)])
        return Scored(following, self.params.prompt_logprobs) if following else None

    def name_full_blocks(self, hasher: BlockHasher, num_tokens: int) -> None:
        """Extend `hashes` over every block that so many tokens fill."""
        size = self.block_size
        while len(self.hashes) < num_tokens // size:
            parent = self.hashes[-1] if self.hashes else hasher.root(self.request)
            start = len(self.hashes) * size
            self.hashes.append(hasher.extend(parent, self.tokens[start : start + size]))

    def seals(self, num_tokens: int) -> list[Seal]:
        """Blocks whose last write is the next step of `num_tokens` tokens."""
        size, end = self.block_size, self.num_computed + num_tokens
        first = max(self.num_computed, self.num_found) // size
        seals = [Seal(self.block_ids[i], self.hashes[i], size) for i in range(first, end // size)]
        if end == self.num_tokens and self.tail_hash is not None:
            seals.append(Seal(self.block_ids[end // size], self.tail_hash, end % size))
        return seals

    def commit_full(self, pool: BlockPool, checksums: dict[BlockId, int]) -> None:
        """Make every block that num_computed has filled findable, with its checksum where there is one."""
        full = min(self.num_computed // self.block_size, len(self.hashes))
        for i in range(self.num_committed, full):
            pool.commit(self.block_ids[i], self.hashes[i], checksums.get(self.block_ids[i]))
        self.num_committed = max(self.num_committed, full)


def _check(work: Work) -> None:
    if not work.prompt:
        raise ProtocolError("a prompt has at least one token")
    if not work.samples or len({sample.index for sample in work.samples}) != len(work.samples):
        raise ProtocolError(f"a request has one or more samples, each named once, not {work.samples}")
    for sample in work.samples:
        num_outputs = len(sample.outputs) // 4
        if num_outputs >= work.sampling.max_tokens:
            raise ProtocolError(f"{num_outputs} of {work.sampling.max_tokens} tokens (max_tokens) are out already")
