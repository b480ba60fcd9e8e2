"""Blocks that are not what they are named are never used, whichever way they came and wherever they broke."""

import random

import pytest

from pdserve.cluster.messages import Bad, Blocks
from pdserve.core.ids import NodeId
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0 = NodeId("P0")


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def sealed_blocks(cluster: InProcessCluster) -> list[int]:
    return [seal.block_id for _, what, plan in cluster.trace if what == "P0 stepped" for seal in plan.seals]


def told_bad(cluster: InProcessCluster) -> int:
    return sum(isinstance(message, Bad) for _, _, message in cluster.trace)


@pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
@pytest.mark.parametrize("position", [0, 3, -1])
def test_a_block_that_broke_in_the_pool_is_computed_again_and_offered_to_nobody(is_remote: bool, position: int):
    cluster = InProcessCluster(max_step_tokens=4 * BLOCK, is_remote=is_remote)
    prompt = make_prompt(6 * BLOCK)
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run(until=lambda: len(sealed_blocks(cluster)) >= 4)
    cluster.nodes[P0].pool.view.block(sealed_blocks(cluster)[position])[5] ^= 1
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    assert told_bad(cluster) >= 1
    cluster.trace.clear()
    again = cluster.submit([*prompt, 1], max_tokens=5)
    cluster.run()
    assert cluster.results(again) == [continuation([*prompt, 1], 5)]
    assert told_bad(cluster) == 0, "the broken block was offered once more"


@pytest.mark.parametrize("seed", range(20))
def test_a_block_that_broke_on_the_wire_is_sent_again_and_stays_cached_at_its_source(seed: int):
    rng = random.Random(seed)
    cluster = InProcessCluster(max_step_tokens=2 * BLOCK, is_remote=True)
    prompt = make_prompt(rng.randrange(BLOCK, 8 * BLOCK), seed)
    spoil_next(cluster, rng)
    request = cluster.submit(prompt, max_tokens=5)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 5)]
    assert told_bad(cluster) == 1
    assert cluster.nodes[P0].machine.pool.num_cached == len(prompt) // BLOCK
    cluster.assert_drained()


def spoil_next(cluster: InProcessCluster, rng: random.Random) -> None:
    """Flip a byte of, cut, or swap the payload of the next Blocks message."""
    send = cluster.hub.send
    how = rng.choice(["flip", "cut", "swap"])

    def spoilt(sender, peer, message, now):
        if isinstance(message, Blocks) and cluster.hub.send is not send:
            cluster.hub.send = send  # type: ignore[method-assign]
            (payload,) = message.payloads
            data = bytearray(payload)
            if how == "flip":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            elif how == "cut":
                del data[rng.randrange(len(data)) :]
            else:
                data = bytearray(reversed(data))
            message = Blocks(message.request, message.attempt, message.seq, message.entries, (memoryview(data),))
        send(sender, peer, message, now)

    cluster.hub.send = spoilt  # type: ignore[method-assign]


def test_ten_thousand_clean_blocks_raise_no_alarm():
    cluster = InProcessCluster(max_step_tokens=64 * BLOCK, is_remote=True, num_blocks=600, timing=Timing(block=1e-6))
    for turn in range(20):
        request = cluster.submit(make_prompt(500 * BLOCK, seed=turn), max_tokens=2)
        cluster.run()
        assert cluster.outcomes[request].finish == "length"
        assert told_bad(cluster) == 0
        cluster.trace.clear()
