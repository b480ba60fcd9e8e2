"""Odd moments of whole clusters, each by itself: events that come late, twice, in pairs, or not at all."""

import random

import pytest

from pdserve.cluster.events import Received
from pdserve.cluster.memory import MemoryHub
from pdserve.cluster.messages import (
    Cancel,
    Capacity,
    Decode,
    End,
    Facts,
    Failed,
    Hello,
    Live,
    Prefill,
    Role,
    Sample,
    Tokens,
    Want,
)
from pdserve.core.block_hash import pack_token_ids
from pdserve.core.ids import NodeId
from pdserve.core.sampling import SamplingParams
from tests.in_process import TINY_SPEC, VOCAB, FakeEngine, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0, D0 = NodeId("P0"), NodeId("D0")
FACTS = Facts("model", "tokenizer", "spec", b"kv", "float32", ("float32",))


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def seen(cluster: InProcessCluster, what: str) -> list:
    return [detail for _, label, detail in cluster.trace if label == what]


class Corrupting(FakeEngine):
    """The bytes of the first block of each step change after their checksum was taken."""

    def step(self, plan):
        result = super().step(plan)
        for seal in plan.seals[:1]:
            self.pool.data[seal.block_id] += 1
        return result


def test_a_block_is_never_written_by_two_copies_at_once():
    cluster = InProcessCluster(num_prefill=3, timing=Timing(block=0.05))
    common = make_prompt(8 * BLOCK)
    first, second, third = [cluster.submit([*common, i], max_tokens=3) for i in range(3)]
    cluster.run(until=lambda: bool(seen(cluster, "D0 copy")))
    for gone in (first, second):
        cluster.cancel(gone)
        cluster.outcomes.pop(gone)
    cluster.run()
    assert cluster.outcomes[third].tokens == continuation([*common, 2], 3)
    targets = [copy.target for action in seen(cluster, "D0 copy") for copy in action.copies]
    assert len(targets) == len(set(targets))
    cluster.assert_drained()


def test_a_pull_that_failed_before_a_lost_end_still_ends():
    hub = MemoryHub(latency_s=0.0001)
    for count in (1, 2):
        hub.drop_next(End, count)
    cluster = InProcessCluster(hub=hub)
    cluster.nodes[P0].engine = Corrupting(cluster.nodes[P0].pool)
    prompt = make_prompt(4 * BLOCK)
    request = cluster.submit(prompt, max_tokens=4)
    cluster.run(limit_s=20)
    first, *rest = cluster.outcomes[request].tokens
    assert rest == continuation([*prompt, first], 3)


def test_a_request_that_waits_for_blocks_does_not_wait_for_a_source_that_was_replaced():
    """Its announcements name blocks of an incarnation that is gone, whoever has its name now."""
    cluster = InProcessCluster(num_blocks=12, max_step_tokens=8 * BLOCK)
    long = cluster.submit(make_prompt(6 * BLOCK), max_tokens=5 * BLOCK)
    cluster.run(until=lambda: len(cluster.outcomes[long].tokens) > 1)
    waits = cluster.submit(make_prompt(7 * BLOCK, seed=1), max_tokens=2)
    cluster.run(until=lambda: len(cluster.outcomes[waits].tokens) == 1)
    cluster.run(until=lambda: any(isinstance(m, End) for m in seen(cluster, "P0>D0")[-1:]))
    cluster.restart(P0)
    cluster.run(limit_s=30)
    assert cluster.results(waits) == [continuation(make_prompt(7 * BLOCK, seed=1), 2)]
    cluster.assert_drained()


def test_a_want_for_what_never_comes_is_answered_after_one_lease():
    cluster = InProcessCluster()
    cluster.hub.send(D0, P0, Want(b"x" * 16, 1, 1, ()), 0.0)
    for beat in range(1, 12):
        cluster.at(0.5 * beat, lambda seq=beat: cluster.hub.send(D0, P0, Want(b"x" * 16, 1, seq, ()), cluster.now))
    cluster.run(until=lambda: cluster.now > 8)
    gone = [when for when, link, m in cluster.trace if link == "P0>D0" and type(m).__name__ == "Gone"]
    assert 5.0 <= gone[0] <= 6.0


def test_a_late_cancel_of_an_earlier_attempt_leaves_the_later_ones_tokens():
    cluster = InProcessCluster(num_prefill=0)
    request = cluster.submit(make_prompt(5), max_tokens=3)
    decode = cluster.nodes[D0].machine
    cluster.hub.drop_next(Cancel)
    cluster.run(until=lambda: cluster.outcomes[request].is_over)
    cluster.hub.send(NodeId("router"), D0, Cancel(request, 0), cluster.now)
    # At the next beat the router says again what was lost.
    cluster.run(until=lambda: cluster.now > 0.4)
    assert [entry.request for entry in decode.held(1).entries] == [request]


def test_what_the_prefill_node_has_cached_is_copied_while_another_prompts_step_runs():
    cluster = InProcessCluster(num_decode=2, max_step_tokens=8 * BLOCK, timing=Timing(step=1.0))
    cached = make_prompt(6 * BLOCK)
    cluster.submit(cached, max_tokens=1)
    cluster.run()
    cluster.trace.clear()
    cluster.submit(make_prompt(8 * BLOCK, seed=1), max_tokens=1)
    cluster.run(until=lambda: bool(seen(cluster, "P0 step")))
    cluster.submit([*cached, 1], max_tokens=2)
    cluster.run()
    first_copy = next(when for when, what, _ in cluster.trace if what.endswith(" copy"))
    first_stepped = next(when for when, what, _ in cluster.trace if what == "P0 stepped")
    assert first_copy < first_stepped


@pytest.mark.parametrize("node", [P0, D0])
def test_messages_that_are_not_for_this_role_or_not_from_this_sender_are_dropped(node: NodeId):
    cluster = InProcessCluster()
    request = cluster.submit(make_prompt(9), max_tokens=3)
    cluster.run(until=lambda: bool(seen(cluster, "P0 step")))
    strange = [Hello(P0, Role.PREFILL, FACTS, Capacity(1, 1, 1, 1, 1)), Cancel(request, 9), Live(1, ()), Tokens(())]
    for message in strange:
        assert cluster.nodes[node].machine.handle(Received(NodeId("P7"), message), cluster.now) == []
    assert cluster.nodes[node].machine.num_unexpected == len(strange)
    cluster.run()
    assert cluster.results(request) == [continuation(make_prompt(9), 3)]


@pytest.mark.parametrize("kind", [Prefill, Decode])
def test_a_request_that_makes_no_sense_fails_by_itself(kind: type):
    cluster = InProcessCluster()
    node = cluster.nodes[P0 if kind is Prefill else D0].machine
    source = () if kind is Prefill else (None,)
    message = kind(b"x" * 16, 1, pack_token_ids([1, 2, 3]), (Sample(0),), (), SamplingParams(), *source)
    ((send,),) = [node.handle(Received(NodeId("router"), message), 0.0)]
    assert isinstance(send.message, Failed)
    assert "3 tokens fill 1 blocks, not 0" in send.message.reason
    assert node.is_idle


def test_a_request_that_can_never_fit_is_refused_by_the_decode_node_with_both_numbers():
    cluster = InProcessCluster(num_blocks=10)
    prompt = make_prompt(9)
    hashes = tuple(cluster.hasher.hashes(prompt))
    message = Decode(b"x" * 16, 1, pack_token_ids(prompt), (Sample(0),), hashes, SamplingParams(max_tokens=33), None)
    (send,) = cluster.nodes[D0].machine.handle(Received(NodeId("router"), message), 0.0)
    assert "up to 11 KV blocks of 10" in send.message.reason


def test_no_generation_of_one_incarnation_is_one_of_the_next():
    before, after = [InProcessCluster().nodes[P0].pool.view.generations for _ in range(2)]
    assert not set(before.tolist()) & set(after.tolist())
