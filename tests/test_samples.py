"""Several samples of one prompt: computed once, moved once, and from there on each for itself."""

import random

import pytest

from pdserve.cluster.messages import Decode, FirstToken, Prefill, Ready, Tokens
from pdserve.core.ids import NodeId, RequestId
from pdserve.core.logprobs import Logprobs
from pdserve.core.sampling import SamplingParams
from pdserve.engine.step import StepPlan
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation, fake_logprobs

BLOCK = TINY_SPEC.block_size
D0, P0 = NodeId("D0"), NodeId("P0")


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def said(prompt: list[int], num_tokens: int, n: int) -> dict[int, list[int]]:
    return {sample: continuation(prompt, num_tokens, sample) for sample in range(n)}


def messages(cluster: InProcessCluster, kind: type) -> list:
    return [message for _, _, message in cluster.trace if isinstance(message, kind)]


def plans(cluster: InProcessCluster, node: NodeId) -> list[StepPlan]:
    return [what for _, link, what in cluster.trace if link == f"{node} step"]


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 2])
@pytest.mark.parametrize("n", [2, 4])
def test_each_sample_is_what_it_is_alone(num_prefill: int, num_tokens: int, n: int):
    cluster = InProcessCluster(num_prefill)
    prompt = make_prompt(num_tokens)
    cold = cluster.submit(prompt, max_tokens=9, n=n)
    cluster.run()
    warm = cluster.submit(prompt, max_tokens=9, n=n)
    cluster.run()
    for request in (cold, warm):
        assert cluster.outcomes[request].samples == said(prompt, 9, n)
        assert cluster.outcomes[request].finishes == dict.fromkeys(range(n), "length")
    cluster.assert_drained()


@pytest.mark.parametrize("is_remote", [False, True], ids=["mapped", "frames"])
def test_one_prompt_is_computed_and_moved_once_however_many_samples_it_has(is_remote: bool):
    moved, computed = set(), set()
    prompt = make_prompt(6 * BLOCK + 1)
    for n in (1, 2, 8):
        cluster = InProcessCluster(is_remote=is_remote)
        cluster.submit(prompt, max_tokens=12, n=n)
        cluster.run()
        moved.add(sum(ready.num_bytes for ready in messages(cluster, Ready)))
        computed.add(sum(len(row.token_ids) for plan in plans(cluster, P0) for row in plan.rows))
        assert len(messages(cluster, Prefill)) == len(messages(cluster, Decode)) == 1
    assert moved == {7 * TINY_SPEC.payload_bytes}
    assert computed == {len(prompt)}


def test_the_partial_block_is_copied_on_the_first_write_and_full_ones_never():
    cluster = InProcessCluster()
    prompt = make_prompt(3 * BLOCK + 2)
    cluster.submit(prompt, max_tokens=12, n=4)
    cluster.run()
    moves = [move for plan in plans(cluster, D0) for move in plan.moves]
    # The last of the four writes to the original.
    assert len(moves) == 3
    assert len({move.source for move in moves}) == 1
    first = next(plan for plan in plans(cluster, D0) if plan.moves)
    tables = [row.block_ids for row in first.rows]
    assert len({table[:3] for table in tables}) == 1
    assert len({table[3] for table in tables}) == 4


def test_a_prompt_of_whole_blocks_is_shared_without_a_copy():
    cluster = InProcessCluster()
    cluster.submit(make_prompt(3 * BLOCK), max_tokens=9, n=4)
    cluster.run()
    assert [move for plan in plans(cluster, D0) for move in plan.moves] == []


def test_the_first_tokens_of_all_samples_come_from_the_node_that_computed_the_prompt():
    cluster = InProcessCluster(timing=Timing(block=5.0))
    prompt = make_prompt(2 * BLOCK)
    request = cluster.submit(prompt, max_tokens=4, n=3)
    cluster.run(until=lambda: len(cluster.outcomes[request].arrivals) >= 3)
    assert cluster.outcomes[request].samples == said(prompt, 1, 3)
    assert not messages(cluster, Ready)
    cluster.run()


def test_samples_that_end_with_their_first_token_leave_the_others_alone():
    prompt = make_prompt(9)
    stop = continuation(prompt, 1, sample=1)[0]
    for num_prefill in (1, 0):
        cluster = InProcessCluster(num_prefill)
        request = cluster.submit(prompt, max_tokens=5, n=3, stop_ids=(stop,))
        cluster.run()
        assert cluster.outcomes[request].samples == {**said(prompt, 5, 3), 1: [stop]}
        assert cluster.outcomes[request].finishes == {0: "length", 1: "stop", 2: "length"}
        assert cluster.outcomes[request].finish == "length+stop"
        cluster.assert_drained()


def test_samples_that_all_end_with_their_first_token_never_reach_a_decode_node():
    cluster = InProcessCluster()
    prompt = make_prompt(9)
    request = cluster.submit(prompt, max_tokens=1, n=3)
    cluster.run()
    assert cluster.outcomes[request].samples == said(prompt, 1, 3)
    assert messages(cluster, Decode) == []
    cluster.assert_drained()


def test_a_sample_that_is_stopped_frees_what_only_it_held_and_the_others_go_on():
    cluster = InProcessCluster()
    prompt = make_prompt(9)
    request = cluster.submit(prompt, max_tokens=60, n=3)
    outcome = cluster.outcomes[request]
    cluster.run(until=lambda: len(outcome.samples.get(1, ())) >= 5)
    cluster.stop_sample(request, 1)
    num_then = len(outcome.samples[1])
    cluster.run()
    assert len(outcome.samples[1]) == num_then
    assert {0: outcome.samples[0], 2: outcome.samples[2]} == {s: continuation(prompt, 60, s) for s in (0, 2)}
    cluster.assert_drained()


@pytest.mark.parametrize("num_arrived", [0, 1, 4], ids=["queued", "first token", "decoding"])
def test_samples_may_be_stopped_at_any_time_until_none_is_left(num_arrived: int):
    cluster = InProcessCluster()
    request = cluster.submit(make_prompt(9), max_tokens=60, n=2)
    cluster.run(until=lambda: len(cluster.outcomes[request].samples.get(1, ())) >= num_arrived)
    cluster.stop_sample(request, 1)
    cluster.stop_sample(request, 1)
    cluster.stop_sample(request, 0)
    assert cluster.dispatcher.num_records == 0
    cluster.outcomes[request].finish = cluster.records[request].finish
    assert cluster.outcomes[request].finish == "stop"
    cluster.run()
    cluster.assert_drained()


def submit_many(cluster: InProcessCluster, num_requests: int, n: int, max_tokens: int) -> dict[RequestId, list[int]]:
    prompts = [make_prompt(5 + 3 * index, seed=index) for index in range(num_requests)]
    return {cluster.submit(prompt, max_tokens=max_tokens, n=n): prompt for prompt in prompts}


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
@pytest.mark.parametrize("num_blocks", [14, 20, 30])
def test_pools_that_are_too_small_for_all_samples_at_once_lose_no_token(num_prefill: int, num_blocks: int):
    cluster = InProcessCluster(num_prefill, num_blocks=num_blocks)
    prompts = submit_many(cluster, 6, n=4, max_tokens=20)
    cluster.run()
    for request, prompt in prompts.items():
        assert cluster.outcomes[request].samples == said(prompt, 20, 4)
    assert cluster.nodes[D0].machine.reservations.num_preemptions > 0
    cluster.assert_drained()


@pytest.mark.parametrize("victim", ["P0", "D0"])
@pytest.mark.parametrize("num_arrived", [0, 1, 2, 6, 11])
def test_a_node_that_dies_at_any_moment_changes_no_sample(victim: str, num_arrived: int):
    cluster = InProcessCluster(2, 2)
    prompts = submit_many(cluster, 4, n=3, max_tokens=12)
    first = next(iter(prompts))
    cluster.run(until=lambda: len(cluster.outcomes[first].samples.get(2, ())) >= num_arrived)
    cluster.kill(NodeId(victim))
    cluster.run()
    for request, prompt in prompts.items():
        assert cluster.outcomes[request].given_up is None
        assert cluster.outcomes[request].samples == said(prompt, 12, 3)
    cluster.assert_drained()


def test_after_a_loss_the_prompt_is_computed_once_more_and_outputs_where_they_go_on():
    cluster = InProcessCluster(1, 2)
    prompt = make_prompt(4 * BLOCK)
    request = cluster.submit(prompt, max_tokens=20, n=2)
    outcome = cluster.outcomes[request]
    cluster.run(until=lambda: len(outcome.samples.get(1, ())) >= 6)
    cluster.kill(cluster.records[request].decode_node or D0)
    cluster.run()
    assert outcome.samples == said(prompt, 20, 2)
    *_, again = messages(cluster, Prefill)
    assert len(again.hashes) == 4
    assert all(sample.outputs for sample in again.samples)
    assert messages(cluster, FirstToken)[-1].drawn == ()


def test_a_lost_word_of_finished_samples_is_asked_for_again():
    cluster = InProcessCluster()
    prompt = make_prompt(9)
    request = cluster.submit(prompt, max_tokens=5, n=3)
    for count in range(1, 5):
        cluster.hub.drop_next(Tokens, count)
    cluster.run()
    assert cluster.hub.num_scripted == 0
    assert cluster.outcomes[request].samples == said(prompt, 5, 3)


def test_as_many_samples_as_a_node_runs_at_once_run():
    cluster = InProcessCluster(max_running=4)
    request = cluster.submit(make_prompt(9), max_tokens=5, n=4)
    cluster.run()
    assert cluster.outcomes[request].samples == said(make_prompt(9), 5, 4)


# ---- log-probabilities ---------------------------------------------------------------------------


def logprobs_of(tokens: list[int], num_top: int) -> list[Logprobs]:
    return [fake_logprobs(token, SamplingParams(logprobs=num_top)) for token in tokens]


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
@pytest.mark.parametrize("num_blocks", [12, 64])
def test_every_token_comes_with_its_log_probabilities_whoever_drew_it(num_prefill: int, num_blocks: int):
    cluster = InProcessCluster(num_prefill, num_blocks=num_blocks)
    prompts = [make_prompt(9, seed) for seed in range(4)]
    requests = [cluster.submit(prompt, max_tokens=20, n=2, logprobs=3) for prompt in prompts]
    cluster.run()
    for request, prompt in zip(requests, prompts, strict=True):
        for sample, tokens in said(prompt, 20, 2).items():
            found = Logprobs.join(cluster.outcomes[request].logprobs[sample])
            assert found == Logprobs.join(logprobs_of(tokens, 3))


def test_log_probabilities_survive_the_loss_of_a_node():
    cluster = InProcessCluster(1, 2)
    prompt = make_prompt(9)
    request = cluster.submit(prompt, max_tokens=20, logprobs=1)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) >= 6)
    cluster.kill(cluster.records[request].decode_node or D0)
    cluster.run()
    found = Logprobs.join(cluster.outcomes[request].logprobs[0])
    assert found == Logprobs.join(logprobs_of(continuation(prompt, 20), 1))


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
@pytest.mark.parametrize("max_step_tokens", [3, 64])
def test_the_prompts_log_probabilities_are_complete_even_where_its_blocks_are_cached(
    num_prefill: int, max_step_tokens: int
):
    cluster = InProcessCluster(num_prefill, max_step_tokens=max_step_tokens)
    prompt = make_prompt(11)
    for _ in range(2):
        request = cluster.submit(prompt, max_tokens=4, prompt_logprobs=2)
        cluster.run()
        scored = [row[0].token for row in cluster.records[request].prompt_logprobs]
        assert scored == prompt[1:]
        assert cluster.outcomes[request].tokens == continuation(prompt, 4)


def test_the_prompts_log_probabilities_are_computed_again_when_they_were_lost():
    cluster = InProcessCluster()
    prompt = make_prompt(11)
    request = cluster.submit(prompt, max_tokens=4, prompt_logprobs=0)
    cluster.hub.drop_next(FirstToken)
    cluster.run()
    assert cluster.hub.num_scripted == 0
    assert [row[0].token for row in cluster.records[request].prompt_logprobs] == prompt[1:]
    assert cluster.outcomes[request].tokens == continuation(prompt, 4)
