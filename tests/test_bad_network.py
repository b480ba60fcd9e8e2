"""Whole clusters over links that lose, repeat, delay and reorder: right tokens, drained pools, no endless wait."""

import random

import pytest

from pdserve.cluster.memory import Faults, MemoryHub
from pdserve.cluster.messages import (
    Blocks,
    Cancel,
    Decode,
    End,
    Fetch,
    FirstToken,
    Have,
    Held,
    Live,
    Prefill,
    Ready,
    Release,
    Tokens,
    Want,
)
from pdserve.core.ids import NodeId, RequestId
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
ON_THE_WAY = [Prefill, Decode, Want, Have, Fetch, Blocks, End, FirstToken, Ready, Release, Tokens, Live, Held, Cancel]


def run_mixed_load(cluster: InProcessCluster, seed: int) -> None:
    """Prompts with and without a common prefix; every stream must be the model's, and nothing stay behind."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCAB) for _ in range(3 * BLOCK)]
    prompts = [
        (common if rng.random() < 0.5 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4 * BLOCK))]
        for _ in range(12)
    ]
    requests = [cluster.submit(prompt, max_tokens=rng.randint(1, 10)) for prompt in prompts]
    cluster.run(limit_s=900)
    for prompt, request in zip(prompts, requests, strict=True):
        outcome = cluster.outcomes[request]
        assert outcome.finish == "length", outcome
        assert outcome.tokens == continuation(prompt, len(outcome.tokens))
    over = cluster.now
    # A lost Cancel or Release is made up for when the lease ends.
    cluster.run(until=lambda: cluster.now > over + 10, limit_s=2000)
    cluster.assert_drained()


@pytest.mark.parametrize("message_type", ON_THE_WAY)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
def test_any_message_lost_once_costs_time_and_no_token(message_type: type, count: int, is_remote: bool):
    hub = MemoryHub(latency_s=0.0001)
    hub.drop_next(message_type, count)
    cluster = InProcessCluster(num_blocks=24, max_step_tokens=8, hub=hub, max_attempts=20, is_remote=is_remote)
    run_mixed_load(cluster, seed=count)


@pytest.mark.parametrize("seed", range(25))
def test_a_link_that_drops_repeats_and_reorders_changes_no_token(seed: int):
    rng = random.Random(seed)
    faults = Faults(drop=0.05, duplicate=0.05, reorder=0.1, delay_s=rng.choice([0.01, 1.0]), seed=seed)
    cluster = InProcessCluster(
        num_prefill=rng.choice([0, 1, 2]),
        num_decode=rng.choice([1, 2]),
        num_blocks=rng.choice([10, 16, 64]),
        max_step_tokens=rng.choice([3, 8, 64]),
        hub=MemoryHub(latency_s=0.0001, faults=faults),
        max_attempts=100,
        cooperative=seed % 2 == 0,
        is_remote=seed % 3 == 0,
    )
    run_mixed_load(cluster, seed)


@pytest.mark.parametrize("seed", range(12))
def test_cancels_restarts_and_broken_links_change_no_token_of_the_others(seed: int):
    rng = random.Random(seed)
    faults = Faults(drop=0.03, duplicate=0.05, reorder=0.1, delay_s=0.1, seed=seed)
    cluster = InProcessCluster(
        num_prefill=2,
        num_decode=2,
        num_blocks=rng.choice([14, 20, 64]),
        max_step_tokens=rng.choice([3, 8, 64]),
        timing=Timing(step=rng.choice([0.001, 0.05]), block=rng.choice([0.0002, 0.05])),
        hub=MemoryHub(latency_s=0.0001, faults=faults),
        max_attempts=100,
        cooperative=seed % 2 == 0,
        is_remote=seed % 3 == 0,
    )
    common = [rng.randrange(VOCAB) for _ in range(4 * BLOCK)]
    prompts = [common + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3 * BLOCK))] for _ in range(10)]
    requests = [cluster.submit(prompt, max_tokens=rng.randint(2, 10)) for prompt in prompts]

    def cancel(request: RequestId) -> None:
        if not cluster.outcomes[request].is_over:
            cluster.cancel(request)
        cluster.outcomes[request].given_up = "cancelled"

    for request in requests[::3]:
        cluster.at(rng.random() * 0.5, lambda request=request: cancel(request))
    for node in (NodeId("P0"), NodeId("P1")):
        cluster.at(rng.random() * 0.5, lambda node=node: cluster.restart(node))
    cluster.run(limit_s=900)
    for prompt, request in zip(prompts, requests, strict=True):
        outcome = cluster.outcomes[request]
        assert outcome.tokens == continuation(prompt, len(outcome.tokens))
        assert outcome.finish == "length" or outcome.given_up == "cancelled"
