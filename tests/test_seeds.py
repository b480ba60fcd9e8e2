"""A seed names an answer: neighbours, memory, nodes and attempts have no part in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.core.ids import NodeId
from pdserve.decode_node.preemption import Mode
from pdserve.decode_node.scheduler import DecodeScheduler
from tests.in_process import InProcessCluster
from tests.tiny import make_cluster, make_prompt

PROMPT = make_prompt(24)
NUM_OUTPUTS = 40
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 42}
UINT64 = 1 << 64


def ask(cluster: InProcessCluster, n: int = 1, **params: Any) -> dict[int, list[int]]:
    """The samples of a seeded request beside whatever is there already."""
    request = cluster.submit(PROMPT, NUM_OUTPUTS, n=n, **SEEDED | params)
    cluster.run()
    return cluster.outcomes[request].samples


@pytest.fixture(scope="module")
def alone(tiny_model: Path) -> list[int]:
    return ask(make_cluster(tiny_model))[0]


def beside(cluster: InProcessCluster, *seeds: int) -> None:
    for number, seed in enumerate(seeds):
        cluster.submit(make_prompt(20 + number, seed=number), NUM_OUTPUTS, temperature=1.0, seed=seed)


def second_of_eight(cluster: InProcessCluster) -> list[int]:
    beside(cluster, 1)
    request = cluster.submit(PROMPT, NUM_OUTPUTS, **SEEDED)
    beside(cluster, *range(2, 8))
    cluster.run()
    return cluster.outcomes[request].tokens


def beside_a_random_seed(cluster: InProcessCluster) -> list[int]:
    beside(cluster, 0xD1CE)
    return ask(cluster)[0]


def beside_its_own_seed(cluster: InProcessCluster) -> list[int]:
    beside(cluster, SEEDED["seed"])
    return ask(cluster)[0]


def on_the_other_decode_node(cluster: InProcessCluster) -> list[int]:
    """The one that computed it first is gone."""
    first = cluster.submit(PROMPT, NUM_OUTPUTS, **SEEDED)
    cluster.run()
    node = cluster.records[first].decode_node
    assert node is not None
    cluster.kill(node)
    again = cluster.submit(PROMPT, NUM_OUTPUTS, **SEEDED)
    cluster.run()
    assert cluster.records[again].decode_node != node
    return cluster.outcomes[again].tokens


def after_a_retry(cluster: InProcessCluster) -> list[int]:
    request = cluster.submit(PROMPT, NUM_OUTPUTS, **SEEDED)
    cluster.run(until=lambda: len(cluster.outcomes[request].tokens) > 5)
    cluster.kill(cluster.records[request].decode_node or NodeId("D0"))
    cluster.run()
    assert cluster.records[request].attempt > 1
    return cluster.outcomes[request].tokens


@pytest.mark.parametrize(
    "run",
    [second_of_eight, beside_a_random_seed, beside_its_own_seed, on_the_other_decode_node, after_a_retry],
    ids=lambda run: run.__name__.replace("_", " "),
)
def test_a_seeded_answer_is_the_one_it_is_alone(
    tiny_model: Path, alone: list[int], run: Callable[[InProcessCluster], list[int]]
):
    assert run(make_cluster(tiny_model, num_decode=2)) == alone


def test_a_seeded_answer_outlives_being_preempted(tiny_model: Path, alone: list[int]):
    """The newest yields: the seeded one."""
    cluster = make_cluster(tiny_model, num_blocks=10, mode=Mode.RECOMPUTE)
    beside(cluster, 1, 2)
    assert ask(cluster)[0] == alone
    decode = cluster.nodes[NodeId("D0")].machine
    assert isinstance(decode, DecodeScheduler)
    assert decode.reservations.num_preemptions > 0


def test_copies_of_a_seeded_request_at_the_same_time_answer_alike(tiny_model: Path, alone: list[int]):
    cluster = make_cluster(tiny_model)
    requests = [cluster.submit(PROMPT, NUM_OUTPUTS, **SEEDED) for _ in range(2)]
    cluster.run()
    assert cluster.results(*requests) == [alone, alone]


def test_samples_of_one_seed_differ_and_come_again_the_first_as_if_it_were_alone(tiny_model: Path, alone: list[int]):
    runs = [ask(make_cluster(tiny_model, num_prefill), n=3) for num_prefill in (1, 0)]
    assert runs[0] == runs[1]
    assert runs[0][0] == alone
    assert len(set(map(tuple, runs[0].values()))) == 3


def test_every_seed_is_another_one_up_to_both_ends_of_their_range(tiny_model: Path, alone: list[int]):
    cluster = make_cluster(tiny_model)
    seeds = (0, 1, -1 % UINT64, 2**63 - 1, 2**63, 2**32)
    answers = {tuple(ask(cluster, seed=seed)[0]) for seed in seeds} | {tuple(alone)}
    assert len(answers) == len(seeds) + 1
