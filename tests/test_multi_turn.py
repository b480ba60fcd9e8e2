"""Conversations: each turn's prompt is the turn before, its answer, and something new.

Two prefill and two decode nodes. Before the first turn the nodes that would be chosen by name are kept busy, so
that a later turn, sent while nothing else is under way, goes to the first turn's nodes for what they have cached.
"""

import itertools
import random

import pytest

from pdserve.cluster.messages import Decode, FirstToken, Prefill, Ready
from pdserve.core.cache_delta import CacheDelta
from pdserve.core.ids import NodeId, RequestId
from pdserve.router.metrics import RouterMetrics
from pdserve.router.record import Plan, Record
from tests.in_process import BEAT_S, TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0, P1, D0, D1 = (NodeId(name) for name in ("P0", "P1", "D0", "D1"))
# As on a CPU core: a step costs as much as seventeen tokens.
TIMING = Timing(step=0.02, token=0.0012)


def make_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def make_cluster(**options: object) -> InProcessCluster:
    options = {"timing": TIMING, "max_step_tokens": 64, "num_blocks": 256, **options}
    cluster = InProcessCluster(2, 2, **options)  # type: ignore[arg-type]
    wait(cluster)
    return cluster


def wait(cluster: InProcessCluster, seconds: float = 2 * BEAT_S) -> None:
    """Two beats, in which the router hears what the nodes have cached."""
    end = cluster.now + seconds
    cluster.run(until=lambda: cluster.now > end)


class Conversation:
    """One client. `records` are the router's, of each turn so far."""

    def __init__(self, cluster: InProcessCluster, seed: int = 0, num_tokens: int = 10 * BLOCK + 1):
        self.cluster = cluster
        self.tokens = make_tokens(num_tokens, seed)
        self.records: list[Record] = []
        self._seed = seed
        self._request: RequestId | None = None

    def ask(self, max_tokens: int = 5 * BLOCK) -> None:
        self._request = self.cluster.submit(self.tokens, max_tokens=max_tokens)
        record = self.cluster.dispatcher.find(self._request)
        assert record is not None
        self.records.append(record)

    def turn(self, num_new: int = 2 * BLOCK, max_tokens: int = 5 * BLOCK) -> None:
        """Ask, take in the answer, which must be right, and something new to ask about."""
        self.ask(max_tokens)
        self.cluster.run()
        self.take(num_new)

    def leave(self) -> None:
        assert self._request is not None
        self.cluster.cancel(self._request)
        self.cluster.outcomes[self._request].given_up = "cancelled"

    def take(self, num_new: int = 2 * BLOCK) -> None:
        assert self._request is not None
        answer = self.cluster.outcomes[self._request].tokens
        assert answer == continuation(self.tokens, len(answer))
        self.tokens = [*self.tokens, *answer, *make_tokens(num_new, self._seed + len(self.records))]
        wait(self.cluster)

    @property
    def nodes(self) -> list[tuple[str | None, str | None]]:
        return [(record.prefill_node, record.decode_node) for record in self.records]


def start_elsewhere(cluster: InProcessCluster, seed: int = 0) -> Conversation:
    """A conversation whose first turn was served by P1 and D1, while P0 and D0 were busy."""
    cluster.submit(make_tokens(20 * BLOCK, seed=90), max_tokens=2)
    talk = Conversation(cluster, seed)
    talk.turn()
    assert talk.nodes == [(P1, D1)]
    return talk


def sent(cluster: InProcessCluster, kind: type) -> list:
    return [message for _, _, message in cluster.trace if isinstance(message, kind)]


def moved_blocks(record: Record) -> int:
    assert record.bytes_moved % TINY_SPEC.payload_bytes == 0
    return record.bytes_moved // TINY_SPEC.payload_bytes


# ---- where turns go --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
def test_later_turns_go_to_the_nodes_of_the_first_and_move_only_what_is_missing(is_remote: bool):
    cluster = make_cluster(is_remote=is_remote)
    talk = start_elsewhere(cluster)
    for _ in range(3):
        before, num_known = len(talk.tokens), (len(talk.tokens) - 2 * BLOCK - 1) // BLOCK
        talk.turn()
        record = talk.records[-1]
        # The decode node has the last turn and its answer, but for the answer's last token, which was never run.
        assert moved_blocks(record) == TINY_SPEC.num_blocks_for(before) - num_known
        assert record.num_cached_tokens == num_known * BLOCK
    assert talk.nodes == [(P1, D1)] * 4
    cluster.assert_drained()
    cluster.assert_views_agree()


def test_two_conversations_stay_apart():
    cluster = make_cluster()
    one, two = Conversation(cluster, seed=1), Conversation(cluster, seed=2)
    for _ in range(4):
        one.ask()
        two.ask()
        cluster.run()
        one.take()
        two.take()
    assert {*one.nodes} | {*two.nodes} == {(P0, D0), (P1, D1)}
    assert len({*one.nodes}) == len({*two.nodes}) == 1


def test_a_turn_that_comes_while_its_node_is_much_busier_goes_elsewhere_and_is_right():
    cluster = make_cluster()
    talk = start_elsewhere(cluster)
    others = [Conversation(cluster, seed) for seed in range(50, 56)]
    for other in others:
        other.ask(max_tokens=60)
    for other in [other for other in others if other.records[0].decode_node == D0]:
        others.remove(other)
        other.leave()
    talk.turn()
    assert len(others) == 3
    assert talk.nodes[-1][1] == D0


# ---- turns that decode nodes compute ---------------------------------------------------------------


def test_a_mostly_cached_turn_is_computed_where_it_decodes_and_nothing_moves():
    cluster = make_cluster(cooperative=True)
    talk = start_elsewhere(cluster)
    cluster.trace.clear()
    num_known = (len(talk.tokens) - 2 * BLOCK - 1) // BLOCK
    talk.turn()
    record = talk.records[-1]
    assert (record.plan, record.decode_node, record.bytes_moved) == (Plan.LOCAL, D1, 0)
    assert record.num_cached_tokens == num_known * BLOCK
    assert (sent(cluster, Prefill), sent(cluster, Ready)) == ([], [])
    cluster.assert_drained()


def test_a_turn_with_as_much_to_compute_on_the_decode_node_is_handed_off():
    """The prefill node lacks the answer as well, but that is the lesser part."""
    cluster = make_cluster(cooperative=True)
    talk = Conversation(cluster)
    talk.turn(num_new=20 * BLOCK)
    talk.turn()
    assert [record.plan for record in talk.records] == [Plan.SPLIT, Plan.SPLIT]


def test_streams_keep_their_promise_beside_a_mostly_cached_turn():
    tpot_s = 0.06
    cluster = make_cluster(cooperative=True, tpot_slo_s=tpot_s)
    talk = Conversation(cluster)
    talk.turn(num_new=12 * BLOCK, max_tokens=30 * BLOCK)
    for seed in (70, 71):
        cluster.submit(make_tokens(BLOCK, seed), max_tokens=150)
    wait(cluster, 1.0)
    streams = [cluster.outcomes[request] for request in list(cluster.outcomes)[-2:]]
    began = cluster.now
    talk.turn()
    assert talk.records[-1].plan is Plan.LOCAL
    for outcome in streams:
        arrivals = [at for at in outcome.arrivals if at > began]
        assert len(arrivals) > 20
        assert max(b - a for a, b in itertools.pairwise(arrivals)) < tpot_s


# ---- views that are wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [P1, D1])
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_node_that_starts_again_has_nothing_cached_and_its_next_turn_is_right(name: NodeId, cooperative: bool):
    cluster = make_cluster(cooperative=cooperative)
    talk = start_elsewhere(cluster)
    cluster.restart(name)
    assert len(cluster.dispatcher.nodes[name].cache) == 0
    wait(cluster)
    talk.turn()
    talk.turn()
    cluster.assert_drained()
    cluster.assert_views_agree()


@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("names", [(P0,), (D0,), (P0, D0), (P0, P1, D0, D1)])
def test_blocks_that_a_node_has_not_but_the_router_believes_in_change_no_token(
    names: tuple[NodeId, ...], cooperative: bool
):
    cluster = make_cluster(cooperative=cooperative)
    talk = start_elsewhere(cluster)
    hashes = tuple(cluster.hasher.hashes(talk.tokens))
    for name in names:
        view = cluster.dispatcher.nodes[name].cache
        position = view.position
        view.apply(CacheDelta(position.whole, position.until, position.until, hashes, ()))
    talk.turn()
    assert names == (P0, P1, D0, D1) or talk.nodes[-1] != (P1, D1)
    cluster.assert_drained()


def test_a_turn_whose_blocks_were_evicted_since_the_last_beat_is_right():
    cluster = make_cluster(num_blocks=40)
    talk = start_elsewhere(cluster)
    before = cluster.now
    for seed in range(8):
        cluster.submit(make_tokens(15 * BLOCK, 200 + seed), max_tokens=2 * BLOCK)
    cluster.run()
    assert cluster.now > before
    talk.turn()
    cluster.assert_drained()
    cluster.assert_views_agree()


def test_what_was_computed_for_the_first_token_is_told_apart_from_what_was_moved():
    """The prefill node finds the first prompt, the decode node the answer as well."""
    cluster = make_cluster()
    talk = start_elsewhere(cluster)
    cluster.trace.clear()
    num_known = (len(talk.tokens) - 2 * BLOCK - 1) // BLOCK
    talk.turn()
    ((first,), (ready,)) = sent(cluster, FirstToken), sent(cluster, Ready)
    assert first.num_cached_tokens == 10 * BLOCK
    assert ready.num_cached_tokens == num_known * BLOCK
    assert len(sent(cluster, Decode)) == 1


def test_prefix_hits_are_counted_by_what_they_have_spared():
    cluster = make_cluster()
    talk = start_elsewhere(cluster)
    talk.turn()
    metrics = RouterMetrics()
    for record in talk.records:
        metrics.observe(record)
    text = metrics.text(cluster.dispatcher).decode()
    first, second = talk.records
    assert f"pdserve_prompt_tokens_total {len(first.prompt) + len(second.prompt)}.0" in text
    assert f'pdserve_cached_prompt_tokens_total{{spared="computing"}} {10 * BLOCK}.0' in text
    assert f'pdserve_cached_prompt_tokens_total{{spared="moving"}} {15 * BLOCK}.0' in text
    num_known = len(cluster.dispatcher.nodes[D1].cache)
    assert f'pdserve_known_prefix_blocks{{node="D1",role="decode"}} {num_known}.0' in text
