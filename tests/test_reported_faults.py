"""Faults that were reported of other engines with separate prefill and decode nodes, each had here in one process.

What is wrong with one input is looked for at every moment around it: text of another request, tokens too
many or too few, blocks that stay, answers made of KV that was never computed, waits without an end.
"""

import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from pdserve.cluster.messages import Cancel, Decode, End, FirstToken, Prefill, Stage
from pdserve.core.ids import NodeId, RequestId
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0, P1, D0 = NodeId("P0"), NodeId("P1"), NodeId("D0")
is_remote = pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def steps(cluster: InProcessCluster, node: NodeId) -> list:
    return [plan for _, what, plan in cluster.trace if what == f"{node} step"]


def sent(cluster: InProcessCluster, kind: type) -> list:
    return [message for _, _, message in cluster.trace if isinstance(message, kind)]


def hang_up(cluster: InProcessCluster, request: RequestId) -> None:
    """The client goes; whatever was sent to it is nobody's business any more."""
    if not cluster.outcomes[request].is_over:
        cluster.cancel(request)
    del cluster.outcomes[request]


@is_remote
@pytest.mark.parametrize("block_s", [0.01 * count for count in range(1, 9)])
def test_a_copy_of_a_cancelled_request_never_writes_into_the_blocks_of_the_next_one(is_remote: bool, block_s: float):
    """The pool is so small that the next request needs the very blocks which a slow copy still writes to."""
    cluster = InProcessCluster(num_blocks=8, max_step_tokens=6 * BLOCK, is_remote=is_remote)
    cluster.timing.block = block_s
    gone = cluster.submit(make_prompt(6 * BLOCK), 8)
    cluster.run(until=lambda: any(what == "D0 copy" for _, what, _ in cluster.trace))
    hang_up(cluster, gone)
    cluster.timing.block = 0.0001
    prompt = make_prompt(6 * BLOCK, seed=1)
    follows = cluster.submit(prompt, 8)
    cluster.run()
    assert cluster.results(follows) == [continuation(prompt, 8)]
    cluster.assert_drained()


@pytest.mark.parametrize("cooperative", [False, True], ids=["split", "cooperative"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_max_tokens_is_exact_and_a_single_token_is_never_handed_off(num_tokens: int, cooperative: bool):
    cluster = InProcessCluster(cooperative=cooperative)
    prompt = make_prompt(2 * BLOCK + 1)
    request = cluster.submit(prompt, num_tokens)
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, num_tokens)]
    assert cluster.outcomes[request].finish == "length"
    assert len(steps(cluster, D0)) == num_tokens - 1
    assert len(sent(cluster, Decode)) == (num_tokens > 1)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_stop_token_ends_the_stream_where_it_is_whichever_node_drew_it(position: int):
    cluster = InProcessCluster()
    prompt = make_prompt(2 * BLOCK + 1)
    expected = continuation(prompt, position + 1)
    request = cluster.submit(prompt, 50, stop_ids=(expected[-1],))
    cluster.run()
    assert cluster.results(request) == [expected]
    assert cluster.outcomes[request].finish == "stop"
    assert len(steps(cluster, D0)) == position
    cluster.assert_drained()


@is_remote
def test_a_hundred_clients_that_leave_around_the_hand_over_cost_later_ones_nothing(is_remote: bool):
    rng = random.Random(3)
    cluster = InProcessCluster(num_blocks=24, timing=Timing(step=0.002, block=0.001), is_remote=is_remote)
    usual = cluster.submit(make_prompt(30, seed=5), 8)
    cluster.run()
    (usual_s,) = [outcome.arrivals[0] for request, outcome in cluster.outcomes.items() if request == usual]
    for turn in range(100):
        request = cluster.submit(make_prompt(10 * BLOCK + rng.randrange(BLOCK), seed=100 + turn), 8)
        cluster.at(rng.random() * 0.05, lambda request=request: hang_up(cluster, request))
        cluster.run(until=lambda request=request: request not in cluster.outcomes)
    cluster.run()
    cluster.assert_drained()
    for seed in range(20):
        started = cluster.now
        request = cluster.submit(make_prompt(30, seed=seed), 8)
        cluster.run()
        assert cluster.results(request) == [continuation(make_prompt(30, seed=seed), 8)]
        assert cluster.outcomes[request].arrivals[0] - started <= usual_s + 1e-9
    cluster.assert_drained()


@pytest.mark.parametrize("node", [P0, D0])
def test_a_cancel_that_is_lost_frees_everything_within_a_lease(node: NodeId):
    for moment in range(0, 40, 4):
        cluster = InProcessCluster(max_step_tokens=BLOCK)
        request = cluster.submit(make_prompt(20), 20)
        for _ in range(moment):
            cluster._next_event()
        cluster.hub.drop_next(Cancel, peer=node)
        hang_up(cluster, request)
        gone_at = cluster.now
        cluster.run()
        assert cluster.now - gone_at <= 5.0 + 2 * 0.5
        cluster.assert_drained()


def tell_wrong_counts(cluster: InProcessCluster, num_times: int) -> None:
    """The next Ends say that one token less was computed than the prompt has."""
    send = cluster.hub.send
    left = [num_times]

    def telling(sender, peer, message, now):
        if isinstance(message, End) and left[0] > 0:
            left[0] -= 1
            message = replace(message, count=message.count - 1)
        send(sender, peer, message, now)

    cluster.hub.send = telling  # type: ignore[method-assign]


@is_remote
def test_a_prompt_of_which_a_part_was_never_computed_is_never_decoded(is_remote: bool):
    cluster = InProcessCluster(is_remote=is_remote)
    tell_wrong_counts(cluster, 1)
    prompt = make_prompt(5 * BLOCK + 1)
    request = cluster.submit(prompt, 8)
    cluster.run(until=lambda: len(sent(cluster, FirstToken)) == 2)
    assert steps(cluster, D0) == []
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 8)]
    cluster.assert_drained()


def test_a_prompt_that_is_never_computed_as_a_whole_ends_with_an_error_that_names_both_numbers():
    cluster = InProcessCluster()
    tell_wrong_counts(cluster, 100)
    request = cluster.submit(make_prompt(21), 8)
    cluster.run()
    outcome = cluster.outcomes[request]
    assert outcome.finish is None
    assert "handoff failed in 3 attempts" in outcome.given_up
    assert "P0 computed 22 tokens of 23" in outcome.given_up
    assert steps(cluster, D0) == []
    cluster.assert_drained()


@pytest.mark.parametrize("num_prefill", [1, 2])
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_a_prefill_node_that_falls_silent_in_the_middle_is_noticed_and_its_prompt_computed_elsewhere(
    num_prefill: int, num_chunks: int
):
    """It says nothing more and nobody hears of it, until the router has missed it for node_lost_s = 3 s."""
    cluster = InProcessCluster(num_prefill, max_step_tokens=2 * BLOCK)
    prompt = make_prompt(6 * BLOCK)
    request = cluster.submit(prompt, 8)
    cluster.run(until=lambda: bool(sent(cluster, Prefill)) and len(steps(cluster, P0)) >= num_chunks)
    cluster.hub.kill(P0)
    cluster.nodes[P0].alive = False
    silent_since = cluster.now
    cluster.at(3.0, lambda: cluster.kill(P0))
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 8)]
    assert cluster.now - silent_since < 3.0 + 1.0
    cluster.assert_drained()


@is_remote
def test_cancelling_after_the_source_is_gone_waits_for_no_word_of_it(is_remote: bool):
    for moment in range(6, 40, 2):
        cluster = InProcessCluster(max_step_tokens=2 * BLOCK, timing=Timing(block=0.05), is_remote=is_remote)
        request = cluster.submit(make_prompt(6 * BLOCK), 8)
        for _ in range(moment):
            cluster._next_event()
        cluster.kill(P0)
        hang_up(cluster, request)
        gone_at = cluster.now
        cluster.run()
        # Only what was being written when the client left is waited for.
        assert cluster.now - gone_at <= 6 * cluster.timing.block + 0.5
        cluster.assert_drained()


def test_what_is_computed_again_after_a_preemption_counts_as_no_prefix_hit():
    cluster = InProcessCluster(num_blocks=14, max_step_tokens=8)
    requests = [cluster.submit(make_prompt(2 * BLOCK + 1, seed=i), 24) for i in range(6)]
    records = [cluster.dispatcher.find(request) for request in requests]
    cluster.run()
    assert cluster.nodes[D0].machine.reservations.num_preemptions > 0
    assert [record.num_cached_tokens for record in records] == [0] * len(records)


def test_running_and_waiting_requests_at_the_limit_of_a_batch_still_all_get_their_turn():
    cluster = InProcessCluster(num_blocks=24, max_running=2)
    prompts = [make_prompt(BLOCK + i, seed=i) for i in range(12)]
    requests = [cluster.submit(prompt, 6) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 6) for prompt in prompts]
    assert all(len(plan.rows) <= 2 for plan in steps(cluster, D0))


def test_every_message_of_a_request_that_is_over_changes_nothing_more():
    """All that was ever said is said again, in order, after the end: late results and notices free nothing twice."""
    for moment in range(2, 40, 3):
        cluster = InProcessCluster(max_step_tokens=BLOCK)
        gone = cluster.submit(make_prompt(18), 20)
        stays = cluster.submit(make_prompt(18, seed=1), 20)
        for _ in range(moment):
            cluster._next_event()
        hang_up(cluster, gone)
        said = [(link.split(">"), message) for _, link, message in cluster.trace if ">" in link]
        for (sender, peer), message in said:
            if getattr(message, "request", None) == gone:
                cluster.hub.send(NodeId(sender), NodeId(peer), message, cluster.now)
        cluster.run()
        assert cluster.results(stays) == [continuation(make_prompt(18, seed=1), 20)]
        assert cluster.now < 1.0, "something was only freed when its lease ended"
        cluster.assert_drained()


def test_the_stage_that_failed_is_named_when_no_attempt_is_left():
    cluster = InProcessCluster(max_attempts=1)
    request = cluster.submit(make_prompt(9), 4)
    cluster.run(until=lambda: bool(sent(cluster, Prefill)))
    cluster.kill(P0)
    cluster.run()
    assert f"{Stage.PREFILL} failed in 1 attempts: lost P0" in cluster.outcomes[request].given_up
    cluster.assert_drained()


NAMES = """
from pdserve.core.block_hash import NO_PARENT, BlockHasher
hasher = BlockHasher(b"f" * 32, 4, salt=b"somebody")
print([name.hex() for name in [*hasher.hashes(list(range(9))), hasher.extend(NO_PARENT, [1, 2, 3, 4])]])
"""


def test_processes_name_blocks_alike_whatever_seed_their_hash_has():
    """Named by hash(), what one node sends another would never find."""
    said = {
        subprocess.run(
            [sys.executable, "-c", NAMES],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(said) == 1
