"""The rules of the hand-off, each by what goes wrong without it. See also test_bad_network and test_verified."""

import random

import pytest

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.messages import Decode, FirstToken, Have, Prefill, Ready, Release, Tokens, Want
from pdserve.core.ids import NodeId, RequestId
from pdserve.decode_node.scheduler import DecodeScheduler
from pdserve.engine.step import StepPlan
from tests.in_process import BEAT_S, ROUTER, TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation, written

BLOCK = TINY_SPEC.block_size
P0, D0, D1 = (NodeId(name) for name in ("P0", "D0", "D1"))
both_ways = pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def seen(cluster: InProcessCluster, what: str) -> list[tuple[float, object]]:
    return [(when, detail) for when, label, detail in cluster.trace if label == what]


def messages(cluster: InProcessCluster, kind: type) -> list:
    return [message for _, _, message in cluster.trace if isinstance(message, kind)]


def attempts(cluster: InProcessCluster) -> set[int]:
    return {message.attempt for message in messages(cluster, Prefill) + messages(cluster, Decode)}


def cancel(cluster: InProcessCluster, request: RequestId) -> None:
    cluster.cancel(request)
    del cluster.outcomes[request]


# ---- reservations --------------------------------------------------------------------------------


def test_a_stream_that_grows_takes_back_a_prompt_that_is_still_coming_before_it_drops_another_stream():
    cluster = InProcessCluster(num_blocks=21, max_step_tokens=BLOCK)
    prompts = [make_prompt(BLOCK), make_prompt(16 * BLOCK, seed=1)]
    stream = cluster.submit(prompts[0], max_tokens=8 * BLOCK)
    cluster.run(until=lambda: len(cluster.outcomes[stream].tokens) > 2)
    coming = cluster.submit(prompts[1], max_tokens=4)
    cluster.run()
    assert cluster.results(stream, coming) == [continuation(prompts[0], 8 * BLOCK), continuation(prompts[1], 4)]
    decode = cluster.nodes[D0].machine
    assert isinstance(decode, DecodeScheduler)
    assert decode.reservations.num_preemptions == 0
    lengths = [len(action.copies) for _, action in seen(cluster, "D0 copy")]
    assert sum(lengths) < 17 + 1 + 16, "what was verified before is not copied again"
    assert len(messages(cluster, Ready)) == 2


# ---- what is written, and when it is free --------------------------------------------------------


@both_ways
def test_no_stream_writes_into_a_block_that_another_reads(is_remote: bool):
    cluster = InProcessCluster(is_remote=is_remote)
    prompt = make_prompt(3 * BLOCK + 2)
    requests = [cluster.submit(prompt, max_tokens=3 * BLOCK) for _ in range(3)]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 3 * BLOCK)] * 3
    steps = [plan for _, plan in seen(cluster, "D0 step") if isinstance(plan, StepPlan)]
    pairs = [(a, b) for plan in steps for a in plan.rows for b in plan.rows if a.key != b.key]
    assert len(pairs) > 2 * BLOCK
    assert not [1 for a, b in pairs if set(written(a, BLOCK)) & set(b.block_ids)]


@both_ways
def test_a_block_that_a_step_writes_is_the_target_of_no_copy_until_the_step_has_ended(is_remote: bool):
    cluster = InProcessCluster(num_blocks=10, max_step_tokens=64, is_remote=is_remote, timing=Timing(step=1.0))
    leaves = cluster.submit(make_prompt(4 * BLOCK), max_tokens=8)
    stays = cluster.submit(make_prompt(8 * BLOCK, seed=1), max_tokens=2)
    cluster.run(until=lambda: len(cluster.outcomes[stays].tokens) == 1 and len(seen(cluster, "D0 step")) > 1)
    (began, plan) = seen(cluster, "D0 step")[-1]
    before = len(seen(cluster, "D0 copy"))
    cluster.run(until=lambda: cluster.now > began + 0.1)
    cancel(cluster, leaves)
    cluster.run()
    ended = next(when for when, detail in seen(cluster, "D0 stepped") if detail is plan)
    assert ended > began + 0.9
    assert seen(cluster, "D0 copy")[before][0] >= ended
    assert cluster.results(stays) == [continuation(make_prompt(8 * BLOCK, seed=1), 2)]


@both_ways
def test_a_block_that_a_copy_writes_is_the_target_of_no_other_until_the_copy_has_ended(is_remote: bool):
    cluster = InProcessCluster(num_blocks=10, max_step_tokens=64, is_remote=is_remote, timing=Timing(block=0.2))
    leaves = cluster.submit(make_prompt(6 * BLOCK), max_tokens=8)
    stays = cluster.submit(make_prompt(6 * BLOCK, seed=1), max_tokens=2)
    cluster.run(until=lambda: bool(seen(cluster, "D0 copy")))
    cancel(cluster, leaves)
    cluster.run()
    free_at: dict[int, float] = {}
    for when, action in seen(cluster, "D0 copy"):
        targets = [copy.target for copy in action.copies]
        assert all(free_at.get(target, 0.0) <= when for target in targets)
        free_at |= dict.fromkeys(targets, when + cluster.timing.block * len(targets))
    assert len(seen(cluster, "D0 copy")) > 1
    assert cluster.results(stays) == [continuation(make_prompt(6 * BLOCK, seed=1), 2)]
    cluster.assert_drained()


# ---- leases --------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", [P0, D0])
def test_a_pause_of_a_node_ends_no_lease_that_was_renewed_meanwhile(node: NodeId):
    cluster = InProcessCluster(max_step_tokens=BLOCK, timing=Timing(step=0.9))
    prompt = make_prompt(8 * BLOCK)
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run(until=lambda: cluster.now > 0.6)
    # The lease is 5 s: this silence and the pause are longer, and the beats in between are read too late.
    cluster.silence_router(2.3)
    cluster.run(until=lambda: cluster.now > 2.8)
    cluster.hold_up(node, 2.9)
    cluster.run(limit_s=40)
    assert cluster.results(request) == [continuation(prompt, 4)]
    assert attempts(cluster) == {1}


@both_ways
@pytest.mark.parametrize("moment", [Want, Have, FirstToken, Ready, Tokens])
def test_what_is_held_for_a_router_that_is_gone_is_free_after_one_lease(moment: type, is_remote: bool):
    cluster = InProcessCluster(max_step_tokens=BLOCK, is_remote=is_remote, timing=Timing(step=0.1))
    # So that the prefill node, too, has nothing but the lease.
    cluster.hub.drop_next(Release)
    cluster.submit(make_prompt(4 * BLOCK), max_tokens=100)
    cluster.run(until=lambda: bool(messages(cluster, moment)))
    cluster.outcomes.clear()
    cluster.silence_router()
    last_beat = cluster.now
    cluster.run(until=lambda: cluster.now > last_beat + DEFAULT_LEASE_S + 2 * BEAT_S)
    for node in cluster.nodes.values():
        gauges = node.machine.gauges()
        assert (gauges.num_held, gauges.num_leased, gauges.num_reserved, gauges.num_leases) == (0, 0, 0, 0)
        assert node.machine.is_idle


# ---- who is gone, and who comes back -------------------------------------------------------------


def test_a_source_that_dies_after_it_has_announced_everything_costs_nothing():
    """What has been announced is copied from its memory, which outlives it."""
    cluster = InProcessCluster(timing=Timing(block=0.5))
    prompt = make_prompt(3 * BLOCK)
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run(until=lambda: any(type(m).__name__ == "End" for m in messages(cluster, object)))
    cluster.run(until=lambda: bool(seen(cluster, "D0 copy")))
    cluster.kill(P0)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 4)]
    assert attempts(cluster) == {1}
    cluster.assert_drained()


def test_a_source_that_dies_with_blocks_on_their_way_costs_an_attempt_and_no_token():
    cluster = InProcessCluster(num_prefill=2, is_remote=True, max_step_tokens=BLOCK)
    prompt = make_prompt(6 * BLOCK)
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run(until=lambda: bool(seen(cluster, "D0 copy")))
    cluster.kill(P0)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 4)]
    assert attempts(cluster) == {1, 2}
    cluster.assert_drained()


@both_ways
def test_the_loss_of_the_source_after_ready_costs_nothing(is_remote: bool):
    cluster = InProcessCluster(is_remote=is_remote)
    prompt = make_prompt(3 * BLOCK)
    request = cluster.submit(prompt, max_tokens=20)
    cluster.run(until=lambda: bool(messages(cluster, Ready)))
    cluster.kill(P0)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 20)]
    assert attempts(cluster) == {1}


def test_a_lost_first_token_delays_its_stream_by_the_hand_off_and_breaks_nothing():
    cluster = InProcessCluster()
    prompt = make_prompt(3 * BLOCK)
    cluster.hub.drop_next(FirstToken)
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 4)]
    assert attempts(cluster) == {1}
    assert cluster.outcomes[request].arrivals[0] == cluster.outcomes[request].arrivals[1] < BEAT_S


def test_a_later_attempt_finds_the_blocks_of_the_one_it_ends_on_both_nodes():
    cluster = InProcessCluster()
    prompt = make_prompt(8 * BLOCK + 1)
    request = cluster.submit(prompt, max_tokens=12)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) == 6)
    cluster.reset_link(D0, ROUTER)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 12)]
    first, second = messages(cluster, FirstToken)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 8 * BLOCK)
    first, second = messages(cluster, Ready)
    assert (first.num_blocks, first.attempt) == (9, 1)
    assert (second.num_blocks, second.attempt) == (1, 2), "only the block at the end is new to the decode node"


@pytest.mark.parametrize(("node", "kind", "num_prefill"), [(P0, Prefill, 1), (D0, Decode, 1), (D0, Decode, 0)])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_request_that_ended_is_not_begun_again_by_a_late_copy_of_it(
    node: NodeId, kind: type, num_prefill: int, is_cancelled: bool
):
    cluster = InProcessCluster(num_prefill)
    request = cluster.submit(make_prompt(3 * BLOCK), max_tokens=4)
    if is_cancelled:
        cluster.run(until=lambda: bool(messages(cluster, kind)))
        cancel(cluster, request)
    cluster.run()
    (late,) = messages(cluster, kind)
    num_steps = len(seen(cluster, f"{node} step"))
    cluster.hub.send(ROUTER, node, late, cluster.now)
    end = cluster.now + 2 * BEAT_S
    cluster.run(until=lambda: cluster.now > end)
    assert cluster.nodes[node].machine.is_drained
    assert len(seen(cluster, f"{node} step")) == num_steps


# ---- what travels --------------------------------------------------------------------------------


def test_a_continued_stream_draws_with_the_index_at_which_it_stopped():
    cluster = InProcessCluster(num_decode=2)
    prompt = make_prompt(3 * BLOCK)
    request = cluster.submit(prompt, max_tokens=12)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) == 5)
    cluster.trace.clear()
    cluster.kill(D0)
    cluster.run()
    plans = [detail for _, _, detail in cluster.trace if isinstance(detail, StepPlan)]
    drawn = {spec.output_index for plan in plans for row in plan.rows for spec in row.samples}
    assert drawn == set(range(5, 12))
    assert {len(message.samples[0].outputs) // 4 for message in messages(cluster, Prefill)} == {5}
    assert cluster.results(request) == [continuation(prompt, 12)]


def test_tokens_that_were_lost_one_by_one_come_in_one_message():
    cluster = InProcessCluster()
    prompt = make_prompt(3)
    for count in (2, 3, 4):
        cluster.hub.drop_next(Tokens, count)
    request = cluster.submit(prompt, max_tokens=10)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 10)]
    arrivals = cluster.outcomes[request].arrivals
    assert max(arrivals.count(moment) for moment in arrivals) >= 4
    assert attempts(cluster) == {1}


# ---- one copy for all ----------------------------------------------------------------------------


@both_ways
def test_a_request_that_waits_for_anothers_copy_and_leaves_takes_nothing_from_it(is_remote: bool):
    cluster = InProcessCluster(num_prefill=2, is_remote=is_remote, timing=Timing(block=0.05))
    common = make_prompt(8 * BLOCK)
    owner, joiner = [cluster.submit([*common, i], max_tokens=3) for i in range(2)]
    cluster.run(until=lambda: bool(seen(cluster, "D0 copy")) and cluster.now > 0.1)
    cancel(cluster, joiner)
    cluster.run()
    assert cluster.results(owner) == [continuation([*common, 0], 3)]
    copied = [copy.hash for _, action in seen(cluster, "D0 copy") for copy in action.copies]
    shared = cluster.hasher.hashes(common)
    assert sorted(block_hash for block_hash in copied if block_hash in shared) == sorted(shared)
    assert len(cluster.nodes[D0].machine.pool.match(shared)) == 8
    cluster.assert_drained()
