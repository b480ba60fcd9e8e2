"""The ledger of a request adds up to its times on the virtual clock, whatever way the request took.

Messages take 0.1 ms there and nothing waits for a core, so that what no stage explains (link_s) is the way of at most
three messages.
"""

import random

import pytest

from pdserve.cluster.messages import Begun, FirstToken
from pdserve.core.ids import NodeId, RequestId
from pdserve.decode_node.preemption import Mode
from tests.in_process import TINY_SPEC, VOCAB, InProcessCluster, Timing

BLOCK = TINY_SPEC.block_size
P0, P1, D0, D1 = (NodeId(name) for name in ("P0", "P1", "D0", "D1"))
HOPS_S = 0.0003
# Of a sum of rounded stages.
ROUNDING_S = 1e-5


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def told(cluster: InProcessCluster, request: RequestId) -> dict:
    """The ledger, of which is known that it adds up and that messages on their way are all it leaves open."""
    ledger = cluster.records[request].ledger()
    for name, total in (
        ("first_token", ledger["ttft_s"]),
        ("second_token", ledger["time_to_second_token_s"] - ledger["ttft_s"]),
    ):
        stages = {stage: seconds for stage, seconds in ledger[name].items() if seconds is not None}
        excess_s = stages.pop("excess_s")
        # Where one node computes and the router knows of it first, nothing can have gone by before.
        assert excess_s <= (ROUNDING_S if name == "first_token" else HOPS_S), (excess_s, stages)
        assert sum(stages.values()) == pytest.approx(total, abs=ROUNDING_S)
        assert abs(stages["link_s"]) <= HOPS_S + ROUNDING_S, stages
        assert min(stages.values()) >= 0.0
    return ledger


def served(cluster: InProcessCluster, num_tokens: int, max_tokens: int = 4, **options) -> dict:
    request = cluster.submit(make_prompt(num_tokens), max_tokens=max_tokens, **options)
    cluster.run()
    return told(cluster, request)


def test_a_split_request_has_its_chunks_and_what_of_its_transfer_the_prompt_did_not_hide():
    cluster = InProcessCluster(timing=Timing(block=0.002))
    ledger = served(cluster, 40)
    timing = cluster.timing
    assert [tokens for tokens, _, _ in ledger["chunks"]] == [16, 16, 8]
    first, second = ledger["first_token"], ledger["second_token"]
    assert first["chunks_s"] == pytest.approx(3 * timing.step + 40 * timing.token, abs=ROUNDING_S)
    # The last two blocks are copied when the prompt is computed, those before meanwhile.
    assert second["copy_s"] + second["verify_s"] == pytest.approx(2 * timing.block, abs=ROUNDING_S)
    assert ledger["copy_s"] + ledger["verify_s"] == pytest.approx(10 * timing.block, abs=ROUNDING_S)
    assert second["first_step_s"] == pytest.approx(timing.step + timing.token, abs=ROUNDING_S)


def test_a_request_whose_prompt_is_computed_where_it_decodes_has_no_transfer():
    ledger = served(InProcessCluster(0, 1), 40)
    second = ledger["second_token"]
    assert [tokens for tokens, _, _ in ledger["chunks"]] == [16, 16, 8]
    assert second["wait_for_blocks_s"] == second["fetch_s"] == second["copy_s"] == second["verify_s"] == 0.0
    assert second["first_step_s"] > 0.0


def test_a_request_that_its_first_token_ends_has_no_second_one():
    cluster = InProcessCluster()
    request = cluster.submit(make_prompt(20), max_tokens=1)
    cluster.run()
    ledger = cluster.records[request].ledger()
    stages = {
        name: seconds for name, seconds in ledger["first_token"].items() if name not in ("delivery_s", "excess_s")
    }
    assert sum(stages.values()) == pytest.approx(ledger["ttft_s"], abs=ROUNDING_S)
    assert ledger["first_token"]["excess_s"] <= ROUNDING_S
    assert ledger["second_token"] is None


def test_a_prompt_beside_others_waits_between_its_chunks():
    cluster = InProcessCluster()
    long = cluster.submit(make_prompt(60), max_tokens=2)
    cluster.at(0.015, lambda: short.append(cluster.submit(make_prompt(10, seed=1), max_tokens=2)))
    short: list[RequestId] = []
    cluster.run(until=lambda: bool(short))
    cluster.run()
    assert told(cluster, long)["first_token"]["chunk_wait_s"] > cluster.timing.step
    assert told(cluster, short[0])["first_token"]["prefill_queue_s"] > 0.0


def test_a_hand_off_waits_for_the_step_that_runs():
    cluster = InProcessCluster(timing=Timing(step=0.05))
    stream = cluster.submit(make_prompt(8), max_tokens=20)
    cluster.run(until=lambda: len(cluster.outcomes[stream].tokens) > 1)
    second = served(cluster, 8, max_tokens=2)["second_token"]
    assert second["decode_queue_s"] > 0.001


def test_a_hand_off_waits_for_blocks():
    cluster = InProcessCluster(num_blocks=12)
    first = cluster.submit(make_prompt(24, seed=1), max_tokens=20)
    cluster.run(until=lambda: len(cluster.outcomes[first].tokens) > 1)
    second = served(cluster, 24, max_tokens=2)["second_token"]
    assert second["wait_for_blocks_s"] > cluster.timing.step


@pytest.mark.parametrize("is_remote", [False, True])
def test_samples_count_from_the_first_of_them(is_remote: bool):
    ledger = served(InProcessCluster(is_remote=is_remote), 21, n=3)
    assert ledger["second_token"]["first_step_s"] > 0.0


def test_bytes_that_travel_are_fetched():
    second = served(InProcessCluster(is_remote=True), 2 * BLOCK)["second_token"]
    # Asked for when there is room for them: a message there and one back.
    assert second["fetch_s"] == pytest.approx(0.0002, abs=ROUNDING_S)


def test_an_attempt_that_failed_before_the_first_token_is_a_stage_of_its_own():
    cluster = InProcessCluster(num_prefill=2)
    request = cluster.submit(make_prompt(60), max_tokens=4)
    cluster.at(0.025, lambda: cluster.kill(cluster.records[request].prefill_node))
    cluster.run()
    ledger = told(cluster, request)
    assert ledger["attempts"] == 2
    assert ledger["first_token"]["earlier_attempts_s"] == pytest.approx(0.025, abs=HOPS_S)


def test_an_attempt_that_failed_after_the_first_token_is_a_stage_of_the_second():
    cluster = InProcessCluster(num_decode=2, timing=Timing(block=0.02))
    request = cluster.submit(make_prompt(60), max_tokens=4)
    cluster.run(until=lambda: bool(cluster.outcomes[request].tokens))
    cluster.at(0.015, lambda: cluster.kill(cluster.records[request].decode_node))
    cluster.run()
    ledger = told(cluster, request)
    assert ledger["attempts"] == 2
    assert ledger["first_token"]["earlier_attempts_s"] == 0.0
    assert ledger["second_token"]["earlier_attempts_s"] == pytest.approx(0.015, abs=ROUNDING_S)
    assert ledger["second_token"]["chunks_s"] > 0.0


@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.RECOMPUTE, Mode.RETURN])
@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
def test_the_ledgers_of_requests_that_yield_to_each_other_add_up(mode: Mode, num_prefill: int):
    cluster = InProcessCluster(num_prefill, num_blocks=17, num_swap_blocks=64, mode=mode)
    requests = [cluster.submit(make_prompt(5 + 3 * i, seed=i), max_tokens=40) for i in range(6)]
    cluster.run()
    assert cluster.nodes[D0].machine.reservations.num_yielded.total() > 0
    for request in requests:
        told(cluster, request)


@pytest.mark.parametrize("seed", range(8))
def test_the_ledgers_of_a_crowd_add_up(seed: int):
    rng = random.Random(seed)
    cluster = InProcessCluster(2, 2, num_blocks=40, cooperative=True, timing=Timing(block=0.001))
    requests: list[RequestId] = []
    for i in range(12):
        prompt, num_samples = make_prompt(rng.randrange(4, 60), seed=i % 5), rng.choice([1, 1, 2])
        cluster.at(
            rng.uniform(0.0, 0.2),
            lambda prompt=prompt, n=num_samples: requests.append(cluster.submit(prompt, max_tokens=6, n=n)),
        )
    cluster.run(until=lambda: len(requests) == 12)
    cluster.run()
    for request in requests:
        told(cluster, request)


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["split", "both"])
def test_what_messages_waited_for_a_core_is_no_links(num_prefill: int):
    cluster = InProcessCluster(num_prefill)
    cluster.waited_s = 0.00005
    ledger = served(cluster, 40)
    # The request and the token; then no more than there is, and nothing where the prompt's end is no message.
    assert ledger["first_token"]["cpu_wait_s"] == pytest.approx(0.0001, abs=1e-6)
    assert ledger["second_token"]["cpu_wait_s"] == pytest.approx(0.0001 if num_prefill else 0.0, abs=1e-6)


def test_where_the_first_sample_is_stopped_another_tells_when_it_begins():
    cluster = InProcessCluster(timing=Timing(step=0.05))
    stream = cluster.submit(make_prompt(8), max_tokens=20)
    cluster.run(until=lambda: len(cluster.outcomes[stream].tokens) > 1)
    request = cluster.submit(make_prompt(21), max_tokens=4, n=3)
    # Its samples have parted then, and wait for the step that runs.
    cluster.run(until=lambda: cluster.records[request].ready_attempt > 0)
    cluster.stop_sample(request, 0)
    cluster.run()
    begun = [message for _, _, message in cluster.trace if isinstance(message, Begun) and message.request == request]
    assert len(begun) == 1
    assert told(cluster, request)["second_token"]["first_step_s"] > 0.0


def test_a_node_tells_of_each_request_once():
    cluster = InProcessCluster()
    served(cluster, 21, n=3)
    messages = [message for _, link, message in cluster.trace if link.endswith(">router")]
    assert sum(isinstance(message, Begun) for message in messages) == 1
    assert sum(isinstance(message, FirstToken) for message in messages) == 1
