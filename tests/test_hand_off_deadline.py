"""Requests whose decode node has no blocks for them in time: they move, or others make room, and nobody is starved."""

import random

import pytest

from pdserve.cluster.events import Received
from pdserve.cluster.memory import MemoryHub
from pdserve.cluster.messages import Decode, End, Live, Prefill, Sample
from pdserve.core.block_hash import pack_token_ids
from pdserve.core.ids import NodeId, RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.decode_node.preemption import Mode
from pdserve.engine.step import RunStep, StepDone
from tests.in_process import ROUTER, TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
P0, D0, D1 = NodeId("P0"), NodeId("D0"), NodeId("D1")
# Of 12 blocks the long stream has 7 at once and all in the end; the late request needs 6.
NUM_BLOCKS = 12
LONG, LATE = 6 * BLOCK, 5 * BLOCK
LONG_OUTPUT = 6 * BLOCK


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def make_cluster(num_decode: int = 1, **options: object) -> InProcessCluster:
    """Steps are so slow that the long stream runs on for some seconds."""
    options.setdefault("timing", Timing(step=0.2))
    # Who yields stays on its node, so that what the router does is because of deadlines alone.
    options.setdefault("mode", Mode.RECOMPUTE)
    return InProcessCluster(1, num_decode, num_blocks=NUM_BLOCKS, max_step_tokens=64, **options)  # type: ignore[arg-type]


def decodes(cluster: InProcessCluster, request: RequestId) -> list[tuple[str, Decode]]:
    """Where the request was to be decoded, in order."""
    return [(link, m) for _, link, m in cluster.trace if isinstance(m, Decode) and m.request == request]


def times_overdue(cluster: InProcessCluster, request: RequestId) -> int:
    """Entries of the beats of the router that said so."""
    entries = [entry for _, _, m in cluster.trace if isinstance(m, Live) for entry in m.entries]
    return sum(entry.is_overdue for entry in entries if entry.request == request)


def start_long(cluster: InProcessCluster, seed: int = 1, priority: int = 0) -> RequestId:
    request = cluster.submit(make_prompt(LONG, seed), LONG_OUTPUT, priority)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) > 1)
    return request


def test_a_request_that_finds_no_blocks_in_time_moves_and_its_source_computes_only_the_token_it_lacks():
    cluster = make_cluster(num_decode=2)
    long = start_long(cluster)
    short = cluster.submit(make_prompt(LATE, 2), 4)
    late = cluster.submit(make_prompt(LATE, 3), 4)
    cluster.run(until=lambda: cluster.outcomes[late].is_over)
    assert not cluster.outcomes[long].is_over
    assert cluster.results(late, short) == [continuation(make_prompt(LATE, seed), 4) for seed in (3, 2)]
    (first, _), (second, decode) = decodes(cluster, late)
    assert (first, second, decode.source.node) == ("router>D0", "router>D1", P0)
    last = [plan.rows for _, what, plan in cluster.trace if what == "P0 step"][-1]
    assert [(row.start, len(row.token_ids)) for row in last] == [(LATE, 1)]
    cluster.run()
    assert cluster.results(long) == [continuation(make_prompt(LONG, 1), LONG_OUTPUT)]
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0
    cluster.assert_drained()


def test_without_another_decode_node_the_newest_stream_yields_and_goes_on_later():
    cluster = make_cluster()
    long = start_long(cluster)
    late = cluster.submit(make_prompt(LATE, 3), 4)
    cluster.run(until=lambda: cluster.outcomes[late].is_over)
    assert not cluster.outcomes[long].is_over
    assert cluster.outcomes[late].arrivals[1] - cluster.outcomes[late].arrivals[0] < 2.0 + 0.5 + 1.0
    cluster.run()
    assert cluster.results(late, long) == [
        continuation(make_prompt(LATE, 3), 4),
        continuation(make_prompt(LONG, 1), LONG_OUTPUT),
    ]
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 1
    cluster.assert_drained()


def test_a_stream_of_higher_priority_yields_to_nobody():
    cluster = make_cluster()
    long = start_long(cluster, priority=1)
    late = cluster.submit(make_prompt(LATE, 3), 4)
    cluster.run()
    assert cluster.outcomes[long].arrivals[-1] < cluster.outcomes[late].arrivals[1]
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0


def test_a_stream_that_has_yielded_once_is_not_made_to_again():
    cluster = make_cluster(timing=Timing(step=0.4))
    long = start_long(cluster)
    first = cluster.submit(make_prompt(LATE, 3), 4)
    cluster.run(until=lambda: cluster.outcomes[first].is_over)
    second = cluster.submit(make_prompt(LATE, 4), 4)
    cluster.run()
    assert cluster.outcomes[second].arrivals[0] + 2.5 < cluster.outcomes[long].arrivals[-1]
    assert cluster.outcomes[long].arrivals[-1] < cluster.outcomes[second].arrivals[1]
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 1


def test_nobody_yields_where_all_together_would_not_be_enough():
    cluster = make_cluster(timing=Timing(step=0.4))
    start_long(cluster, priority=1)
    cluster.submit(make_prompt(BLOCK, 2), 4 * BLOCK)
    late = cluster.submit(make_prompt(2 * LATE, 3), 4)
    cluster.run(until=lambda: times_overdue(cluster, late) >= 3)
    assert len(cluster.outcomes[late].tokens) == 1
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0
    cluster.run()
    cluster.assert_drained()


def test_a_block_that_the_late_request_shares_with_the_one_to_yield_is_no_gain():
    cluster = make_cluster(timing=Timing(step=2.0), handoff_deadline_s=0.5)
    common = make_prompt(4 * BLOCK, 1)
    cluster.submit(make_prompt(2 * BLOCK + 1, 2), 8, priority=1)
    shares = cluster.submit([*common, *make_prompt(3 * BLOCK, 3)], 5)
    cluster.run(until=lambda: len(cluster.outcomes[shares].tokens) > 1)
    late = cluster.submit([*common, *make_prompt(5 * BLOCK, 4)], 4)
    cluster.run(until=lambda: times_overdue(cluster, late) >= 3)
    assert not cluster.outcomes[shares].is_over
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0
    cluster.run()
    assert cluster.results(late) == [continuation([*common, *make_prompt(5 * BLOCK, 4)], 4)]


@pytest.mark.parametrize("seed", range(8))
def test_among_many_that_are_late_nobody_yields_again_and_again_and_every_stream_is_right(seed: int):
    rng = random.Random(seed)
    cluster = make_cluster(num_decode=rng.choice([1, 2]), handoff_deadline_s=0.5, max_running=rng.choice([3, 16]))
    common = make_prompt(rng.choice([0, 3 * BLOCK]), seed=99)
    prompts = [[*common, *make_prompt(rng.randint(1, LONG - len(common)), 100 * seed + i)] for i in range(12)]
    requests = [cluster.submit(prompt, LONG_OUTPUT, rng.choice([0, 0, 1])) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [continuation(prompt, LONG_OUTPUT) for prompt in prompts]
    assert sum(times_overdue(cluster, request) for request in requests) > 0
    assert all(len(decodes(cluster, request)) <= 2 for request in requests)
    cluster.assert_drained()


def prefill(cluster: InProcessCluster, request: int, attempt: int, prompt: list[int]) -> Received:
    name = RequestId(bytes([request]) * 16)
    hashes = tuple(cluster.hasher.hashes(prompt))
    message = Prefill(name, attempt, pack_token_ids(prompt), (Sample(0),), hashes, SamplingParams(max_tokens=9))
    return Received(ROUTER, message)


def test_a_prefill_node_half_of_whose_pool_is_parked_says_so_and_starts_only_what_was_parked_there():
    cluster = make_cluster()
    node = cluster.nodes[P0]

    def compute(event: Received) -> bool:
        """Whether a step came of it; the step is done then."""
        steps = [action for action in node.machine.handle(event, 0.0) if isinstance(action, RunStep)]
        for step in steps:
            node.machine.handle(StepDone(node.engine.step(step.plan)), 0.0)
        node.machine.check()
        return bool(steps)

    prompts = [make_prompt(size * BLOCK, seed=size) for size in (5, 7, 1)]
    assert compute(prefill(cluster, 1, 1, prompts[0]))
    assert not node.machine.gauges().starts_no_prompt
    assert compute(prefill(cluster, 2, 1, prompts[1]))
    assert node.machine.gauges().starts_no_prompt
    assert not compute(prefill(cluster, 3, 1, prompts[2]))
    assert compute(prefill(cluster, 1, 2, prompts[0]))
    assert node.machine.gauges().num_waiting == 1


def test_what_others_have_yielded_for_is_not_taken_back_when_a_stream_grows():
    """The blocks are all here and only the word that they are is lost, again and again."""
    hub = MemoryHub(latency_s=0.0001)
    cluster = make_cluster(hub=hub)
    long = start_long(cluster)
    grows = cluster.submit(make_prompt(2, 5), 7 * BLOCK, priority=1)
    cluster.run(until=lambda: len(cluster.outcomes[grows].tokens) > 1)
    for count in range(1, 14):
        hub.drop_next(End, count)
    late = cluster.submit(make_prompt(LATE, 3), 4)
    cluster.run(until=lambda: cluster.outcomes[late].is_over)
    assert not cluster.outcomes[grows].is_over
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 2
    cluster.run()
    assert cluster.results(late, grows, long) == [
        continuation(make_prompt(LATE, 3), 4),
        continuation(make_prompt(2, 5), 7 * BLOCK),
        continuation(make_prompt(LONG, 1), LONG_OUTPUT),
    ]
    cluster.assert_drained()


def test_a_hand_off_that_is_under_way_is_not_begun_anew_elsewhere():
    cluster = InProcessCluster(1, 2, timing=Timing(block=1.5))
    request = cluster.submit(make_prompt(LATE), 4)
    cluster.run()
    assert cluster.outcomes[request].arrivals[1] - cluster.outcomes[request].arrivals[0] > 5
    assert len(decodes(cluster, request)) == 1
    assert cluster.results(request) == [continuation(make_prompt(LATE), 4)]
