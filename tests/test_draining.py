"""A node that is told to end takes no new work, loses nothing, and is told when nobody needs it any more."""

import random

import pytest

from pdserve.cluster.messages import Cancel, Decode, Prefill, Tokens
from pdserve.core.ids import NodeId
from tests.in_process import BEAT_S, VOCAB, InProcessCluster, continuation

P0, P1, D0, D1 = (NodeId(name) for name in ("P0", "P1", "D0", "D1"))


def make_prompts(count: int, num_tokens: int = 30) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(VOCAB) for _ in range(num_tokens)] for _ in range(count)]


def given(cluster: InProcessCluster, node: NodeId) -> list[bytes]:
    """Requests that the router has given this node, in order."""
    return [m.request for _, link, m in cluster.trace if link == f"router>{node}" and isinstance(m, Prefill | Decode)]


@pytest.mark.parametrize(("leaving", "staying"), [(P0, P1), (D0, D1)], ids=["prefill", "decode"])
def test_what_a_leaving_node_has_it_finishes_and_it_gets_nothing_new(leaving: NodeId, staying: NodeId):
    cluster = InProcessCluster(num_prefill=2, num_decode=2)
    cluster.run(until=lambda: cluster.now > 0.6)
    prompts = make_prompts(8)
    requests = [cluster.submit(prompt, max_tokens=20) for prompt in prompts[:4]]
    cluster.run(until=lambda: len(given(cluster, leaving)) == len(given(cluster, staying)) == 2)
    had = given(cluster, leaving)
    cluster.leave(leaving)
    cluster.run(until=lambda: cluster.dispatcher.nodes[leaving].is_leaving)
    assert not cluster.nodes[leaving].machine.is_drained
    requests += [cluster.submit(prompt, max_tokens=20) for prompt in prompts[4:]]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, 20) for prompt in prompts]
    assert given(cluster, leaving) == had
    assert cluster.nodes[leaving].machine.is_drained
    cluster.assert_drained()


def test_a_decode_node_stays_until_the_router_has_its_last_tokens():
    cluster = InProcessCluster()
    (prompt,) = make_prompts(1)
    request = cluster.submit(prompt, max_tokens=6)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) == 3)
    cluster.leave(D0)
    # The step after the next one draws the last token: that message is lost, and asked for again.
    cluster.hub.drop_next(Tokens, 3, sender=D0)
    cluster.run(until=lambda: cluster.nodes[D0].machine.is_idle)
    assert len(cluster.outcomes[request].tokens) == 5
    assert not cluster.nodes[D0].machine.is_drained
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 6)]
    cluster.run(until=lambda: cluster.nodes[D0].machine.is_drained)


def test_a_leaving_node_does_not_wait_for_a_word_that_was_lost():
    cluster = InProcessCluster()
    (prompt,) = make_prompts(1)
    request = cluster.submit(prompt, max_tokens=6)
    cluster.hub.drop_next(Cancel, sender=NodeId("router"), peer=D0)
    cluster.run(until=lambda: cluster.outcomes[request].is_over)
    over = cluster.now
    cluster.leave(D0)
    cluster.run(until=lambda: cluster.nodes[D0].machine.is_drained)
    assert cluster.now - over < 2 * BEAT_S


def test_an_idle_node_can_go_at_once():
    cluster = InProcessCluster()
    cluster.leave(P0)
    assert cluster.nodes[P0].machine.is_drained


def test_a_cluster_whose_only_node_of_a_role_leaves_says_so():
    cluster = InProcessCluster()
    cluster.leave(P0)
    cluster.run(until=lambda: cluster.dispatcher.nodes[P0].is_leaving)
    assert cluster.dispatcher.nodes.readiness() == (False, "no prefill node has joined")
