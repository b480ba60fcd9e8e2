"""Whole clusters with the real engine on a tiny model: greedy tokens equal transformers' in fp32.

The full matrix of chunk sizes, lengths around block edges, split and colocated, cold and warm; then the
same under preemption, cancelled neighbours, a dead node, and with seeded draws instead of greedy ones.
"""

from pathlib import Path

import pytest

from pdserve.cluster.config import DecodeBaseline
from pdserve.core.ids import NodeId
from pdserve.decode_node.preemption import Mode
from pdserve.decode_node.scheduler import DecodeScheduler
from tests.tiny import NUM_OUTPUTS, GreedyOracle, make_cluster, make_prompt

SPLITS = pytest.mark.parametrize(
    ("num_prefill", "is_remote"), [(1, False), (1, True), (0, False)], ids=["shm", "zmq", "both"]
)
TRANSPORTS = pytest.mark.parametrize("is_remote", [False, True], ids=["shm", "zmq"])
NO_CHUNKS = 4096


@SPLITS
@pytest.mark.parametrize("chunk", [16, 64, 256, NO_CHUNKS])
def test_every_length_cold_and_warm_equals_transformers(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, is_remote: bool, chunk: int
):
    edges = [n for blocks in (1, 2, 4, 9) for n in (blocks * 16 - 1, blocks * 16, blocks * 16 + 1)]
    cluster = make_cluster(tiny_model, num_prefill, num_blocks=256, max_step_tokens=chunk, is_remote=is_remote)
    for num_tokens in [1, *edges]:
        prompt = make_prompt(num_tokens, seed=num_tokens)
        cold = cluster.submit(prompt, NUM_OUTPUTS)
        cluster.run()
        warm = cluster.submit(prompt, NUM_OUTPUTS)
        cluster.run()
        assert cluster.results(cold, warm) == [oracle(prompt)] * 2, f"prompt of {num_tokens} tokens"
    cluster.assert_drained()


@SPLITS
def test_penalised_streams_equal_transformers_from_the_first_token_on_whatever_yields_and_dies(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, is_remote: bool
):
    """What penalties depend on is rebuilt from the tokens: on the decode node, after preemption, in another attempt."""
    cluster = make_cluster(tiny_model, num_prefill, num_blocks=14, max_step_tokens=32, is_remote=is_remote)
    prompts = [make_prompt(40 + seed, seed) for seed in range(5)]
    requests = [cluster.submit(prompt, NUM_OUTPUTS, repetition_penalty=1.5) for prompt in prompts]
    cluster.run(until=lambda: len(cluster.outcomes[requests[0]].tokens) > 5)
    cluster.restart(NodeId("D0"))
    cluster.run()
    expected = [oracle(prompt, repetition_penalty=1.5) for prompt in prompts]
    assert expected != [oracle(prompt) for prompt in prompts]
    assert cluster.results(*requests) == expected


@SPLITS
def test_a_second_turn_on_a_warm_prefix_equals_transformers(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, is_remote: bool
):
    cluster = make_cluster(tiny_model, num_prefill, num_blocks=128, max_step_tokens=32, is_remote=is_remote)
    prompt = make_prompt(45)
    turn = cluster.submit(prompt, NUM_OUTPUTS)
    cluster.run()
    second = prompt + cluster.outcomes[turn].tokens + make_prompt(30, seed=2)
    again = cluster.submit(second, NUM_OUTPUTS)
    cluster.run()
    assert cluster.results(turn, again) == [oracle(prompt), oracle(second)]


@SPLITS
@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.RECOMPUTE, Mode.RETURN])
def test_many_streams_at_once_with_preemption_equal_transformers(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, is_remote: bool, mode: Mode
):
    preemption = {"mode": mode, "num_swap_blocks": 32}
    cluster = make_cluster(
        tiny_model, num_prefill, num_blocks=12, max_step_tokens=24, is_remote=is_remote, **preemption
    )
    prompts = [make_prompt(n, seed=n) for n in (5, 16, 33, 47, 64, 31, 17, 80)]
    requests = [cluster.submit(prompt, 3 * NUM_OUTPUTS) for prompt in prompts]
    cluster.run()
    assert cluster.results(*requests) == [oracle(prompt, 3 * NUM_OUTPUTS) for prompt in prompts]
    decode = cluster.nodes[NodeId("D0")].machine
    assert isinstance(decode, DecodeScheduler)
    ways = {mode} if num_prefill or mode is not Mode.RETURN else {Mode.RECOMPUTE}
    assert decode.reservations.num_yielded.keys() == ways
    cluster.assert_drained()


@SPLITS
def test_samples_that_share_a_prompt_equal_their_single_runs(tiny_model: Path, num_prefill: int, is_remote: bool):
    """Each sample is what comes of the same seed when it is asked for as one of fewer, in another pool."""
    draws = {"temperature": 0.9, "seed": 11, "logprobs": 2, "frequency_penalty": 0.5}
    prompts = [make_prompt(n, seed=n) for n in (15, 16, 45)]
    found = []
    for n, num_blocks in ((4, 64), (4, 14), (2, 64)):
        cluster = make_cluster(
            tiny_model, num_prefill, num_blocks=num_blocks, max_step_tokens=24, is_remote=is_remote, num_swap_blocks=8
        )
        requests = [cluster.submit(prompt, NUM_OUTPUTS, n=n, **draws) for prompt in prompts]
        cluster.run()
        found.append([cluster.outcomes[request].samples for request in requests])
        cluster.assert_drained()
    many, tight, two = found
    assert many == tight
    assert [{0: samples[0], 1: samples[1]} for samples in many] == two
    assert all(len({tuple(tokens) for tokens in samples.values()}) == 4 for samples in many)


@TRANSPORTS
@pytest.mark.parametrize("victim", ["P0", "D0"])
def test_a_node_dies_and_the_streams_still_equal_transformers(
    tiny_model: Path, oracle: GreedyOracle, victim: str, is_remote: bool
):
    cluster = make_cluster(tiny_model, 2, num_decode=2, num_blocks=64, max_step_tokens=16, is_remote=is_remote)
    prompts = [make_prompt(n, seed=n) for n in (20, 33, 48, 50)]
    requests = [cluster.submit(prompt, NUM_OUTPUTS) for prompt in prompts]
    cluster.run(until=lambda: len(cluster.outcomes[requests[1]].tokens) > 2)
    cluster.kill(NodeId(victim))
    cluster.run()
    assert cluster.results(*requests) == [oracle(prompt) for prompt in prompts]


def test_seeded_draws_do_not_depend_on_neighbours_plan_or_a_dead_node(tiny_model: Path):
    prompt, draws = make_prompt(40), {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7}
    results = []
    for num_prefill, is_remote in ((1, False), (1, True), (0, False)):
        cluster = make_cluster(tiny_model, num_prefill, num_blocks=64, max_step_tokens=16, is_remote=is_remote)
        request = cluster.submit(prompt, NUM_OUTPUTS, **draws)
        cluster.run()
        results += cluster.results(request)
    crowd = make_cluster(tiny_model, 2, num_decode=2, num_blocks=64, max_step_tokens=48, is_remote=True)
    others = [crowd.submit(make_prompt(30, seed=i), NUM_OUTPUTS, temperature=1.0, seed=i) for i in range(5)]
    request = crowd.submit(prompt, NUM_OUTPUTS, **draws)
    crowd.run(until=lambda: len(crowd.outcomes[request].tokens) > 4)
    crowd.kill(NodeId("D0"))
    crowd.kill(NodeId("P1"))
    crowd.run()
    results += crowd.results(request)
    assert results == results[:1] * 4
    assert all(crowd.outcomes[other].finish == "length" for other in others)


@TRANSPORTS
def test_min_tokens_holds_back_the_stop_id_and_ignored_ones_do_not_end(
    tiny_model: Path, oracle: GreedyOracle, is_remote: bool
):
    prompt = make_prompt(33)
    expected = oracle(prompt)
    stop = expected[3]
    first = expected.index(stop)
    cluster = make_cluster(tiny_model, num_blocks=64, max_step_tokens=16, is_remote=is_remote)
    plain = cluster.submit(prompt, NUM_OUTPUTS, stop_ids=(stop,))
    held = cluster.submit(prompt, NUM_OUTPUTS, stop_ids=(stop,), min_tokens=first + 1)
    cluster.run()
    assert cluster.outcomes[plain].tokens == expected[: first + 1]
    assert cluster.outcomes[plain].finish == "stop"
    assert stop not in cluster.outcomes[held].tokens[: first + 1]
    assert len(cluster.outcomes[held].tokens) > first + 1


@SPLITS
@pytest.mark.parametrize(
    "baseline",
    [
        DecodeBaseline(batching="static"),
        DecodeBaseline(chunked_prefill="off"),
        DecodeBaseline(prefix_cache="off"),
        DecodeBaseline(kv_allocation="max-length"),
    ],
    ids=["static", "whole", "alone", "longest"],
)
def test_what_the_present_way_is_compared_with_equals_transformers_too(
    tiny_model: Path, oracle: GreedyOracle, num_prefill: int, is_remote: bool, baseline: DecodeBaseline
):
    cluster = make_cluster(
        tiny_model,
        num_prefill,
        num_blocks=20,
        max_step_tokens=24,
        is_remote=is_remote,
        baseline=baseline,
        max_model_len=128,
    )
    lengths = (5, 16, 33, 47, 47, 64, 31, 17, 80)
    prompts = [make_prompt(n, seed=n) for n in lengths]
    answers = [3 + 7 * index % 40 for index in range(len(lengths))]
    requests = [cluster.submit(prompt, length) for prompt, length in zip(prompts, answers, strict=True)]
    cluster.run()
    assert cluster.results(*requests) == [oracle(p, length) for p, length in zip(prompts, answers, strict=True)]
    cluster.assert_drained()
