"""Decode nodes that compute prompts beside their streams: when they do, what it costs the streams, and what is lost."""

import itertools
import random

import pytest

from pdserve.cluster.messages import Decode, FirstToken
from pdserve.core.ids import NodeId, RequestId
from pdserve.engine.step import StepPlan
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing, continuation

BLOCK = TINY_SPEC.block_size
# As on a CPU core: a step costs as much as seventeen tokens, and a prompt of 400 in one step half a second.
TIMING = Timing(step=0.02, token=0.0012)
TPOT_S = 0.1


def make_cluster(num_prefill: int = 1, num_decode: int = 1, **options: object) -> InProcessCluster:
    """Nodes that the router has heard of: it knows their room and what they expect a token to take."""
    options = {"timing": TIMING, "num_blocks": 256, "max_step_tokens": 512, "cooperative": True, **options}
    cluster = InProcessCluster(num_prefill, num_decode, **options)  # type: ignore[arg-type]
    wait(cluster, 0.6)
    return cluster


def wait(cluster: InProcessCluster, seconds: float) -> None:
    end = cluster.now + seconds
    cluster.run(until=lambda: cluster.now > end)


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def make_line(length: int = 12, num_tokens: int = 60, seed: int = 0) -> list[list[int]]:
    return [make_prompt(num_tokens - i % BLOCK, seed=seed + i) for i in range(length)]


def computed_by(cluster: InProcessCluster) -> dict[RequestId, str]:
    """The node that the prompt of each request was given to, by the last message that a decode node had."""
    return {
        message.request: message.source.node if message.source else link.removeprefix("router>")
        for _, link, message in cluster.trace
        if isinstance(message, Decode)
    }


def assert_right(cluster: InProcessCluster, prompts: list[list[int]], requests: list[RequestId]) -> None:
    for prompt, request in zip(prompts, requests, strict=True):
        outcome = cluster.outcomes[request]
        assert outcome.finish == "length", outcome
        assert outcome.tokens == continuation(prompt, len(outcome.tokens))
    cluster.assert_drained()


def learn(cluster: InProcessCluster) -> None:
    """Both nodes compute a few prompts, and know then what steps cost."""
    requests = [cluster.submit(prompt, max_tokens=10) for prompt in make_line()]
    cluster.run()
    assert {computed_by(cluster)[request] for request in requests} == {"P0", "D0"}


def gaps(cluster: InProcessCluster, request: RequestId) -> list[float]:
    return [after - before for before, after in itertools.pairwise(cluster.outcomes[request].arrivals)]


# ---- who computes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tpot_slo_s", [None, TPOT_S])
@pytest.mark.parametrize("max_step_tokens", [16, 512])
def test_of_a_long_line_the_decode_node_computes_a_part(max_step_tokens: int, tpot_slo_s: float | None):
    cluster = make_cluster(max_step_tokens=max_step_tokens, tpot_slo_s=tpot_slo_s)
    prompts = make_line()
    requests = [cluster.submit(prompt, max_tokens=10) for prompt in prompts]
    cluster.run()
    assert_right(cluster, prompts, requests)
    assert set(computed_by(cluster).values()) == {"P0", "D0"}


def test_a_line_has_its_first_tokens_sooner_when_decode_nodes_help():
    last = {}
    for cooperative in (True, False):
        cluster = make_cluster(cooperative=cooperative, tpot_slo_s=TPOT_S)
        start = cluster.now
        requests = [cluster.submit(prompt, max_tokens=10) for prompt in make_line(num_tokens=80)]
        cluster.run()
        last[cooperative] = max(cluster.outcomes[request].arrivals[0] for request in requests) - start
    assert last[True] < 0.8 * last[False]


@pytest.mark.parametrize("tpot_slo_s", [None, TPOT_S])
def test_with_nothing_waiting_every_new_prompt_is_handed_off(tpot_slo_s: float | None):
    cluster = make_cluster(tpot_slo_s=tpot_slo_s)
    learn(cluster)
    prompts, requests = make_line(seed=100), []
    for prompt in prompts:
        wait(cluster, 1.0)
        requests.append(cluster.submit(prompt, max_tokens=10))
        cluster.run()
    assert_right(cluster, prompts, requests)
    assert {computed_by(cluster)[request] for request in requests} == {"P0"}


def test_without_cooperation_every_prompt_is_handed_off_however_long_the_line():
    cluster = make_cluster(cooperative=False, tpot_slo_s=TPOT_S)
    prompts = make_line(30)
    requests = [cluster.submit(prompt, max_tokens=10) for prompt in prompts]
    cluster.run()
    assert_right(cluster, prompts, requests)
    assert set(computed_by(cluster).values()) == {"P0"}


def test_every_block_edge_and_length_of_output_is_right_where_it_decodes_too():
    cluster = make_cluster()
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1]
    busy = make_prompt(900, seed=99)
    cluster.submit(busy, max_tokens=2)
    prompts = [make_prompt(length, seed=length) for length in lengths]
    requests = [cluster.submit(prompt, max_tokens=2 + i) for i, prompt in enumerate(prompts)]
    cluster.run()
    assert_right(cluster, prompts, requests)
    assert [computed_by(cluster)[request] for request in requests] == ["D0"] * len(lengths)


def test_a_prompt_computed_where_it_decodes_finds_what_was_handed_off_before():
    cluster = make_cluster()
    prompt = make_prompt(50 * BLOCK)
    first = cluster.submit(prompt, max_tokens=4)
    cluster.run()
    cluster.submit(make_prompt(800, seed=1), max_tokens=2)
    second = cluster.submit([*prompt, 7, 8], max_tokens=4)
    before = len(cluster.trace)
    cluster.run()
    assert cluster.results(first, second) == [continuation(prompt, 4), continuation([*prompt, 7, 8], 4)]
    assert computed_by(cluster)[second] == "D0"
    computed = sum(plan.num_tokens for _, what, plan in cluster.trace[before:] if what == "D0 step")
    assert computed < 20


def test_the_decode_node_reports_the_first_token_and_the_time_it_took_as_a_prefill_node_does():
    cluster = make_cluster()
    cluster.submit(make_prompt(900, seed=1), max_tokens=2)
    start = cluster.now
    request = cluster.submit(make_prompt(60), max_tokens=4)
    cluster.run()
    said = [(when, link, m) for when, link, m in cluster.trace if isinstance(m, FirstToken) and m.request == request]
    assert [(link, message.drawn[0].index) for _, link, message in said] == [("D0>router", 0)]
    when, _, first = said[0]
    assert first.prefill_s > 0
    # All but the two messages' way.
    assert first.queue_s + first.prefill_s == pytest.approx(when - start, abs=0.001)


# ---- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "helpers"), [(32, {"P0"}), (128, {"P0", "D0"})])
def test_a_decode_node_without_room_for_it_computes_no_prompt(num_blocks: int, helpers: set[str]):
    """Half of the smaller pool is taken by a stream; each prompt needs more than the other half."""
    cluster = make_cluster(num_blocks=num_blocks, tpot_slo_s=TPOT_S)
    prompts = [make_prompt(60), *make_line(6, num_tokens=72)]
    requests = [cluster.submit(prompts[0], max_tokens=60)]
    wait(cluster, 1.0)
    assert len(cluster.outcomes[requests[0]].tokens) < 60
    requests += [cluster.submit(prompt, max_tokens=8) for prompt in prompts[1:]]
    cluster.run()
    assert_right(cluster, prompts, requests)
    assert set(computed_by(cluster).values()) == helpers


# ---- the streams beside it -------------------------------------------------------------------------


def run_stream_beside_a_prompt(tpot_slo_s: float | None) -> tuple[InProcessCluster, RequestId, RequestId]:
    """The decode node has learned from a few steps what chunks cost; then a stream runs, and a prompt comes."""
    cluster = make_cluster(tpot_slo_s=tpot_slo_s, num_blocks=512)
    learn(cluster)
    stream = cluster.submit(make_prompt(40), max_tokens=80)
    cluster.run(until=lambda: len(cluster.outcomes[stream].tokens) > 10)
    cluster.submit(make_prompt(1500, seed=1), max_tokens=2)
    prompt = make_prompt(400, seed=2)
    beside = cluster.submit(prompt, max_tokens=4)
    cluster.run()
    assert computed_by(cluster)[beside] == "D0"
    assert computed_by(cluster)[stream] == "P0"
    assert cluster.results(stream, beside) == [continuation(make_prompt(40), 80), continuation(prompt, 4)]
    return cluster, stream, beside


def widest_step_s(cluster: InProcessCluster, request: RequestId) -> float:
    """The longest step of the decode node while `request` had tokens."""
    arrivals = cluster.outcomes[request].arrivals
    plans: list[StepPlan] = [
        plan for when, what, plan in cluster.trace if what == "D0 step" and arrivals[0] < when < arrivals[-1]
    ]
    return max(TIMING.step + TIMING.token * plan.num_tokens for plan in plans)


def test_a_streams_tokens_keep_their_promised_time_beside_a_prompt():
    cluster, stream, _ = run_stream_beside_a_prompt(TPOT_S)
    assert max(gaps(cluster, stream)) <= TPOT_S
    # It is used, too: the prompt is computed in few steps.
    assert widest_step_s(cluster, stream) > 0.8 * TPOT_S


def test_without_a_promise_a_stream_runs_at_half_its_speed_beside_a_prompt():
    cluster, stream, _ = run_stream_beside_a_prompt(None)
    alone = TIMING.step + TIMING.token
    assert max(gaps(cluster, stream)) <= 2.2 * alone
    assert widest_step_s(cluster, stream) > 1.6 * alone


def test_a_long_prompt_beside_a_stream_is_computed_meanwhile():
    cluster, stream, beside = run_stream_beside_a_prompt(TPOT_S)
    assert cluster.outcomes[beside].arrivals[0] < cluster.outcomes[stream].arrivals[-1]


# ---- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.03, 0.2, 0.5])
@pytest.mark.parametrize("num_prefill", [1, 2])
@pytest.mark.parametrize("victim", ["P0", "D0"])
def test_a_node_that_dies_meanwhile_costs_no_token(victim: str, num_prefill: int, after_s: float):
    cluster = make_cluster(num_prefill, 2, tpot_slo_s=TPOT_S, max_attempts=5)
    prompts = make_line(14, num_tokens=40)
    requests = [cluster.submit(prompt, max_tokens=25) for prompt in prompts]
    wait(cluster, after_s)
    assert not all(cluster.outcomes[request].is_over for request in requests)
    assert {"P0", "D0", "D1"} <= set(computed_by(cluster).values())
    cluster.kill(NodeId(victim))
    cluster.run()
    assert_right(cluster, prompts, requests)


def test_a_prompt_that_is_cancelled_in_the_middle_leaves_nothing_and_changes_no_other():
    cluster = make_cluster(tpot_slo_s=TPOT_S)
    busy, stream, gone = make_prompt(600, seed=1), make_prompt(40, seed=2), make_prompt(200, seed=3)
    streaming = cluster.submit(stream, max_tokens=60)
    cluster.run(until=lambda: len(cluster.outcomes[streaming].tokens) > 5)
    waiting, cancelled = cluster.submit(busy, max_tokens=2), cluster.submit(gone, max_tokens=4)
    wait(cluster, 0.2)
    assert computed_by(cluster)[cancelled] == "D0"
    assert not cluster.outcomes[cancelled].tokens
    cluster.cancel(cancelled)
    cluster.outcomes[cancelled].given_up = "cancelled"
    cluster.run()
    assert_right(cluster, [stream, busy], [streaming, waiting])


def test_what_a_prompt_that_is_cached_to_its_last_token_waits_for_is_told_as_waiting():
    cluster = InProcessCluster(0, 1, max_running=1)
    prompt = make_prompt(BLOCK + 1)
    first, second = (cluster.submit(prompt, max_tokens=8) for _ in range(2))
    cluster.run()
    ledger = cluster.records[second].ledger()
    assert ledger["prefill_queue_s"] > 8 * cluster.timing.step > 2 * ledger["prefill_s"]
    assert cluster.results(first) == cluster.results(second)
