"""How it was done before: static batches, whole prompts, no shared prefixes, memory for the longest request.

Each is slower, which is what it is there for; none loses, repeats or changes a token, and nothing is left of any.
"""

import itertools
import random

import pytest

from pdserve.cluster.config import DecodeBaseline
from pdserve.cluster.messages import Capacity, Decode, FirstToken
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NodeId, RequestId
from pdserve.decode_node.node import least_tokens
from pdserve.decode_node.preemption import Mode
from pdserve.engine.step import StepPlan
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
D0, P0 = NodeId("D0"), NodeId("P0")
STATIC = DecodeBaseline(batching="static")
WHOLE = DecodeBaseline(chunked_prefill="off")
ALONE = DecodeBaseline(prefix_cache="off")
LONGEST = DecodeBaseline(kv_allocation="max-length")
ALL = DecodeBaseline("static", "off", "off", "max-length")
BASELINES = {"static": STATIC, "whole": WHOLE, "alone": ALONE, "longest": LONGEST, "all": ALL}
SPLITS = pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
EACH = pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
MAX_MODEL_LEN = 64


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def make_cluster(num_prefill: int, baseline: DecodeBaseline, **options: object) -> InProcessCluster:
    return InProcessCluster(num_prefill, baseline=baseline, max_model_len=MAX_MODEL_LEN, **options)  # type: ignore[arg-type]


def crowd(cluster: InProcessCluster, num_requests: int, n: int = 1) -> dict[RequestId, tuple[list[int], int]]:
    """Prompt and answer length by request; both differ, and every second prompt begins like the one before."""
    rng, submitted = random.Random(num_requests), {}
    for index in range(num_requests):
        prompt = make_prompt(12, seed=index // 2) + make_prompt(1 + 3 * index % 17, seed=100 + index)
        max_tokens = rng.randrange(2, 30)
        submitted[cluster.submit(prompt, max_tokens, n=n)] = (prompt, max_tokens)
    return submitted


def check(cluster: InProcessCluster, submitted: dict[RequestId, tuple[list[int], int]], n: int = 1) -> None:
    for request, (prompt, max_tokens) in submitted.items():
        expected = {sample: continuation(prompt, max_tokens, sample) for sample in range(n)}
        assert cluster.outcomes[request].samples == expected
    cluster.assert_drained()


def steps(cluster: InProcessCluster, node: NodeId = D0) -> list[StepPlan]:
    return [what for _, link, what in cluster.trace if link == f"{node} step"]  # type: ignore[misc]


# ---- all of them ---------------------------------------------------------------------------------


@EACH
@SPLITS
@pytest.mark.parametrize("n", [1, 3])
def test_a_crowd_gets_the_tokens_that_it_would_get_alone(num_prefill: int, baseline: DecodeBaseline, n: int):
    cluster = make_cluster(num_prefill, baseline, num_blocks=72, num_swap_blocks=8)
    submitted = crowd(cluster, 12, n)
    cluster.run()
    check(cluster, submitted, n)


@EACH
@pytest.mark.parametrize("cooperative", [False, True])
@pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
def test_whoever_computes_a_prompt_and_however_it_travels_the_tokens_are_the_same(
    baseline: DecodeBaseline, is_remote: bool, cooperative: bool
):
    cluster = make_cluster(2, baseline, num_decode=2, num_blocks=40, is_remote=is_remote, cooperative=cooperative)
    submitted = crowd(cluster, 14)
    cluster.run()
    check(cluster, submitted)


@EACH
@SPLITS
@pytest.mark.parametrize("seed", range(2))
def test_clients_that_go_away_and_nodes_that_die_leave_nothing(num_prefill: int, baseline: DecodeBaseline, seed: int):
    rng = random.Random(seed)
    timing = Timing(block=rng.choice((0.0002, 0.02)))
    cluster = make_cluster(num_prefill, baseline, num_decode=2, num_blocks=36, num_swap_blocks=6, timing=timing)
    submitted = crowd(cluster, 16)
    gone = rng.sample(list(submitted), 5)

    def go(request: RequestId) -> None:
        if not cluster.outcomes[request].is_over:
            cluster.cancel(request)
            cluster.outcomes[request].finish = "gone"

    for request in gone:
        cluster.at(rng.uniform(0.02, 1.5), lambda request=request: go(request))
    victim = NodeId(rng.choice(["P0", "D0", "D1"] if num_prefill else ["D0", "D1"]))
    cluster.at(rng.uniform(0.05, 1.0), lambda: cluster.restart(victim))
    cluster.run(until=lambda: cluster.now > 2.0)
    cluster.run()
    check(cluster, {request: given for request, given in submitted.items() if request not in gone})


# ---- static batches ------------------------------------------------------------------------------


def batches(cluster: InProcessCluster) -> list[set[int]]:
    """Keys of the sequences that ran together, in order: a new batch wherever nobody ran on."""
    found: list[set[int]] = []
    before: set[int] = set()
    for plan in steps(cluster):
        keys = {row.key for row in plan.rows}
        if not keys & before:
            found.append(set())
        found[-1] |= keys
        before = keys
    return found


@SPLITS
def test_nobody_joins_a_static_batch_until_all_of_it_has_ended(num_prefill: int):
    cluster = make_cluster(num_prefill, STATIC, num_blocks=256)
    crowd(cluster, 16)
    given: dict[int, int] = {}
    beside: list[tuple[int, int]] = []
    scheduler = cluster.nodes[D0].machine

    def watch() -> bool:
        holding = {job.sequence.key for job in scheduler._jobs.holding()}  # type: ignore[union-attr]
        for key in holding - given.keys():
            given[key] = len(set(given.values())) if not holding & given.keys() else max(given.values())
        beside.extend((given[a], given[b]) for a, b in itertools.pairwise(holding))
        return cluster.is_quiet()

    cluster.run(until=watch)
    assert all(a == b for a, b in beside)
    assert 2 <= len(set(given.values())) < 16


def test_a_batch_is_all_that_waits_when_the_one_before_has_ended_however_many_that_are():
    cluster = make_cluster(0, STATIC, num_blocks=512, max_running=40)
    first = cluster.submit(make_prompt(5), 20)
    cluster.run(until=lambda: len(cluster.outcomes[first].tokens) > 2)
    later = [cluster.submit(make_prompt(5, seed), 20) for seed in range(1, 31)]
    cluster.run()
    assert [len(batch) for batch in batches(cluster)] == [1, 30]
    assert all(cluster.outcomes[request].finish == "length" for request in later)


def test_prompts_are_computed_elsewhere_while_a_static_batch_runs_and_their_hand_offs_wait_without_being_late():
    cluster = make_cluster(1, STATIC, num_decode=2, num_blocks=256, timing=Timing(step=0.2), handoff_deadline_s=0.5)
    cluster.run(until=lambda: cluster.now > 1.0)
    submitted = {cluster.submit(make_prompt(6, seed), 20): (make_prompt(6, seed), 20) for seed in range(8)}
    cluster.run()
    check(cluster, submitted)
    told = [what for _, _, what in cluster.trace if isinstance(what, FirstToken)]
    ends = [cluster.outcomes[request].arrivals[-1] for request in submitted]
    # The first of them end long after the last prompt is computed.
    assert max(cluster.outcomes[request].arrivals[0] for request in submitted) < min(ends)
    assert len(told) == 8
    assert all(what.attempt == 1 for _, _, what in cluster.trace if isinstance(what, Decode))


@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.RECOMPUTE, Mode.RETURN])
@SPLITS
def test_who_yields_its_blocks_goes_on_in_the_next_batch(num_prefill: int, mode: Mode):
    cluster = make_cluster(num_prefill, STATIC, num_blocks=20, num_swap_blocks=16, mode=mode)
    prompts = [make_prompt(9, seed) for seed in range(6)]
    submitted = {cluster.submit(prompt, 40): (prompt, 40) for prompt in prompts}
    cluster.run()
    check(cluster, submitted)
    assert cluster.nodes[D0].machine.reservations.num_preemptions > 0  # type: ignore[union-attr]


def test_of_varied_answers_a_static_batch_takes_longer_than_a_continuous_one():
    took = {}
    for baseline in (STATIC, DecodeBaseline()):
        cluster = make_cluster(0, baseline, num_blocks=64, max_running=8)
        crowd(cluster, 32)
        cluster.run()
        took[baseline.batching] = max(outcome.arrivals[-1] for outcome in cluster.outcomes.values())
    assert took["static"] > 1.2 * took["continuous"]


# ---- whole prompts -------------------------------------------------------------------------------


@SPLITS
@pytest.mark.parametrize("tpot_slo_s", [None, 0.011])
def test_a_prompt_is_computed_in_one_step_whatever_its_length_and_whoever_waits(
    num_prefill: int, tpot_slo_s: float | None
):
    cluster = make_cluster(num_prefill, WHOLE, num_blocks=512, max_step_tokens=16, tpot_slo_s=tpot_slo_s)
    stream = cluster.submit(make_prompt(5), 50)
    cluster.run(until=lambda: len(cluster.outcomes[stream].tokens) > 5)
    lengths = [3, 16, 100, 400]
    requests = [cluster.submit(make_prompt(length, length), 4) for length in lengths]
    cluster.run()
    node = P0 if num_prefill else D0
    chunks = [len(row.token_ids) for plan in steps(cluster, node) for row in plan.rows if len(row.token_ids) > 1]
    assert sorted(chunks) == sorted([5, *lengths])
    assert cluster.results(*requests) == [continuation(make_prompt(length, length), 4) for length in lengths]


def test_prompts_that_fit_into_a_step_share_it_whatever_the_streams_were_promised():
    cluster = make_cluster(0, WHOLE, num_blocks=512, max_step_tokens=64, tpot_slo_s=0.011)
    stream = cluster.submit(make_prompt(5), 50)
    cluster.run(until=lambda: len(cluster.outcomes[stream].tokens) > 5)
    for seed in (1, 2):
        cluster.submit(make_prompt(20, seed), 4)
    cluster.run()
    assert 1 + 20 + 20 in [plan.num_tokens for plan in steps(cluster)]


def test_a_slow_link_cuts_no_tail_off_a_whole_prompt():
    cluster = make_cluster(1, WHOLE, num_blocks=512, is_remote=True, bytes_per_s=2e4, timing=Timing(token=0.001))
    cluster.submit(make_prompt(200), 4)
    cluster.run()
    assert [plan.num_tokens for plan in steps(cluster, P0)] == [200]


# ---- no shared prefixes --------------------------------------------------------------------------


@SPLITS
def test_without_a_prefix_cache_every_prompt_is_computed_and_moved_whole(num_prefill: int):
    cluster = make_cluster(num_prefill, ALONE, num_blocks=128)
    prompt = make_prompt(33)
    one = cluster.submit(prompt, 8)
    cluster.run()
    again = [cluster.submit(prompt, 8) for _ in range(3)]
    cluster.run()
    assert cluster.results(one, *again) == [continuation(prompt, 8)] * 4
    assert all(cluster.records[request].num_cached_tokens == 0 for request in (one, *again))
    computing = steps(cluster, P0 if num_prefill else D0)
    assert sum(len(row.token_ids) for plan in computing for row in plan.rows if row.start < 33) == 4 * 33
    cluster.assert_drained()


@SPLITS
def test_short_prompts_with_equal_answers_share_no_block_either(num_prefill: int):
    cluster = make_cluster(num_prefill, ALONE, num_blocks=64)
    for _ in range(3):
        cluster.submit([1, 2], 16)
        cluster.run()
    pool = cluster.nodes[D0].machine.pool
    # Of each 17 tokens have KV: four blocks are full.
    assert pool.num_cached == 3 * 4


def test_without_a_prefix_cache_the_next_attempt_finds_its_own_blocks():
    cluster = make_cluster(1, ALONE, num_decode=2, num_blocks=64)
    prompt = make_prompt(33)
    request = cluster.submit(prompt, 30)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) > 4)
    cluster.kill(cluster.records[request].decode_node)  # type: ignore[arg-type]
    cluster.run()
    assert cluster.results(request) == [continuation(prompt, 30)]
    again = [row for plan in steps(cluster, P0) for row in plan.rows]
    assert [row.start for row in again if row.start + len(row.token_ids) > 33] == [32]


# ---- memory for the longest request --------------------------------------------------------------


@SPLITS
def test_as_many_sequences_run_as_there_is_memory_for_the_longest(num_prefill: int):
    cluster = make_cluster(num_prefill, LONGEST, num_blocks=3 * MAX_MODEL_LEN // BLOCK + 5)
    submitted = crowd(cluster, 12)
    most = 0

    def watch() -> bool:
        nonlocal most
        machine = cluster.nodes[D0].machine
        jobs = machine._jobs.holding()  # type: ignore[union-attr]
        most = max(most, len(jobs))
        for job in jobs:
            held = len(job.sequence.block_ids) + job.sequence.num_reserved
            assert held == MAX_MODEL_LEN // BLOCK
        return cluster.is_quiet()

    cluster.run(until=watch)
    check(cluster, submitted)
    assert most == 3
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0  # type: ignore[union-attr]


@SPLITS
def test_each_sample_of_a_request_has_memory_for_the_longest_answer(num_prefill: int):
    cluster = make_cluster(num_prefill, LONGEST, num_blocks=3 * MAX_MODEL_LEN // BLOCK + 1)
    prompts = [make_prompt(length, length) for length in (2, 4, 7, 17)]
    submitted = {cluster.submit(prompt, MAX_MODEL_LEN - len(prompt), n=3): prompt for prompt in prompts}
    cluster.run()
    check(cluster, {request: (prompt, MAX_MODEL_LEN - len(prompt)) for request, prompt in submitted.items()}, n=3)
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0  # type: ignore[union-attr]


def test_nobody_gives_up_memory_for_the_longest_request_to_a_late_hand_off():
    cluster = make_cluster(1, LONGEST, num_blocks=MAX_MODEL_LEN // BLOCK, timing=Timing(step=0.3))
    submitted = {cluster.submit(make_prompt(6, seed), 20): (make_prompt(6, seed), 20) for seed in range(3)}
    cluster.run()
    check(cluster, submitted)
    assert cluster.nodes[D0].machine.reservations.num_preemptions == 0  # type: ignore[union-attr]


def test_a_pool_that_does_not_hold_the_longest_request_is_refused_with_both_numbers():
    capacity = Capacity(num_blocks=4, block_size=32, max_model_len=129, max_running=8, token_bytes=1)
    assert least_tokens("paged", capacity) == 0
    with pytest.raises(ConfigError, match=r"--kv-allocation max-length: .* 129 tokens .* holds 128: .*--kv-memory"):
        least_tokens("max-length", capacity)
