"""Blocks that are sent: copied off the loop, in order, kept while the link is full, never of another block."""

import asyncio

import pytest

from pdserve.cluster.messages import Blocks, HaveEntry
from pdserve.core.ids import BlockId, NodeId, RequestId
from pdserve.kvtransfer.offer import SendBlocks
from pdserve.kvtransfer.sender import BlockSender
from tests.kvtransfer.pools import GENERATION, LARGE_SPEC, SPEC, block_hash, content, make_pool

REQUEST = RequestId(b"r" * 16)
D0, D1 = NodeId("D0"), NodeId("D1")


class Link:
    """Takes `room` messages, then none; `arrived` is what it took, `told` is set whenever it was asked."""

    def __init__(self, room: int = 1000):
        self.room = room
        self.arrived: list[tuple[NodeId, int, bytes]] = []
        self.asked = asyncio.Event()

    def send(self, peer: NodeId, message: Blocks) -> bool:
        self.asked.set()
        if not self.room:
            return False
        self.room -= 1
        for entry, payload in zip(message.entries, message.payloads, strict=True):
            self.arrived.append((peer, entry.block_id, bytes(payload)))
        return True

    async def until(self, num_arrived: int) -> None:
        while len(self.arrived) < num_arrived:
            self.asked.clear()
            await asyncio.wait_for(self.asked.wait(), 10)


def make_sender(pool, link: Link) -> BlockSender:
    def fail(error: BaseException) -> None:
        raise error

    return BlockSender(pool.view, link.send, fail)


def blocks(block_id: int, peer: NodeId = D0, generation: int | None = None) -> SendBlocks:
    entry = HaveEntry(block_hash(block_id), BlockId(block_id), generation or GENERATION + block_id, 0)
    return SendBlocks(peer, Blocks(REQUEST, 1, 1, (entry,)))


@pytest.mark.parametrize("spec", [SPEC, LARGE_SPEC], ids=["small", "larger than a slice"])
async def test_blocks_arrive_as_they_lie_and_in_order(spec):
    pool, link = make_pool(spec), Link()
    sender = make_sender(pool, link)
    for block_id in (3, 0, 7, 1):
        sender.put(blocks(block_id))
    await link.until(4)
    assert link.arrived == [(D0, i, content(spec, i)) for i in (3, 0, 7, 1)]
    sender.close()


async def test_a_full_link_delays_blocks_and_loses_none():
    pool, link = make_pool(), Link(room=2)
    sender = make_sender(pool, link)
    for block_id in range(8):
        sender.put(blocks(block_id))
    await link.until(2)
    for _ in range(6):
        link.room = 1
        arrived = len(link.arrived)
        sender.writable(D0)
        await link.until(arrived + 1)
    assert [block_id for _, block_id, _ in link.arrived] == list(range(8))
    sender.close()


async def test_a_peer_that_does_not_read_does_not_hold_up_another():
    pool, link = make_pool(), Link()
    take = link.send
    sender = BlockSender(pool.view, lambda peer, m: peer == D1 and take(peer, m), lambda error: None)
    sender.put(blocks(0, D0))
    sender.put(blocks(1, D1))
    await link.until(1)
    assert [peer for peer, _, _ in link.arrived] == [D1]
    sender.close()


async def test_a_block_that_was_reassigned_before_its_turn_is_left_out():
    pool, link = make_pool(), Link()
    sender = make_sender(pool, link)
    sender.put(blocks(2, generation=GENERATION))
    sender.put(blocks(4))
    await link.until(1)
    assert [block_id for _, block_id, _ in link.arrived] == [4]
    sender.close()


async def test_what_was_for_a_peer_that_is_gone_is_not_sent_to_its_next_incarnation():
    pool, link = make_pool(), Link(room=0)
    sender = make_sender(pool, link)
    sender.put(blocks(0))
    await asyncio.wait_for(link.asked.wait(), 10)
    sender.gone(D0)
    link.room = 1000
    sender.put(blocks(5))
    await link.until(1)
    assert [block_id for _, block_id, _ in link.arrived] == [5]
    sender.close()
