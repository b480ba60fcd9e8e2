"""The hand-off between real schedulers on an injected clock: order, progress, bytes, and the odd cases."""

import itertools
import random

import pytest

from pdserve.cluster.messages import FirstToken, Ready, Tokens
from pdserve.decode_node.scheduler import DecodeScheduler
from tests.in_process import TINY_SPEC, VOCAB, FakeEngine, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1])
def test_every_prompt_length_around_a_block_edge_gets_the_models_tokens(num_prefill: int, num_tokens: int):
    cluster = InProcessCluster(num_prefill)
    prompt = make_prompt(num_tokens)
    cold = cluster.submit(prompt, max_tokens=7)
    cluster.run()
    warm = cluster.submit(prompt, max_tokens=7)
    cluster.run()
    assert cluster.results(cold, warm) == [continuation(prompt, 7)] * 2
    cluster.assert_drained()


@pytest.mark.parametrize("max_step_tokens", [1, 3, BLOCK, 7, 64])
def test_every_chunk_budget_gives_the_same_tokens(max_step_tokens: int):
    cluster = InProcessCluster(max_step_tokens=max_step_tokens)
    prompts = [make_prompt(n, seed=n) for n in (1, 9, 17, 30)]
    requests = [cluster.submit(prompt, max_tokens=5) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 5) for prompt in prompts]


def test_the_bytes_of_a_chunk_are_verified_before_the_next_chunk_ends():
    cluster = InProcessCluster(max_step_tokens=2 * BLOCK)
    cluster.submit(make_prompt(10 * BLOCK), max_tokens=3)
    cluster.run()
    ends: list[tuple[float, set[bytes]]] = []
    verified: dict[bytes, float] = {}
    for when, what, detail in cluster.trace:
        if what == "P0 stepped":
            ends.append((when, {seal.block_hash for seal in detail.seals}))
        elif what == "D0 verified":
            verified.update((block_hash, when) for block_hash in detail)
    assert len(ends) == 5
    for (_, sealed), (next_end, _) in itertools.pairwise(ends):
        assert len(sealed) == 2
        assert all(verified[block_hash] < next_end for block_hash in sealed)


def test_the_first_token_reaches_the_router_without_waiting_for_the_transfer():
    cluster = InProcessCluster(timing=Timing(block=5.0))
    cluster.submit(make_prompt(3 * BLOCK), max_tokens=3)
    cluster.run()
    arrived = {type(m): when for when, link, m in reversed(cluster.trace) if link.endswith(">router")}
    assert arrived[FirstToken] + 4.0 < arrived[Ready] < arrived[Tokens]


def test_hundred_requests_flow_through_pools_that_hold_two_prompts():
    """No beat passes without a chunk, a copy or a token while work waits."""
    prompt_blocks = 5
    cluster = InProcessCluster(num_blocks=2 * prompt_blocks + 2, max_step_tokens=2 * BLOCK)
    prompts = [make_prompt(prompt_blocks * BLOCK - i % 3, seed=i) for i in range(100)]
    requests = [cluster.submit(prompt, max_tokens=4) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 4) for prompt in prompts]
    progress = [when for when, what, _ in cluster.trace if what.endswith((" step", " copy", " stepped", " verified"))]
    assert max(b - a for a, b in itertools.pairwise(progress)) < 0.5
    cluster.assert_drained()


def test_a_warm_second_turn_moves_only_the_missing_blocks():
    cluster = InProcessCluster()
    first = make_prompt(6 * BLOCK)
    turn = cluster.submit(first, max_tokens=2 * BLOCK + 1)
    cluster.run()
    answer = cluster.outcomes[turn].tokens
    cluster.trace.clear()
    second = first + answer + make_prompt(3 * BLOCK, seed=2)
    cluster.submit(second, max_tokens=2)
    cluster.run()
    (ready,) = [m for _, _, m in cluster.trace if isinstance(m, Ready)]
    # The decode node has the first prompt and the answer, but for the answer's last token.
    known = (len(first) + len(answer) - 1) // BLOCK
    missing = TINY_SPEC.num_blocks_for(len(second)) - known
    assert ready.num_bytes == missing * TINY_SPEC.payload_bytes
    assert ready.num_cached_tokens == known * BLOCK


def test_a_prompt_that_ends_with_its_first_token_never_reaches_the_decode_node():
    cluster = InProcessCluster()
    prompt = make_prompt(9)
    one = cluster.submit(prompt, max_tokens=1)
    stops = cluster.submit(prompt, max_tokens=9, stop_ids=(continuation(prompt, 1)[0],))
    cluster.run()
    assert cluster.results(one, stops) == [continuation(prompt, 1)] * 2
    assert [cluster.outcomes[r].finish for r in (one, stops)] == ["length", "stop"]
    assert not any(what == "D0 step" for _, what, _ in cluster.trace)
    cluster.assert_drained()


def test_requests_with_a_common_prefix_pull_it_once():
    cluster = InProcessCluster(num_prefill=2, timing=Timing(block=0.05))
    common = make_prompt(8 * BLOCK)
    prompts = [common + make_prompt(3, seed=i) for i in range(6)]
    requests = [cluster.submit(prompt, max_tokens=3) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 3) for prompt in prompts]
    copied = [copy.hash for _, what, action in cluster.trace if what == "D0 copy" for copy in action.copies]
    assert len(copied) == len(set(copied))


def test_a_joiner_takes_over_when_the_owner_of_a_copy_is_cancelled():
    cluster = InProcessCluster(num_prefill=2, timing=Timing(block=0.05))
    common = make_prompt(8 * BLOCK)
    owner = cluster.submit([*common, 1], max_tokens=3)
    joiner = cluster.submit([*common, 2], max_tokens=3)
    cluster.run(until=lambda: any(what == "D0 copy" for _, what, _ in cluster.trace))
    cluster.cancel(owner)
    cluster.outcomes.pop(owner)
    cluster.run()
    assert cluster.outcomes[joiner].tokens == continuation([*common, 2], 3)
    cluster.assert_drained()


def test_a_corrupt_block_is_wanted_again_and_never_used():
    cluster = InProcessCluster(timing=Timing(block=0.001))
    prompt = make_prompt(4 * BLOCK)
    source = cluster.nodes["P0"].pool
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run(until=lambda: any(what == "D0 copy" for _, what, _ in cluster.trace))
    block_id = next(action for _, what, action in cluster.trace if what == "D0 copy").copies[0].source
    before = source.data[block_id].clone()
    source.data[block_id] += 1
    cluster.run(until=lambda: any(what == "D0 verified" for _, what, _ in cluster.trace))
    source.data[block_id] = before
    cluster.run()
    assert cluster.outcomes[request].tokens == continuation(prompt, 4)
    cluster.assert_drained()


def test_a_block_that_stays_corrupt_is_computed_by_the_decode_node_itself():
    class Corrupting(FakeEngine):
        """Its bytes change after their checksum was taken."""

        def step(self, plan):
            result = super().step(plan)
            for seal in plan.seals[:1]:
                self.pool.data[seal.block_id] += 1
            return result

    cluster = InProcessCluster()
    cluster.nodes["P0"].engine = Corrupting(cluster.nodes["P0"].pool)
    prompt = make_prompt(4 * BLOCK)
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run()
    first, *rest = cluster.outcomes[request].tokens
    assert rest == continuation([*prompt, first], 3)
    assert any(what == "D0 step" and detail.num_tokens > 1 for _, what, detail in cluster.trace)
    cluster.assert_drained()


def test_out_of_blocks_preempts_and_every_stream_is_still_right():
    cluster = InProcessCluster(num_blocks=14, max_step_tokens=8)
    prompts = [make_prompt(2 * BLOCK + 1, seed=i) for i in range(6)]
    requests = [cluster.submit(prompt, max_tokens=24) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 24) for prompt in prompts]
    decode = cluster.nodes["D0"].machine
    assert isinstance(decode, DecodeScheduler)
    assert decode.reservations.num_preemptions > 0
    cluster.assert_drained()


def test_cancelling_at_any_moment_leaves_nothing_behind():
    for steps in range(0, 60, 2):
        cluster = InProcessCluster(max_step_tokens=BLOCK)
        gone = cluster.submit(make_prompt(20), max_tokens=20)
        stays = cluster.submit(make_prompt(20, seed=1), max_tokens=20)
        for _ in range(steps):
            cluster._next_event()
        cluster.cancel(gone)
        cluster.outcomes.pop(gone)
        cluster.run()
        assert cluster.outcomes[stays].tokens == continuation(make_prompt(20, seed=1), 20)
        cluster.assert_drained()


def test_leases_end_by_themselves_when_the_router_is_gone():
    cluster = InProcessCluster(max_step_tokens=BLOCK)
    cluster.submit(make_prompt(20), max_tokens=200)
    cluster.run(until=lambda: len(next(iter(cluster.outcomes.values())).tokens) > 2)
    cluster.outcomes.clear()
    cluster.silence_router()
    cluster.run(until=lambda: cluster.now > 12.0)
    for node in cluster.nodes.values():
        assert node.machine.gauges().num_held == 0


@pytest.mark.parametrize("victim", ["P0", "D0"])
def test_a_dead_node_costs_an_attempt_and_no_token(victim: str):
    for steps in range(5, 120, 5):
        cluster = InProcessCluster(num_prefill=2, num_decode=2, max_step_tokens=BLOCK)
        prompts = [make_prompt(13 + i, seed=i) for i in range(4)]
        requests = [cluster.submit(prompt, max_tokens=12) for prompt in prompts]
        for _ in range(steps):
            cluster._next_event()
        cluster.kill(victim)
        cluster.run()
        assert cluster.results(*requests) == [continuation(prompt, 12) for prompt in prompts]
        cluster.assert_drained()


def test_the_last_prefill_node_dies_and_the_decode_node_finishes_alone():
    cluster = InProcessCluster(max_step_tokens=BLOCK)
    prompts = [make_prompt(20, seed=i) for i in range(3)]
    requests = [cluster.submit(prompt, max_tokens=6) for prompt in prompts]
    for _ in range(12):
        cluster._next_event()
    cluster.kill("P0")
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 6) for prompt in prompts]
