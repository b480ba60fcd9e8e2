"""Whole clusters with requests that need nearly all of a pool, or more, among small ones; and with priorities."""

import random
import time

import pytest

from pdserve.cluster.config import Admission, Control, RouterBaseline, Slo
from pdserve.cluster.messages import Facts
from pdserve.core.admission import MAX_PASSES
from pdserve.core.ids import RequestId
from pdserve.core.sampling import SamplingParams
from pdserve.core.turns import Policy
from pdserve.router.generation import GenerationError, GenerationRequest
from pdserve.router.service import RouterService
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
NUM_BLOCKS = 20
BIG = 18 * BLOCK


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def arrival(cluster: InProcessCluster, request: RequestId, index: int) -> float:
    return cluster.outcomes[request].arrivals[index]


def run_to_end(cluster: InProcessCluster, prompts: dict[RequestId, tuple[list[int], int]]) -> None:
    cluster.run(limit_s=60)
    for request, (prompt, num_tokens) in prompts.items():
        assert cluster.results(request) == [continuation(prompt, num_tokens)]
    cluster.assert_drained()


# ---- more than there is ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "told"),
    [
        (9, NUM_BLOCKS * BLOCK - 8, None),
        (9, NUM_BLOCKS * BLOCK - 7, "the prompt and output need KV for 81 tokens, the largest node holds 80"),
        (NUM_BLOCKS * BLOCK + 1, 1, "the prompt need KV for 81 tokens, the largest node holds 80"),
    ],
)
async def test_a_request_that_can_never_fit_is_refused_before_it_waits_with_both_numbers(
    num_prompt: int, max_tokens: int, told: str | None
):
    cluster = InProcessCluster(num_blocks=NUM_BLOCKS)
    cluster.run(until=lambda: cluster.dispatcher.nodes.readiness()[0])
    facts = Facts("model", "tokenizer", "spec", b"kv", "float32", ("float32",))
    service = RouterService(Control(), Admission(), Slo(), RouterBaseline(), facts, 4096)
    service._dispatcher = cluster.dispatcher
    request = GenerationRequest([1] * num_prompt, SamplingParams(max_tokens=max_tokens), "r", time.monotonic())
    refused = None
    try:
        service.submit(request)
    except GenerationError as error:
        refused = (error.status, error.code, error.message.split(":")[0])
    finally:
        await service._endpoint.close()
    assert refused == (told and (400, "context_length_exceeded", told))
    assert cluster.dispatcher.num_records == (1 if told is None else 0)


# ---- nearly all there is ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
def test_behind_a_request_that_needs_nearly_the_whole_pool_small_ones_are_served_and_all_end(num_prefill: int):
    """Half of the pool is in use when it comes."""
    cluster = InProcessCluster(num_prefill, num_blocks=NUM_BLOCKS)
    prompts: dict[RequestId, tuple[list[int], int]] = {}

    def submit(num_tokens: int, max_tokens: int) -> RequestId:
        prompt = make_prompt(num_tokens, len(prompts))
        request = cluster.submit(prompt, max_tokens)
        prompts[request] = (prompt, max_tokens)
        return request

    running = submit(9 * BLOCK, BLOCK * 5)
    cluster.run(until=lambda: len(cluster.outcomes[running].tokens) > 1)
    big = submit(BIG, 4)
    small = [submit(BLOCK - 1, 2) for _ in range(20)]
    run_to_end(cluster, prompts)
    before = [request for request in small if arrival(cluster, request, -1) < arrival(cluster, big, -1)]
    assert len(before) >= 1
    assert max(arrival(cluster, request, -1) for request in prompts) < 10.0


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
def test_under_an_endless_stream_of_small_ones_a_request_that_needs_nearly_the_whole_pool_is_served(num_prefill: int):
    """Those that are there when it comes may end; of the others few get blocks before it does."""
    cluster = InProcessCluster(num_prefill, num_blocks=NUM_BLOCKS, timing=Timing(step=0.02))
    prompts: dict[RequestId, tuple[list[int], int]] = {}

    def submit() -> None:
        prompt = make_prompt(BLOCK + 1, len(prompts))
        prompts[cluster.submit(prompt, 12)] = (prompt, 12)

    for _ in range(8):
        submit()
    cluster.run(until=lambda: cluster.now > 0.2)
    num_before = len(prompts)
    prompt = make_prompt(BIG, 99)
    big = cluster.submit(prompt, 3)
    while not cluster.outcomes[big].is_over:
        submit()
        end = cluster.now + 0.03
        cluster.run(until=lambda end=end: cluster.now > end)
        assert cluster.now < 20.0
    overtaking = [
        request
        for request in list(prompts)[num_before:]
        if cluster.outcomes[request].arrivals and arrival(cluster, request, 0) < arrival(cluster, big, 0)
    ]
    # They may pass it in each line: at the router, and for the blocks of each node.
    assert len(overtaking) <= MAX_PASSES * 3
    prompts[big] = (prompt, 3)
    run_to_end(cluster, prompts)


# ---- long ones and urgent ones ---------------------------------------------------------------------


def test_short_prompts_are_answered_while_a_very_long_one_is_computed():
    cluster = InProcessCluster(num_blocks=1200, max_step_tokens=64, timing=Timing(step=0.001, token=0.001))
    long = cluster.submit(make_prompt(4000), 2)
    waits = []
    for seed in range(1, 15):
        end = cluster.now + 0.1
        cluster.run(until=lambda end=end: cluster.now > end)
        start = cluster.now
        short = cluster.submit(make_prompt(20, seed), 1)
        cluster.run(until=lambda short=short: cluster.outcomes[short].is_over)
        waits.append(cluster.now - start)
    assert not cluster.outcomes[long].tokens
    # Its own step, the chunk that was under way, and the messages.
    assert max(waits) < 0.021 + 0.065 + 0.002
    cluster.run()
    assert cluster.results(long) == [continuation(make_prompt(4000), 2)]


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("num_prefill", [0, 1], ids=["colocated", "split"])
def test_requests_are_answered_in_the_order_of_their_priorities(num_prefill: int, policy: Policy):
    """More than a node is given at once, so that they wait at the router, for blocks and for chunks."""
    cluster = InProcessCluster(num_prefill, num_blocks=NUM_BLOCKS, policy=policy, timing=Timing(step=0.05))
    priorities = [i % 4 for i in range(24)]
    requests = [cluster.submit(make_prompt(5 * BLOCK, i), 1, p) for i, p in enumerate(priorities)]
    cluster.run()
    first_ones = {r for r in requests[:8]}
    waited = sorted((r for r in requests if r not in first_ones), key=lambda r: arrival(cluster, r, 0))
    answered = [priorities[requests.index(r)] for r in waited]
    assert answered == sorted(answered, reverse=True)


@pytest.mark.parametrize("ttft_slo_s", [None, 1.0])
def test_a_promise_is_kept_by_as_many_at_the_router_as_on_the_node(ttft_slo_s: float | None):
    """Thirty prompts at once are three times what can be in time."""
    cluster = InProcessCluster(
        max_step_tokens=64,
        num_blocks=512,
        policy=Policy.FCFS,
        ttft_slo_s=ttft_slo_s,
        timing=Timing(step=0.001, token=0.0012),
    )
    warm = [cluster.submit(make_prompt(64, 1000 + i), 1) for i in range(20)]
    cluster.run()
    cluster.run(until=lambda end=cluster.now + 1.1: cluster.now > end)
    start = cluster.now
    lengths = [100 if i % 3 else 300 for i in range(30)]
    requests = [cluster.submit(make_prompt(length, i), 1) for i, length in enumerate(lengths)]
    cluster.run()
    kept = sum(arrival(cluster, request, 0) - start <= 1.0 for request in requests)
    assert all(cluster.outcomes[request].is_over for request in warm)
    assert kept >= 7 if ttft_slo_s else kept < 6
