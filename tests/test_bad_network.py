"""Whole clusters over links that lose, repeat, delay, reorder and break: right tokens, drained pools, no endless wait.

Nothing may wait for more than what repeats it. A request that a message of is lost is missed, and that within

    a Want, Have, Blocks, Fetch, End, Gone   two beats: the Want is repeated by the first beat after half a second
    a Prefill, Decode, Failed, FirstToken    two beats: the node does not name it in two answers running
    Tokens, Resume, Live, Held, Peers        one beat
    a Cancel, Release                        nobody waits for it; the blocks it would free are free after a lease

and is then computed again at worst. The limits below are these times plus the longest request of the load, twice.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pdserve.cluster.attempts import DEFAULT_LEASE_S
from pdserve.cluster.memory import Fate, Faults, MemoryHub
from pdserve.cluster.messages import (
    Bad,
    Blocks,
    Cancel,
    Decode,
    End,
    Failed,
    Fetch,
    FirstToken,
    Gone,
    Have,
    Held,
    Live,
    Peers,
    Prefill,
    Ready,
    Release,
    Resume,
    Tokens,
    Want,
)
from pdserve.core.ids import NodeId, RequestId
from pdserve.core.kv_spec import KVSpec
from tests.in_process import BEAT_S, ROUTER, TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0, P1, D0, D1 = (NodeId(name) for name in ("P0", "P1", "D0", "D1"))
# Blocks so large that four of them use the credit of a pull up.
LARGE_SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=1 << 16, dtype="float32", block_size=BLOCK)
CALM = [Prefill, Decode, Want, Have, End, FirstToken, Ready, Release, Tokens, Live, Held, Cancel]
# Those that are sent only because something else went wrong or somebody left.
ROUGH = [Peers, Gone, Bad, Failed, Resume]
REQUEST_S = 0.2
MISSED_S = 2 * BEAT_S
LIMIT_S = MISSED_S + 2 * REQUEST_S
DRAIN_S = DEFAULT_LEASE_S + 2 * BEAT_S
is_remote = pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
fate = pytest.mark.parametrize("fate", list(Fate), ids=lambda fate: fate.value)


@dataclass
class Asked:
    """One request of a load with so many samples, and when it came."""

    prompt: list[int]
    request: RequestId
    at: float
    n: int


class Load:
    """Prompts with and without a common prefix, of one or two samples, spread over a second."""

    def __init__(self, cluster: InProcessCluster, seed: int, num_requests: int = 20, max_blocks: int = 4):
        rng = random.Random(seed)
        self.cluster = cluster
        self.asked: list[Asked] = []
        self.cancelled: set[RequestId] = set()
        self._num_requests = num_requests
        common = [rng.randrange(VOCAB) for _ in range(3 * BLOCK)]
        for index in range(num_requests):
            head = common if rng.random() < 0.5 else []
            prompt = head + [rng.randrange(VOCAB) for _ in range(rng.randint(1, max_blocks * BLOCK))]
            max_tokens = rng.randint(1, 10)
            asked = (prompt, max_tokens, 1 + index % 2)
            cluster.at(rng.random(), lambda asked=asked: self._ask(*asked))

    def _ask(self, prompt: list[int], max_tokens: int, n: int) -> None:
        self.asked.append(Asked(prompt, self.cluster.submit(prompt, max_tokens, n=n), self.cluster.now, n))

    def cancel_one(self) -> None:
        """The client of the oldest request that still waits for its first token goes away."""
        waiting = [a.request for a in self.asked if not self.cluster.outcomes[a.request].tokens]
        for request in waiting[:1]:
            self.cancelled.add(request)
            self.cluster.cancel(request)
            self.cluster.outcomes[request].given_up = "cancelled"

    def run(self, limit_s: float = LIMIT_S, drain_s: float = DRAIN_S) -> None:
        """Every stream must be the model's, end within limit_s, and leave nothing behind for more than drain_s."""
        cluster = self.cluster
        cluster.run(until=lambda: len(self.asked) == self._num_requests, limit_s=10)
        cluster.run(until=lambda: all(outcome.is_over for outcome in cluster.outcomes.values()), limit_s=limit_s + 20)
        over = cluster.now
        for asked in self.asked:
            outcome = cluster.outcomes[asked.request]
            for sample, tokens in outcome.samples.items():
                assert tokens == continuation(asked.prompt, len(tokens), sample)
            if asked.request not in self.cancelled:
                assert outcome.finishes == dict.fromkeys(range(asked.n), "length"), outcome
                assert outcome.arrivals[-1] - asked.at <= limit_s
        cluster.run(limit_s=over + drain_s)
        cluster.assert_drained()


def make_cluster(is_remote: bool, **options: object) -> InProcessCluster:
    options = {"num_blocks": 24, "max_step_tokens": 8, "max_attempts": 2, **options}
    return InProcessCluster(hub=MemoryHub(latency_s=0.0001), is_remote=is_remote, **options)  # type: ignore[arg-type]


def script(cluster: InProcessCluster, fate: Fate, message_type: type, count: int) -> None:
    hub = cluster.hub
    {Fate.LOST: hub.drop_next, Fate.TWICE: hub.repeat_next, Fate.LATE: hub.delay_next}[fate](message_type, count)


# ---- one message ---------------------------------------------------------------------------------


@is_remote
@fate
@pytest.mark.parametrize("message_type", CALM)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_message_lost_repeated_or_late_once_costs_time_an_attempt_at_most_and_no_token(
    count: int, message_type: type, fate: Fate, is_remote: bool
):
    run_with_fate(message_type, count, fate, is_remote)


@fate
@pytest.mark.parametrize("count", [1, 2, 3])
def test_blocks_lost_repeated_or_late_once_cost_time_and_no_token(count: int, fate: Fate):
    run_with_fate(Blocks, count, fate, is_remote=True)


def run_with_fate(message_type: type, count: int, fate: Fate, is_remote: bool) -> None:
    cluster = make_cluster(is_remote)
    script(cluster, fate, message_type, count)
    Load(cluster, seed=count).run()
    assert cluster.hub.num_scripted == 0


@fate
@pytest.mark.parametrize("count", [1, 2, 3])
def test_credit_lost_repeated_or_late_once_costs_time_and_no_token(count: int, fate: Fate):
    cluster = make_cluster(True, spec=LARGE_SPEC)
    script(cluster, fate, Fetch, count)
    Load(cluster, seed=count, num_requests=5, max_blocks=8).run()
    assert cluster.hub.num_scripted == 0


@is_remote
@fate
@pytest.mark.parametrize("count", [1, 2])
def test_news_of_a_prefill_node_that_went_and_came_back_lost_repeated_or_late_costs_no_token(
    count: int, fate: Fate, is_remote: bool
):
    cluster = make_cluster(is_remote)
    load = Load(cluster, seed=count)
    cluster.run(until=lambda: cluster.now > 0.2)
    script(cluster, fate, Peers, count)
    cluster.reset_link(P0, ROUTER)
    load.run()
    assert cluster.hub.num_scripted == 0


def disturb(cluster: InProcessCluster, load: Load) -> None:
    """A bit of everything, so that every type of message is sent."""
    cluster.hub.drop_next(Tokens, 5)
    for bit in range(8):
        cluster.at(0.1 * bit, lambda bit=bit: flip(cluster, bit))
    for moment in (0.25, 0.35, 0.45, 0.55):
        cluster.at(moment, load.cancel_one)
    for turn, (node, peer) in enumerate([(D0, P0), (D1, P1), (D0, P1), (D1, P0), (P1, ROUTER), (D0, ROUTER)] * 2):
        cluster.at(0.2 + 0.05 * turn, lambda node=node, peer=peer: cluster.reset_link(node, peer))


def flip(cluster: InProcessCluster, bit: int) -> None:
    """Spoil a part of every block that the fake model does not look at: only who verifies can see it."""
    for node in (P0, P1):
        pool = cluster.nodes[node].pool
        for block_id in range(pool.num_blocks):
            pool.view.block(block_id)[5] ^= 1 << bit


def run_disturbed(message_type: type, count: int, fate: Fate, is_remote: bool, seed: int) -> InProcessCluster:
    cluster = make_cluster(is_remote, num_prefill=2, num_decode=2, max_attempts=5)
    script(cluster, fate, message_type, count)
    load = Load(cluster, seed, num_requests=30, max_blocks=8)
    disturb(cluster, load)
    # What befalls the message comes on top of what it is the answer to.
    load.run(limit_s=2 * LIMIT_S)
    return cluster


@is_remote
@fate
@pytest.mark.parametrize("message_type", ROUGH)
def test_a_message_that_repairs_something_may_itself_be_lost_repeated_or_late(
    message_type: type, fate: Fate, is_remote: bool
):
    # With this seed each of them is sent.
    cluster = run_disturbed(message_type, 1, fate, is_remote, seed=2)
    assert cluster.hub.num_scripted == 0


@pytest.mark.slow
@is_remote
@fate
@pytest.mark.parametrize("message_type", [*CALM, *ROUGH])
@pytest.mark.parametrize("count", range(1, 9))
def test_whatever_befalls_any_message_of_a_disturbed_cluster_costs_no_token(
    count: int, message_type: type, fate: Fate, is_remote: bool
):
    run_disturbed(message_type, count, fate, is_remote, seed=count)


# ---- a link --------------------------------------------------------------------------------------


LINKS = [(P0, ROUTER), (D0, ROUTER), (D0, P0)]


def after(cluster: InProcessCluster, num_messages: int, *link: NodeId) -> Callable[[], bool]:
    """Whether so many messages have arrived over a link, in both directions together."""
    labels = {f"{link[0]}>{link[1]}", f"{link[1]}>{link[0]}"}
    return lambda: sum(label in labels for _, label, _ in cluster.trace) >= num_messages


def run_with_reset(link: tuple[NodeId, NodeId], num_messages: int, is_remote: bool, down_s: float) -> None:
    cluster = make_cluster(is_remote)
    load = Load(cluster, seed=num_messages)
    cluster.run(until=after(cluster, num_messages, *link), limit_s=10)
    cluster.reset_link(*link, down_s)
    load.run(limit_s=LIMIT_S + down_s)


@is_remote
@pytest.mark.parametrize("link", LINKS, ids="-".join)
@pytest.mark.parametrize("num_messages", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_link_that_breaks_once_costs_an_attempt_at_most_and_no_token(
    num_messages: int, link: tuple[NodeId, NodeId], is_remote: bool
):
    run_with_reset(link, num_messages, is_remote, down_s=0.01)


@pytest.mark.slow
@is_remote
@pytest.mark.parametrize("link", LINKS, ids="-".join)
@pytest.mark.parametrize("down_s", [0.001, 0.2, 2.0])
def test_a_link_that_breaks_after_any_message_costs_an_attempt_at_most_and_no_token(
    down_s: float, link: tuple[NodeId, NodeId], is_remote: bool
):
    for num_messages in range(1, 60):
        run_with_reset(link, num_messages, is_remote, down_s)


# ---- all of it by chance -------------------------------------------------------------------------


def make_random(rng: random.Random, seed: int, faults: Faults, **options: object) -> InProcessCluster:
    return InProcessCluster(
        num_decode=rng.choice([1, 2]),
        max_step_tokens=rng.choice([3, 8, 64]),
        hub=MemoryHub(latency_s=0.0001, faults=faults),
        max_attempts=100,
        cooperative=seed % 2 == 0,
        is_remote=seed % 3 == 0,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(25))
def test_a_link_that_drops_repeats_and_reorders_changes_no_token(seed: int):
    rng = random.Random(seed)
    faults = Faults(drop=0.05, duplicate=0.05, reorder=0.1, delay_s=rng.choice([0.01, 1.0]), seed=seed)
    pools = {"num_prefill": rng.choice([0, 1, 2]), "num_blocks": rng.choice([10, 16, 64])}
    Load(make_random(rng, seed, faults, **pools), seed).run(limit_s=600, drain_s=30)


@pytest.mark.parametrize("seed", range(12))
def test_cancels_restarts_and_broken_links_change_no_token_of_the_others(seed: int):
    rng = random.Random(seed)
    faults = Faults(drop=0.03, duplicate=0.05, reorder=0.1, delay_s=0.1, seed=seed)
    timing = Timing(step=rng.choice([0.001, 0.05]), block=rng.choice([0.0002, 0.05]))
    cluster = make_random(rng, seed, faults, num_prefill=2, num_blocks=rng.choice([16, 24, 64]), timing=timing)
    load = Load(cluster, seed)
    for _ in range(6):
        cluster.at(rng.random(), load.cancel_one)
        node = rng.choice(list(cluster.nodes))
        cluster.at(rng.random(), lambda node=node: cluster.restart(node))
        node, peer = rng.choice([*LINKS, (D0, P1)])
        cluster.at(rng.random(), lambda node=node, peer=peer: cluster.reset_link(node, peer))
    load.run(limit_s=600, drain_s=30)
