"""KV blocks spoilt on their way, and a cluster that looks after every event whether one of them was let in.

    where a block is spoilt         by
    in the source's pool            SpoilingEngine, after the prompt's last step
    between Have and copy           WatchedCluster, when the copy of it ends: shared memory only
    on the wire                     Wire: the announcement over shared memory, else the frame

Sabotage says which blocks and how, and counts.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from pdserve.cluster.memory import MemoryHub
from pdserve.cluster.messages import Blocks, Have, HaveEntry, Message
from pdserve.core.ids import BlockHash, BlockId, NodeId, RequestId
from pdserve.engine.kv_pool import KVPool, PoolView
from pdserve.engine.step import StepPlan, StepResult
from pdserve.kvtransfer.pull import BlockCopy, CopyBlocks, CopyDone, Verdict
from tests.in_process import FakeEngine, InProcessCluster, SimNode, continuation

D0, P0 = NodeId("D0"), NodeId("P0")


@dataclass(frozen=True)
class Sent:
    """A block on the wire. payload: its bytes, or None where it is only announced."""

    entry: HaveEntry
    payload: bytes | None = None


SpoilPool = Callable[[memoryview, bytes, random.Random], None]
SpoilCopy = Callable[[PoolView, BlockCopy, bytes], Iterator[None]]
SpoilSent = Callable[[Sent, Sent, random.Random], Sent]


@dataclass
class Sabotage:
    """What is done to which blocks.

    truths   what the blocks of all prompts hold
    victims  each with the block it is mixed up with
    left     how often each is still to be spoilt
    """

    rng: random.Random
    in_pool: SpoilPool | None = None
    in_copy: SpoilCopy | None = None
    on_wire: SpoilSent | None = None
    truths: dict[BlockHash, bytes] = field(default_factory=dict)
    victims: dict[BlockHash, BlockHash] = field(default_factory=dict)
    left: dict[BlockHash, int] = field(default_factory=dict)
    num_done: int = 0

    def other(self, block_hash: BlockHash) -> bytes:
        """The bytes of the block that this one is mixed up with."""
        return self.truths[self.victims[block_hash]]

    def plan(self, victims: dict[BlockHash, BlockHash], times: int) -> None:
        self.victims, self.left = victims, dict.fromkeys(victims, times)

    def is_due(self, block_hash: BlockHash) -> bool:
        """Whether this block is to be spoilt now; counts."""
        if not self.left.get(block_hash):
            return False
        self.left[block_hash] -= 1
        self.num_done += 1
        return True


class SpoilingEngine(FakeEngine):
    """Blocks break in the pool after their checksums were taken, and after whoever computed them has read them."""

    def __init__(self, pool: KVPool, sabotage: Sabotage):
        super().__init__(pool)
        self._sabotage = sabotage

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        sabotage = self._sabotage
        for seal in plan.seals:
            if sabotage.in_pool is not None and sabotage.is_due(seal.block_hash):
                sabotage.in_pool(self.pool.view.block(seal.block_id), sabotage.other(seal.block_hash), sabotage.rng)
        return result


class Wire(MemoryHub):
    """change: what is put on the wire to the decode node for each message to it.

    carried       everything that was sent to it, spoilt or not
    sends_blocks  blocks are spoilt in their frames, else in their announcements
    """

    def __init__(self, sabotage: Sabotage, sends_blocks: bool):
        super().__init__(latency_s=0.0001)
        self.change: Callable[[Message], list[Message]] = lambda message: [message]
        self.carried: list[Message] = []
        self._sabotage = sabotage
        self._sends_blocks = sends_blocks
        self._entries: dict[BlockHash, HaveEntry] = {}

    def send(self, sender: NodeId, peer: NodeId, message: Message, now: float) -> None:
        if peer != D0:
            super().send(sender, peer, message, now)
            return
        for put in self.change(self._spoil(message)):
            self.carried.append(put)
            super().send(sender, peer, put, now)

    def _spoil(self, message: Message) -> Message:
        if isinstance(message, Have):
            self._entries.update((entry.hash, entry) for entry in message.entries)
        if isinstance(message, Have) and not self._sends_blocks:
            return replace(message, entries=tuple(self._spoilt(Sent(entry)).entry for entry in message.entries))
        if isinstance(message, Blocks):
            pairs = zip(message.entries, message.payloads, strict=True)
            sent = [self._spoilt(Sent(entry, bytes(payload))) for entry, payload in pairs]
            payloads = tuple(memoryview(block.payload or b"") for block in sent)
            return replace(message, entries=tuple(block.entry for block in sent), payloads=payloads)
        return message

    def _spoilt(self, block: Sent) -> Sent:
        sabotage = self._sabotage
        if sabotage.on_wire is None or not sabotage.is_due(block.entry.hash):
            return block
        entry = self._entries[sabotage.victims[block.entry.hash]]
        payload = sabotage.other(block.entry.hash) if block.payload is not None else None
        return sabotage.on_wire(block, Sent(entry, payload), sabotage.rng)


class WatchedCluster(InProcessCluster):
    """After every event each block that the decode node could use is what its name says."""

    def __init__(self, sabotage: Sabotage, *, is_remote: bool, **options):
        self.sabotage = sabotage
        self.truths = sabotage.truths
        self.wire = Wire(sabotage, is_remote)
        self.num_checked = 0
        super().__init__(
            hub=self.wire,
            is_remote=is_remote,
            make_engine=lambda pool: SpoilingEngine(pool, sabotage),
            **options,
        )

    def submit(self, prompt: list[int], max_tokens: int = 8, **params: object) -> RequestId:
        text = prompt + continuation(prompt, max_tokens)
        for num_tokens in range(len(prompt), len(text) + 1):
            self.truths.update(self._contents(text[:num_tokens]))
        return super().submit(prompt, max_tokens, **params)

    def _contents(self, tokens: list[int]) -> dict[BlockHash, bytes]:
        """What FakeEngine keeps of each block of a text."""
        size, contents = self.spec.block_size, {}
        for index, block_hash in enumerate(self.hasher.hashes(tokens)):
            block = np.zeros((2, size, self.spec.head_dim), np.float32)
            for offset, token in enumerate(tokens[index * size : (index + 1) * size]):
                block[0, offset], block[1, offset] = token, index * size + offset
            contents[block_hash] = block.tobytes()
        return contents

    def _feed(self, name: NodeId, event: object) -> None:
        if isinstance(event, CopyDone):
            for copy, verdict in zip(event.copies, event.verdicts, strict=True):
                if verdict is Verdict.OK:
                    self.check_block(name, copy.target, copy.hash)
        super()._feed(name, event)
        if name == D0:
            for block_hash in self.truths:
                block_id = self.nodes[name].machine.pool.find(block_hash)
                if block_id is not None:
                    self.check_block(name, block_id, block_hash)

    def check_block(self, name: NodeId, block_id: BlockId, block_hash: BlockHash) -> None:
        self.num_checked += 1
        held = bytes(self.nodes[name].pool.view.block(block_id))
        assert held == self.truths[block_hash], f"block {block_id} of {name} is not {block_hash.hex()}"

    def _end_copy(self, node: SimNode, action: CopyBlocks, source: PoolView | None) -> None:
        spoil = self.sabotage.in_copy
        spoilt = [copy for copy in action.copies if spoil is not None and self.sabotage.is_due(copy.hash)]
        if spoil is None or not spoilt:
            super()._end_copy(node, action, source)
            return
        (copy,) = spoilt
        with contextmanager(spoil)(source, copy, self.sabotage.other(copy.hash)):
            super()._end_copy(node, action, source)
