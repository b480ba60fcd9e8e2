"""Out of blocks on a decode node: who yields, in which way, how often, and that no token is lost or changed."""

import random
from collections import Counter

import pytest

from pdserve.cluster.memory import Fate
from pdserve.cluster.messages import Decode, Returned
from pdserve.core.ids import NodeId, RequestId
from pdserve.decode_node.job import MAX_YIELDS
from pdserve.decode_node.preemption import Mode
from pdserve.decode_node.swap import SwapIn, SwapOut
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
D0 = NodeId("D0")
MODES = [Mode.SWAP, Mode.RECOMPUTE, Mode.RETURN, Mode.AUTO]


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def crowd(
    cluster: InProcessCluster, num_requests: int = 6, max_tokens: int = 40, longer: int = 3, **options: int
) -> dict[RequestId, list[int]]:
    """Each prompt is so much longer than the one before."""
    prompts = [make_prompt(5 + longer * index, seed=index) for index in range(num_requests)]
    return {cluster.submit(prompt, max_tokens=max_tokens, **options): prompt for prompt in prompts}


def check(cluster: InProcessCluster, prompts: dict[RequestId, list[int]], max_tokens: int = 40) -> None:
    for request, prompt in prompts.items():
        assert cluster.outcomes[request].tokens == continuation(prompt, max_tokens)
    cluster.assert_drained()
    space = cluster.nodes[D0].machine.reservations.space
    assert space.num_free == space.num_slots


def yielded(cluster: InProcessCluster, node: NodeId = D0) -> Counter:
    return cluster.nodes[node].machine.reservations.num_yielded


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
@pytest.mark.parametrize("num_blocks", [17, 22, 30])
def test_every_stream_is_exact_when_the_pool_holds_a_part_of_them(mode: Mode, num_prefill: int, num_blocks: int):
    cluster = InProcessCluster(num_prefill, num_blocks=num_blocks, num_swap_blocks=64, mode=mode)
    prompts = crowd(cluster)
    cluster.run()
    check(cluster, prompts)
    assert yielded(cluster).total() > 0


@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.RECOMPUTE, Mode.RETURN])
def test_sequences_yield_in_the_way_that_was_asked_for(mode: Mode):
    cluster = InProcessCluster(num_blocks=20, num_swap_blocks=64, mode=mode)
    prompts = crowd(cluster)
    cluster.run()
    check(cluster, prompts)
    assert yielded(cluster).keys() == {mode}


def test_a_host_pool_that_is_full_leaves_recomputing():
    cluster = InProcessCluster(num_blocks=20, num_swap_blocks=6, mode=Mode.SWAP)
    prompts = crowd(cluster)
    cluster.run()
    check(cluster, prompts)
    assert yielded(cluster)[Mode.RECOMPUTE] > 0


def test_what_comes_back_from_the_host_pool_is_not_computed_again():
    computed = {}
    for mode in (Mode.SWAP, Mode.RECOMPUTE):
        cluster = InProcessCluster(num_blocks=20, num_swap_blocks=64, mode=mode)
        crowd(cluster)
        cluster.run()
        plans = [what for _, link, what in cluster.trace if link == "D0 step"]
        computed[mode] = sum(len(row.token_ids) for plan in plans for row in plan.rows)
        if mode is Mode.SWAP:
            out = sum(len(what.slots) for _, link, what in cluster.trace if isinstance(what, SwapOut))
            back = sum(len(what.copies) for _, link, what in cluster.trace if isinstance(what, SwapIn))
            assert 0 < back <= out
    # Six requests of 40 tokens, the first of each from the prefill node, the last never run.
    assert computed[Mode.SWAP] == 6 * 39 < computed[Mode.RECOMPUTE]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_blocks", [16, 20, 26])
def test_nobody_yields_more_often_than_the_bound_and_everybody_gets_done(mode: Mode, num_blocks: int):
    cluster = InProcessCluster(num_blocks=num_blocks, num_swap_blocks=30, mode=mode, max_running=32)
    prompts = crowd(cluster, num_requests=16, longer=1)
    counts: Counter[RequestId] = Counter()
    seen: dict[RequestId, int] = {}

    def watch() -> bool:
        for job in cluster.nodes[D0].machine._jobs:
            request = job.sequence.request
            seen[request] = max(seen.get(request, 0), job.num_yields)
            counts[request] = seen[request]
        return cluster.is_quiet()

    cluster.run(until=watch)
    check(cluster, prompts)
    assert max(counts.values()) <= MAX_YIELDS


@pytest.mark.parametrize("priority", [0, 1])
def test_the_oldest_of_the_most_important_never_yields(priority: int):
    cluster = InProcessCluster(num_blocks=20, num_swap_blocks=64)
    requests = [cluster.submit(make_prompt(9, seed), max_tokens=40) for seed in range(3)]
    requests.append(cluster.submit(make_prompt(9, 7), max_tokens=40, priority=priority))
    most: Counter[RequestId] = Counter()

    def watch() -> bool:
        for job in cluster.nodes[D0].machine._jobs:
            most[job.sequence.request] = max(most[job.sequence.request], job.num_yields)
        return cluster.is_quiet()

    cluster.run(until=watch)
    safe, first_to_go = (requests[3], requests[2]) if priority else (requests[0], requests[3])
    assert most[safe] == 0
    assert most[first_to_go] > 0


def test_a_request_that_is_sent_back_goes_on_where_there_is_room():
    cluster = InProcessCluster(1, 2, num_blocks=24, mode=Mode.RETURN)
    # Both have a beat in which they say how much room they have.
    cluster.run(until=lambda: cluster.now > 1.0)
    prompts = crowd(cluster, num_requests=5, max_tokens=40)
    cluster.run()
    for request, prompt in prompts.items():
        assert cluster.outcomes[request].tokens == continuation(prompt, 40)
    returned = [message for _, _, message in cluster.trace if isinstance(message, Returned)]
    assert returned
    # It is no failure, and the node it goes to knows how often it has yielded.
    assert all(cluster.records[message.request].failures == [] for message in returned)
    again = [m for _, _, m in cluster.trace if isinstance(m, Decode) and m.attempt > 1]
    assert {m.num_yields for m in again} <= set(range(1, MAX_YIELDS + 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [2, 3])
def test_samples_of_one_prompt_yield_apart(mode: Mode, n: int):
    cluster = InProcessCluster(num_blocks=18, num_swap_blocks=20, mode=mode)
    prompts = crowd(cluster, num_requests=4, max_tokens=20, n=n)
    cluster.run()
    for request, prompt in prompts.items():
        assert cluster.outcomes[request].samples == {s: continuation(prompt, 20, s) for s in range(n)}
    cluster.assert_drained()


def test_blocks_that_come_back_other_than_they_left_are_computed_again():
    cluster = InProcessCluster(num_blocks=20, num_swap_blocks=64, mode=Mode.SWAP, timing=Timing(block=0.002))
    prompts = crowd(cluster)
    node = cluster.nodes[D0]

    def spoil() -> bool:
        for slot in range(64):
            node.host.block(slot)[3] ^= 0xFF
        return True

    cluster.run(until=lambda: any(isinstance(what, SwapIn) for _, _, what in cluster.trace))
    spoil()
    cluster.run()
    check(cluster, prompts)
    assert node.machine.gauges().num_corrupt > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_clients_that_go_away_while_sequences_come_and_go_leave_nothing(mode: Mode, seed: int):
    rng = random.Random(seed)
    cluster = InProcessCluster(
        1, 2, num_blocks=20, num_swap_blocks=16, mode=mode, timing=Timing(step=0.01, block=rng.choice((0.0002, 0.02)))
    )
    prompts = crowd(cluster, num_requests=10, n=rng.choice((1, 2)), max_tokens=30)
    gone = rng.sample(list(prompts), 4)

    def go(request: RequestId) -> None:
        if not cluster.outcomes[request].is_over:
            cluster.cancel(request)
            cluster.outcomes[request].finish = "gone"

    for request in gone:
        cluster.at(rng.uniform(0.05, 1.5), lambda request=request: go(request))
    killed = NodeId(rng.choice(["P0", "D0", "D1"]))
    cluster.at(rng.uniform(0.1, 1.0), lambda: cluster.restart(killed))
    cluster.run(until=lambda: cluster.now > 2.0)
    cluster.run()
    for request, prompt in prompts.items():
        if request not in gone:
            outcome = cluster.outcomes[request]
            assert outcome.samples == {s: continuation(prompt, 30, s) for s in outcome.samples}
            assert outcome.given_up is None
    cluster.assert_drained()


@pytest.mark.parametrize("fate", list(Fate), ids=lambda fate: fate.value)
@pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_word_that_a_request_is_sent_back_may_be_lost_repeated_or_late(count: int, is_remote: bool, fate: Fate):
    cluster = InProcessCluster(num_blocks=20, mode=Mode.RETURN, max_attempts=5, is_remote=is_remote)
    hub = cluster.hub
    {Fate.LOST: hub.drop_next, Fate.TWICE: hub.repeat_next, Fate.LATE: hub.delay_next}[fate](Returned, count)
    prompts = crowd(cluster)
    cluster.run(limit_s=60)
    check(cluster, prompts)
    assert hub.num_scripted == 0
